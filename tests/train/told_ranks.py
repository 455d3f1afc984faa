"""python told_ranks.py FOLDER RANK: rank 0 has a verdict, which rank 1 reads only when it may."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from mmdata.train.run.heartbeat import Heartbeats, OwnPosition
from tests.waiting import wait_until

MAY_READ = threading.Event()


class Late(Heartbeats):
    """Once constructed, it reads what others have sent only if it may."""

    def _receive(self, ranks: range | tuple[int, ...]) -> None:
        if MAY_READ.is_set() or not hasattr(self, "_thread"):
            super()._receive(ranks)


def wait_for_a_heartbeat(heartbeats: Heartbeats) -> None:
    """Of rank 1."""
    tick = heartbeats._known[1][0]
    wait_until(lambda: heartbeats._known[1][0] > tick)


def main(folder: Path, rank: int) -> None:
    """Fail unless rank 0 knows when rank 1 has read the verdict."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=2)
    group, released = dist.new_group(backend="gloo"), folder / "released"
    if rank == 0:
        MAY_READ.set()
    heartbeats = Late(OwnPosition(), group, interval_s=0.05)
    if rank == 0:
        wait_for_a_heartbeat(heartbeats)  # now rank 1 is constructed
        heartbeats.verdict = "all ranks end"
        for _ in range(3):
            wait_for_a_heartbeat(heartbeats)
            assert heartbeats.untold(patience_s=3600)
        assert not heartbeats.untold(patience_s=-1), "a rank that is not heard of is not waited for"
        released.touch()
        wait_until(lambda: not heartbeats.untold(patience_s=3600))
    else:
        while not released.exists():
            assert not heartbeats.verdict
            assert not heartbeats.presence.gone()
            time.sleep(0.01)
        MAY_READ.set()
        wait_until(lambda: heartbeats.verdict)
    heartbeats.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
