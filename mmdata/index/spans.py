"""Where the members of an indexed sample lie in its tar, whichever they are: between two samples that the index names.

An index names the image and the captions of a row alone. The members of a sample are consecutive, so all its headers
lie behind what is known of the row before, and before what is known of the row after.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.index.columns import Columns
from mmdata.tars.tar import BLOCK

Ints = NDArray[np.int64]
KINDS = ("image", "caption")


def span_of(columns: Columns, row: int) -> tuple[int, int | None]:
    """Offsets between which all headers of a row's sample lie; None: up to the tar's end.

    Args:
        columns: of the shard.
        row: in the shard.
    """
    start, end = 0, None
    if row > 0:
        begins, sizes = _members(columns, row - 1)
        behind = max(begin + size for begin, size in zip(begins, sizes, strict=True))
        start = behind + -behind % BLOCK
    if row + 1 < len(columns):
        end = min(begin for begin in _members(columns, row + 1)[0] if begin > 0)
    return start, end


def spans_of(columns: Columns, rows: Ints, *, shard_bytes: int) -> tuple[Ints, Ints]:
    """`span_of` n rows: offsets and sizes in bytes, int64 (n,) each. They hold all members of the samples.

    Args:
        columns: of the shard.
        rows: in the shard, int64 (n,).
        shard_bytes: size of the tar.
    """
    begins = np.stack([columns.fixed(f"{kind}_offset") for kind in KINDS])  # (2, rows)
    behind = (begins + np.stack([columns.fixed(f"{kind}_bytes") for kind in KINDS])).max(axis=0)
    starts = np.append(0, (behind + -behind % BLOCK)[:-1])
    ends = np.append(np.where(begins > 0, begins, shard_bytes).min(axis=0)[1:], shard_bytes)
    return starts[rows], ends[rows] - starts[rows]


def _members(columns: Columns, row: int) -> tuple[list[int], list[int]]:
    """Offsets and sizes of the members of a row that the index knows; (0, 0) for captions that it does not have."""
    begins = [int(columns.fixed(f"{kind}_offset")[row]) for kind in KINDS]
    return begins, [int(columns.fixed(f"{kind}_bytes")[row]) for kind in KINDS]
