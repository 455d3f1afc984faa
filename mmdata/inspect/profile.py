"""Where a loader's time goes: measured from outside, for any iterable of batches; by stage where it keeps a clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mmdata.batch import Batch

STAGES = {"read": "read_s", "decode": "decode_s", "transform": "transform_s", "tokenize": "tokenize_s"}
REMEDIES = {
    "read": "put the shards on a faster disk, or read them once so that they lie in the system's cache",
    "decode": "store smaller images, or add workers (data.num_workers)",
    "transform": "lower data.image_size, or add workers (data.num_workers)",
    "tokenize": "lower data.max_length, or add workers (data.num_workers)",
}
KEEPS_UP = 0.05  # of the time spent waiting: below it more speed would not be felt


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        steps: batches after the first.
        rows: valid rows in them.
        seconds: that they took.
        first_batch_s: seconds until the first batch, which is not counted in any other number.
        wait_share: of `seconds`, spent waiting for a batch; 1 where the loop does nothing else.
        padding_share: of the text positions of valid rows.
        step_s: seconds that the loop was busy with each batch.
        stages: seconds of all workers together by stage; empty where the loader keeps no clock.
    """

    steps: int
    rows: int
    seconds: float
    first_batch_s: float
    wait_share: float
    padding_share: float
    step_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Valid rows a second."""
        return self.rows / self.seconds

    @property
    def stage_shares(self) -> dict[str, float]:
        """Share of the workers' time by stage, the largest first."""
        total = sum(self.stages.values()) or 1.0
        return {
            name: self.stages[name] / total for name in sorted(self.stages, key=self.stages.__getitem__, reverse=True)
        }

    def in_words(self) -> str:
        """One sentence: where the time goes, and what to do."""
        speed = f"at {self.samples_per_s:,.0f} samples/s"
        waits = (
            f"{speed} the loop waits {self.wait_share:.0%} of its time"
            if self.step_s
            else f"at full speed, {speed[3:]}"
        )
        if not self.stages:
            return f"{waits}; this loader keeps no clock of its stages."
        stage, share = next(iter(self.stage_shares.items()))
        if self.step_s and self.wait_share < KEEPS_UP:
            return f"{waits}: the loader keeps up, and there is nothing to do ({stage} is {share:.0%} of its work)."
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        work = f"{stage} is {share:.0%} of the workers' time"
        return f"{waits}, {work}; to go faster, {REMEDIES[stage]}; {cores} cores are at hand."


def profile(loader: Iterable[Batch], steps: int, *, step_s: float = 0.0) -> Profile:
    """Run through batches and measure.

    Args:
        loader: a `Loader`, or any other iterable of batches; begun anew when it ends.
        steps: batches to measure, after a first one.
        step_s: seconds that the loop is busy with each batch, as a training step would be; 0 measures the loader at
            full speed, which then is all that the loop waits for.

    Raises:
        ValueError: the loader gives no batches, or fewer than one step is asked for.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more: got {steps}")
    batches = _endless(loader)
    started = time.perf_counter()
    next(batches)
    first_batch_s = time.perf_counter() - started
    before = _stages(loader)
    rows = tokens = places = 0
    wait_s = 0.0
    started = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        wait_s += time.perf_counter() - asked
        mask = batch["attention_mask"][batch["valid"]]
        rows, tokens, places = rows + len(mask), tokens + int(mask.sum()), places + mask.numel()
        time.sleep(step_s)
    seconds = time.perf_counter() - started
    return Profile(
        steps=steps,
        rows=rows,
        seconds=seconds,
        first_batch_s=first_batch_s,
        wait_share=wait_s / seconds,
        padding_share=1 - tokens / places if places else 0.0,
        step_s=step_s,
        stages={name: total - before[name] for name, total in _stages(loader).items()},
    )


def _endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the loader gives no batches: there is nothing to measure")


def _stages(loader: Iterable[Batch]) -> dict[str, float]:
    stats = getattr(loader, "stats", None)
    return {} if stats is None else {name: float(getattr(stats, entry)) for name, entry in STAGES.items()}
