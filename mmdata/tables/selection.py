"""The selected rows of an index: which rows of the corpus a plan plans.

A selection decides by what the index says of a row, so it is the same in every process. It costs one bit a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mmdata.hashing import fast_hash
from mmdata.index.columns import offsets_of

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

CHUNK_ROWS = 2**20
"""About how many rows are in memory at a time where all are looked at."""


class Selection:
    """Some rows of a corpus, in the corpus's order.

    The selected rows have places 0 … len−1. A plan works with places: they are consecutive within a shard, as rows are
    without a selection. `rows` turns places into row numbers.

    Args:
        starts: first row of each shard, then the number of rows: int64 (num_shards + 1,).
        masks: of each shard, bool (rows of the shard,): True for the selected rows.
        name: says which rows these are, for states and messages; equal for selections by the same rule.

    Attributes:
        starts: first place of each shard, then the number of selected rows: int64 (num_shards + 1,).

    Example:
        Rows 0, 1 and 4 of shards of 3 and 2 rows have the places 0, 1 and 2, of which two are in the first shard:
        Selection(np.array([0, 3, 5]), [[True, True, False], [False, True]], name="…").starts == [0, 2, 3]
    """

    def __init__(self, starts: Ints, masks: Iterable[Bools | Sequence[bool]], *, name: str) -> None:
        self.name = name
        self._first_rows = starts
        self._first_bytes = offsets_of(-(-np.diff(starts) // 8))
        self._bits = np.zeros(int(self._first_bytes[-1]), np.uint8)
        counts = np.zeros(len(starts) - 1, np.int64)
        for shard, mask in enumerate(masks):
            selected = np.asarray(mask, np.bool_)
            if selected.shape != (starts[shard + 1] - starts[shard],):
                raise ValueError(
                    f"selection: shard {shard} has {starts[shard + 1] - starts[shard]} rows, and its mask "
                    f"{selected.shape}; give one bool a row"
                )
            self._bits[self._first_bytes[shard] : self._first_bytes[shard + 1]] = np.packbits(selected)
            counts[shard] = np.count_nonzero(selected)
        self.starts = offsets_of(counts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def digest(self) -> str:
        """Equal for the same rows: 16 hexadecimal digits of the XXH3 of a bit for each row."""
        return f"{fast_hash(self._bits.tobytes()) % 2**64:016x}"

    def of_shard(self, shard: int) -> Ints:
        """The selected rows of a shard, int64."""
        first = self._first_rows[shard]
        bits = self._bits[self._first_bytes[shard] : self._first_bytes[shard + 1]]
        if self.starts[shard + 1] - self.starts[shard] > len(bits) // 4:
            return np.flatnonzero(np.unpackbits(bits).view(np.bool_)) + first
        # Of few selected rows most bytes are 0: the others alone are unpacked.
        (filled,) = bits.nonzero()
        byte, bit = np.unpackbits(bits[filled, None], axis=1).view(np.bool_).nonzero()
        return filled[byte] * 8 + (bit + first)

    def has(self, row: int) -> bool:
        """Whether a row of the corpus is selected."""
        shard = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return row in self.of_shard(shard).tolist()

    def rows(self, shard: int, begin: int, end: int) -> Ints:
        """The rows at places begin … end−1, which all lie in one shard."""
        first = self.starts[shard]
        return self.of_shard(shard)[begin - first : end - first]

    def chunks(self, num_rows: int) -> Iterator[Ints]:
        """All selected rows, about `num_rows` at a time; whole shards."""
        for first, last in shard_runs(self.starts, num_rows):
            yield np.concatenate([np.empty(0, np.int64), *(self.of_shard(shard) for shard in range(first, last))])


def row_chunks(selection: Selection | None, num_rows: int) -> Iterator[Ints]:
    """The rows that are planned, some at a time: those selected, or all `num_rows`."""
    if selection is not None:
        yield from selection.chunks(CHUNK_ROWS)
        return
    for begin in range(0, num_rows, CHUNK_ROWS):
        yield np.arange(begin, min(begin + CHUNK_ROWS, num_rows))


def shard_runs(starts: Ints, num_rows: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive shards, (first, last + 1), of about `num_rows` rows each, at least one shard."""
    first = 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + num_rows, side="right"))
        last = min(max(last - 1, first + 1), len(starts) - 1)
        yield first, last
        first = last
