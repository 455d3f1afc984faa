"""Checkpoints that are written while training goes on: real runs, a slow disk, a full one, a kill in the middle."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager

from mmdata.errors import TrainingError
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from mmdata.train.run.checkpoint_writer import CheckpointWriter
from mmdata.train.run.watchdog import LONG_S
from tests.train.small_run import SmallBatches
from tests.train.test_loop import last_state, make_trainer, read_metrics, run_small, run_two_ranks
from tests.train.test_memory import equal

PATIENCE_S = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose disk is fast."""
    output = tmp_path_factory.mktemp("whole")
    assert make_trainer(output, keep_checkpoints=9).run() == 0
    return output


class Disk:
    """Stands between a run and its disk: `during` is called when a checkpoint is half written.

    Attributes:
        written: steps of the checkpoints, in order.
        most: writes at the same time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, during: Callable[[int], object]) -> None:
        self.written: list[int] = []
        self.most = self._now = 0
        self._during, self._write_data = during, FileSystemWriter.write_data
        monkeypatch.setattr(FileSystemWriter, "write_data", lambda writer, *given: self._write(writer, *given))

    def _write(self, writer: FileSystemWriter, *given: Any) -> Any:
        step = int(str(writer.path).removesuffix(".part")[-10:])
        self._now += 1
        self.most = max(self.most, self._now)
        self._during(step)
        done = self._write_data(writer, *given)
        self.written.append(step)
        self._now -= 1
        return done


def same_checkpoints(one: Path, other: Path) -> bool:
    """Whether two runs have the same checkpoints, all bits of them but what a clock says."""
    names = sorted(path.name for path in (one / "checkpoints").glob("step-*"))
    assert names == sorted(path.name for path in (other / "checkpoints").glob("step-*"))
    states = ([load_checkpoint(run / "checkpoints" / name) for run in (one, other)] for name in names)
    return all(equal(first, second) for first, second in states)


def test_training_goes_on_while_a_checkpoint_is_written(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    fifth = threading.Event()

    def before(number: int, rows: list[int]) -> None:
        made.append(number)
        if number == 5:
            assert not list((tmp_path / "checkpoints").glob("step-*"))
            fifth.set()

    disk = Disk(monkeypatch, lambda step: step > 3 or fifth.wait(PATIENCE_S))
    assert make_trainer(tmp_path, SmallBatches(before), keep_checkpoints=9).run() == 0
    assert fifth.is_set()
    assert (disk.written, disk.most) == ([3, 6, 9, 12], 1)
    assert same_checkpoints(tmp_path, whole)
    assert read_metrics(tmp_path) == read_metrics(whole)


def test_next_checkpoint_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    late = threading.Event()
    disk = Disk(monkeypatch, lambda step: late.wait(0.05))  # longer than three steps
    assert make_trainer(tmp_path, checkpoint_every_steps=1, keep_checkpoints=20).run() == 0
    assert (disk.written, disk.most) == (list(range(1, 13)), 1)
    assert {thread.name for thread in threading.enumerate() if "checkpoint" in thread.name} == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": {"decay": 0.9}},
        {"queue": 20, "mask_false_negatives": True},
    ],
)
def test_checkpoint_holds_the_state_at_its_step_whatever_came_while_it_was_written(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = settings | {"keep_checkpoints": 9, "checkpoint_every_steps": 4}
    assert make_trainer(tmp_path / "fast", **settings).run() == 0
    seventh = threading.Event()
    Disk(monkeypatch, lambda step: step > 4 or seventh.wait(PATIENCE_S))
    batches = SmallBatches(lambda number, rows: seventh.set() if number == 7 else None)
    assert make_trainer(tmp_path / "slow", batches, **settings).run() == 0
    assert same_checkpoints(tmp_path / "slow", tmp_path / "fast")


def test_run_killed_while_a_checkpoint_is_written_resumes_bit_for_bit(whole: Path, tmp_path: Path):
    killed = run_small(tmp_path, signal="SIGKILL", at=7, slow_save_of=6)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / ".step-0000000006.part").is_dir()
    assert last_state(tmp_path)["step"] == 4, "from the end of the epoch"
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8)), "training went on"
    resumed = run_small(tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 4 of 12" in resumed.stdout
    assert read_metrics(tmp_path) == read_metrics(whole)
    assert equal(last_state(tmp_path)["model"], last_state(whole)["model"])
    assert equal(last_state(tmp_path)["optimizer"], last_state(whole)["optimizer"])
    assert not list((tmp_path / "checkpoints").glob(".*.part"))


def test_evaluation_is_not_recorded_before_its_checkpoint_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    evaluated, recorded = threading.Event(), []

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        evaluated.set()
        return {"score": 0.5}

    disk = Disk(monkeypatch, lambda step: step > 4 or evaluated.wait(PATIENCE_S))
    trainer = make_trainer(tmp_path, evaluate=evaluate, checkpoint_every_steps=100, epochs=2)
    record = trainer.report.record

    def watch(kind: str, values: Any, **options: Any) -> None:
        if kind == "evaluation":
            recorded.append((values["step"], list(disk.written), latest_checkpoint(tmp_path / "checkpoints").name))  # type: ignore[union-attr]
        record(kind, values, **options)

    monkeypatch.setattr(trainer.report, "record", watch)
    assert trainer.run() == 0
    assert recorded == [(4, [4], "step-0000000004"), (8, [4, 8], "step-0000000008")]


def test_error_of_the_writing_ends_the_run_at_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(step: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Disk(monkeypatch, full)
    trainer = make_trainer(tmp_path)
    with pytest.raises(OSError, match=r"No space left on device: '.*/checkpoints/step-0000000003'"):
        trainer.run()
    assert trainer.step == 6
    assert latest_checkpoint(tmp_path / "checkpoints") is None


def test_error_of_the_writing_ends_all_ranks_at_the_next_checkpoint(tmp_path: Path):
    for code, error in run_two_ranks(tmp_path, largest_file=5000, train={"evaluate_every_epochs": 0}):
        assert "OSError: [Errno 27] File too large" in error
        assert code == 1
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 7)), "training went on"


@pytest.mark.parametrize("last", [False, True])
def test_last_checkpoint_is_written_before_the_run_goes_on(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    threads: dict[int, str] = {}
    Disk(monkeypatch, lambda step: threads.update({step: threading.current_thread().name}))
    stop = SmallBatches(lambda number, rows: None if last or number < 4 else signal.raise_signal(signal.SIGTERM))
    assert make_trainer(tmp_path, stop).run() == (0 if last else 128 + signal.SIGTERM)
    final = max(threads)
    assert final == (12 if last else 5)
    assert threads.pop(final) == threading.main_thread().name
    assert set(threads.values()) == {"mmdata-checkpoint_0"}


def test_error_of_the_run_comes_after_the_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raised = threading.Event()

    def before(number: int, rows: list[int]) -> None:
        if number == 5:
            raised.set()
            raise TrainingError("the loader is broken")

    Disk(monkeypatch, lambda step: raised.wait(PATIENCE_S) and threading.Event().wait(0.2))
    with pytest.raises(TrainingError, match="the loader is broken"):
        make_trainer(tmp_path, SmallBatches(before)).run()
    assert last_state(tmp_path)["step"] == 3


@pytest.mark.parametrize("fails", [False, True])
def test_run_may_wait_long_for_a_checkpoint(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last one is written in the step, and the one before it while the run ends with an error."""
    waits, limits = threading.Event(), [0.0]

    def before(number: int, rows: list[int]) -> None:
        if fails and number == 5:
            raise TrainingError("the loader is broken")

    def at(doing: str | None, limit_s: float = 0.0) -> None:
        limits.append(limit_s)
        if doing in (None, "writing a checkpoint") and trainer.step >= (4 if fails else 12):
            waits.set()

    Disk(monkeypatch, lambda step: (fails or step == 12) and waits.wait(PATIENCE_S) and written.append(limits[-1]))
    written: list[float] = []
    trainer = make_trainer(tmp_path, SmallBatches(before), evaluate_every_epochs=0, checkpoint_every_steps=3)
    monkeypatch.setattr(trainer.watchdog, "at", at)
    with pytest.raises(TrainingError) if fails else contextlib.nullcontext():
        trainer.run()
    assert written == [LONG_S]


def test_run_waits_for_its_checkpoints_where_a_rank_has_no_memory_for_a_copy(tmp_path: Path):
    done = run_small(tmp_path, torchrun=2, no_memory=True)
    assert done.returncode == 0, done.stderr
    for step in (3, 6, 9):
        assert f"training waits for the checkpoint of step {step}: no memory for a copy of it (" in done.stdout
    assert last_state(tmp_path)["step"] == 12


def test_error_of_the_copy_that_is_not_of_memory_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(stager: DefaultStager, tensors: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(DefaultStager, "stage", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        make_trainer(tmp_path).run()


def test_copies_are_made_by_a_stager_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """That of torch 2.11 cannot copy a second time."""
    stage, used = DefaultStager.stage, list[DefaultStager]()
    monkeypatch.setattr(DefaultStager, "stage", lambda self, *given: used.append(self) or stage(self, *given))
    assert make_trainer(tmp_path).run() == 0
    assert len(used) == len({id(stager) for stager in used}) > 1


def test_error_of_the_run_is_raised_and_that_of_the_writing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def before(number: int, rows: list[int]) -> None:
        if number == 4:
            raise TrainingError("the loader is broken")

    def full(step: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Disk(monkeypatch, full)
    with pytest.raises(TrainingError, match="the loader is broken"):
        make_trainer(tmp_path, SmallBatches(before)).run()
    said = "step-0000000003': no space left on device; free some space or choose another disk, then run this again"
    assert f"the last checkpoint could not be written: '{tmp_path}/checkpoints/{said}" in capsys.readouterr().out


@pytest.mark.parametrize("tied", [False, True])
def test_copy_of_a_state_shares_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool):
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100, bias=False))
    if tied:
        model[1].weight = model[0].weight
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    places = [1]
    moved = threading.Event()
    Disk(monkeypatch, lambda step: moved.wait(PATIENCE_S))
    with CheckpointWriter(tmp_path, keep=1, say=print) as writer:
        writer.save({"step": 1, "model": model.state_dict(), "batches": {"places": places}}, background=True)
        with torch.no_grad():
            model[0].weight.zero_()
            model[1].weight.zero_()
        places.append(2)
        moved.set()
        writer.wait()
    found = load_checkpoint(tmp_path / "step-0000000001")
    assert equal(found["model"], expected)
    assert found["batches"] == {"places": [1]}
