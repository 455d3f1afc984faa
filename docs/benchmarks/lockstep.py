"""What it costs that ranks agree on each batch: asked when the batch is due, and asked a batch ahead.

PYTHONPATH=. python docs/benchmarks/lockstep.py --step-ms 100 --hop-us 50

A collective of W ranks in a ring takes 2 (W - 1) hops. Here it is simulated, by a question that is answered after this
time; the loop around it is the trainer's. Printed is what a step takes beyond its own time, the median of all steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from threading import Event, Timer
from typing import Any, cast

import torch

from mmdata.batch import Batch
from mmdata.train.prefetch import DevicePrefetcher
from mmdata.train.ranks import lockstep


class Work:
    """A collective that ends after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._done = Event()
        Timer(seconds, self._done.set).start()

    def wait(self) -> None:
        self._done.wait()


class Ready:
    """A loader that is never waited for."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._steps):
            yield cast(Batch, {"rows": torch.zeros(1)})

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def beyond_ms(ranks: int, given: argparse.Namespace, *, ahead: bool) -> float:
    """Milliseconds of a step beyond its own."""
    seconds = 2 * (ranks - 1) * given.hop_us / 1e6
    cast(Any, lockstep.dist).all_reduce = lambda values, **_: Work(seconds)
    together = lockstep.Lockstep(cast(Any, object()), lambda: 0)
    batches = DevicePrefetcher(Ready(given.steps), "cpu", took=together.took)
    taken: list[float] = []
    before = time.perf_counter()
    for _ in together.batches(iter(batches)):
        if not ahead:  # the two that were waited for before: one for the batch, one for signals
            for _ in range(2):
                Work(seconds).wait()
        time.sleep(given.step_ms / 1e3)
        together.signal()
        taken.append(1e3 * (time.perf_counter() - before) - given.step_ms)
        before = time.perf_counter()
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--hop-us", type=float, default=50.0, help="from one host to the next over TCP")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    print("| ranks | ring, ms | two a step, when due: ms a step | one, a batch ahead: ms a step |\n|---|---|---|---|")
    for ranks in given.ranks:
        due, ahead = (beyond_ms(ranks, given, ahead=ahead) for ahead in (False, True))
        print(f"| {ranks:,} | {2 * (ranks - 1) * given.hop_us / 1e3:.1f} | {due:.1f} | {ahead:.1f} |", flush=True)


if __name__ == "__main__":
    main()
