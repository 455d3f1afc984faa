"""COCO's captions, instances and person keypoints as a table: a row for each image, with its captions and all boxes.

Several files of the same images are read as one. They are streamed; what is needed of them stays in memory as JSON,
about 200 bytes a box and 400 an image, where dictionaries would take five times that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.json_tables import JsonEntry, hashable, stream_entries
from mmdata.convert.sources.rows import SourceKind, fill_templates
from mmdata.convert.sources.tables import SourceTable, TableRow
from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted, excerpt
from mmdata.tars.captions import clean_caption
from mmdata.tars.texts import Loss

KEYS_SEEN = 100
"""Images whose keys can be kept."""
BOX_VALUES = ("id", "area", "iscrowd", "keypoints", "num_keypoints")
"""What is kept of an annotation beside its box and category, if it is there."""
SEGMENTATION = "segmentation"
"""Polygons or run lengths of an annotation, most of a file's bytes: kept on request."""

IMAGE, CAPTIONS = "file_name", "captions"
KEY = "boxes"
"""Column, and key of a sample's JSON, that holds its boxes."""
LARGEST = 2**31
"""Coordinates are below it."""
MAX_BYTES = 2**19
"""Most bytes of JSON for the boxes of one image; half of what a sample may have."""
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class CocoTable(SourceTable):
    """Images with captions, boxes or both.

    Captions are those of a file of captions of the same images, if it is given too; an image without one has those
    that the caption templates make of the names of its categories, each name once, in the order of the boxes.

    Args:
        paths: of files of the same images: instances_*.json, person_keypoints_*.json, captions_*.json. Images that
            several of them have are one. An annotation of one id in two files is one box with what both say.
        config: keep and caption templates are used.

    Attributes:
        has_boxes: whether any annotation is one.

    Raises:
        DataError: not JSON, entries that are not COCO's, a category with two names, no images.
        ConfigError: no captions and no templates.
    """

    kind = SourceKind.BOXES
    group_by = "none"

    def __init__(self, paths: Sequence[Path], config: ConvertConfig) -> None:
        self.path = paths[0]
        self.types: dict[str, str] = {}
        self._templates = tuple(config.caption_templates or ())
        self._of_box = (*BOX_VALUES, *((SEGMENTATION,) if SEGMENTATION in config.keep else ()))
        self._images: list[bytes] = []  # as JSON, by row
        self._annotations: dict[Any, list[bytes]] = {}  # as JSON, by the id of their image
        self._faults: dict[int, tuple[Reason, str]] = {}  # of rows that cannot be used
        self._categories: dict[Any, str] = {}
        self.has_boxes = has_captions = False
        first: dict[Any, tuple[int, int, Any]] = {}  # of an image's id: row, file and path
        for file, path in enumerate(paths):
            for entry in stream_entries(path):
                value = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
                if entry.number and entry.key == "images":
                    self._add_image(file, entry.number, value, first)
                elif entry.number and entry.key == "annotations":
                    has_captions |= "caption" in value
                    self._add_annotation(file, path, entry, value)
                elif entry.number and entry.key == "categories":
                    self._add_category(path, entry.number, value)
            if self.has_boxes and not self._categories:
                raise DataError(f"annotations '{path}': boxes, and no \"categories\" that name what is in them")
        if not self._images:
            raise DataError(f"annotations '{self.path}': no images in it; the corpus is empty")
        if not has_captions and not self._templates:
            raise ConfigError(
                f"annotations '{self.path}': boxes and no captions; make a caption of the names in the boxes with "
                '--caption-template "a photo of {}.", or give the folder of the corpus with --split, which takes its '
                "file of captions as well"
            )
        self._orphans = [one for one in self._annotations if one not in first]
        self.num_rows = len(self._images) + len(self._orphans)
        seen = (key for image in islice(self._images, KEYS_SEEN) for key in json.loads(image))
        self.columns = list(dict.fromkeys([IMAGE, CAPTIONS, *((KEY, SEGMENTATION) if self.has_boxes else ()), *seen]))

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All images, then the annotations of images that are not listed. See `SourceTable.rows`."""
        for number, image in enumerate(self._images):
            yield self._row(number, json.loads(image))
        for image_id in self._orphans:
            found = counted(len(self._annotations[image_id]), "annotation")
            detail = f"{found} of image {excerpt(image_id)}, which is not among the file's images"
            yield TableRow(self._place(image_id), None, (Reason.MISSING_IMAGE, detail))

    def _place(self, image_id: Any) -> str:
        return f"{self.path.name}, image {excerpt(image_id)}"

    def _row(self, number: int, image: dict[str, Any]) -> TableRow:
        place, path = self._place(image.get("id")), path_of(image)
        cells = {**image, IMAGE: path}
        if number in self._faults:
            return TableRow(place, cells, self._faults[number])
        found = _joined(map(json.loads, self._annotations.get(hashable(image["id"]), ())))
        captions = [one["caption"] for one in found if "caption" in one]
        boxes = self._boxes(one for one in found if "caption" not in one)
        if not captions and self._templates and (names := boxes.names()):
            captions = fill_templates(self._templates, ", ".join(names))
        cells[CAPTIONS] = captions
        if self.has_boxes:
            cells[KEY] = boxes.entries
        return TableRow(place, cells, None if captions else self._missing_caption(), boxes.losses)

    def _missing_caption(self) -> tuple[Reason, str]:
        detail = "the image has no caption"
        if self.has_boxes and self._templates:
            detail = "the image has no box with a category, so --caption-template has no name for it"
        elif self.has_boxes:
            detail += "; --caption-template makes one of the names of its boxes"
        return Reason.MISSING_CAPTION, detail

    def _boxes(self, annotations: Iterable[dict[str, Any]]) -> Boxes:
        boxes = Boxes()
        for one in annotations:
            name = f"annotation {one['id']}" if "id" in one else "an annotation"
            category = self._categories.get(hashable(one["category_id"]))
            if category is None:
                boxes.leave_out(f"{name}: category {excerpt(one['category_id'])} is not among the file's categories")
                continue
            more = {key: one[key] for key in self._of_box if key in one}
            boxes.add(name, one["bbox"], {"category": category}, more)
        return boxes

    def _add_image(self, file: int, entry: int, image: dict[str, Any], first: dict[Any, tuple[int, int, Any]]) -> None:
        row, name = len(self._images), path_of(image)
        if "id" not in image:
            self._faults[row] = (Reason.BROKEN_ROW, f"entry {entry} of images has no id")
        else:
            known, known_file, known_name = first.setdefault(hashable(image["id"]), (row, file, name))
            if known != row and known_file != file and name == known_name:
                return  # the same image in another file
            if known != row and name == known_name:
                self._faults[row] = (Reason.DUPLICATE_IMAGE, f"the image id of row {known} again, with the same path")
            elif known != row:
                paths = f"with the path {excerpt(name)} and not {excerpt(known_name)}"
                detail = f"the image id of row {known} again, {paths}; that row has the annotations"
                self._faults[row] = (Reason.BROKEN_ROW, detail)
        self._images.append(_packed(image))

    def _add_annotation(self, file: int, path: Path, entry: JsonEntry, found: dict[str, Any]) -> None:
        if "image_id" not in found:
            raise DataError(
                f"annotations '{path}', entry {entry.number} of annotations: no image_id; every annotation of COCO's "
                "form names its image"
            )
        if "caption" in found:
            kept = {"caption": found["caption"]}
        else:
            self.has_boxes = True
            kept = {"bbox": found.get("bbox"), "category_id": found.get("category_id")}
            kept |= {name: found[name] for name in self._of_box if name in found}
        self._annotations.setdefault(hashable(found["image_id"]), []).append(_packed({"file": file, **kept}))

    def _add_category(self, path: Path, entry: int, found: dict[str, Any]) -> None:
        place = f"annotations '{path}', entry {entry} of categories"
        try:
            name = clean_caption(found.get("name"))
        except BadSample as bad:
            raise DataError(f"{place}: no usable name ({bad.detail})") from bad
        known = self._categories.setdefault(hashable(found.get("id")), name)
        if known != name:
            raise DataError(
                f"{place}: id {excerpt(found.get('id'))} is {excerpt(name)}, and {excerpt(known)} before it; "
                "give each category an id of its own"
            )


def path_of(image: dict[str, Any]) -> Any:
    """The path of an image: its `file_name`, or, in LVIS, the last two parts of its `coco_url`."""
    if "file_name" not in image and isinstance(url := image.get("coco_url"), str):
        return "/".join(url.split("/")[-2:])
    return image.get("file_name")


def _packed(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _joined(annotations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The annotations of an image, those of one id in two files as one: keypoints join the box of their person."""
    joined: list[dict[str, Any]] = []
    first: dict[Any, int] = {}  # of an id and a category: its place in `joined`
    for one in annotations:
        place = len(joined)
        if "id" in one:
            place = first.setdefault((hashable(one["id"]), hashable(one["category_id"])), place)
        if place < len(joined) and joined[place]["file"] != one["file"]:
            joined[place] = {**one, **joined[place]}
        else:
            joined.append(one)
    return joined


class Boxes:
    """The boxes of one image while they are collected, and what is wrong with the others."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._bytes = 0
        self._left_out = 0
        self._first = ""

    def add(self, name: str, bbox: Any, says: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Add a box, or count it as left out.

        Args:
            name: of the annotation, for messages.
            bbox: [x, y, width, height]; anything else is left out.
            says: what the box shows, such as {"category": "dog"}; a clean text.
            more: further values of the annotation as given. With one that JSON cannot hold (NaN), the box is left out.
        """
        if fault := fault_of(bbox):
            self.leave_out(f"{name}: {fault}")
            return
        entry = {"bbox": bbox, **says, **more}
        size = _json_bytes(entry)
        if size is None:
            self.leave_out(f"{name}: one of its values holds NaN, Infinity or a lone surrogate")
        elif self._bytes + size > MAX_BYTES:
            self.leave_out(f"{name}: the boxes up to it have more than {MAX_BYTES} bytes of JSON")
        else:
            self._bytes += size
            self.entries.append(entry)

    def leave_out(self, detail: str) -> None:
        """Count a box that cannot be used."""
        self._left_out += 1
        self._first = self._first or detail

    @property
    def losses(self) -> dict[Loss, str]:
        """What the sample has lost, for `TableRow.losses`."""
        said = f"{self._left_out} {'box' if self._left_out == 1 else 'boxes'} left out; the first is {self._first}"
        return {Loss.BOX_UNUSABLE: said} if self._left_out else {}

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


def _json_bytes(value: Any) -> int | None:
    """Bytes of a value as strict JSON; None if JSON cannot hold it."""
    try:
        return len(_ENCODER.encode(value).encode())
    except (TypeError, ValueError, RecursionError):
        return None
