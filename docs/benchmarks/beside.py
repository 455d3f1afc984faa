"""What a loader takes from a training loop beside it: many small operations, as kernel launches are, with and without.

PYTHONPATH=. python docs/benchmarks/beside.py photos          # after docs/benchmarks/loading.py make
PYTHONPATH=. python docs/benchmarks/beside.py photos --side   # in turn with the same workers in a side process
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from threading import Thread

import torch

from docs.benchmarks.loading import HOME, LENGTH
from mmdata import Loader


def steps_per_s(seconds: float) -> float:
    """Steps of 2,000 small operations, in Python, that hold the interpreter as launches of kernels do."""
    small = torch.zeros(8)
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        for _ in range(2000):
            small.add_(1.0)
        done += 1
    return done / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["photos", "shrunk", "large"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--side", action="store_true", help="also with data.workers: process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = {
        "shards": str(HOME / given.workload),
        "tokenizer": str(HOME / "tokenizer"),
        "global_batch_size": 2048,  # takes longer than a round; not a whole epoch, or the next one would be begun
        "text_buckets": [LENGTH],
        "num_workers": given.workers,
        "prefetch": 3,
    }
    kinds = ["thread", "process"] if given.side else ["thread"]
    loaders = {kind: Loader.from_config({**settings, "workers": kind}) for kind in kinds}
    for loader in loaders.values():
        next(iter(loader))  # the side process is started, memory is there
    alone: list[float] = []
    beside: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        alone.append(steps_per_s(given.seconds))
        for kind, loader in loaders.items():
            batches = iter(loader)
            first = Thread(target=next, args=(batches,))  # as long as it is being made, the workers work
            first.start()
            beside[kind].append(steps_per_s(given.seconds))
            assert first.is_alive(), "the batch was ready before the round ended: set --seconds lower"
            first.join()
            batches.close()  # type: ignore[attr-defined]
    for kind, rates in beside.items():
        print(
            f"steps/s alone {median(alone):.1f}, beside {given.workers} worker(s), {kind}: {median(rates):.1f}: "
            f"{median(b / a for a, b in zip(alone, rates, strict=True)):.3f}"
        )


if __name__ == "__main__":
    main()
