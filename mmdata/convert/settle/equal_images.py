"""Finds rows with equal images, byte for byte. Only images whose size and last bytes are equal are read whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle.repeats import Repeats
from mmdata.convert.sources.files import glimpse_file
from mmdata.convert.sources.rows import KEY_BYTES, InputRow, row_key
from mmdata.convert.sources.tars import PackedFiles
from mmdata.convert.units.engines import in_order
from mmdata.errors import BadSample, Reason
from mmdata.processes import usable_cores

CHUNK = 4096
"""Rows of which is known at once whether another may have the same image."""


def equal_digests(
    rows: Callable[[], Iterable[InputRow]], examiner: Examiner, folder: Path, *, rows_at_most: int
) -> Iterator[bytes]:
    """The digest of each row's image; b"" where no other row has an equal one, or where it cannot be read.

    Args:
        rows: gives all rows, numbered from 0. It is called twice.
        examiner: reads images.
        folder: for temporary files.
        rows_at_most: upper bound of the number of rows.
    """
    workers = usable_cores()
    with Repeats(folder, rows_at_most, with_firsts=True) as alike:
        keys, start = in_order(workers, _Glimpse(examiner.root), rows()), 0
        while chunk := list(islice(keys, CHUNK)):
            alike.add(b"".join(chunk), np.arange(start, start + len(chunk)))
            start += len(chunk)
        alike.sort()
        yield from in_order(workers, examiner.digest, _without_others(rows(), alike))


@dataclass(frozen=True)
class _Glimpse:
    """Looks at the size and the end of an image file: KEY_BYTES that are equal for equal files, and seldom for others.

    Args:
        root: of the corpus.
    """

    root: str

    def __call__(self, row: InputRow) -> bytes:
        if row.fault or isinstance(row.files, PackedFiles):  # an image in a tar is read in any case
            return row_key(row.number)
        try:
            seen = glimpse_file(self.root, row.image) if isinstance(row.image, str) else row.image
        except BadSample:
            return row_key(row.number)
        return hashlib.sha256(seen).digest()[:KEY_BYTES] if isinstance(seen, bytes) else row_key(row.number)


def _without_others(rows: Iterable[InputRow], alike: Repeats) -> Iterator[InputRow]:
    """The rows; those in files that are like no other come without their image, so that it is not read."""
    start, known = -CHUNK, set[int]()
    for number, row in enumerate(rows):
        if number >= start + CHUNK:
            start = number
            known = set(alike.between(start, start + CHUNK).rows.tolist())
        may_repeat = isinstance(row.files, PackedFiles) or number in known
        yield row if may_repeat else InputRow(row.number, row.place, fault=(Reason.FILTERED, "like no other"))
