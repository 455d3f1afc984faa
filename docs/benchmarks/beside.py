"""What a loader takes from a training loop beside it: many small operations, as kernel launches are, with and without.

PYTHONPATH=. python docs/benchmarks/beside.py photos          # after docs/benchmarks/loading.py make
PYTHONPATH=. python docs/benchmarks/beside.py photos --process   # in turn with the same workers in a worker process

With --process it also runs beside another program that makes the same batches for itself: the cost of any load on the
other cores.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from threading import Thread

import torch

from docs.benchmarks.loading import HOME, LENGTH
from mmdata import Loader

OTHER = "another program"


def make_loader(workload: str, workers: str, num_workers: int) -> Loader:
    settings = {
        "shards": str(HOME / workload),
        "tokenizer": str(HOME / "tokenizer"),
        "global_batch_size": 2048,  # takes longer than a round; not a whole epoch, or the next one would be begun
        "text_buckets": [LENGTH],
        "loading": {"num_processes": int(workers == "process"), "num_workers": num_workers, "prefetch_batches": 3},
    }
    return Loader.from_config(settings)


def steps_per_s(seconds: float) -> float:
    """Steps of 2,000 small operations, in Python, that hold the interpreter as launches of kernels do."""
    small = torch.zeros(8)
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        for _ in range(2000):
            small.add_(1.0)
        done += 1
    return done / spent


def beside_loader(loader: Loader, seconds: float) -> float:
    """Steps a second while the workers of a loader make a batch."""
    batches = iter(loader)
    first = Thread(target=next, args=(batches,))  # as long as it is being made, the workers work
    first.start()
    rate = steps_per_s(seconds)
    assert first.is_alive(), "the batch was ready before the round ended: set --seconds lower"
    first.join()
    batches.close()  # type: ignore[attr-defined]
    return rate


@contextlib.contextmanager
def other_program(given: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """One that makes batches for as long as it is looked at, and is stopped otherwise."""
    command = [sys.executable, __file__, given.workload, "--workers", str(given.workers), "--load"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        process.send_signal(signal.SIGSTOP)

        def measure() -> float:
            process.send_signal(signal.SIGCONT)
            rate = steps_per_s(given.seconds)
            process.send_signal(signal.SIGSTOP)
            return rate

        try:
            yield measure
        finally:
            process.kill()  # also where it is stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["photos", "shrunk", "large"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument(
        "--process", action="store_true", help="also with data.loading.num_processes: 1, and another program"
    )
    parser.add_argument("--load", action="store_true", help="only make batches, for ever")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.load:
        while True:
            for _ in make_loader(given.workload, "thread", given.workers):
                print(flush=True)
    with contextlib.ExitStack() as stack:
        kinds: dict[str, Callable[[], float]] = {}
        for workers in ["thread", "process"] if given.process else ["thread"]:
            loader = make_loader(given.workload, workers, given.workers)
            next(iter(loader))  # the worker process is started, memory is there
            kinds[workers] = lambda loader=loader: beside_loader(loader, given.seconds)
        if given.process:
            kinds[OTHER] = stack.enter_context(other_program(given))
        compare(kinds, given)


def compare(kinds: dict[str, Callable[[], float]], given: argparse.Namespace) -> None:
    """All in turn; medians of the ratios of neighbours."""
    alone: list[float] = []
    beside: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, measure in kinds.items():
            alone.append(steps_per_s(given.seconds))
            beside[kind].append(measure() / alone[-1])
    for kind, shares in beside.items():
        print(
            f"{median(alone):.1f} steps/s alone; beside {given.workers} worker(s), {kind}: "
            f"{median(shares):.3f} of it ({min(shares):.3f} to {max(shares):.3f})"
        )


if __name__ == "__main__":
    main()
