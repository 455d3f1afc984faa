"""COCO's captions, instances and person keypoints: a row for each image, all boxes in its JSON.

Several files of the same images are read as one. They are streamed; what is needed of them stays in memory as text,
about 150 bytes a box and 350 an image, where dictionaries would take ten times that.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmdata.config.convert import ALL, RESERVED, ConvertConfig, Grouping
from mmdata.convert.sources.files import digest_of_zip
from mmdata.convert.sources.json_tables import JsonEntry, hashable, stream_entries
from mmdata.convert.sources.open_table import fingerprint
from mmdata.convert.sources.rows import InputRow, fill_templates
from mmdata.convert.sources.table_source import find_images
from mmdata.convert.sources.tables import shown
from mmdata.errors import BadSample, ConfigError, DataError, Reason, counted, excerpt
from mmdata.tars.captions import clean_caption
from mmdata.tars.texts import Loss

KEYS_SEEN = 100
"""Images whose keys can be kept."""
PATH = "path"
"""Name under which the path of an image is kept."""

BOX_VALUES = ("id", "area", "iscrowd", "keypoints", "num_keypoints")
"""What is kept of an annotation beside its box and category, if it is there."""
SEGMENTATION = "segmentation"
"""Polygons or run lengths of an annotation, most of a file's bytes: kept on request."""
IMAGES_SEEN = 20
"""Images that are looked for to find their folder."""
NO_GROUP = -1
"""Group of an image whose annotations another image of the same id has."""

KEY = "boxes"
"""Key of a sample's JSON that holds its boxes."""
LARGEST = 2**31
"""Coordinates are below it."""
MAX_BYTES = 2**19
"""Most bytes of JSON for the boxes of one image; half of what a sample may have."""
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)


class CocoSource:
    """Images with captions, boxes or both.

    Captions are those of a file of captions of the same images, if it is given too; an image without one has those
    that the caption templates make of the names of its categories, each name once, in the order of the boxes.

    Args:
        paths: of files of the same images: instances_*.json, person_keypoints_*.json, captions_*.json. An annotation
            of one id in two files is one box with what both say.
        config: images, keep and caption templates are used.

    Raises:
        DataError: see `CocoFiles`.
        ConfigError: no captions and no templates, or a name in `keep` that no image has.
    """

    group_by: Grouping = "none"
    rows_are_exact = True
    classes: tuple[str, ...] = ()
    has_captions = True

    def __init__(self, paths: Sequence[Path], config: ConvertConfig) -> None:
        self._files = [fingerprint(path) for path in paths]
        self._templates = tuple(config.caption_templates or ())
        self._content = CocoFiles(paths, needs_segmentation=SEGMENTATION in config.keep)
        if not self._content.has_captions and not self._templates:
            raise _no_captions(paths[0])
        seen = [image for row in range(min(KEYS_SEEN, len(self._content.groups))) for image in self._image(row)]
        known = dict.fromkeys(key for image in seen for key in image if key not in ("file_name", PATH, KEY, *RESERVED))
        self._kept = _names_to_keep(paths[0], config.keep, [*known])
        self.rows_at_most = len(self._content.groups) + len(self._content.orphans)
        names = [name for image in seen[:IMAGES_SEEN] if isinstance(name := path_of(image), str) and name]
        self.root, self._found_in = find_images(paths[0].parent, config.images, names)

    def rows(self) -> Iterator[InputRow]:
        """All images, then the annotations of images that are not listed. See `Source.rows`."""
        for number, group in enumerate(self._content.groups):
            yield self._row(number, group)
        for place, (image_id, group) in enumerate(self._content.orphans):
            found = counted(len(self._content.annotations.of(group)), "annotation")
            detail = f"{found} of image {excerpt(image_id)}, which is not among the file's images"
            number = len(self._content.groups) + place
            yield InputRow(number, self._place(image_id), fault=(Reason.MISSING_IMAGE, detail))

    def rows_with_labels(self) -> Iterator[InputRow]:
        """None. See `Source.rows_with_labels`."""
        return iter(())

    def describe(self) -> dict[str, Any]:
        """Names and hashes of the files. See `Source.describe`."""
        return {
            "kind": "annotations",
            "form": "COCO",
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            **({"images": self._found_in} if self._found_in else {}),
            **digest_of_zip(self.root),
        }

    def _image(self, row: int) -> list[dict[str, Any]]:
        return self._content.images.of(row)

    def _place(self, image_id: Any) -> str:
        return f"{self._files[0].name}, image {excerpt(image_id)}"

    def _row(self, number: int, group: int) -> InputRow:
        (image,) = self._image(number)
        path, place = path_of(image), self._place(image.get("id"))
        if group == NO_GROUP:
            return InputRow(number, place, image=path, fault=self._content.faults[number])
        annotations = self._joined(self._content.annotations.of(group))
        captions = tuple(one["caption"] for one in annotations if "caption" in one)
        boxes = self._boxes(one for one in annotations if "caption" not in one)
        names = boxes.names()
        if not captions and self._templates and names:
            captions = tuple(fill_templates(self._templates, ", ".join(names)))
        fault = None if captions else self._missing_caption()
        extra = {name: path if name == PATH else image.get(name) for name in self._kept}
        if self._content.has_boxes:
            extra = {KEY: boxes.entries, **extra}
        return InputRow(number, place, image=path, captions=captions, extra=extra, losses=boxes.losses, fault=fault)

    def _missing_caption(self) -> tuple[Reason, str]:
        detail = "the image has no caption"
        if self._content.has_boxes and self._templates:
            detail = "the image has no box with a category, so --caption-template has no name for it"
        elif self._content.has_boxes:
            detail += "; --caption-template makes one of the names of its boxes"
        return Reason.MISSING_CAPTION, detail

    def _boxes(self, annotations: Iterator[dict[str, Any]]) -> Boxes:
        boxes = Boxes()
        for one in annotations:
            name = f"annotation {one['id']}" if "id" in one else "an annotation"
            category = self._content.categories.get(hashable(one["category_id"]))
            if category is None:
                boxes.leave_out(f"{name}: category {excerpt(one['category_id'])} is not among the file's categories")
                continue
            more = {key: one[key] for key in (*BOX_VALUES, SEGMENTATION) if key in one}
            boxes.add(name, one["bbox"], {"category": category}, more)
        return boxes

    def _joined(self, annotations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The annotations of an image, those of one id in two files as one: keypoints join the box of their person."""
        joined: list[dict[str, Any]] = []
        first: dict[Any, int] = {}  # of an id and a category: its place in `joined`
        for one in annotations:
            if "id" not in one:
                joined.append(one)
                continue
            place = first.setdefault((hashable(one["id"]), hashable(one["category_id"])), len(joined))
            if place < len(joined) and joined[place]["file"] != one["file"]:
                joined[place] = {**one, **joined[place]}
            else:
                joined.append(one)
        return joined


def _names_to_keep(path: Path, keep: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names of the values of an image that are kept: "*" takes all that are known; segmentations are kept in boxes.

    Raises:
        ConfigError: a name that no image has.
    """
    asked = [PATH if name == "file_name" else name for name in keep]  # stored as "path", as of a table
    if strangers := [name for name in asked if name not in (ALL, PATH, SEGMENTATION, *known)]:
        raise ConfigError(
            f"annotations '{path}': nothing of the name '{strangers[0]}' (keep); there are: "
            f"{shown([PATH, *known, SEGMENTATION])}"
        )
    named = [name for word in asked for name in (known if word == ALL else (word,))]
    return tuple(dict.fromkeys(name for name in named if name != SEGMENTATION))


def _no_captions(path: Path) -> ConfigError:
    """The error for boxes without captions and without templates."""
    advice = ""
    kind, _, part = path.stem.partition("_") if not path.stem.startswith("person_") else ("", "", path.stem[17:])
    if kind != "captions" and part and (path.parent / f"captions_{part}.json").is_file():
        folder = path.parent.parent if path.parent.name == "annotations" else path.parent
        advice = f", or convert '{folder}' with --split {part}, which takes captions_{part}.json as well"
    return ConfigError(
        f"annotations '{path}': boxes and no captions; make a caption of the names in the boxes with "
        f'--caption-template "a photo of {{}}."{advice}'
    )


class CocoFiles:
    """The content of one or more files of the same images.

    Args:
        paths: of the files. Images and annotations that several of them have are one.
        needs_segmentation: whether segmentations are kept.

    Attributes:
        images: what an image entry says, by row.
        groups: of each row's annotations.
        annotations: each with "file", the number of its file, by group.
        orphans: (id, group) of annotations whose image is not listed.
        faults: of rows that cannot be used.
        categories: names by id.
        has_captions, has_boxes: whether any annotation is one.

    Raises:
        DataError: not JSON, entries that are not COCO's, a category with two names, no images.
    """

    def __init__(self, paths: Sequence[Path], *, needs_segmentation: bool) -> None:
        self.images, self.annotations = GroupedRecords(), GroupedRecords()
        self.groups = array("q")
        self.faults: dict[int, tuple[Reason, str]] = {}
        self.categories: dict[Any, str] = {}
        self.has_captions = self.has_boxes = False
        self._kept = (*BOX_VALUES, *([SEGMENTATION] if needs_segmentation else ()))
        self._group_of: dict[Any, int] = {}
        self._row_of: dict[Any, tuple[int, int, Any]] = {}  # of an image id: row, file and path
        for number, path in enumerate(paths):
            self._read(number, path)
        if not self.groups:
            raise DataError(f"annotations '{paths[0]}': no images in it; the corpus is empty")
        self.images.close()
        self.annotations.close()
        self.orphans = [(one, group) for one, group in self._group_of.items() if one not in self._row_of]
        self._row_of.clear()

    def _read(self, number: int, path: Path) -> None:
        for entry in stream_entries(path):
            if entry.number == 0:
                continue
            if entry.key == "images":
                self._add_image(number, path, entry)
            elif entry.key == "annotations":
                self._add_annotation(number, path, entry)
            elif entry.key == "categories":
                self._add_category(path, entry)
        if self.has_boxes and not self.categories:
            raise DataError(f"annotations '{path}': boxes, and no \"categories\" that name what is in them")

    def _add_image(self, number: int, path: Path, entry: JsonEntry) -> None:
        image = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
        row = len(self.groups)
        if "id" not in image:
            self.faults[row] = (Reason.BROKEN_ROW, f"entry {entry.number} of images has no id")
            self._append(row, image, NO_GROUP)
            return
        key, name = hashable(image["id"]), path_of(image)
        known = self._row_of.get(key)
        if known is None:
            self._row_of[key] = (row, number, name)
            self._append(row, image, self._group(key))
            return
        first, file, first_name = known
        if file != number and name == first_name:  # the same image in another file
            return
        detail = f"the image id of row {first} again"
        if name == first_name:
            self.faults[row] = (Reason.DUPLICATE_IMAGE, f"{detail}, with the same path")
        else:
            said = f"{detail}, with the path {excerpt(name)} and not {excerpt(first_name)}"
            self.faults[row] = (Reason.BROKEN_ROW, f"{said}; that row has the annotations")
        self._append(row, image, NO_GROUP)

    def _append(self, row: int, image: dict[str, Any], group: int) -> None:
        self.images.add(row, image)
        self.groups.append(group)

    def _add_annotation(self, number: int, path: Path, entry: JsonEntry) -> None:
        found = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
        if "image_id" not in found:
            raise DataError(
                f"annotations '{path}', entry {entry.number} of annotations: no image_id; every annotation of COCO's "
                "form names its image"
            )
        group = self._group(hashable(found["image_id"]))
        if "caption" in found:
            self.has_captions = True
            self.annotations.add(group, {"file": number, "caption": found["caption"]})
            return
        kept = {name: found[name] for name in self._kept if name in found}
        box = {"bbox": found.get("bbox"), "category_id": found.get("category_id")}
        self.has_boxes = True
        self.annotations.add(group, {"file": number, **box, **kept})

    def _add_category(self, path: Path, entry: JsonEntry) -> None:
        found = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
        place = f"annotations '{path}', entry {entry.number} of categories"
        try:
            name = clean_caption(found.get("name"))
        except BadSample as bad:
            raise DataError(f"{place}: no usable name ({bad.detail})") from bad
        known = self.categories.setdefault(hashable(found.get("id")), name)
        if known != name:
            raise DataError(
                f"{place}: id {excerpt(found.get('id'))} is {excerpt(name)}, and {excerpt(known)} before it; "
                "give each category an id of its own"
            )

    def _group(self, image_id: Any) -> int:
        return self._group_of.setdefault(image_id, len(self._group_of))


def path_of(image: dict[str, Any]) -> Any:
    """The path of an image: its `file_name`, or, in LVIS, the last two parts of its `coco_url`."""
    if "file_name" not in image and isinstance(url := image.get("coco_url"), str):
        return "/".join(url.split("/")[-2:])
    return image.get("file_name")


class GroupedRecords:
    """Records in groups, read back group by group in the order in which they were added."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends = array("q", [0])
        self._groups = array("q")
        self._order = np.zeros(0, np.int64)
        self._sorted = np.zeros(0, np.int64)

    def add(self, group: int, record: dict[str, Any]) -> None:
        """Add a record to a group, a number from 0."""
        self._data += json.dumps(record, separators=(",", ":")).encode()
        self._ends.append(len(self._data))
        self._groups.append(group)

    def close(self) -> None:
        """Make the records readable; none is added after it."""
        groups = np.array(self._groups, np.int64)
        self._order = np.argsort(groups, kind="stable")
        self._sorted = groups[self._order]
        self._groups = array("q")

    def of(self, group: int) -> list[dict[str, Any]]:
        """The records of one group."""
        first, end = np.searchsorted(self._sorted, [group, group + 1])
        places = (int(place) for place in self._order[first:end])
        return [json.loads(self._data[self._ends[place] : self._ends[place + 1]]) for place in places]


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


def _json_bytes(value: Any) -> int | None:
    """Bytes of a value as strict JSON; None if JSON cannot hold it."""
    try:
        return len(_ENCODER.encode(value).encode())
    except (TypeError, ValueError, RecursionError):
        return None
