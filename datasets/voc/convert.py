"""Converts PASCAL VOC: python datasets/voc/convert.py VOCdevkit/VOC2012 OUT --split train [train_tokenizer=512 …]

An image is a row. Its caption is made of the names of its objects, and its JSON keeps their boxes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser

from mmdata.convert import convert, load_recipe
from mmdata.convert.sources.coco import Boxes
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.safe_read import read_inside
from mmdata.tars.captions import clean_caption

MAX_BYTES = 2**20
"""Largest XML file of an image."""


def main() -> None:
    """Convert one split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("voc", type=Path, metavar="VOC2012", help="folder with Annotations, ImageSets and JPEGImages")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--split", required=True, help="list in ImageSets/Main: train, val, trainval or test")
    parser.add_argument("--caption-template", default="a photo of {}.", help="{} stands for the names of the objects")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings of mmdata convert")
    options = parser.parse_intermixed_args()
    try:
        config = load_recipe(None, {"images": str(options.voc.resolve() / "JPEGImages")}, overrides=options.settings)
        report = convert(rows(options.voc, options.split, options.caption_template), options.out, config)
    except (ConfigError, DataError) as error:
        raise SystemExit(f"error: {error}") from error
    print({name: report.accounts[name] for name in ("rows", "written", "quarantined", "reasons")})


def rows(voc: Path, split: str, template: str = "a photo of {}.") -> Iterator[dict[str, Any]]:
    """The images of a split, in the order of its list. One whose XML cannot be used has the reason in `left_out`."""
    lists = voc / "ImageSets/Main"
    if not (lists / f"{split}.txt").is_file():
        there = ", ".join(sorted(path.stem for path in lists.glob("*.txt") if "_" not in path.stem))
        raise ConfigError(f"split '{split}': no such list in '{lists}'; there are: {there or 'none'}")
    seen: set[str] = set()
    for stem in (lists / f"{split}.txt").read_text("utf-8-sig").splitlines():
        image = f"{(stem := stem.strip())}.jpg"
        try:
            if stem in seen:
                raise BadSample(Reason.DUPLICATE_IMAGE, f"'{stem}' is in the list twice")
            seen.add(stem)
            yield {"image": image, "key": stem, **read_annotation(voc / "Annotations", f"{stem}.xml", template)}
        except BadSample as bad:
            yield {"image": image, "captions": [], "left_out": str(bad)}


def read_annotation(folder: Path, name: str, template: str) -> dict[str, Any]:
    """What the XML of an image says: captions, boxes and filename.

    Raises:
        BadSample: there is no XML, it cannot be read, or no object in it can be used.
    """
    root = parse_xml(read_inside(str(folder), name, max_bytes=MAX_BYTES)[0], name)
    boxes = boxes_of(root)
    if not boxes.entries:
        raise BadSample(Reason.MISSING_CAPTION, f"'{name}' has no object with a name and a box")
    left_out = {"boxes_left_out": ", ".join(boxes.losses.values())} if boxes.losses else {}
    caption = template.replace("{}", ", ".join(boxes.names()))
    return {"captions": [caption], "boxes": boxes.entries, "filename": root.findtext("filename"), **left_out}


class _Builder(TreeBuilder):
    """Refuses a document type declaration, so no entity is ever defined or expanded."""

    def doctype(self, *declared: object) -> None:
        """Refuse it."""
        raise BadSample(Reason.BROKEN_ROW, "XML with a document type declaration (<!DOCTYPE …>), which is not read")


def parse_xml(data: bytes, name: str) -> Element:
    """The root element of an annotation.

    Raises:
        BadSample: broken_row: it is not XML, or has a document type declaration or another root than `annotation`.
    """
    parser = XMLParser(target=_Builder())
    try:
        parser.feed(data)
        root = parser.close()
    except (ParseError, ValueError, LookupError) as error:  # the others: an encoding that Python does not know
        raise BadSample(Reason.BROKEN_ROW, f"'{name}' is not XML: {error}") from error
    if root.tag != "annotation":
        raise BadSample(Reason.BROKEN_ROW, f"'{name}' is XML of <{root.tag[:80]}>, and <annotation> is expected")
    return root


def boxes_of(root: Element) -> Boxes:
    """The boxes of the objects, in their order.

    VOC counts pixels from 1 and includes the last one; here a box begins at 0 and has a width and a height:
    xmin 48, ymin 240, xmax 195, ymax 371 give [47, 239, 148, 132].
    """
    boxes = Boxes()
    for number, found in enumerate(root.findall("object"), 1):
        try:
            category = clean_caption(found.findtext("name"))
        except BadSample as bad:
            boxes.leave_out(f"object {number}: its name cannot be used ({bad.detail})")
            continue
        more: dict[str, Any] = {"pose": found.findtext("pose")}
        more |= {flag: number_of(found.findtext(flag)) for flag in ("truncated", "occluded", "difficult")}
        given = {key: value for key, value in more.items() if value is not None}
        corners = [number_of(found.findtext(f"bndbox/{name}")) for name in ("xmin", "ymin", "xmax", "ymax")]
        boxes.add(f"object {number}", _box(corners), {"category": category}, given)
    return boxes


def _box(corners: list[int | float | None]) -> list[int | float] | None:
    """[x, y, width, height] from 0; None if a corner is missing."""
    left, top, right, bottom = (math.nan if corner is None else corner for corner in corners)
    box = [left - 1, top - 1, right - left + 1, bottom - top + 1]
    return box if all(map(math.isfinite, box)) else None


def number_of(text: str | None) -> int | float | None:
    """A number as written, whole where it is whole; None for anything else."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return int(number) if number.is_integer() and "." not in (text or "") else number


if __name__ == "__main__":
    main()
