"""An extract of a tar behind a URL: the members of some of its rows, one after another, in a file of the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mmdata.storage.http import Span

Ints = NDArray[np.int64]

GAP = 2**17
"""Bytes between two members that are fetched with them: a request takes as long as so many bytes, or longer."""
PIECE = 2**20
"""Largest range of a request, in bytes."""


class Extract:
    """Where the members of some rows of a tar lie, in the tar and in the extract.

    Args:
        offsets: of the members in the tar, in bytes (n,), in any order, n at least 1.
        sizes: of the members, in bytes (n,).
        of: size of the tar, in bytes.

    Attributes:
        bytes: size of the extract.

    Example:
        Members at 512 and 5,000,000, of 1,000 bytes each, are the bytes 0 to 1,000 and 1,000 to 2,000 of an extract.
    """

    def __init__(self, offsets: Ints, sizes: Ints, *, of: int) -> None:
        order = np.argsort(offsets, kind="stable")
        begins, ends = offsets[order], np.maximum.accumulate((offsets + sizes)[order])
        apart = np.flatnonzero(begins[1:] > ends[:-1] + GAP)
        self._begins = np.append(begins[:1], begins[1:][apart])
        self._ends = np.append(ends[:-1][apart], ends[-1:])
        lengths = self._ends - self._begins
        self._places = np.cumsum(lengths) - lengths
        self._of = of
        self.bytes = int(lengths.sum())

    def place(self, offset: int, size: int) -> int | None:
        """Offset in the extract of bytes of the tar; None if it does not hold them."""
        span = int(np.searchsorted(self._begins, offset, side="right")) - 1
        if span < 0 or offset + size > self._ends[span]:
            return None
        return int(self._places[span] + offset - self._begins[span])

    def key(self, sha256: str) -> str:
        """Name in the cache of this extract of a tar with this SHA-256; 64 hexadecimal digits."""
        bounds = np.stack([self._begins, self._ends]).astype("<i8").tobytes()
        return hashlib.sha256(b"extract of " + sha256.encode() + bounds).hexdigest()

    def pieces(self) -> Iterator[Span]:
        """The ranges of the tar to ask for, in the extract's order."""
        for begin, end in zip(self._begins.tolist(), self._ends.tolist(), strict=True):
            for start in range(begin, end, PIECE):
                yield Span(start, min(start + PIECE, end), self._of)
