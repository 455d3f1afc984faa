"""A sample of the rows of a corpus, and what it says about all of them. The same corpus has the same sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

SHARE = 0.01
"""Share of the rows that a sample has, within LEAST and MOST."""
LEAST = 500
MOST = 5000
RUNS = 100
"""Places of a sample whose rows lie beside each other, where a single row is dear to read."""
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio, 0.618, times 2**64: its multiples, without their whole part, lie evenly from 0 to 1 (Weyl 1916)."""
Z = 1.959963984540054
"""Standard deviations of a normal distribution on either side of its mean that hold 95 % of it."""


@dataclass(frozen=True)
class Estimate:
    """A number of the whole corpus, as a sample predicts it.

    Attributes:
        sampled: the number in the sample.
        low, likely, high: the number in the corpus: what is likely, and the ends of the 95 % interval.
    """

    sampled: int
    low: int
    likely: int
    high: int


@dataclass(frozen=True)
class SampleOf:
    """Which rows a sample has: as many runs of rows, all of one length, as equal stretches of the corpus.

    Where in its stretch a run lies moves on by the golden ratio from stretch to stretch, so that nothing that comes
    back every so many rows, such as the first caption of each image, is met always or never.

    Attributes:
        rows: of the corpus.
        size: rows of the sample.
        run: rows of each run; one where rows can be read one by one.
        ranges: (first row, row behind the last) of each run.
    """

    rows: int
    size: int
    run: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def choose(cls, rows: int, *, in_runs: bool) -> SampleOf:
        """The sample of a corpus of so many rows: SHARE of them, at least LEAST and at most MOST.

        Args:
            rows: of the corpus.
            in_runs: whether rows are to lie beside each other, at RUNS places.

        Example:
            choose(100_000, in_runs=False) has 1,000 runs of one row, one in each 100 rows
        """
        size = min(rows, max(LEAST, min(MOST, math.ceil(rows * SHARE))))
        if size == rows:
            return cls(rows, rows, max(rows, 1), ((0, rows),))
        run = -(-size // RUNS) if in_runs else 1
        count = min(-(-size // run), rows // run)
        ranges: list[tuple[int, int]] = []
        for number in range(count):
            begin, end = rows * number // count, rows * (number + 1) // count
            start = begin + (number * GOLDEN % 2**64 * (end - begin - run + 1) >> 64)
            ranges.append((start, start + run))
        return cls(rows, count * run, run, tuple(ranges))

    def numbers(self) -> Iterator[int]:
        """Numbers of the rows of the sample, in order."""
        return (number for start, end in self.ranges for number in range(start, end))

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows, so that nothing is left to guess."""
        return self.size == self.rows

    def count(self, found: Sequence[bool]) -> Estimate:
        """How many rows of the corpus are of a kind.

        Args:
            found: for each row of the sample, in order, whether it is.
        """
        sampled = sum(found)
        if self.is_whole:
            return Estimate(sampled, sampled, sampled, sampled)
        share = sampled / self.size
        low, high = wilson(share, self._independent(found, share))
        return Estimate(
            sampled,
            max(sampled, math.floor(low * self.rows)),
            round(share * self.rows),
            min(self.rows - self.size + sampled, math.ceil(high * self.rows)),
        )

    def total(self, values: Sequence[int]) -> Estimate:
        """The sum of a value over all rows of the corpus.

        Args:
            values: for each row of the sample, in order.
        """
        sampled = sum(values)
        if self.is_whole:
            return Estimate(sampled, sampled, sampled, sampled)
        means = self._means(values)
        likely = sampled / self.size * self.rows
        half = Z * statistics.stdev(means) / math.sqrt(len(means)) * self.rows
        return Estimate(sampled, max(sampled, math.floor(likely - half)), round(likely), math.ceil(likely + half))

    def _means(self, values: Sequence[float]) -> list[float]:
        """The mean of each run."""
        iterator = iter(values)
        return [sum(islice(iterator, self.run)) / self.run for _ in self.ranges]

    def _independent(self, found: Sequence[bool], share: float) -> float:
        """Number of rows, drawn one by one, that would say as much: neighbours are often alike.

        The variance of a share over runs, against that of rows drawn one by one (Kish 1965, the design effect). Where
        all rows are alike it is not known, and each run counts once.
        """
        runs = len(self.ranges)
        if self.run == 1:
            return self.size
        variance = statistics.variance(self._means(found)) / runs
        alone = share * (1 - share)
        return max(runs, min(self.size, alone / variance)) if variance and alone else runs


def wilson(share: float, size: float) -> tuple[float, float]:
    """The 95 % interval of a share that a sample of `size` has shown.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    middle = share + Z * Z / (2 * size)
    half = Z * math.sqrt(share * (1 - share) / size + Z * Z / (4 * size * size))
    scale = 1 + Z * Z / size
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
