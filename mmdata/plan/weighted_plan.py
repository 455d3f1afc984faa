"""The plan of rows that come more or less often than once an epoch: a plan for each part, one after the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import BucketPolicy, Shapes
from mmdata.plan.mixture import Mixture
from mmdata.plan.plan import Plan, PlannedShape, Step, largest_first
from mmdata.plan.row_ranges import PASS_SHIFT, occurrences_of
from mmdata.plan.rows import Rows, count_buckets
from mmdata.plan.weights import RowWeights
from mmdata.plan.window_rows import shapes_of

Ints = NDArray[np.int64]

MAX_PASS = 1 << (63 - PASS_SHIFT)
"""Passes are below this number."""
HELD_PARTS = 2
"""Parts whose plans are kept: the one that is loaded, and the next, whose batches are made ahead."""

NEVER_EMPTY = 40.0
"""An epoch is without a row with a probability of e to the minus this."""


class PartRows:
    """The rows of one part, as its plan sees them.

    Args:
        rows: of the corpus.
        weights: of these.
        part: its number.
    """

    def __init__(self, rows: Rows, weights: RowWeights, part: int) -> None:
        self._rows, self._weights, self._part = rows, weights, part
        self.starts, self.fingerprint = rows.starts, rows.fingerprint
        self.selection = weights.selection(rows.starts, part)

    def shapes(self, rows: Ints, epoch: int) -> Shapes:
        """Shapes of n rows in this part, whatever the epoch: the rows' passes decide their captions."""
        return shapes_of(self._rows, occurrences_of(rows, self._weights.passes(rows, self._part)))

    def bucket_counts(self, policy: BucketPolicy, epoch: int, shards: Ints) -> Ints:
        """Rows of each of n shards by bucket, int64 (n, K)."""
        return count_buckets(self, policy, epoch, shards)


class WeightedPlan(Plan):
    """A plan in which a row comes as often in an epoch as its weight says.

    Each part of an epoch is planned like a corpus of its rows alone, so no batch has a row twice; its last batches may
    be padded.

    Args:
        rows: of the corpus; their own selection is not used: rows that are not selected have the weight 0.
        policy: as of a `Plan`.
        weights: one for each row.
        mixture: which datasets there are, for those who ask; each once.
        settings: further arguments of a `Plan`, without `num_lanes`.

    Raises:
        ValueError: another number of weights than of rows, or weights so small that an epoch may have no row.
    """

    def __init__(
        self,
        rows: Rows,
        policy: BucketPolicy,
        weights: RowWeights,
        *,
        mixture: Mixture | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rows, policy, mixture=mixture, **settings)
        if len(weights.values) != rows.starts[-1]:
            raise ValueError(f"weights: {len(weights.values):,} for {int(rows.starts[-1]):,} rows; give one a row")
        below = np.minimum(weights.values, 1.0, dtype=np.float64)
        with np.errstate(divide="ignore"):  # of a weight of 1, which alone is enough
            surely = -np.log1p(-below).sum()
        if surely < NEVER_EMPTY:
            raise ValueError(f"{weights.name}: the weights are so small that an epoch may have no row")
        self.weights = weights
        self._settings = settings
        self._plans: dict[int, Plan | None] = {}
        self._steps_of_part: dict[int, int] = {}

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs may have different numbers of steps: which rows come in a part is drawn for each epoch."""
        return True

    def in_words(self, epoch: int, world_size: int = 1) -> str:
        """Rows, steps and batch size of an epoch, for a repr: reads nothing, so it may not know the steps."""
        return f"{self.num_rows:,} weighted rows in batches of up to {self.global_batch_size // world_size:,} rows"

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        self._check_epoch(epoch)
        return sum(map(self._num_steps, self._parts(epoch)))

    def shapes(self, epoch: int) -> list[PlannedShape]:
        """The shapes that occur in an epoch, those with the most pixels first. From counts alone."""
        steps: Counter[tuple[Any, int]] = Counter()
        for part in self._parts(epoch):
            for shape in [] if (plan := self._plan(part)) is None else plan.shapes(part):
                steps[shape.bucket, shape.rows] += shape.steps
        return largest_first([PlannedShape(bucket, rows, count) for (bucket, rows), count in steps.items()])

    def identity(self) -> dict[str, str | int | bool | None]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        return {**super().identity(), "weights": self.weights.name}

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """As `Plan.steps`."""
        self._check_epoch(epoch)
        self.check_ranks(rank, world_size)
        first = 0  # step of the epoch with which the part begins
        for part in self._parts(epoch):
            count = self._num_steps(part)
            plan = self._plan(part) if start < first + count else None
            if plan is not None:
                begin = max(0, start - first)
                for step in plan.steps(part, start=begin, rank=rank, world_size=world_size):
                    passes = np.where(step.rows < 0, -1, self.weights.passes(step.rows.clip(0), part))
                    yield step._replace(epoch=epoch, number=first + step.number, passes=passes)
            first += count

    def _check_epoch(self, epoch: int) -> None:
        last = MAX_PASS // self.weights.num_parts - 1
        if not 0 <= epoch <= last:
            raise ValueError(f"epoch must be 0 … {last} with weights up to {self.weights.num_parts}: got {epoch}")

    def _parts(self, epoch: int) -> range:
        return range(epoch * self.weights.num_parts, (epoch + 1) * self.weights.num_parts)

    def _num_steps(self, part: int) -> int:
        if part not in self._steps_of_part:
            plan = self._plan(part)
            self._steps_of_part[part] = 0 if plan is None else plan.num_steps(part)
        return self._steps_of_part[part]

    def _plan(self, part: int) -> Plan | None:
        """The plan of a part; None if no row is in it. Its only epoch has the part's number, which orders it."""
        plans = self._plans
        if part not in plans:
            rows = PartRows(self.rows, self.weights, part)
            # A window reaches over as many shards as one of all rows: their columns are held while it is read.
            share = len(rows.selection) / self.num_rows
            settings: dict[str, Any] = {**self._settings, "window_rows": max(1, math.ceil(self.window_rows * share))}
            made = Plan(rows, self.policy, **settings) if len(rows.selection) else None
            # Replaced, not changed: threads ask for parts at once.
            plans = self._plans = {**dict(list(plans.items())[1 - HELD_PARTS :]), part: made}
        return plans[part]
