"""A sample of the rows of a corpus, and what it says about all of them. The same corpus has the same sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.chosen import Choice, ChosenSource
from mmdata.convert.sources.rows import Source, grouping, has_url, image_key
from mmdata.progress import Track

SHARE = 0.01
"""Share of the rows that a sample has, within LEAST and MOST."""
LEAST = 500
MOST = 2000
RUNS = 100
"""Places of a sample whose rows lie beside each other, where a single row is dear to read."""
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio, 0.618, times 2**64: its multiples, without their whole part, lie evenly from 0 to 1 (Weyl 1916)."""
Z = 1.959963984540054
"""Standard deviations of a normal distribution on either side of its mean that hold 95 % of it."""

_KEYED = np.dtype([("key", ">u8"), ("row", "<i8")])


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


class SampledRows:
    """Chooses the rows of a sample when the corpus is open.

    They are all rows of some images, so that rows of one image are merged as in the conversion. Where the images are in
    a table they are runs of rows at RUNS places.

    Args:
        config: the setting about rows of one image is used.
        rows: of the corpus, those to convert; None takes all.
        track: shows progress.

    Attributes:
        rows: of the corpus.
        size: rows of the sample.
        independent: images, or runs, of the sample: rows of one are often alike.
        urls: rows of the corpus whose image is behind a URL; None where the images are in a table.
        knows_merges: whether rows of one image are all in the sample, or none.
    """

    def __init__(self, config: ConvertConfig, rows: Choice | None, track: Track) -> None:
        self._config = config
        self._chosen = rows
        self._track = track
        self.rows = self.size = self.independent = 0
        self.urls: int | None = None
        self.knows_merges = False

    def __call__(self, source: Source) -> NDArray[np.int64]:
        """Numbers of the rows of the sample."""
        corpus = source if self._chosen is None else ChosenSource(source, self._chosen)
        how = grouping(corpus, self._config)
        if corpus.holds_images and corpus.can_be_sent:
            self.rows = corpus.num_rows
            runs = list(_runs(self.rows, _size(self.rows)))
            numbers = np.concatenate([np.arange(start, end) for start, end in runs])
            self.independent = len(runs)
        else:
            numbers = self._of_images(corpus)
        self.size = len(numbers)
        self.knows_merges = how == "none" or (not corpus.holds_images and how == "image") or self.is_whole
        return corpus.numbers[numbers] if isinstance(corpus, ChosenSource) else numbers

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows, so that nothing is left to guess."""
        return self.size == self.rows

    def count(self, sampled: int) -> Estimate:
        """How many rows of the corpus are of a kind, given those of the sample."""
        if self.is_whole:
            return Estimate(sampled, sampled, sampled, sampled)
        share = sampled / self.size
        low, high = wilson(share, self.independent)
        return Estimate(
            sampled,
            max(sampled, math.floor(low * self.rows)),
            round(share * self.rows),
            min(self.rows - self.size + sampled, math.ceil(high * self.rows)),
        )

    def _of_images(self, corpus: Source) -> NDArray[np.int64]:
        """The rows whose images have the least keys, which are hashes; reads all rows."""
        kept, waiting, urls = np.zeros(0, _KEYED), list[tuple[int, int]](), 0
        passing = self._track(corpus.rows(), "choose a sample", corpus.num_rows)
        for row in passing:
            waiting.append((int.from_bytes(image_key(row)[:8], "big"), row.number))
            self.rows, urls = self.rows + 1, urls + has_url(row)
            if len(waiting) > MOST:
                kept, waiting = _least(kept, waiting, MOST), []
        kept = _least(kept, waiting, _size(self.rows))
        self.urls, self.independent = urls, len(np.unique(kept["key"]))
        return kept["row"].astype(np.int64)


def wilson(share: float, size: float) -> tuple[float, float]:
    """The 95 % interval of a share that a sample of `size` has shown.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    middle = share + Z * Z / (2 * size)
    half = Z * math.sqrt(share * (1 - share) / size + Z * Z / (4 * size * size))
    scale = 1 + Z * Z / size
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _size(rows: int) -> int:
    return min(rows, max(LEAST, min(MOST, math.ceil(rows * SHARE))))


def _runs(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """(first row, row behind the last) of runs of rows, one in each of as many equal stretches.

    Where in its stretch a run lies moves on by the golden ratio from stretch to stretch, so that nothing that comes
    back every so many rows is met always or never.
    """
    if size == rows:
        yield 0, rows
        return
    run = -(-size // RUNS)
    count = min(-(-size // run), rows // run)
    for number in range(count):
        begin, end = rows * number // count, rows * (number + 1) // count
        start = begin + (number * GOLDEN % 2**64 * (end - begin - run + 1) >> 64)
        yield start, start + run


def _least(kept: NDArray[np.void], more: list[tuple[int, int]], size: int) -> NDArray[np.void]:
    """The `size` rows with the least keys."""
    return np.sort(np.concatenate([kept, np.array(more, _KEYED)]), order=["key", "row"])[:size]
