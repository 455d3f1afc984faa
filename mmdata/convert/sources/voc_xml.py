"""Reads the XML of one image of PASCAL VOC. A document type declaration is refused, so no entity is ever expanded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from mmdata.convert.sources.boxes import Boxes
from mmdata.errors import BadSample, Reason
from mmdata.tars.captions import clean_caption

MAX_BYTES = 2**20
"""Largest XML file of an image."""
MAX_DEPTH = 32
"""Elements within elements; VOC has five."""
FLAGS = ("truncated", "occluded", "difficult")
_WHOLE = re.compile(r"-?[0-9]{1,9}")


def parse_xml(data: bytes) -> Element:
    """The root element of an annotation.

    Raises:
        BadSample: broken_row: not XML, a document type declaration, elements that are nested too deeply, or another
            root than `annotation`.
    """
    builder, depth = TreeBuilder(), 0
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise BadSample(Reason.BROKEN_ROW, f"XML with more than {MAX_DEPTH} elements within each other")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*declared: object) -> None:
        raise BadSample(
            Reason.BROKEN_ROW, "XML with a document type declaration (<!DOCTYPE …>), which is not read; remove it"
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the others: an encoding that Python does not know
        raise BadSample(Reason.BROKEN_ROW, f"not XML: {error}") from error
    root = builder.close()
    if root.tag != "annotation":
        raise BadSample(Reason.BROKEN_ROW, f"XML of <{root.tag[:80]}>, and <annotation> is expected")
    return root


def boxes_of(root: Element) -> Boxes:
    """The boxes of the objects, in their order.

    VOC counts pixels from 1 and includes the last one; here a box begins at 0 and has a width and a height:
    xmin 48, ymin 240, xmax 195, ymax 371 give [47, 239, 148, 132].
    """
    boxes = Boxes()
    for number, found in enumerate(root.findall("object"), 1):
        name = f"object {number}"
        try:
            category = clean_caption(found.findtext("name"))
        except BadSample as bad:
            boxes.leave_out(f"{name}: its name cannot be used ({bad.detail})")
            continue
        more: dict[str, Any] = {}
        if (pose := _text(found, "pose")) is not None:
            more["pose"] = pose
        for flag in FLAGS:
            if (value := _text(found, flag)) is not None:
                more[flag] = int(value) if _WHOLE.fullmatch(value) else value
        boxes.add(name, _box(found.find("bndbox")), {"category": category}, more)
    return boxes


def facts_of(root: Element) -> dict[str, Any]:
    """What the XML says of the image, which can be kept."""
    facts: dict[str, Any] = {"filename": _text(root, "filename"), "folder": _text(root, "folder")}
    for name, path in (("height", "size/height"), ("width", "size/width"), ("segmented", "segmented")):
        facts[name] = _number(_text(root, path))
    return facts


FACTS = ("filename", "folder", "height", "width", "segmented")
"""Names of `facts_of`."""


def _box(found: Element | None) -> Any:
    """[x, y, width, height] from 0 of a bndbox; what it holds instead if it is not four numbers."""
    if found is None:
        return None
    corners = [_text(found, name) for name in ("xmin", "ymin", "xmax", "ymax")]
    numbers = [_number(corner) for corner in corners]
    if any(number is None for number in numbers):
        return ", ".join(str(corner) for corner in corners)
    left, top, right, bottom = (number or 0 for number in numbers)
    return [left - 1, top - 1, right - left + 1, bottom - top + 1]


def _number(text: str | None) -> int | float | None:
    """A number as written, whole where it is whole; None for anything else."""
    read: Callable[[str], int | float] = int if text and _WHOLE.fullmatch(text) else float
    try:
        number = read(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(found: Element, path: str) -> str | None:
    """The stripped text of an element below; None if there is none."""
    text = (found.findtext(path) or "").strip()
    return text or None
