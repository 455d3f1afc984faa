"""python waiting_ranks.py FOLDER RANK: ranks wait for long work of rank 0, and for a rank that does not come."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mmdata.errors import TrainingError
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather, on_first
from mmdata.train.run.watchdog import Watchdog


def meet_at_a_checkpoint(watchdog: Watchdog) -> None:
    watchdog.at("writing a checkpoint")
    watchdog.meet()


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    done: list[int] = []

    def work() -> None:
        time.sleep(6)
        done.append(rank)

    def fail() -> None:
        time.sleep(6)
        raise ValueError("no groups")

    on_first(work, group, takes=collectives.LONG)
    assert done == [0][rank:]
    with pytest.raises(ValueError, match="no groups"):
        on_first(fail, group, takes=collectives.LONG)
    gather(None, group)
    said = r"^rank 0: a collective failed at step 7, writing a checkpoint \(.*Ranks? 1 failed to pass monitoredBarrier"
    with Watchdog(600, lambda: 7, group) as watchdog:
        watchdog.meet()
    if rank == 0:
        with pytest.raises(TrainingError, match=said), Watchdog(600, lambda: 7, group) as watchdog:
            meet_at_a_checkpoint(watchdog)
    else:
        time.sleep(6)
    collectives.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
