"""Runs that get no further or lose a rank end, and say at which step: processes under torchrun, asleep or killed."""

from __future__ import annotations

import re
import subprocess
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
from tests.train.test_loop import make_trainer, run_small


def test_rank_that_is_killed_ends_the_others_which_say_where_they_were(tmp_path: Path):
    done = run_small(
        tmp_path, torchrun=3, signal="SIGKILL", at=5
    )  # batch 5 is taken before update 4 is made of batch 3
    assert done.returncode == 1
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: (SIGTERM|a collective failed) at step [45], ", done.stderr), done.stderr
    assert re.search(r"rank +: 2 \(local_rank: 2\)\n +exitcode +: -9 ", done.stderr), "torchrun names the rank"


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


def test_limit_that_becomes_shorter_counts_at_once():
    program = (
        "import time; from mmdata.train.run.watchdog import Watchdog\n"
        "with Watchdog(1, lambda: 7, None) as watchdog:\n"
        "    watchdog.at('evaluating', 600); time.sleep(1.5); watchdog.at('computing'); time.sleep(600)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: rank 0 has got no further for 1 s: step 7, computing. It ends" in done.stderr


def test_the_watch_ends_with_the_run():
    with Watchdog(600, lambda: 7, None) as watchdog:
        watchdog.at("computing")
    assert "mmdata-watchdog" not in {thread.name for thread in threading.enumerate()}


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
