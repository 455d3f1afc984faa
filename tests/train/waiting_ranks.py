"""python waiting_ranks.py FOLDER RANK: ranks wait for long work of rank 0, and for a rank that does not come."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather, on_first
from mmdata.train.run.watchdog import Watchdog


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
    watchdog = Watchdog(600, lambda: 0, group)
    watchdog.meet()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Ranks? 1 failed to pass monitoredBarrier"):
            watchdog.meet()
    else:
        time.sleep(6)
    collectives.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
