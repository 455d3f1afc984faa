"""Runs that get no further or lose a rank end, and say at which step: processes under torchrun, asleep or killed."""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.errors import TrainingError
from mmdata.train.log import meter
from mmdata.train.run.watchdog import Watchdog
from tests.programs import PATIENCE_S, run_program
from tests.train.test_loop import make_trainer, run_small


def test_rank_that_is_killed_ends_the_others_which_say_where_they_were(tmp_path: Path):
    done = run_small(
        tmp_path, torchrun=3, signal="SIGKILL", at=5
    )  # batch 5 is taken before update 4 is made of batch 3
    assert done.returncode == 1
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: (SIGTERM|a collective failed) at step [45], ", done.stderr), done.stderr
    assert re.search(r"rank +: 2 \(local_rank: 2\)\n +exitcode +: -9 ", done.stderr), "torchrun names the rank"


def test_rank_that_fails_in_a_step_is_named_by_the_others(tmp_path: Path):
    done = run_small(tmp_path, torchrun=2, error_in_step="no pixels. At all", at=5)
    assert done.returncode == 1
    assert "ValueError: no pixels. At all" in done.stderr
    said = (
        r"^rank 0: a collective failed at step 5, computing \([^()]*\): rank 1 has failed \(ValueError: no pixels\. At "
    )
    found = re.search(rf"{said}all\); the same command resumes$", done.stderr, re.MULTILINE)
    assert found, done.stderr
    assert "GLHF" not in found[0], "only the first sentence of torch's message"


@pytest.mark.sweep
def test_rank_that_waits_for_ever_for_one_that_is_killed_says_where_it_was(tmp_path: Path):
    """As in a collective of nccl, which notices no other rank's end: torchrun kills it after 30 seconds."""
    done = run_small(tmp_path, torchrun=2, signal="SIGKILL", at=5, sleep_s=1, others_sleep_s=3600)
    assert done.returncode == 1
    assert "rank 0: SIGTERM at step 4, waiting for data\n" in done.stderr


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.sweep(keep=1)
def test_rank_that_gets_no_further_ends_with_the_stacks_of_its_threads(tmp_path: Path, ranks: int):
    done = run_small(tmp_path, torchrun=ranks, at=5, sleep_s=3600, stall_timeout_s=20)
    assert done.returncode == 1
    place = f"rank {max(0, ranks - 1)} has got no further for 20 s: step {4 if ranks else 5}, waiting for data"
    said = f"error: {place}. It ends; the stacks of its threads follow; the same command resumes\n"
    assert said in done.stderr
    assert re.search(r"Timeout \(0:00:22\)!\n(.*\n)+.* in happen\n", done.stderr), done.stderr


def test_rank_that_gets_no_further_says_so_after_an_evaluation_too():
    program = """
import time
from mmdata.train.run.watchdog import Watchdog
with Watchdog(1, lambda: 7, None) as watchdog:
    watchdog.at("evaluating", 1000)
    time.sleep(1.5)
    watchdog.at("computing")
    time.sleep(60)
"""
    done = run_program([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    said = "error: rank 0 has got no further for 1 s: step 7, computing. It ends; the stacks of its threads follow; "
    assert done.stderr.startswith(said), done.stderr


def test_rank_whose_torch_has_no_store_of_the_group_keeps_its_error():
    program = """
import torch.distributed as dist
from mmdata.train.run import watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def none():
    raise AttributeError("get_group_store")
watchdog._store = none
with watchdog.Watchdog(600, lambda: 7, dist.group.WORLD):
    raise ValueError("no pixels")
"""
    done = run_program([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stderr.rstrip().endswith("ValueError: no pixels")


def test_signals_of_others_are_not_told_as_those_of_the_rank():
    """A forked child's, as of a loader's worker; and a real-time signal, which has no name."""
    program = """
import os, signal, time
import torch.distributed as dist
from mmdata.train.run.watchdog import Watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGRTMIN + 4):
    signal.signal(number, lambda *given: None)
with Watchdog(600, lambda: 7, dist.group.WORLD) as watchdog:
    if not (child := os.fork()):
        signal.raise_signal(signal.SIGHUP)
        os._exit(0)
    os.waitpid(child, 0)
    signal.raise_signal(signal.SIGRTMIN + 4)
    signal.raise_signal(signal.SIGTERM)
"""
    done = run_program([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(("rank", "Exception"))] == [
        "rank 0: SIGTERM at step 7, starting"
    ]


def test_the_watch_ends_with_the_run():
    with Watchdog(600, lambda: 7, None) as watchdog:
        watchdog.at("computing")
    assert "mmdata-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_handler_of_a_library_in_c_stays(tmp_path: Path):
    with open(tmp_path / "stacks.txt", "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            with Watchdog(600, lambda: 7, None) as watchdog:
                signal.raise_signal(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert watchdog.received == 0
    assert "most recent call first" in (tmp_path / "stacks.txt").read_text()


def test_signal_before_the_end_of_a_job_is_passed_on_after_sigterm_too():
    passed_on: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: passed_on.append(number))
    with Watchdog(600, lambda: 7, None):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert passed_on == [signal.SIGUSR2]


def test_an_error_that_is_of_no_collective_stays_as_it_is():
    with pytest.raises(RuntimeError, match=r"^out of memory$"), Watchdog(600, lambda: 7, None):
        raise RuntimeError("out of memory")


def keep_none(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """A miner that leaves nothing over."""
    return torch.zeros_like(negatives)


def spoil_rows(number: int, batch: Any) -> None:
    batch["valid"].zero_()


@pytest.mark.parametrize(
    ("settings", "spoil"),
    [({"miner": {"name": "user", "target": f"{__name__}:keep_none"}}, None), ({}, spoil_rows)],
    ids=["miner", "rows"],
)
def test_run_that_learns_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, spoil: Any):
    monkeypatch.setattr(meter, "STILL_MOST", 6)
    assert make_trainer(tmp_path / "short", steps=3, **settings).run() == 0
    trainer = make_trainer(tmp_path / "long", steps=10**6, log_every_steps=10**6, **settings)
    if spoil:
        trainer.source.spoil = spoil
    said = "loss and gradient have been exactly 0 for 6 updates: no row is valid, or no negative passes train.miner, "
    with pytest.raises(TrainingError, match=f"^{said}train.teacher and the masks; loosen them$"):
        trainer.run()
    assert trainer.step == 6
