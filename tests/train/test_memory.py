"""A run that remembers (queue, feature cache) and draws (random miner, dropout), under a scaler: killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata.errors import DataError
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from tests.train.small_run import go_back
from tests.train.test_loop import last_state, make_trainer, read_metrics, run_small

TRAIN: dict[str, Any] = {
    "precision": "fp16",
    "mask_false_negatives": True,
    "queue": 20,
    "mining_after_steps": 1,
    "feature_cache": "pair",
    "miner": {"name": "gumbel_top_k", "k": 3},
    "epochs": 3,
}
FILES = ("features.npy", "features.steps.npy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole")
    assert make_trainer(output, **TRAIN).run() == 0
    return output


def equal(one: Any, other: Any) -> bool:
    """Of plain containers and tensors, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def rewritten_by_step_6(whole: Path) -> int:
    """Rows of the 7th batch that an earlier one has held, by the shares of the log lines before and after it."""
    before, after = (line["never_written_share"] for line in read_metrics(whole, "feature_cache")[5:7])
    return 8 - round(32 * (before - after))


def test_run_with_memory_killed_and_resumed_is_the_undisturbed_one_bit_for_bit(whole: Path, tmp_path: Path):
    killed = run_small(tmp_path, train=TRAIN, at=7, signal="SIGKILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert last_state(tmp_path)["step"] == 6
    assert np.load(tmp_path / "features.steps.npy").max() == 6, "the cache ran ahead of the checkpoint"
    resumed = run_small(tmp_path, train=TRAIN)
    assert resumed.returncode == 0, resumed.stderr
    for kind in ("train", "queue"):
        assert len(read_metrics(tmp_path, kind)) == 12
        assert read_metrics(tmp_path, kind) == read_metrics(whole, kind)
    # The rows of step 6 were in the file already, and are not compared with themselves.
    lines, expected = read_metrics(tmp_path, "feature_cache"), read_metrics(whole, "feature_cache")
    assert (lines[6]["rewritten"], expected[6]["rewritten"]) == (0, rewritten_by_step_6(whole))
    assert lines[:6] + lines[7:] == expected[:6] + expected[7:]
    before, after = last_state(whole), last_state(tmp_path)
    for part in ("model", "optimizer", "scaler", "memory", "rng", "batches", "meter"):
        assert equal(before[part], after[part]), part
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()


def test_run_stopped_between_two_log_lines_of_its_memory_writes_them_as_the_undisturbed_one(tmp_path: Path):
    train = {**TRAIN, "log_every_steps": 4}
    assert make_trainer(tmp_path / "whole", **train).run() == 0
    stopped = make_trainer(tmp_path / "cut", **train)
    stopped.source.before = lambda number, rows: signal.raise_signal(signal.SIGTERM) if number == 5 else None
    assert stopped.run() == 128 + signal.SIGTERM
    assert last_state(tmp_path / "cut")["step"] == 6
    assert make_trainer(tmp_path / "cut", **train).run() == 0
    lines = read_metrics(tmp_path / "cut", "feature_cache")
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert lines == read_metrics(tmp_path / "whole", "feature_cache")


def test_run_with_memory_says_how_much_and_how_old(whole: Path):
    queue = read_metrics(whole, "queue")
    assert [line["rows"] for line in queue[:5]] == [0, 8, 16, 20, 20]
    assert queue[2]["age_steps"] == 1.5  # rows of steps 1 and 2, seen after 3 updates
    cache = read_metrics(whole, "feature_cache")
    assert cache[0]["never_written_share"] == 0.75  # 8 rows of 32
    assert cache[0]["rewritten"] == 0
    assert sum(line["rewritten"] for line in cache) == 96 - 32 * (1 - cache[-1]["never_written_share"])
    assert all(-1 <= line["similarity"] <= 1.001 for line in cache if line["similarity"] is not None)


def test_run_refuses_another_feature_cache(whole: Path, tmp_path: Path):
    stopped = signal.SIGTERM
    small = make_trainer(tmp_path, **TRAIN)
    small.source.before = lambda number, rows: signal.raise_signal(stopped) if number == 2 else None
    assert small.run() == 128 + stopped
    (tmp_path / FILES[0]).write_bytes((whole / FILES[0]).read_bytes())
    (tmp_path / FILES[1]).write_bytes(np.load(whole / FILES[1]).tobytes())
    with pytest.raises(DataError, match=r"feature cache .*: the checkpoint has one, and it cannot be read"):
        make_trainer(tmp_path, **TRAIN)


def test_queue_resumes_on_two_ranks_with_the_rows_of_one(tmp_path: Path):
    train = {**TRAIN, "precision": "fp32", "miner": None, "epochs": None, "steps": 4, "checkpoint_every_steps": 2}
    train.pop("epochs")
    small = make_trainer(tmp_path, **train)
    assert small.run() == 0
    path = latest_checkpoint(tmp_path / "checkpoints")
    assert path is not None
    expected = load_checkpoint(path)["memory"]["queue"]
    go_back(tmp_path, 2)
    resumed = run_small(tmp_path, torchrun=2, train=train)
    assert resumed.returncode == 0, resumed.stderr
    found = last_state(tmp_path)["memory"]["queue"]
    for name in ("keys", "valid", "written"):
        assert torch.equal(found["kept"][name], expected["kept"][name])
