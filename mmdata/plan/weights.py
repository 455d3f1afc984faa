"""How often each row comes: its weight is the number of passes over it in an epoch, on average.

A weight of 2.3 gives two or three passes an epoch, and 23 in ten epochs; a weight of 0.1 one in ten epochs. How many is
not drawn anew: each row has a phase of its own, and its passes are counted on from epoch to epoch (systematic
sampling), so that its captions come in turn and its crops differ as in any other plan.

An epoch has parts, as many as the largest weight. A row comes at most once in a part, and its passes lie evenly over
the parts, from an offset that is drawn for each row and epoch: each part mixes the rows by their weights, rows meet
others in each epoch, and no batch has a row twice.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import fast_hash
from mmdata.index import Index
from mmdata.plan.buckets import Shapes
from mmdata.plan.plan import Plan, Step
from mmdata.plan.rows import MAX_EPOCH, MAX_PASS, Rows, npy_of_rows, occurrences_of
from mmdata.seeding import mix
from mmdata.tables.joined import Joined
from mmdata.tables.selection import Selection
from mmdata.tables.values import in_condition

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

OF = "data.row_weights"
LABEL_BALANCED = "label_balanced"
MAX_REPEATS = 10
"""Largest weight. An epoch has as many parts as the largest weight, and the last batches of each part may be padded."""


class RowWeights:
    """Weights of the rows of a corpus, and the rows of each part of each epoch.

    Args:
        values: of each row, 0 or more; kept as float32 (num_rows,).
        name: of the rule, for states and messages.
        seed: of the phases.

    Attributes:
        num_parts: of an epoch. Parts are numbered through: epoch e has those from e · num_parts on.
        rows_of_part: on average.
        name: with a digest of the weights.

    Example:
        Weights 3, 1 and 0.5 make three parts an epoch; the first row is in each, the second in one of the three.
    """

    def __init__(self, values: NDArray[np.floating], *, name: str, seed: int) -> None:
        self.values = values.astype(np.float32)
        self.num_parts = max(1, math.ceil(float(self.values.max(initial=0.0))))
        self.rows_of_part = float(self.values.sum(dtype=np.float64)) / self.num_parts
        self.name = f"{name} ({fast_hash(self.values.tobytes()) % 2**64:016x})"
        self._seed = mix(np.array([seed]))

    def passes(self, rows: Ints, part: int) -> tuple[Ints, Ints]:
        """Passes over n rows, counted from epoch 0 on, before a part and by its end: int64 (n,) each."""
        epoch, number = divmod(part, self.num_parts)
        values, phase = self.values[rows].astype(np.float64), self._fraction(rows, 0)
        before, by_the_end = (np.floor(values * count + phase) for count in (epoch, epoch + 1))  # of the epoch
        offset = self._fraction(rows, epoch + 1)
        # Pass j of n comes in the part that (j + offset) / n of the epoch lies in. A quotient that is a whole number is
        # exact, so with as many passes as parts each part has one, and by the last part all have come.
        found = (np.ceil((by_the_end - before) * n / self.num_parts - offset) for n in (number, number + 1))
        first, last = ((before + count).astype(np.int64) for count in found)
        return first, last

    def next_epoch(self, row: int, epoch: int) -> int | None:
        """The first epoch from this one on in which a row comes; None if there is none."""
        # As in `passes`: so many passes come before each epoch.
        before = np.floor(
            float(self.values[row]) * np.arange(epoch, MAX_EPOCH + 2) + self._fraction(np.array([row]), 0)
        )
        comes = np.flatnonzero(np.diff(before))
        return epoch + int(comes[0]) if len(comes) else None

    def _fraction(self, rows: Ints, draw: int) -> NDArray[np.float64]:
        """A number from 0 to below 1 for each row; `draw` tells several of a row apart."""
        # Of 32 bits, so that a whole number of passes and a fraction never round up to the next number.
        key = mix((self._seed ^ mix(np.array([draw]))).astype(np.int64))
        drawn = mix((rows.astype(np.uint64) ^ key).astype(np.int64)) >> np.uint64(32)
        return drawn.astype(np.float64) * 2.0**-32

    def selection(self, starts: Ints, part: int) -> Selection:
        """The rows of a part.

        Args:
            starts: first row of each shard, then the number of rows.
            part: its number.
        """

        def masks() -> Iterator[NDArray[np.bool_]]:
            for first, last in itertools.pairwise(starts.tolist()):
                passes, by_the_end = self.passes(np.arange(first, last), part)
                yield by_the_end > passes

        return Selection(starts, masks(), name=f"{self.name}, part {part}")


HELD_PARTS = 2
"""Parts whose plans are kept: the one that is loaded, and the next, whose batches are made ahead."""

NEVER_EMPTY = 40.0
"""An epoch is without a row with a probability of e to the minus this."""


class PartRows(Rows):
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
        return self._rows.shapes_of(occurrences_of(rows, self._weights.passes(rows, self._part)[0]))


class WeightedPlan(Plan):
    """A plan in which a row comes as often in an epoch as its weight says.

    Each part of an epoch is planned like a corpus of its rows alone, so no batch has a row twice; its last batches may
    be padded.

    Args:
        plan: of the rows, each once, in one lane (its lanes and repeats are not used). Nor is its selection: rows that
            are not selected have the weight 0. Its mixture says which datasets there are, for those who ask.
        weights: one for each row.

    Raises:
        ValueError: another number of weights than of rows, or weights so small that an epoch may have no row.
    """

    def __init__(self, plan: Plan, weights: RowWeights) -> None:
        rows, policy = plan.rows, plan.policy
        settings: dict[str, Any] = {
            "global_batch_size": plan.global_batch_size,
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "leftover": plan.leftover,
        }
        super().__init__(rows, policy, window_rows=plan.window_rows, mixture=plan.mixture, **settings)
        if len(weights.values) != rows.starts[-1]:
            raise ValueError(f"weights: {len(weights.values):,} for {int(rows.starts[-1]):,} rows; give one a row")
        below = np.minimum(weights.values, 1.0, dtype=np.float64)
        with np.errstate(divide="ignore"):  # of a weight of 1, which alone is enough
            surely = -np.log1p(-below).sum()
        if surely < NEVER_EMPTY:
            raise ValueError(f"{weights.name}: the weights are so small that an epoch may have no row")
        self.weights = weights
        num_rows, window_rows = self.num_rows, self.window_rows

        def plan_of(part: int) -> Plan | None:
            """The plan of a part; None if no row is in it. Its only epoch has the part's number, which orders it."""
            of_part = PartRows(rows, weights, part)
            # A window reaches over as many shards as one of all rows: their columns are held while it is read.
            share = int(of_part.places[-1]) / num_rows
            reach = max(1, math.ceil(window_rows * share))
            return Plan(of_part, policy, window_rows=reach, **settings) if share else None

        self._plan = lru_cache(HELD_PARTS)(plan_of)
        self._steps_of_part: dict[int, int] = {}

    @property
    def most_rows(self) -> int:
        """As `Plan.most_rows`: the rows of a part, on average."""
        # Weights are rounded to 24 bits: a sum that is a whole number may be a little less.
        return int(self.weights.rows_of_part + 1e-3)

    @property
    def _steps_follow_from_shards(self) -> bool:
        """No: which rows come in a part is drawn for each epoch."""
        return False

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        self._check_epoch(epoch)
        return sum(map(self._num_steps, self._parts(epoch)))

    def steps_of_buckets(self, epoch: int) -> list[int]:
        """As `Plan.steps_of_buckets`."""
        counts = np.zeros(len(self.batch_sizes), np.int64)
        for part in self._parts(epoch):
            if (plan := self._plan(part)) is not None:
                steps = plan.steps_of_buckets(part)
                assert steps is not None, "no stream has weights"
                counts += steps
        return counts.tolist()

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
                    passes = np.where(step.rows < 0, -1, self.weights.passes(step.rows.clip(0), part)[0])
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


def row_weights(data: DataConfig, index: Index, rows: Rows, joined: Joined) -> RowWeights | None:
    """The weights that a section `data` gives its rows, 0 to those that are not planned; None: every row comes once.

    Args:
        data: settings.
        index: of the shards.
        rows: of the index.
        joined: what `data.join` names.

    Raises:
        ConfigError: no such column or file, a weight that is negative or no number, or no weight above 0.
        DataError: the file is damaged.
    """
    if data.captions == "every":
        values = _of_rows(index, rows, lambda shard: np.diff(index.shard(shard).lists("caption_hash")[0]))
        if not values.any():
            raise ConfigError("data.captions every: the shards hold labels and no captions; leave it out")
        return RowWeights(values, name="data.captions every", seed=data.seed)
    if (given := data.row_weights) is None:
        return None
    name, without = given, ""
    if given == LABEL_BALANCED:
        values = _balanced(index, rows)
    elif given.lower().endswith(".npy"):
        name = Path(given).name
        file = npy_of_rows(given, index, of=OF, kinds="iuf", what="a weight is a number")
        values = _of_rows(index, rows, lambda shard: file.read(*index.starts[shard : shard + 2].tolist()))
    else:
        of_shard = joined.pick(given, "number", "bool", of=OF, what="numbers", also=LABEL_BALANCED)
        values = _of_rows(index, rows, lambda shard: _as_floats(of_shard(shard)))
        without = f": leave out the rows without one (data.select='{in_condition(given)} is not None')"
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        raise ConfigError(
            f"{OF} {name}: row {row:,} (key '{index.keys(np.array([row]))[0]}') has the weight {values[row]:g}; a "
            f"weight is a number from 0 on{without if np.isnan(values[row]) else ''}"
        )
    if not values.any():
        raise ConfigError(f"{OF} {name}: every row has the weight 0")
    if above := int((values > MAX_REPEATS).sum()):
        logger.warning(
            f"{OF}: {above:,} of {np.count_nonzero(values):,} rows have a weight above {MAX_REPEATS}, up to "
            f"{values.max():.4g}: they come {MAX_REPEATS} times an epoch"
        )
    return RowWeights(np.minimum(values, MAX_REPEATS), name=f"{OF} {name}", seed=data.seed)


def _of_rows(index: Index, rows: Rows, of_shard: Callable[[int], NDArray[np.generic]]) -> Floats:
    """A number for each row, 0 for those that are not planned; `of_shard` gives those of all rows of a shard."""
    values = np.zeros(int(rows.starts[-1]))
    used = np.flatnonzero(np.diff(rows.places))
    index.fetch_columns(used)
    for shard in used.tolist():
        planned = rows.of_shard(shard)
        values[planned] = of_shard(shard)[planned - rows.starts[shard]]
    return values


def _as_floats(values: Any) -> Floats:
    return values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()


def _balanced(index: Index, rows: Rows) -> Floats:
    """Weights that give each class as many passes as another, and the rows one on average."""
    if not index.has_labels:
        raise ConfigError(f"{OF} {LABEL_BALANCED}: no row of the corpus has a label")
    labels = _of_rows(index, rows, lambda shard: index.shard(shard).fixed("label")).astype(np.int64)
    used = np.zeros(len(labels), np.bool_)
    for some in rows.planned():
        used[some] = True
    if (without := int((labels[used] < 0).sum())) > 0:
        raise ConfigError(
            f"{OF} {LABEL_BALANCED}: {without:,} rows have no label; leave them out: data.select='label is not None'"
        )
    counts = np.bincount(labels[used])
    weights = np.zeros(len(labels))
    weights[used] = used.sum() / (np.count_nonzero(counts) * counts[labels[used]])
    return weights
