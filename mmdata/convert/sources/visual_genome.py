"""Visual Genome: all phrases about regions of an image are its captions, and its JSON keeps each with its box.

The file of regions, 700 MB in reality, is streamed each time that the rows are read; only what image_data.json says of
each image stays in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.convert.sources.boxes import KEY, Boxes
from mmdata.convert.sources.coco_files import IMAGES_SEEN
from mmdata.convert.sources.images_folder import find_images
from mmdata.convert.sources.json_stream import JsonEntry, stream_entries
from mmdata.convert.sources.json_tables import hashable
from mmdata.convert.sources.kept import Kept
from mmdata.convert.sources.open_table import fingerprint
from mmdata.convert.sources.rows import InputRow
from mmdata.errors import BadSample, ConfigError, DataError, Reason, excerpt
from mmdata.tars.captions import clean_caption

REGIONS, IMAGE_DATA = "region_descriptions.json", "image_data.json"
FOLDERS = ("VG_100K", "VG_100K_2")
"""Folders of the images, as the archives unpack."""
FACTS = ("image_id", "url", "height", "width", "coco_id", "flickr_id")
"""What can be kept of an image."""


class VisualGenomeSource:
    """Images with regions, in the order of the file; then the images that only image_data.json has.

    An image is the file that the URL in image_data.json ends in ("VG_100K_2/1.jpg"); without that file, or if nothing
    is there, ID.jpg in VG_100K, in VG_100K_2, or beside them.

    Args:
        path: of region_descriptions.json; image_data.json is looked for beside it.
        config: images and keep are used.

    Raises:
        DataError: not JSON, or not of this form.
        ConfigError: a name in `keep` that no image has, or a `split`: the corpus has no parts.
    """

    group_by: Grouping = "none"
    rows_are_exact = True
    classes: tuple[str, ...] = ()
    has_captions = True

    def __init__(self, path: Path, config: ConvertConfig) -> None:
        if config.split is not None:
            raise ConfigError(
                f"split '{config.split}': '{path}' is of one part; --val-share sets images aside for validation"
            )
        self._path = path
        self._kept = Kept(path, config.keep, FACTS)
        beside = path.parent / IMAGE_DATA
        self._files = [fingerprint(one) for one in (path, beside) if one == path or beside.is_file()]
        self._images = _image_data(beside) if beside.is_file() else {}
        entries, ids = 0, dict[Any, None]()
        for entry in self._entries():
            entries += 1
            ids[_id_of(entry.value)] = None
        self._without = [one for one in self._images if one not in ids]
        self.rows_at_most = entries + len(self._without)
        seen = islice((one for one in ids if one is not None), IMAGES_SEEN)
        paths = [place for image_id in seen for place in self._places(image_id)]
        self.root, self._found_in = find_images(path.parent, config.images, paths)

    def rows(self) -> Iterator[InputRow]:
        """All images. See `Source.rows`."""
        rows: dict[Any, int] = {}
        for number, entry in enumerate(self._entries()):
            image_id = _id_of(entry.value)
            if image_id is None:
                fault = (Reason.BROKEN_ROW, 'no "id" of an image, or no list of "regions"')
                yield InputRow(number, f"{self._path.name}, entry {entry.number}", fault=fault)
                continue
            first = rows.setdefault(image_id, number)
            if first == number:
                yield self._row(number, image_id, entry.value["regions"])
                continue
            fault = (Reason.DUPLICATE_IMAGE, f"the regions of image {excerpt(image_id)} again: row {first} has it")
            yield InputRow(number, self._place(image_id), image=self._find(image_id), fault=fault)
        begin = self.rows_at_most - len(self._without)
        for number, image_id in enumerate(self._without, begin):
            fault = (Reason.MISSING_CAPTION, f"the image is in {IMAGE_DATA}, and has no regions")
            yield InputRow(number, self._place(image_id), image=self._find(image_id), fault=fault)

    def describe(self) -> dict[str, Any]:
        """Names and hashes of the files. See `Source.describe`."""
        return {
            "kind": "annotations",
            "form": "Visual Genome",
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            **({"images": self._found_in} if self._found_in else {}),
        }

    def _entries(self) -> Iterator[JsonEntry]:
        return stream_entries(self._path)

    def _place(self, image_id: Any) -> str:
        return f"{self._path.name}, image {excerpt(image_id)}"

    def _row(self, number: int, image_id: Any, regions: list[Any]) -> InputRow:
        boxes, phrases = Boxes(), dict[str, None]()
        for order, found in enumerate(regions, 1):
            region = cast("dict[str, Any]", found if isinstance(found, dict) else {})
            region_id = region.get("region_id", region.get("id"))
            name = f"region {order if region_id is None else excerpt(region_id)}"
            try:
                phrase = clean_caption(region.get("phrase"))
            except BadSample as bad:
                boxes.leave_out(f"{name}: its phrase cannot be used ({bad.detail})")
                continue
            phrases[phrase] = None  # of a region whose box is unusable, too: it is about the image all the same
            bbox = [region.get(key) for key in ("x", "y", "width", "height")]
            boxes.add(name, bbox, {"phrase": phrase}, {} if region_id is None else {"id": region_id})
        fault = None if phrases else (Reason.MISSING_CAPTION, "the image has no region with a phrase")
        path = self._find(image_id)
        facts = {**dict(zip(FACTS, self._images.get(image_id, ()), strict=False)), "image_id": image_id}
        extra = {KEY: boxes.entries, **self._kept.of(facts, path)}
        place, captions = self._place(image_id), tuple(phrases)
        return InputRow(number, place, image=path, captions=captions, extra=extra, losses=boxes.losses, fault=fault)

    def _places(self, image_id: Any) -> list[str]:
        """Where the image of an id may lie below the root, the likeliest first."""
        _, url, *_ = self._images.get(image_id, (image_id, None))
        name, ends = f"{image_id}.jpg", list[str]()
        if isinstance(url, str) and url.count("/") > 1:
            ends = url.split("/")[-2:]
            name = ends[-1]
        return list(dict.fromkeys(["/".join(ends) or f"{FOLDERS[0]}/{name}", *(f"{f}/{name}" for f in FOLDERS), name]))

    def _find(self, image_id: Any) -> str:
        places = self._places(image_id)
        return next((one for one in places if os.path.isfile(os.path.join(self.root, one))), places[0])


def is_regions(value: Any) -> bool:
    """Whether an entry of a JSON array is that of an image of Visual Genome with its regions."""
    return _id_of(value) is not None


def _id_of(value: Any) -> Any:
    """Id of the image whose regions an entry holds, as a key of a dictionary; None for something else."""
    entry = cast("dict[str, Any]", value if isinstance(value, dict) else {})
    image_id = entry.get("id", entry.get("image_id"))
    return hashable(image_id) if isinstance(entry.get("regions"), list) and image_id is not None else None


def _image_data(path: Path) -> dict[Any, tuple[Any, ...]]:
    """The values of FACTS of each image, by id; the first entry of an id counts."""
    found: dict[Any, tuple[Any, ...]] = {}
    for entry in stream_entries(path):
        image = cast("dict[str, Any]", entry.value if isinstance(entry.value, dict) else {})
        image_id = image.get("image_id", image.get("id"))
        if entry.key or image_id is None:
            raise DataError(
                f"annotations '{path}', entry {entry.number}: no image_id; an array of images is expected, as Visual "
                "Genome has it"
            )
        found.setdefault(hashable(image_id), (image_id, *(image.get(name) for name in FACTS[1:])))
    return found
