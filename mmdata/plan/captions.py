"""Which caption a row has in a pass: one of its own in turn, or one of a source that is drawn by probability.

It depends on (seed, row, pass) alone, so it is the same in each process, on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.config.data import Probability, begin_and_end
from mmdata.index.caption_lengths import CaptionTokens, CountsTokens, caption_lengths
from mmdata.index.index import Index
from mmdata.index.ragged import spans
from mmdata.seeding import mix
from mmdata.tables.captions import TableCaptions

Ints = NDArray[np.int64]


def choose_captions(rows: Ints, num_captions: Ints, epoch: int | Ints) -> Ints:
    """Choose one of its captions for each row in an epoch.

    A row has its captions in turn, epoch by epoch, and starts at a caption that differs from row to row.

    Args:
        rows: int64 (n,).
        num_captions: int64 (n,), at least 1 each.
        epoch: from 0; or int64 (n,), if the rows are in different passes over their datasets.

    Returns:
        int64 (n,), the position of the caption among those of its row.
    """
    # `mix` gives each row its own start; without it all rows of equal numbers of captions would change in step.
    return ((mix(rows) % num_captions.astype(np.uint64)).astype(np.int64) + epoch) % num_captions


class ShardCaptions:
    """The captions in the shards, as a source.

    Args:
        index: of the shards.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lengths: Literal["index"] | CaptionTokens | None = None

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each of n rows has, int64 (n,)."""
        return np.diff(self._index.take_lists(rows, "caption_hash")[0])

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of the captions."""
        self._lengths = caption_lengths(self._index, tokenizer)

    def tokens(self, rows: Ints, chosen: Ints) -> Ints:
        """Tokens of one caption of each of n rows, int64 (n,); 1 before they are counted."""
        if self._lengths is None:
            return np.ones(len(rows), np.int64)
        if self._lengths == "index":
            offsets, counts = self._index.take_lists(rows, "caption_tokens")
            return counts[offsets[:-1] + chosen].astype(np.int64)
        offsets, counts = self._lengths
        return counts[offsets[rows] + chosen].astype(np.int64)

    def hashes(self, rows: Ints, chosen: Ints) -> Ints:
        """Hashes of one caption of each of n rows, int64 (n,)."""
        offsets, hashes = self._index.take_lists(rows, "caption_hash")
        return hashes[offsets[:-1] + chosen]


class Chosen(NamedTuple):
    """The captions of n rows: the number of the source, -1 where a row has no caption, and the position in its list."""

    source: Ints
    position: Ints


class CaptionSources:
    """Several sources of captions, of which each row draws one in each pass.

    A row that a source has no caption for draws from the others, in proportion to their probabilities. A source of
    probability 0 is for the rows that the others have nothing for.

    Args:
        sources: by name.
        probabilities: of the sources; their sum is 1. Or pairs, of the first epoch and of the last.
        seed: of the draws.
        epochs: over which probabilities change along a line, 2 or more; later passes have those of the last epoch.
            None: no probability is a pair.

    Attributes:
        name: for states and messages, with a digest of probabilities and texts.

    Example:
        With {"shards": 0.25, "join:recap": 0.75} a row has a caption of the table in three of four passes, on average.
        With {"shards": (0.5, 0.9), "join:recap": (0.5, 0.1)} over 5 epochs it has one with probability 0.5, 0.4, 0.3,
        0.2 and 0.1.
    """

    def __init__(
        self,
        sources: Mapping[str, ShardCaptions | TableCaptions],
        probabilities: Mapping[str, Probability],
        *,
        seed: int,
        epochs: int | None = None,
    ) -> None:
        self.sources = list(sources.values())
        self.names = list(sources)
        pairs = [begin_and_end(probabilities[name]) for name in sources]
        self._begin, self._end = np.array(pairs, np.float64).T[:, :, None]  # (S, 1) each
        self._last = 0 if epochs is None else epochs - 1
        if not self._last and (self._begin != self._end).any():
            raise ValueError(f"probabilities change over the epochs of a run: epochs must be 2 or more, got {epochs}")
        # Other numbers than those that `RowWeights` draws of the same seed.
        self._seed = mix(mix(np.array([seed])).astype(np.int64))
        digest = hashlib.sha256()
        for source, (begin, end) in zip(self.sources, pairs, strict=True):
            texts = source.fingerprint if isinstance(source, TableCaptions) else "shards"
            over = f"{float(begin)!r}" if begin == end else f"{begin!r} to {end!r} in {self._last}"
            digest.update(f"{over} {texts}\n".encode())
        self.digest = digest.hexdigest()[:16]
        said = [f"{begin:g}" if begin == end else f"{begin:g} to {end:g}" for begin, end in pairs]
        listed = ", ".join(f"{name} {one}" for name, one in zip(sources, said, strict=True))
        over = f" over {epochs} epochs" if self.changes else ""
        self.name = f"data.captions {listed}{over} ({self.digest})"

    @property
    def changes(self) -> bool:
        """Whether probabilities change from epoch to epoch."""
        return bool((self._begin != self._end).any())

    @property
    def typical_passes(self) -> list[int]:
        """Passes whose captions tell the lengths of all: the first, and the last of probabilities that change."""
        return [0, self._last] if self.changes else [0]

    def probabilities(self, passes: int | Ints) -> NDArray[np.float64]:
        """Probabilities of the S sources in n passes, (S, n); or (S, 1) in a single pass."""
        if not self.changes:
            return self._begin
        part = np.minimum(np.asarray(passes, np.int64).reshape(-1), self._last) / self._last
        # Exactly the given ones at both ends, and never below 0.
        return self._begin * (1 - part) + self._end * part

    def count(self, tokenizer: CountsTokens) -> None:
        """Know the tokens of all captions; before, each counts as one token long."""
        for source in self.sources:
            source.count(tokenizer)

    def num_captions(self, rows: Ints) -> Ints:
        """How many captions each source has for n rows, int64 (S, n)."""
        return np.stack([source.num_captions(rows) for source in self.sources])

    def choose(self, rows: Ints, passes: int | Ints) -> Chosen:
        """Source and position of the captions of n rows, int64 (n,), in a pass or a pass each."""
        numbers = self.num_captions(rows)
        weights = np.where(numbers > 0, self.probabilities(passes), 0.0)  # (S, n)
        weights = np.where(weights.any(axis=0), weights, numbers > 0)
        bounds = np.cumsum(weights, axis=0)
        # Of 32 bits, so that the product never rounds up to the last bound.
        uniform = (self._random(rows, passes) >> np.uint64(32)) * 2.0**-32
        source = (uniform * bounds[-1] >= bounds).sum(axis=0)
        has_any = bounds[-1] > 0
        number = numbers[np.where(has_any, source, 0), np.arange(len(rows))]
        return Chosen(np.where(has_any, source, -1), choose_captions(rows, np.maximum(number, 1), passes))

    def tokens(self, rows: Ints, passes: int | Ints) -> Ints:
        """Tokens of the captions of n rows, int64 (n,); 0 where a row has none."""
        chosen, tokens = self.choose(rows, passes), np.zeros(len(rows), np.int64)
        for number, source in enumerate(self.sources):
            mine = chosen.source == number
            tokens[mine] = source.tokens(rows[mine], chosen.position[mine])
        return tokens

    def longest(self, rows: Ints) -> Ints:
        """Tokens of the longest caption that each of n rows may draw, int64 (n,)."""
        found = np.zeros(len(rows), np.int64)
        for source in self.sources:
            num = source.num_captions(rows)
            of_rows = np.repeat(np.arange(len(rows)), num)  # (T,), one for each caption
            positions = spans(np.zeros(len(rows), np.int64), num)
            np.maximum.at(found, of_rows, source.tokens(rows[of_rows], positions))
        return found

    def hashes(self, rows: Ints, passes: int | Ints) -> Ints:
        """Hashes of the captions of n rows, int64 (n,); 0 where a row has none."""
        chosen, hashes = self.choose(rows, passes), np.zeros(len(rows), np.int64)
        for number, source in enumerate(self.sources):
            mine = chosen.source == number
            hashes[mine] = source.hashes(rows[mine], chosen.position[mine])
        return hashes

    def _random(self, rows: Ints, passes: int | Ints) -> NDArray[np.uint64]:
        """A number for each row in its pass."""
        of_passes = mix(np.asarray(passes, np.int64).reshape(-1)) ^ self._seed
        return mix((mix((mix(rows) ^ self._seed).astype(np.int64)) + of_passes).astype(np.int64))
