"""python long_work_ranks.py RANK RENDEZVOUS FAILS: rank 0 works for longer than the watchdog lets a rank stand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from mmdata.train.ranks import lockstep
from mmdata.train.run.watchdog import Watchdog


def main(rank: int, rendezvous: str, fails: bool) -> None:
    """Print what came of it."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo")
    lockstep.SIGN_EVERY_S = 0.25

    def work(go_on: Callable[[], None]) -> None:
        for _ in range(160):
            time.sleep(0.1)
            go_on()
        if fails:
            raise ValueError("no groups")

    with Watchdog(10.0, lambda: 7, group) as watchdog:
        watchdog.at("searching")
        try:
            lockstep.on_first_for_long(work, group, moved=lambda: watchdog.at("searching"))
        except ValueError as error:
            print(f"rank {rank}: {error}", flush=True)
        else:
            print(f"rank {rank}: fine", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails")
