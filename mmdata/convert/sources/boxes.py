"""The boxes of an image as a sample's JSON keeps them, one form for all corpora: pixels of the corpus's own file.

A box is [x, y, width, height] from the left upper corner, as COCO writes it, before EXIF orientation and `--resize`.
What cannot be used is left out and counted as a loss of the sample; a box that reaches beyond the image stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mmdata.errors import Reason, excerpt
from mmdata.tars.texts import Loss

KEY = "boxes"
"""Key of a sample's JSON that holds its boxes."""
LARGEST = 2**31
"""Coordinates are below it."""
MAX_BYTES = 2**19
"""Most bytes of JSON for the boxes of one image; half of what a sample may have."""
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class Boxes:
    """The boxes of one image while they are collected, and what is wrong with the others."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._bytes = 0
        self._left_out = 0
        self._parts_lost = 0
        self._first = ""

    def add(self, name: str, bbox: Any, says: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Add a box, or count it as left out.

        Args:
            name: of the annotation, for messages.
            bbox: [x, y, width, height]; anything else is left out.
            says: what the box shows, such as {"category": "dog"}; a clean text.
            more: further values of the annotation as given; one that JSON cannot hold (NaN) is left out.
        """
        if fault := fault_of(bbox):
            self.leave_out(f"{name}: {fault}")
            return
        entry = {"bbox": bbox, **says, **more}
        size = _json_bytes(entry)
        if size is None:
            for key in [key for key, value in more.items() if _json_bytes(value) is None]:
                del entry[key]
                self._parts_lost += 1
                self._first = self._first or f"{name}: its {excerpt(key)} holds NaN, Infinity or a lone surrogate"
            size = _json_bytes(entry) or 0
        if self._bytes + size > MAX_BYTES:
            self.leave_out(f"{name}: the boxes up to it have more than {MAX_BYTES} bytes of JSON")
            return
        self._bytes += size
        self.entries.append(entry)

    def leave_out(self, detail: str) -> None:
        """Count a box that cannot be used."""
        self._left_out += 1
        self._first = self._first or detail

    @property
    def losses(self) -> dict[Loss, str]:
        """What the sample has lost, for `Row.losses`."""
        counts = ((self._left_out, "box", "boxes"), (self._parts_lost, "value of a box", "values of boxes"))
        said = " and ".join(f"{number} {one if number == 1 else many}" for number, one, many in counts if number)
        return {Loss.BOX_UNUSABLE: f"{said} left out; the first is {self._first}"} if said else {}

    def names(self) -> list[str]:
        """The categories in the boxes, each once, in the order of the boxes."""
        return list(dict.fromkeys(entry["category"] for entry in self.entries))


def fault_of(bbox: Any) -> str:
    """What is wrong with a box [x, y, width, height]; "" if nothing is."""
    if not isinstance(bbox, list) or len(bbox) != 4:
        return f"its box is {excerpt(bbox)}, not [x, y, width, height]"
    for value in bbox:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -LARGEST < value < LARGEST:
            return f"its box holds {excerpt(value)}, and numbers of pixels are expected"
    if bbox[2] <= 0 or bbox[3] <= 0:
        return f"its box of {bbox[2]:g} × {bbox[3]:g} pixels has no area"
    return ""


def missing_caption(templates: Iterable[str] | None) -> tuple[Reason, str]:
    """The fault of a row without a caption whose boxes give no names for one."""
    if templates:
        return Reason.MISSING_CAPTION, "the image has no box with a category, so --caption-template has no name for it"
    return Reason.MISSING_CAPTION, "the image has no caption; --caption-template makes one of the names of its boxes"


def _json_bytes(value: Any) -> int | None:
    """Bytes of a value as strict JSON; None if JSON cannot hold it."""
    try:
        return len(_ENCODER.encode(value).encode())
    except (TypeError, ValueError, RecursionError):
        return None
