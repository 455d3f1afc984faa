"""What the loader's clock costs: a worker's batches with it and without, in turn, in one thread.

PYTHONPATH=. python docs/benchmarks/clock.py CONFIG [--rounds 40]

Processor seconds, so that other jobs on the machine count less; each pair makes the same batch. What the runs without
it differ by is the noise.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice
from statistics import median

import torch

from mmdata.config import load_config
from mmdata.loader import BatchBuilder, unfinished
from mmdata.loader.corpus import open_corpus
from mmdata.loader.stats import WATCH_EVERY, StageClock
from mmdata.plan.from_config import build_plan


class NoClock(StageClock):
    """What takes the clock's place: it does nothing."""

    def watch(self, watching: bool) -> None:
        pass

    def lap(self, stage: str) -> None:
        pass

    def stop(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    data = load_config(given.config, given.overrides).data
    corpus = open_corpus(data)
    plan = build_plan(data, corpus.index, corpus.tokenizer)
    made_by = BatchBuilder.from_config(data, corpus, plan)
    steps = list(islice(plan.steps(0), given.rounds))
    clocks = {"with": StageClock, "without": NoClock, "without, again": NoClock}
    spent: dict[str, list[float]] = {name: [] for name in clocks}
    names = list(clocks)
    for step in [steps[0], *steps]:
        names = [*names[1:], names[0]]  # who is first changes
        for name in names:
            unfinished.StageClock = clocks[name]
            started = time.thread_time()
            made_by.make(step)
            spent[name].append(time.thread_time() - started)
    base, rows = spent["without"][1:], len(steps[0].rows)  # the first warmed up
    print(f"{len(base)} batches of {rows}: {1e6 * median(base) / rows:.0f} us a row")
    for name in ("with", "without, again"):
        ratio = median(a / b for a, b in zip(spent[name][1:], base, strict=True))
        print(f"{name:15} {ratio - 1:+.2%} (median of pairs)")
    print(f"the clock alone {laps_us():.2f} us a row")


def laps_us(rows: int = 20_000) -> float:
    """Microseconds that the laps of a row take, with nothing between them."""
    clock = StageClock()
    started = time.thread_time()
    for i in range(rows):
        clock.watch(i % WATCH_EVERY == 0)
        for stage in ("read", "decode", "transform"):
            clock.lap(stage)
    return 1e6 * (time.thread_time() - started) / rows


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
