"""Where the members of an indexed sample lie in its tar, whichever they are: between two samples that the index names.

An index names the image and the captions of a row alone. The members of a sample are consecutive, so all its headers
lie behind what is known of the row before, and before what is known of the row after.
"""

from __future__ import annotations

from mmdata.index.columns import Columns
from mmdata.tars.tar import BLOCK

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


def _members(columns: Columns, row: int) -> tuple[list[int], list[int]]:
    """Offsets and sizes of the members of a row that the index knows; (0, 0) for captions that it does not have."""
    begins = [int(columns.fixed(f"{kind}_offset")[row]) for kind in KINDS]
    return begins, [int(columns.fixed(f"{kind}_bytes")[row]) for kind in KINDS]
