"""Measures where a loader's time goes: for any iterable of batches, and by stage if the loader has `stats`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mmdata.batch import Batch
from mmdata.loader.stats import Stats

KEEPS_UP = 0.05
"""Share of time spent waiting for data below which the loader is fast enough."""
CORE = "waiting for a core"


@dataclass(frozen=True)
class Profile:
    """Measurements of a loader.

    Attributes:
        steps: measured batches; the first batch is not among them.
        rows: valid rows in them.
        seconds: their time.
        first_batch_s: seconds until the first batch.
        wait_share: share of `seconds` spent waiting for a batch; 1 if the loop does nothing else.
        step_s: seconds that the loop was busy with each batch.
        stats: the loader's times by stage over these batches; None if the loader has none.
    """

    steps: int
    rows: int
    seconds: float
    first_batch_s: float
    wait_share: float
    step_s: float = 0.0
    stats: Stats | None = field(default=None, repr=False)

    @property
    def samples_per_s(self) -> float:
        """Valid rows per second."""
        return self.rows / self.seconds

    @property
    def keeps_up(self) -> bool:
        """Whether the loop, not the loader, takes the time; False at full speed."""
        return self.step_s > 0 and self.wait_share < KEEPS_UP

    @property
    def bottleneck(self) -> str:
        """What to make faster first: a stage of the loader, "transfer", "device" (the loop), or "" without `stats`."""
        if self.keeps_up:
            return "device"
        found = self.stats.bottleneck() if self.stats else None
        return found.stage if found else ""

    @property
    def row_ms(self) -> dict[str, float]:
        """Milliseconds of a worker for each row by stage, the largest first. Waiting for a core is a stage too."""
        if self.stats is None:
            return {}
        seconds = {**self.stats.own_s, CORE: self.stats.core_wait_s}
        rows = max(1, self.stats.rows)
        return {name: 1e3 * seconds[name] / rows for name in sorted(seconds, key=seconds.__getitem__, reverse=True)}

    @property
    def stage_shares(self) -> dict[str, float]:
        """Share of the workers' time by stage, the largest first. Waiting for a core is a stage too."""
        total = sum(self.row_ms.values()) or 1.0
        return {name: ms / total for name, ms in self.row_ms.items()}

    def work_share(self, stage: str) -> float:
        """Share of a stage of what the workers do; unlike `stage_shares` without the time that they wait for a core."""
        work = sum(ms for name, ms in self.row_ms.items() if name != CORE)
        return self.row_ms.get(stage, 0.0) / (work or 1.0)

    def in_words(self) -> str:
        """Where the time goes, in a sentence or two."""
        if self.step_s:
            speed = f"at {self.samples_per_s:,.0f} samples/s the loop waits for data {self.wait_share:.0%} of its time"
        else:
            speed = f"at full speed the loader gives {self.samples_per_s:,.0f} samples/s"
        found = self.stats.bottleneck() if self.stats else None
        if found is None:
            return f"{speed}; this loader keeps no clock of its stages."
        if self.keeps_up:
            return f"{speed}: the loader keeps up."
        return f"{speed}; {found.words}."


def profile(loader: Iterable[Batch], steps: int, *, step_s: float = 0.0) -> Profile:
    """Run through batches and measure.

    Args:
        loader: a `Loader`, a `DevicePrefetcher` over one, or any iterable of batches; iterated again when it ends.
        steps: batches to measure, after a first one.
        step_s: seconds that the loop is busy with each batch, like a training step; 0 measures the loader's full speed.

    Raises:
        ValueError: the loader gives no batches, or fewer than one step is asked for.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more: got {steps}")
    batches = _endless(loader)
    started = time.perf_counter()
    next(batches)
    first_batch_s = time.perf_counter() - started
    clock: Stats | None = getattr(loader, "stats", None)
    before = clock.copy() if clock else None
    rows, wait_s = 0, 0.0
    started = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        wait_s += time.perf_counter() - asked
        rows += int(batch["valid"].sum())
        time.sleep(step_s)
    seconds = time.perf_counter() - started
    return Profile(
        steps=steps,
        rows=rows,
        seconds=seconds,
        first_batch_s=first_batch_s,
        wait_share=wait_s / seconds,
        step_s=step_s,
        stats=clock.since(before) if clock and before else None,
    )


def _endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the loader gives no batches: there is nothing to measure")
