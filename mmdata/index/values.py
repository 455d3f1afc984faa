"""Finds values of index columns that no row of a shard can have. Sound columns cost one or two passes of numpy."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmdata.images.probe import FORMATS
from mmdata.index.histogram import MAX_TOKENS
from mmdata.tars.captions import NO_CAPTION

_INSIDE = "0 to {size}, the shard's bytes"
_BOUNDS: dict[str, tuple[int, int | None, str]] = {
    "image_offset": (0, None, _INSIDE),
    "caption_offset": (0, None, _INSIDE),
    "image_bytes": (0, None, "bytes that lie in the shard"),
    "caption_bytes": (0, None, "bytes that lie in the shard"),
    "image_format": (0, len(FORMATS) - 1, f"0 to {len(FORMATS) - 1}, or a newer mmdata"),
    "caption_format": (0, 3, "0 to 3, or a newer mmdata"),
    "height": (1, 2**31 - 1, "1 or more pixels"),
    "width": (1, 2**31 - 1, "1 or more pixels"),
    "orientation": (1, 8, "1 to 8"),
    "label": (-1, 2**63 - 1, "-1 or a class number"),
}
"""Smallest and largest value of a column, and both in words; None stands for the shard's size in bytes."""


class WrongValue(NamedTuple):
    """The first impossible value of a column: its row, the value, and what was expected."""

    row: int
    value: int
    expected: str


@cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def wrong_number(
    name: str, values: npt.NDArray[Any], *, size: int, offsets: npt.NDArray[Any] | None = None
) -> WrongValue | None:
    """The first wrong value of a column with one number a row, or None.

    Args:
        name: of the column.
        values: (rows,).
        size: of the shard in bytes.
        offsets: (rows,), for a column of sizes in bytes: the offset of each payload, 0 to `size`.
    """
    if not len(values) or name not in _BOUNDS:
        return None
    low, high, expected = _BOUNDS[name]
    if high is None:
        high = size
    if offsets is not None:
        # Offsets are at most `size`, so a sum that overflows is negative: as unsigned, above any size.
        if values.min() >= 0 and (offsets + values).view(np.uint64).max() <= size:
            return None
        wrong = (values < 0) | (values > size - offsets)
    else:
        least, greatest = _limits(values.dtype)
        if (low <= least or values.min() >= low) and (high >= greatest or values.max() <= high):
            return None
        wrong = (values < low) | (values > high)
    row = int(wrong.argmax())
    return WrongValue(row, int(values[row]), expected.format(size=size))


def wrong_captions(offsets: npt.NDArray[np.int32], *, formats: npt.NDArray[np.uint8]) -> WrongValue | None:
    """The first row without a caption, or None; all rows of a shard of labels only are without.

    Args:
        offsets: (rows + 1,), those of `Columns.lists`.
        formats: (rows,), column caption_format.
    """
    lengths = np.diff(offsets)
    if len(formats) and (formats == NO_CAPTION).all():
        wrong, expected = lengths != 0, "no caption, as caption_format says"
    else:
        wrong, expected = (lengths < 1) | (formats == NO_CAPTION), "1 caption or more"
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    return WrongValue(row, int(lengths[row]), expected)


def wrong_tokens(
    offsets: npt.NDArray[np.int32], values: npt.NDArray[Any], *, captions: npt.NDArray[np.int32]
) -> WrongValue | None:
    """The first row whose captions and token counts differ in number, or with an impossible count; or None.

    Args:
        offsets: (rows + 1,), of the token counts.
        values: tokens of each caption; empty if no tokenizer counted them.
        captions: (rows + 1,), offsets of the captions.
    """
    if len(offsets) < 2 or not len(values):
        return None
    if offsets.tobytes() != captions.tobytes():  # both (rows + 1,)
        row = int((np.diff(offsets) != np.diff(captions)).argmax())
        return WrongValue(row, int(np.diff(offsets)[row]), f"{np.diff(captions)[row]}, one for each caption")
    if values.view(np.uint32).max() > MAX_TOKENS:  # as unsigned, a negative value is larger than MAX_TOKENS
        place = int(((values < 0) | (values > MAX_TOKENS)).argmax())
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        return WrongValue(row, int(values[place]), f"0 to {MAX_TOKENS} tokens")
    return None
