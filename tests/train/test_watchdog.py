"""Runs that get no further: real processes, stopped, asleep or killed, end with an error that names rank and step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.errors import TrainingError
from mmdata.train.run.heartbeat import RankPosition
from mmdata.train.run.watchdog import STALLED, Watchdog
from tests.programs import PATIENCE_S, Program, free_port, run_ranks
from tests.train.test_loop import last_state, make_trainer
from tests.waiting import wait_until

PROGRAM = Path(__file__).with_name("small_run.py")


def start(output: Path, *, ranks: int = 2, **spec: Any) -> list[subprocess.Popen[str]]:
    spec = {"output": str(output), "train": {}, "stall_timeout_s": 30, **spec}
    command = [sys.executable, str(PROGRAM), json.dumps(spec)]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
    environments = [os.environ | {"OMP_NUM_THREADS": "1"} | world | {"RANK": str(rank)} for rank in range(ranks)]
    return [Program(command, env=each, stderr=subprocess.PIPE, text=True) for each in environments]


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    error = process.communicate(timeout=PATIENCE_S)[1]
    return process.returncode, error


@pytest.mark.sweep
def test_rank_that_sleeps_in_its_batches_ends_all_ranks(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, at=5, sleep_s=600)  # batch 5 is taken before update 4 is made of batch 4
    said = r"error: rank 1 has got no further for \d+ s \(the limit is 30 s\): step 4, waiting for data; "
    for process in launched:
        code, error = end_of(process)
        assert code == STALLED, error
        assert re.search(said + "rank 0: step 4, computing. All ranks end", error), error
    assert "time.sleep" in error or "before" in error, "each process says where its threads are"


@pytest.mark.sweep
def test_rank_that_is_stopped_ends_the_others(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, at=5, heard=True, signal="SIGSTOP")
    code, error = end_of(launched[0])
    assert code == STALLED, error
    said = r"error: rank 1 has not been heard of for \d+ s \(the limit is 30 s\): it is stopped, dead or "
    said += "cut off; last heard of at step 4, waiting for data; rank 0: step 4, computing. All ranks end"
    assert re.search(said, error), error


def test_rank_that_is_killed_ends_the_others(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, at=5, heard=True, signal="SIGKILL")
    code, error = end_of(launched[0])
    assert code == 1, error
    said = "TrainingError: rank 1 is gone (killed?), last heard of at step 4, waiting for data; all ranks stop, "
    assert said + "this one at step 4, computing; the same command resumes" in error
    assert end_of(launched[1])[0] == -signal.SIGKILL


FOR_EVER = {"others_sleep_s": 3600, "grace_s": 1, "stall_timeout_s": 1e9}
"""Ranks that wait in something that notices no other rank's end, as a collective of nccl, without a limit."""


def test_rank_that_is_killed_is_named_by_ranks_that_wait_for_ever(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, ranks=3, at=5, heard=True, signal="SIGKILL", **FOR_EVER)
    for rank in (0, 1):
        code, error = end_of(launched[rank])
        assert code == STALLED, error
        said = "error: rank 2 is gone (killed?), last heard of at step 4, waiting for data; rank "
        assert said in error
        assert "step 4, waiting for data. All ranks end; the same command resumes" in error
    assert end_of(launched[2])[0] == -signal.SIGKILL


@pytest.mark.sweep
def test_first_rank_that_is_killed_is_named_by_ranks_that_wait_for_ever(tmp_path: Path, launched: list[Any]):
    """The store lives in its process, and ends with it."""
    spec = FOR_EVER | {"others_sleep_s": 0, "signal_of_others": "SIGKILL"}
    launched += start(tmp_path, at=5, sleep_s=3600, heard=True, **spec)
    assert end_of(launched[0])[0] == -signal.SIGKILL
    code, error = end_of(launched[1])
    assert code == STALLED, error
    said = (
        "error: rank 0 is gone (killed?), last heard of at step 4, waiting for data; rank 1: step 4, waiting for data. "
    )
    assert said + "All ranks end; the same command resumes" in error


@pytest.mark.sweep
def test_rank_that_ends_with_an_error_is_named_by_ranks_that_wait_for_ever(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, ranks=3, at=2, error="out of memory", in_forward=True, **FOR_EVER)
    assert "RuntimeError: out of memory" in end_of(launched[2])[1]
    for rank in (0, 1):
        code, error = end_of(launched[rank])
        assert code == STALLED, error
        assert "error: rank 2 ended at step 2, computing: RuntimeError: out of memory; rank " in error


def test_rank_0_knows_which_ranks_have_read_the_verdict(tmp_path: Path):
    run_ranks(PROGRAM.with_name("told_ranks.py"), tmp_path)


@pytest.mark.parametrize(("takes_s", "write_s"), [(20, 120), (3600, 3)])
@pytest.mark.sweep
def test_a_checkpoint_in_progress_is_waited_for_before_the_end_if_that_does_not_last(
    tmp_path: Path, launched: list[Any], takes_s: int, write_s: int
):
    late = {"slow_save_of": 6, "slow_rank": 0, "save_takes_s": takes_s, "write_s": write_s}
    launched += start(tmp_path, at=7, sleep_s=1, signal="SIGKILL", **FOR_EVER, **late)
    code, error = end_of(launched[0])
    assert code == STALLED, error
    assert f"; the checkpoint that is being written is waited for, for {write_s} s at most\n" in error
    assert "error: rank 1 is gone (killed?), last heard of at " in error
    assert last_state(tmp_path)["step"] == 4


@pytest.mark.sweep
def test_rank_that_is_stopped_for_a_while_is_not_gone(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, at=5, sleep_s=0, signal="SIGSTOP", grace_s=1, stall_timeout_s=1e9)
    stat = Path(f"/proc/{launched[1].pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", program=launched[1])  # it is stopped
    time.sleep(5)  # longer than the grace, and than a heartbeat takes
    assert [process.poll() for process in launched] == [None, None]
    launched[1].send_signal(signal.SIGCONT)
    assert [end_of(process)[0] for process in launched] == [0, 0]


@pytest.mark.sweep
def test_loader_that_gives_nothing_ends_a_single_process(tmp_path: Path, launched: list[Any]):
    launched += start(tmp_path, ranks=1, at=5, sleep_s=600, stall_timeout_s=20)
    code, error = end_of(launched[0])
    assert code == STALLED, error
    assert re.search(
        r"error: rank 0 has got no further for \d+ s \(.*\): step 5, waiting for data. All ranks end", error
    )


def keep_none(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """A miner that leaves nothing over."""
    return torch.zeros_like(negatives)


@pytest.fixture
def no_end_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits of what is learned: the same limit of a position would end pytest where a step takes longer."""
    monkeypatch.setattr(Watchdog, "_judge", lambda self, timeout_s: "")
    monkeypatch.setattr("mmdata.train.run.trainer.STALL_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("no_end_of_this_process")
def test_miner_that_passes_nothing_ends_the_run(tmp_path: Path):
    miner = {"name": "user", "target": f"{__name__}:keep_none"}
    trainer = make_trainer(tmp_path, miner=miner, steps=10**6, log_every_steps=10**6)
    said = r"step \d+: loss and gradient have been exactly 0 for .*\(on rank 0 8 of 8 are\), or no negative passes"
    with pytest.raises(TrainingError, match=said):
        trainer.run()


@pytest.mark.usefixtures("no_end_of_this_process")
def test_batches_without_a_valid_row_end_the_run(tmp_path: Path):
    trainer = make_trainer(tmp_path, steps=10**6, log_every_steps=10**6)
    trainer.source.spoil = lambda number, batch: batch["valid"].zero_()
    with pytest.raises(TrainingError, match=r"no row is valid \(on rank 0 0 of 8 are\), or no negative passes"):
        trainer.run()


def test_run_that_learns_nothing_says_so_once_at_a_log_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trainer = make_trainer(tmp_path, steps=12, log_every_steps=2)
    # Steps 1 and 2 are too few for a line: the last batch of an epoch may have one row, and no negatives.
    trainer.source.spoil = lambda number, batch: batch["valid"].fill_(number in (0, 3))
    assert trainer.run() == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "exactly 0" in line]
    assert said == [
        "loss and gradient are exactly 0 since step 4: no row is valid, or no negative passes train.miner, "
        "train.teacher and the masks; the run ends after 600 s of it"
    ]


def test_a_few_updates_without_negatives_are_no_error(tmp_path: Path):
    miner = {"name": "user", "target": f"{__name__}:keep_none"}
    assert make_trainer(tmp_path, miner=miner, steps=3).run() == 0


def test_positions_order_by_step_then_by_what_comes_first():
    positions = [
        RankPosition(2, "computing"),
        RankPosition(3, "waiting for data"),
        RankPosition(3, "waiting for the other ranks"),
        RankPosition(3, "computing"),
    ]
    shuffled = [positions[i] for i in (2, 0, 3, 1)]
    assert sorted(shuffled, key=RankPosition.order) == positions
    assert RankPosition(3, "evaluating").order() == RankPosition(3, "computing").order()
