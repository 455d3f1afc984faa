"""How often each row comes: its weight is the number of passes over it in an epoch, on average.

A weight of 2.3 gives two or three passes an epoch, and 23 in ten epochs; a weight of 0.1 one in ten epochs. How many is
not drawn anew: each row has a phase of its own, and its passes are counted on from epoch to epoch (systematic
sampling), so that its captions come in turn and its crops differ as in any other plan.

An epoch has parts, as many as the largest weight. A row comes at most once in a part, and its passes lie evenly over
the parts, from an offset that is drawn for each row and epoch: each part mixes the rows by their weights, rows meet
others in each epoch, and no batch has a row twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmdata.hashing import fast_hash
from mmdata.plan.position import MAX_EPOCH
from mmdata.seeding import mix
from mmdata.tables.selection import Selection

Ints = NDArray[np.int64]

COUNT_ROWS = 2**20
"""Rows that are counted at a time."""


class RowWeights:
    """Weights of the rows of a corpus, and the rows of each part of each epoch.

    Args:
        values: of each row, 0 or more; kept as float32 (num_rows,).
        name: of the rule, for states and messages.
        seed: of the phases.

    Attributes:
        num_parts: of an epoch. Parts are numbered through: epoch e has those from e · num_parts on.
        name: with a digest of the weights.

    Example:
        Weights 3, 1 and 0.5 make three parts an epoch; the first row is in each, the second in one of the three.
    """

    def __init__(self, values: NDArray[np.floating], *, name: str, seed: int) -> None:
        self.values = values.astype(np.float32)
        self.num_parts = max(1, math.ceil(float(self.values.max(initial=0.0))))
        self.name = f"{name} ({fast_hash(self.values.tobytes()) % 2**64:016x})"
        self._seed = mix(np.array([seed]))

    def rows_of_epoch(self, most: float = math.inf) -> float:
        """Rows of an epoch on average, each as often as it comes; `most`: weights above it count as that."""
        return float(np.minimum(self.values, most).sum(dtype=np.float64))

    def passes(self, rows: Ints, part: int) -> Ints:
        """Passes over n rows before a part, from epoch 0 on: int64 (n,)."""
        return self._passes(rows, part)[0]

    def next_epoch(self, row: int, epoch: int) -> int | None:
        """The first epoch from this one on in which a row comes; None if its weight is 0, or there is no such epoch."""
        weight = float(self.values[row])
        if not weight > 0:
            return None
        rows = np.array([row])
        phase = float(self._fraction(rows, 0)[0])
        # floor(weight · epochs + phase) passes come in so many epochs: the next one begins where that grows.
        wanted = max(epoch, math.ceil((math.floor(weight * epoch + phase) + 1 - phase) / weight) - 2)
        while wanted <= MAX_EPOCH:
            if (self.passes(rows, (wanted + 1) * self.num_parts) > self.passes(rows, wanted * self.num_parts)).all():
                return wanted
            wanted += 1
        return None

    def _passes(self, rows: Ints, part: int) -> tuple[Ints, Ints]:
        """Passes over n rows before a part, and by its end."""
        epoch, number = divmod(part, self.num_parts)
        values, phase = self.values[rows].astype(np.float64), self._fraction(rows, 0)
        before, by_the_end = (np.floor(values * count + phase) for count in (epoch, epoch + 1))  # of the epoch
        offset = self._fraction(rows, epoch + 1)
        # Pass j of n comes in the part that (j + offset) / n of the epoch lies in. A quotient that is a whole number is
        # exact, so with as many passes as parts each part has one, and by the last part all have come.
        found = (np.ceil((by_the_end - before) * n / self.num_parts - offset) for n in (number, number + 1))
        first, last = ((before + count).astype(np.int64) for count in found)
        return first, last

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
            for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
                found = np.empty(last - first, np.bool_)
                for begin in range(first, last, COUNT_ROWS):
                    rows = np.arange(begin, min(begin + COUNT_ROWS, last))
                    passes, by_the_end = self._passes(rows, part)
                    found[begin - first : begin - first + len(rows)] = by_the_end > passes
                yield found

        return Selection(starts, masks(), name=f"{self.name}, part {part}")
