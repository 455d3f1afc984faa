"""A step of each shape before the first: it leaves nothing behind, and a shape that does not fit is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mmdata import Loader, load_config
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.train.models.dual_encoder import DualEncoder
from mmdata.train.ranks import parallel
from mmdata.train.run import trainer as run_trainer
from mmdata.train.run.trainer import Trainer
from tests.programs import PATIENCE_S, Program, free_port

CLOCKS = ("time", "samples_per_s", "step_ms", "data_wait_share")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """Two epochs of six updates over batches of several shapes, with all that a step may have."""
    folder = tmp_path_factory.mktemp("rehearsal")
    raw = make_corpus(folder / "raw", 24)
    shards = folder / "shards"
    convert(raw / "captions.jsonl", shards, ConvertConfig(train_tokenizer=300))
    data: dict[str, Any] = {"shards": str(shards), "tokenizer": str(shards / "tokenizer"), "global_batch_size": 4}
    data |= {"image_buckets": [[16, 16], [16, 32], [32, 16]], "text_buckets": 3, "loading": {"num_workers": 1}}
    train: dict[str, Any] = {"epochs": 2, "warmup_steps": 1, "log_every_steps": 1, "seed": 3}
    train |= {"teacher": {}, "miner": {"name": "gumbel_top_k", "k": 1}, "mining_after_steps": 3}
    train |= {"mask_false_negatives": True, "queue": 8}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({"data": data, "model": {"name": "micro", "dropout": 0.2}, "train": train}))
    return path


def train(config: Path, output: Path, *words: str, ranks: int = 1) -> list[str]:
    """Train in processes of their own, without a launcher; what rank 0 printed."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
    command = [sys.executable, "-m", "mmdata", "train", str(config), f"train.output={output}", *words]
    processes = [
        Program(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank)} | world,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = [(*process.communicate(timeout=PATIENCE_S), process.returncode) for process in processes]
    assert [code for _, _, code in ends] == [0] * ranks, ends
    return ends[0][0].splitlines()


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def shapes_of(config: Path) -> set[tuple[Any, ...]]:
    return {(batch["pixel_values"].shape, batch["input_ids"].shape) for batch in Loader.from_config(str(config))}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, []), (1, ["train.micro_batch_size=3"]), (2, []), (2, ["train.parallel=fsdp"])],
    ids=["alone", "micro-batches", "ddp", "fsdp"],
)
@pytest.mark.sweep(keep=1)
def test_a_rehearsed_run_makes_the_updates_of_one_that_was_not(
    config: Path, tmp_path: Path, ranks: int, words: list[str]
):
    plain = train(config, tmp_path / "plain", *words, ranks=ranks)
    said = train(config, tmp_path / "rehearsed", *words, "train.rehearse=true", ranks=ranks)
    assert not any(line.startswith("rehearsed ") for line in plain), "auto: not on a CPU"
    (line,) = (line for line in said if line.startswith("rehearsed "))
    assert re.fullmatch(rf"rehearsed {len(shapes_of(config))} batch shapes in \d+\.\d s", line)
    assert said.index(line) < next(i for i, line in enumerate(said) if line.startswith("step 1 "))
    assert metrics(tmp_path / "rehearsed") == metrics(tmp_path / "plain")


def trainer(config: Path, output: Path, **changes: Any) -> Trainer:
    settings = load_config(config)
    loader = Loader.from_config(settings.data.model_copy(update={}))
    torch.manual_seed(0)
    assert loader.builder.spec.tokenizer is not None
    model = DualEncoder.from_config(settings.model, vocab_size=loader.builder.spec.tokenizer.vocab_size)
    return Trainer(model, loader, settings.train.model_copy(update={"rehearse": True, **changes}), output=output)


def test_a_shape_that_does_not_fit_is_named_before_the_first_update(config: Path, tmp_path: Path):
    run = trainer(config, tmp_path)
    seen: list[tuple[int, ...]] = []

    def full(module: Any, given: Any) -> None:
        seen.append(tuple(given[0].shape))
        if given[0].shape[2:] == (32, 16):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")

    run.model.image_tower.register_forward_pre_hook(full)  # type: ignore[union-attr]
    said = (
        r"^out of memory in the rehearsal of 4 rows of 32 × 16 pixels and \d+ tokens \(steps: \d+ of an epoch's 6\) "
        r"\(CUDA out of memory. Tried to allocate 2.00 GiB.\): set train.micro_batch_size, or lower it, or data.global_"
    )
    with pytest.raises(ConfigError, match=said):
        run.run()
    assert len(seen) > 0
    assert run.step == 0
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_rehearsal_puts_buffers_and_gradients_back(config: Path, tmp_path: Path):
    def count(module: Any, given: object) -> None:
        module.calls.add_(1)

    run = trainer(config, tmp_path)
    run.model.image_tower.register_buffer("calls", torch.zeros(()))  # type: ignore[union-attr]
    run.model.image_tower.register_forward_pre_hook(count)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    drawn = torch.get_rng_state()
    run.model.train()
    run._rehearse()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(weight.grad is None for weight in run.model.parameters())
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not run.optimizer.state


def test_a_signal_stops_a_rehearsal_between_two_shapes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = trainer(config, tmp_path)
    forwards: list[int] = []

    def stop(module: Any, given: Any) -> None:
        forwards.append(len(given[0]))
        signal.raise_signal(signal.SIGTERM)

    run.model.image_tower.register_forward_pre_hook(stop)  # type: ignore[union-attr]
    assert run.run() == 128 + signal.SIGTERM
    assert forwards == [4], "one step of the first shape"
    assert run.step == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"starting: 12 steps, in {tmp_path}; on cpu, in fp32"
    assert said[1].startswith(f"rehearsing shape 1 of {len(shapes_of(config))}: 4 rows of ")
    assert said[2:] == ["stopped by SIGTERM in the rehearsal, before an update; the same command resumes"]


def test_a_rehearsal_names_the_shapes(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trainer(config, tmp_path)._rehearse()
    said = capsys.readouterr().out.splitlines()
    count = len(shapes_of(config))
    assert [line.split(":")[0] for line in said[1:-1]] == [f"rehearsing shape {n + 1} of {count}" for n in range(count)]


@pytest.mark.parametrize(("compiled", "rehearses"), [(False, False), (True, True)])
def test_a_run_that_compiles_is_rehearsed_unless_told_otherwise(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool, rehearses: bool
):
    monkeypatch.setattr(parallel, "BACKEND", "eager")
    monkeypatch.setattr(run_trainer, "rehearse", lambda *_, **__: seen.append(True))
    seen: list[bool] = []
    trainer(config, tmp_path, compile=compiled, rehearse="auto")._rehearse()
    assert seen == [True] * rehearses


@pytest.mark.parametrize("micro_batch_size", [None, 3])
@pytest.mark.sweep(keep=1)
def test_after_a_rehearsal_no_step_compiles(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch_size: int | None
):
    monkeypatch.setattr(parallel, "BACKEND", "aot_eager")  # needs no compiler
    torch._dynamo.reset()
    few = yaml.safe_load(config.read_text())
    few["data"] |= {"image_buckets": [[16, 16], [16, 32]], "text_buckets": 2}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(few))
    run = trainer(tmp_path / "few.yaml", tmp_path, compile=True, micro_batch_size=micro_batch_size)
    run.model.train()
    torch._dynamo.utils.counters.clear()
    run._rehearse()
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made > 0
    assert run.run() == 0
    assert run.step == 12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made
    torch._dynamo.reset()
