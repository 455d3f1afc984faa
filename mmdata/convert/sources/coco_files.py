"""Reads COCO's files of annotations, several of the same images as one: boxes, keypoints and captions by image id.

The files are streamed; what is needed of them stays in memory as text, about 150 bytes a box and 350 an image.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from mmdata.convert.sources.coco_records import GroupedRecords
from mmdata.convert.sources.json_stream import JsonEntry, stream_entries
from mmdata.convert.sources.json_tables import hashable
from mmdata.errors import BadSample, DataError, Reason, excerpt
from mmdata.tars.captions import clean_caption

BOX_VALUES = ("id", "area", "iscrowd", "keypoints", "num_keypoints")
"""What is kept of an annotation beside its box and category, if it is there."""
SEGMENTATION = "segmentation"
"""Polygons or run lengths of an annotation, most of a file's bytes: kept on request."""
IMAGES_SEEN = 20
"""Images that are looked for to find their folder."""
NO_GROUP = -1
"""Group of an image whose annotations another image of the same id has."""


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
        has_captions: whether any annotation is a caption.

    Raises:
        DataError: not JSON, entries that are not COCO's, a category with two names, no images.
    """

    def __init__(self, paths: Sequence[Path], *, needs_segmentation: bool) -> None:
        self.images, self.annotations = GroupedRecords(), GroupedRecords()
        self.groups = array("q")
        self.faults: dict[int, tuple[Reason, str]] = {}
        self.categories: dict[Any, str] = {}
        self.has_captions = False
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
        has_boxes = False
        for entry in stream_entries(path):
            if entry.number == 0:
                continue
            if entry.key == "images":
                self._add_image(number, path, entry)
            elif entry.key == "annotations":
                has_boxes |= self._add_annotation(number, path, entry)
            elif entry.key == "categories":
                self._add_category(path, entry)
        if has_boxes and not self.categories:
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

    def _add_annotation(self, number: int, path: Path, entry: JsonEntry) -> bool:
        """Add an annotation; returns whether it is a box."""
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
            return False
        kept = {name: found[name] for name in self._kept if name in found}
        box = {"bbox": found.get("bbox"), "category_id": found.get("category_id")}
        self.annotations.add(group, {"file": number, **box, **kept})
        return True

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
