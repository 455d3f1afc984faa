"""Checkpoints of several ranks: real ranks (gloo), kills, and torch's own reader as the oracle."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from mmdata.train.run.checkpoint import find_checkpoint, latest_checkpoint, load_checkpoint
from tests.rounding import RUN_IN_DOUBLE
from tests.train.test_checkpoint import equal
from tests.train.test_loop import last_state, read_metrics, run_small

AVERAGES = ("ema", "teacher")


def fsdp(output: Path, *, torchrun: int = 2, **spec: Any) -> subprocess.CompletedProcess[str]:
    train = {"parallel": "fsdp", "teacher": {"decay": 0.9}, **spec.pop("train", {})}
    train |= {"queue": 20, "mask_false_negatives": True, "ema": {"decay": 0.8}}
    train["groups"] = [{"match": "image_proj*", "freeze": True}, {"match": "text_*", "lr_scale": 0.5}]
    return run_small(output, torchrun=torchrun, train=train, **spec)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    done = fsdp(output)
    assert done.returncode == 0, done.stderr
    return output


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_sharded_checkpoints_of_a_run_are_folders_with_a_file_a_rank(whole: Path):
    assert names_in(whole) == ["step-0000000009", "step-0000000012"], "keep_checkpoints is 2"
    files = sorted(path.name for path in (whole / "checkpoints" / "step-0000000012").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "files.json", "run.pt"]


@pytest.mark.sweep
def test_sharded_run_killed_and_resumed_makes_the_same_updates_bit_for_bit(whole: Path, tmp_path: Path):
    killed = fsdp(tmp_path, signal="SIGKILL", at=7, sleep_s=1)
    assert killed.returncode != 0
    newest = last_state(tmp_path)["step"]
    assert newest in (4, 6), "that of step 6 is written meanwhile"
    resumed = fsdp(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {tmp_path}/checkpoints/step-000000000{newest}: step {newest} of 12" in resumed.stdout
    assert read_metrics(tmp_path) == read_metrics(whole)
    before, after = last_state(whole), last_state(tmp_path)
    assert len(before["optimizer"]) > 5
    for part in ("model", "optimizer", "memory", "rng"):
        assert equal(before[part], after[part]), part


def test_sharded_checkpoint_that_a_killed_rank_did_not_finish_is_never_taken(whole: Path, tmp_path: Path):
    killed = fsdp(tmp_path, signal="SIGKILL", at=7, slow_save_of=6)
    assert killed.returncode != 0
    assert names_in(tmp_path) == [".step-0000000006.part", "step-0000000003", "step-0000000004"]
    half = tmp_path / "checkpoints" / ".step-0000000006.part"
    assert {path.name for path in half.iterdir()} <= {"__0_0.distcp"}, "rank 0's part at most"
    assert last_state(tmp_path)["step"] == 4
    resumed = fsdp(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert names_in(tmp_path) == names_in(whole)
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_sharded_checkpoint_is_finished_by_a_rank_that_has_an_error_of_its_own(tmp_path: Path):
    failed = fsdp(tmp_path, error="the loader is broken", at=7, slow_save_of=6, save_takes_s=0.5)
    assert failed.returncode != 0
    assert "the loader is broken" in failed.stderr
    assert last_state(tmp_path)["step"] == 6
    assert names_in(tmp_path) == ["step-0000000004", "step-0000000006"]


def test_sharded_checkpoint_has_the_names_and_numbers_of_ddp(whole: Path, tmp_path: Path):
    assert fsdp(tmp_path, train={"parallel": "ddp"}).returncode == 0
    assert names_in(tmp_path) == names_in(whole)
    one, other = last_state(whole), last_state(tmp_path)
    assert one["model"].keys() == other["model"].keys()
    assert one["optimizer"].keys() == other["optimizer"].keys()
    for found, expected in (
        (one["model"], other["model"]),
        *((one["memory"][k], other["memory"][k]) for k in AVERAGES),
    ):
        torch.testing.assert_close(dict(found), dict(expected), rtol=1e-3, atol=1e-5)
    assert not [name for name in one["optimizer"] if name.startswith("image_proj")]
    for part in ("batches", "rng"):
        assert equal(one[part], other[part]), part


@pytest.mark.parametrize("ranks", [4, 0])
@pytest.mark.sweep
def test_sharded_run_resumes_on_another_number_of_ranks(ranks: int, tmp_path: Path):
    spec: dict[str, Any] = {"dropout": 0.0, "double": True}
    assert fsdp(tmp_path / "whole", **spec).returncode == 0
    stopped = fsdp(tmp_path / "cut", signal="SIGTERM", at=4, **spec)
    assert "stopped by SIGTERM after step 5 of 12" in stopped.stdout, stopped.stderr
    resumed = fsdp(tmp_path / "cut", torchrun=ranks, **spec)
    assert resumed.returncode == 0, resumed.stderr
    assert "step-0000000005: step 5 of 12" in resumed.stdout
    expected, found = ([line["loss"] for line in read_metrics(tmp_path / run)] for run in ("whole", "cut"))
    assert found == pytest.approx(expected, rel=0, abs=RUN_IN_DOUBLE)
    one, other = last_state(tmp_path / "whole"), last_state(tmp_path / "cut")
    torch.testing.assert_close(other["model"], one["model"], rtol=0, atol=RUN_IN_DOUBLE)
    for name in AVERAGES:
        torch.testing.assert_close(other["memory"][name], one["memory"][name], rtol=0, atol=RUN_IN_DOUBLE)


def test_sharded_checkpoint_is_what_torch_reads_from_it(whole: Path, tmp_path: Path):
    path = find_checkpoint(whole)
    dcp_to_torch_save(path, tmp_path / "by_torch.pt")
    by_torch = torch.load(tmp_path / "by_torch.pt", weights_only=True)
    state = load_checkpoint(path)
    assert equal(by_torch["model"], dict(state["model"]))
    assert equal(by_torch["memory"]["teacher"], dict(state["memory"]["teacher"]))
    assert equal(by_torch["optimizer"], state["optimizer"])


def test_sharded_checkpoint_error_of_one_rank_ends_all(tmp_path: Path):
    done = fsdp(tmp_path, largest_file=5000, train={"evaluate_every_epochs": 0})
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert "CheckpointException" not in done.stderr
    assert latest_checkpoint(tmp_path / "checkpoints") is None
