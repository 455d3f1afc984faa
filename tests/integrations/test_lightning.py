"""Lightning's own Trainer runs our loader: each row once an epoch, another order each epoch, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.errors import ConfigError
from mmdata.loader import Loader

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'mmdata[lightning]'"
)

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402

from mmdata.batch import normalized, valid_inputs  # noqa: E402
from mmdata.integrations.lightning import EpochLoader, LoaderDataModule  # noqa: E402

ROWS, STEPS = 22, 3  # of the fixture `data`


class Contrast(lightning.LightningModule):
    """The plainest fine-tuning of a CLIPModel; keeps what it saw."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[list[str]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        self.seen.append((self.current_epoch, batch["rows"].tolist()))
        inputs = valid_inputs(batch)
        return self.clip(**inputs | {"pixel_values": normalized(inputs["pixel_values"])}, return_loss=True).loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append(batch["keys"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def rows(self, epoch: int) -> list[int]:
        return [row for at, rows in self.seen if at == epoch for row in rows if row >= 0]


class CrashError(Exception):
    """What a test raises in mid-training."""


class CrashAfter(Callback):
    """Ends training without a goodbye, before the batch that follows `batches` others."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batches:
            raise CrashError


def trainer(folder: Path, callbacks: list[Callback] | None = None, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
        **quiet | {"devices": 1, "max_epochs": 2} | settings,
    )


@pytest.mark.parametrize("through", ["loader", "datamodule"])
def test_fit_sees_each_row_once_an_epoch_in_another_order(
    data: dict[str, Any], clip: Any, tmp_path: Path, through: str
):
    model = Contrast(clip)
    given = (
        {"train_dataloaders": Loader.from_config(data)}
        if through == "loader"
        else {"datamodule": LoaderDataModule(data)}
    )
    trainer(tmp_path).fit(model, **given)
    assert len(model.seen) == 2 * STEPS
    assert sorted(model.rows(0)) == sorted(model.rows(1)) == list(range(ROWS))
    assert model.rows(0) != model.rows(1)


@pytest.mark.parametrize("through", ["loader", "datamodule"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_fit_resumes_where_the_checkpoint_was_written(
    data: dict[str, Any], clip: Any, tmp_path: Path, through: str, stop: int
):
    def given() -> dict[str, Any]:
        loader = through == "loader"
        return {"train_dataloaders": Loader.from_config(data)} if loader else {"datamodule": LoaderDataModule(data)}

    whole = Contrast(clip)
    trainer(tmp_path).fit(whole, **given())
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first = Contrast(clip)
    with pytest.raises(CrashError):
        trainer(tmp_path, [save, CrashAfter(stop)]).fit(first, **given())
    second = Contrast(clip)
    trainer(tmp_path).fit(second, ckpt_path=str(tmp_path / f"step={stop}.ckpt"), **given())
    assert first.seen == whole.seen[:stop]
    assert second.seen == whole.seen[stop:]


def test_fit_with_boxes_resumes_where_the_checkpoint_was_written(boxed: dict[str, Any], clip: Any, tmp_path: Path):
    test_fit_resumes_where_the_checkpoint_was_written(boxed, clip, tmp_path, "datamodule", 2)


def test_datamodule_validates_on_the_same_batches_each_time(data: dict[str, Any], clip: Any, tmp_path: Path):
    model = Contrast(clip)
    trainer(tmp_path).fit(model, datamodule=LoaderDataModule(data | {"val": {"shards": data["shards"]}}))
    assert len(model.validated) == 2 * STEPS
    assert model.validated[:STEPS] == model.validated[STEPS:]
    assert sorted(key for keys in model.validated[:STEPS] for key in keys if key) == [f"{i:04d}" for i in range(ROWS)]


def test_datamodule_without_trainer_says_what_to_do(data: dict[str, Any]):
    with pytest.raises(RuntimeError, match=r"needs its trainer: Trainer\.fit\(model, datamodule=…\) brings it"):
        LoaderDataModule(data).train_dataloader()


def test_datamodule_alone_in_a_launchers_process_is_refused(
    data: dict[str, Any], clip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = trainer(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .*Lightning's Trainer has a world of 1: .*devices="):
        alone.fit(Contrast(clip), datamodule=LoaderDataModule(data))


def test_epoch_loader_of_other_ranks_than_the_trainers_is_refused(data: dict[str, Any], tmp_path: Path):
    loader = Loader.from_config(data, rank=1, world_size=2)
    message = r"the loader gives the share of rank 1 of 2, and this process trains as rank 0 of 1: .*; give the"
    with pytest.raises(ConfigError, match=message):
        EpochLoader(loader, trainer(tmp_path))
