"""Finds the rows that repeat an earlier one, by a 16-byte key, in bounded memory. The first row of a key is no repeat.

The keys are divided by their first bits over temporary files, each is sorted by itself, and what it finds is divided
again, by row: memory is that of one file each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.convert.settle.spill import Spill, add_rows

BUCKET_ROWS = 2**18
"""Rows of a file, on average; 32 bytes each."""

_KEYED = np.dtype([("high", ">u8"), ("low", ">u8"), ("row", "<i8"), ("said", "<i8")])
_FOUND = np.dtype([("row", "<i8"), ("first", "<i8"), ("same", "?")])


class RepeatedRows(NamedTuple):
    """Rows that repeat an earlier one.

    Attributes:
        rows: int64 (R,), ascending.
        firsts: int64 (R,), the first row with the key of each.
        same: bool (R,), whether that row says the same.
    """

    rows: NDArray[np.int64]
    firsts: NDArray[np.int64]
    same: NDArray[np.bool_]


class Repeats:
    """Takes the keys of rows, then tells which rows repeat. A context manager.

    Args:
        folder: for temporary files.
        num_rows: of the source.
        with_firsts: whether the first of several rows with one key is found too, as the first of itself.

    Example:
        with Repeats(folder, 3) as repeats:
            repeats.add(b"a" * 16 + b"b" * 16 + b"a" * 16, np.arange(3))
            repeats.sort()
            repeats.between(0, 3)  # Found(rows=[2], firsts=[0], same=[True])
    """

    def __init__(self, folder: Path, num_rows: int, *, with_firsts: bool = False) -> None:
        self._count = max(1, -(-num_rows // BUCKET_ROWS))
        self._keyed = Spill(folder)
        self._found = Spill(folder)
        self._with_firsts = with_firsts
        self._last = -1, np.zeros(0, _FOUND)  # the bucket that was read last
        self.num_found = 0  # repeats, without the firsts

    def add(self, keys: bytes | bytearray, rows: NDArray[np.int64], said: NDArray[np.int64] | None = None) -> None:
        """Add rows.

        Args:
            keys: KEY_BYTES of each row, one after the other, uniformly distributed.
            rows: int64 (N,), their numbers; they may come in any order.
            said: int64 (N,), hashes of what the rows say besides; None: all say the same.
        """
        records = np.zeros(len(rows), _KEYED)
        halves = np.frombuffer(keys, ">u8").reshape(-1, 2)
        records["high"], records["low"], records["row"] = halves[:, 0], halves[:, 1], rows
        if said is not None:
            records["said"] = said
        buckets = (records["high"].astype(np.uint64) >> np.uint64(40)).astype(np.int64) * self._count >> 24
        add_rows(self._keyed, buckets, records)

    def sort(self) -> None:
        """Find the repeats, once all rows were added."""
        for bucket in range(self._count):
            records = np.frombuffer(self._keyed.read(bucket), _KEYED)
            found = _repeats(records)
            self.num_found += len(found)
            if self._with_firsts:
                firsts = np.zeros(len(numbers := np.unique(found["first"])), _FOUND)
                firsts["row"], firsts["first"], firsts["same"] = numbers, numbers, True
                found = np.concatenate([found, firsts])
            add_rows(self._found, found["row"] // BUCKET_ROWS, found)
        self._keyed.close()

    def between(self, start: int, stop: int) -> RepeatedRows:
        """The repeats among the rows from `start` to before `stop`; fastest in ascending order."""
        parts = [np.zeros(0, _FOUND)]
        for bucket in range(start // BUCKET_ROWS, -(-stop // BUCKET_ROWS)):
            if self._last[0] != bucket:
                found = np.frombuffer(self._found.read(bucket), _FOUND)
                self._last = bucket, found[np.argsort(found["row"])]
            found = self._last[1]
            begin, end = np.searchsorted(found["row"], (start, stop))
            parts.append(found[begin:end])
        found = np.concatenate(parts)
        return RepeatedRows(found["row"].astype(np.int64), found["first"].astype(np.int64), found["same"])

    def close(self) -> None:
        """Remove the temporary files."""
        self._keyed.close()
        self._found.close()

    def __enter__(self) -> Repeats:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _repeats(records: NDArray[np.void]) -> NDArray[np.void]:
    """What the records of one file repeat, in any order."""
    ordered = records[np.lexsort((records["row"], records["low"], records["high"]))]
    begins = np.ones(len(ordered), np.bool_)
    begins[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (ordered["low"][1:] != ordered["low"][:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))[~begins]
    later = ordered[~begins]
    found = np.zeros(len(later), _FOUND)
    found["row"], found["first"] = later["row"], ordered["row"][first]
    found["same"] = later["said"] == ordered["said"][first]
    return found
