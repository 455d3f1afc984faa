"""Lightning's own Trainer and the epochs of loader and stream: resumed, cut short, or the same each time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmdata
from mmdata.errors import ConfigError

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'mmdata[lightning]'"
)

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from mmdata.integrations.lightning import EpochLoader, LoaderDataModule  # noqa: E402

STEPS = 2  # of an epoch of a stream whose passes have 3 batches


class Watch(lightning.LightningModule):
    """The smallest model; keeps the keys it saw, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[list[str]]] = {}
        self.validated: list[list[str]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.setdefault(self.current_epoch, []).append(batch["keys"])
        return self.layer(batch["valid"].float()[:, None]).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(batch["keys"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, given: dict[str, Any], *, ckpt_path: str | None = None, **settings: Any) -> Watch:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet | settings)
    model = Watch()
    given = {name: give(trainer) if name == "epochs" else give for name, give in given.items()}
    if "epochs" in given:
        given["train_dataloaders"] = given.pop("epochs")
    trainer.fit(model, ckpt_path=ckpt_path, **given)
    return model


def ways(data: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is handed to `fit`, made anew for each."""
    without = {name: value for name, value in data.items() if name != "shards"}

    def loader() -> mmdata.Loader:
        return mmdata.Loader.from_config(data)

    def stream() -> Any:
        return mmdata.stream(data["shards"], without, steps_per_epoch=STEPS)

    return {
        "loader": lambda: {"train_dataloaders": loader()},
        "stream": lambda: {"train_dataloaders": stream()},
        "LoaderDataModule": lambda: {"datamodule": LoaderDataModule(data)},
        "stream module": lambda: {"datamodule": LoaderDataModule(data, steps_per_epoch=STEPS)},
        "EpochLoader": lambda: {"epochs": lambda trainer: EpochLoader(loader(), trainer)},
    }


WAYS = ["loader", "stream", "LoaderDataModule", "stream module", "EpochLoader"]


def epochs_of(way: str, data: dict[str, Any], count: int) -> dict[int, list[list[str]]]:
    """The keys of the first epochs, without any trainer."""
    streams = way.lower().startswith("stream")
    batches = mmdata.stream(None, data, steps_per_epoch=STEPS) if streams else mmdata.Loader.from_config(data)
    return {epoch: [batch["keys"] for batch in batches] for epoch in range(count)}


def flat(epochs: dict[int, list[list[str]]]) -> list[list[str]]:
    return [keys for batches in epochs.values() for keys in batches]


def resumed(folder: Path, make: Callable[[], dict[str, Any]], **until: Any) -> dict[int, list[list[str]]]:
    """What comes after a checkpoint that was written at the end of epoch 0, as ModelCheckpoint does by default."""
    fit(folder, make(), callbacks=[ModelCheckpoint(folder, filename="end")], max_epochs=1)
    return fit(folder, make(), ckpt_path=str(folder / "end.ckpt"), enable_checkpointing=False, **until).seen


@pytest.mark.parametrize("way", [way for way in WAYS if way != "stream"])
def test_fit_resumed_from_the_end_of_an_epoch_goes_on_with_the_next(data: dict[str, Any], tmp_path: Path, way: str):
    expected = epochs_of(way, data, 3)
    assert resumed(tmp_path, ways(data)[way], max_epochs=3) == {epoch: expected[epoch] for epoch in (1, 2)}


@pytest.mark.parametrize("way", ["LoaderDataModule", "stream module", "EpochLoader"])
def test_fit_resumed_from_the_end_of_an_epoch_goes_on_to_its_max_steps(data: dict[str, Any], tmp_path: Path, way: str):
    # Here Lightning begins the epoch that has ended once more, and tells samplers an epoch too many from then on.
    expected = epochs_of(way, data, 3)
    seen = resumed(tmp_path, ways(data)[way], max_steps=3 * len(expected[0]))
    assert seen == {epoch: expected[epoch] for epoch in (1, 2)}


def test_fit_of_a_bare_stream_resumed_from_the_end_of_an_epoch_begins_a_pass_and_says_so(
    data: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    seen = resumed(tmp_path, ways(data)["stream"], max_epochs=3)
    assert "epoch 1 begins with pass 1 from its start" in caplog.text
    assert [len(seen[epoch]) for epoch in (1, 2)] == [STEPS, STEPS]
    passes = mmdata.stream(None, data)
    list(passes)
    assert seen[1] == [batch["keys"] for batch in islice(passes, STEPS)]


@pytest.mark.parametrize("way", ["stream", "stream module"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_fit_of_a_stream_resumes_at_the_next_batch(data: dict[str, Any], tmp_path: Path, way: str, stop: int):
    make, expected = ways(data)[way], flat(epochs_of(way, data, 3))
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first = fit(tmp_path, make(), callbacks=[save], max_epochs=3, max_steps=stop)
    resumed = fit(tmp_path, make(), ckpt_path=str(tmp_path / f"step={stop}.ckpt"), max_epochs=3)
    assert flat(first.seen) == expected[:stop]
    assert flat(resumed.seen) == expected[stop:]


@pytest.mark.parametrize("way", WAYS)
def test_fit_with_limit_train_batches_gives_other_batches_each_epoch(data: dict[str, Any], tmp_path: Path, way: str):
    seen = fit(tmp_path, ways(data)[way](), limit_train_batches=1, max_epochs=3, enable_checkpointing=False).seen
    assert [len(seen[epoch]) for epoch in range(3)] == [1, 1, 1]
    assert seen[0] != seen[1] != seen[2] != seen[0]
    if "oader" in way:
        assert seen == {epoch: batches[:1] for epoch, batches in epochs_of(way, data, 3).items()}


@pytest.mark.parametrize("way", ["LoaderDataModule", "stream module", "EpochLoader"])
def test_fit_with_overfit_batches_gives_the_same_batches_each_epoch(data: dict[str, Any], tmp_path: Path, way: str):
    seen = fit(tmp_path, ways(data)[way](), overfit_batches=2, max_epochs=3, enable_checkpointing=False).seen
    assert seen == dict.fromkeys(range(3), epochs_of(way, data, 1)[0][:2])


def test_fit_validates_on_a_bare_loader(data: dict[str, Any], tmp_path: Path):
    loaders = {"train_dataloaders": mmdata.Loader.from_config(data), "val_dataloaders": mmdata.Loader.from_config(data)}
    model = fit(tmp_path, loaders, max_epochs=2, enable_checkpointing=False)
    expected = epochs_of("loader", data, 2)
    assert model.seen == expected
    assert model.validated == expected[0] + expected[1]


def test_fit_counts_no_validation_of_a_checkpoint_as_a_resume(data: dict[str, Any], tmp_path: Path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = data | {"val": {"shards": data["shards"]}}
    fit(tmp_path, {"datamodule": LoaderDataModule(settings)}, callbacks=[save], max_steps=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}
    module = LoaderDataModule(settings)
    checkpoint = str(tmp_path / "step=1.ckpt")
    lightning.Trainer(accelerator="cpu", **quiet).validate(Watch(), ckpt_path=checkpoint, datamodule=module)
    assert fit(tmp_path, {"datamodule": module}, max_epochs=1).seen == epochs_of("loader", data, 1)


def test_modules_can_be_sent_to_processes_that_spawn(data: dict[str, Any]):
    for module in (LoaderDataModule(data), LoaderDataModule(data, steps_per_epoch=STEPS)):
        assert pickle.loads(pickle.dumps(module)).data == module.data


def test_stream_without_a_length_is_refused_with_what_to_give(data: dict[str, Any]):
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"a batch ahead of a stream that has no length, .*: give steps_per_epoch"):
        EpochLoader(mmdata.stream(None, data), trainer)


def test_loader_and_stream_are_no_dataloaders_and_say_how_to_skip_batches(data: dict[str, Any]):
    accelerate = pytest.importorskip("accelerate", reason="pip install 'mmdata[huggingface]'")
    loader, stream = mmdata.Loader.from_config(data), mmdata.stream(None, data, steps_per_epoch=3)
    rows = [batch["keys"] for batch in loader]
    loader.set_epoch(0)
    with pytest.raises(AttributeError, match=r"a Loader is no torch DataLoader .*load_state_dict\(\{\*\*loader\."):
        accelerate.skip_first_batches(loader, 2)
    loader.load_state_dict({**loader.state_dict(), "step": 2})  # as it says
    assert [batch["keys"] for batch in loader] == rows[2:]
    keys = [batch["keys"] for batch in mmdata.stream(None, data, steps_per_epoch=3)]
    with pytest.raises(AttributeError, match=r"a Stream is no torch DataLoader .*in itertools\.islice\(stream, 3"):
        accelerate.skip_first_batches(stream, 2)
    assert len([*islice(stream, 2)]) == 2
    stream.load_state_dict(stream.state_dict())
    assert [batch["keys"] for batch in stream] == keys[2:]
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


@pytest.mark.parametrize("way", ["LoaderDataModule", "EpochLoader"])
def test_fit_gives_each_epoch_of_weighted_rows_whole(data: dict[str, Any], tmp_path: Path, way: str):
    np.save(tmp_path / "weights.npy", np.random.default_rng(1).uniform(0.3, 2.9, 22))
    weighted = {**data, "global_batch_size": 2, "row_weights": str(tmp_path / "weights.npy")}
    plan = mmdata.Loader.from_config(weighted).plan
    steps = [plan.num_steps(epoch) for epoch in range(6)]
    assert max(steps) > steps[0]
    model = fit(tmp_path, ways(weighted)[way](), max_epochs=6, enable_checkpointing=False)
    assert [len(batches) for batches in model.seen.values()] == steps
