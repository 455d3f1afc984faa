"""PASCAL VOC: an XML of boxes for each image, and lists of the images of each part."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.convert.sources.boxes import KEY, missing_caption
from mmdata.convert.sources.folder import IMAGE_SUFFIXES
from mmdata.convert.sources.images_folder import find_images
from mmdata.convert.sources.kept import Kept
from mmdata.convert.sources.rows import InputRow, fill_templates
from mmdata.convert.sources.tables import choose_part, shown
from mmdata.convert.sources.voc_xml import FACTS, MAX_BYTES, boxes_of, facts_of, parse_xml
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.safe_read import read_inside, read_regular

ANNOTATIONS, IMAGES, LISTS = "Annotations", "JPEGImages", "ImageSets/Main"
"""Folders of a VOC."""
_YEAR = re.compile(r"VOC\d{4}")


def find_voc(folder: Path) -> Path | None:
    """The folder that holds Annotations/ and JPEGImages/: the folder itself, VOC2012 in it, or VOCdevkit/VOC2012.

    Raises:
        DataError: there are several years.
    """
    for start in (folder, folder / "VOCdevkit"):
        if _is_voc(start):
            return start
        years = [one for one in sorted(start.glob("VOC*")) if _YEAR.fullmatch(one.name) and _is_voc(one)]
        if len(years) > 1:
            raise DataError(
                f"source '{folder}': has several years, which are converted one by one: "
                f"{shown([one.name for one in years])}; give one as the source, as {years[-1]}"
            )
        if years:
            return years[0]
    return None


def voc_parts(folder: Path) -> dict[str, Path]:
    """The lists of images of each part (train, val, trainval, test); lists of one class are none."""
    found = sorted((folder / LISTS).glob("*.txt"))
    return {path.stem: path for path in found if path.is_file() and _has_only_names(path)}


class VocSource:
    """The images of one part of a VOC, in the order of its list; without lists, all images in the order of their names.

    Captions are made by the caption templates of the names of an image's objects, each name once, in their order.

    Args:
        folder: that `find_voc` found.
        config: split, images, keep and caption templates are used.

    Raises:
        DataError: several parts and no `split`, or no annotations.
        ConfigError: no such part, no templates, or a name in `keep` that no image has.
    """

    group_by: Grouping = "none"
    rows_are_exact = True
    classes: tuple[str, ...] = ()
    has_captions = True

    def __init__(self, folder: Path, config: ConvertConfig) -> None:
        self._annotations = os.path.realpath(folder / ANNOTATIONS)
        self._kept = Kept(folder, config.keep, FACTS)
        self._templates = tuple(config.caption_templates or ())
        if not self._templates:
            raise ConfigError(
                f"source '{folder}': boxes and no captions; make a caption of the names of an image's objects with "
                '--caption-template "a photo of {}."'
            )
        named = config.images != "."
        self.root = find_images(folder, config.images, ())[0] if named else os.path.realpath(folder)
        self._below = "" if named else IMAGES
        images = _listing(os.path.join(self.root, self._below))
        self._images: dict[str, str] = {}  # of a stem: the first name with it
        for name in sorted(name for name in images if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES):
            self._images.setdefault(os.path.splitext(name)[0], name)
        self._said = _listing(self._annotations)
        parts = voc_parts(folder)
        if parts:
            self._list = choose_part(folder, parts, config.split).name
            self._stems = _names(folder / LISTS / self._list)
        elif config.split is not None:
            raise ConfigError(f"split '{config.split}': '{folder}' has no lists of parts in {LISTS}")
        else:
            self._list = ""
            described = {os.path.splitext(name)[0] for name in self._said if name.lower().endswith(".xml")}
            self._stems = sorted(described | self._images.keys())
        if not self._stems:
            raise DataError(f"source '{folder}': no images in it; the corpus is empty")
        self.rows_at_most = len(self._stems)
        self._listing = _digest([self._stems, sorted(self._said.items()), sorted(images.items())])

    def rows(self) -> Iterator[InputRow]:
        """The images of the part. See `Source.rows`."""
        rows: dict[str, int] = {}
        for number, stem in enumerate(self._stems):
            first = rows.setdefault(stem, number)
            path = os.path.join(self._below, self._images.get(stem, f"{stem}.jpg"))
            if first == number:
                yield self._row(number, stem, path)
            else:
                fault = (Reason.DUPLICATE_IMAGE, f"'{stem}' is in the list twice: row {first} has it")
                yield InputRow(number, self._place(stem), image=path, fault=fault)

    def describe(self) -> dict[str, Any]:
        """A hash of the names and sizes of all files. See `Source.describe`."""
        listed = {"list": self._list} if self._list else {}
        return {"kind": "annotations", "form": "PASCAL VOC", **listed, "listing_sha256": self._listing}

    def _place(self, stem: str) -> str:
        return f"{ANNOTATIONS}/{stem}.xml"

    def _row(self, number: int, stem: str, path: str) -> InputRow:
        place = self._place(stem)
        try:
            root = parse_xml(self._read(stem))
        except BadSample as bad:
            return InputRow(number, place, image=path, fault=(bad.reason, bad.detail))
        boxes = boxes_of(root)
        names = boxes.names()
        captions = tuple(fill_templates(self._templates, ", ".join(names))) if names else ()
        fault = None if captions else missing_caption(self._templates)
        extra = {KEY: boxes.entries, **self._kept.of(facts_of(root), path)}
        return InputRow(number, place, image=path, captions=captions, extra=extra, losses=boxes.losses, fault=fault)

    def _read(self, stem: str) -> bytes:
        """The XML of an image.

        Raises:
            BadSample: there is none, or it cannot be read.
        """
        try:
            return read_inside(self._annotations, f"{stem}.xml", max_bytes=MAX_BYTES)[0]
        except BadSample as bad:
            if bad.reason is Reason.MISSING_IMAGE:
                detail = f"the image has no annotations: {bad.detail}"
                raise BadSample(Reason.MISSING_CAPTION, detail) from bad
            if bad.reason is Reason.IMAGE_TOO_LARGE:
                raise BadSample(Reason.BROKEN_ROW, bad.detail) from bad
            raise


def _is_voc(folder: Path) -> bool:
    return (folder / ANNOTATIONS).is_dir() and ((folder / IMAGES).is_dir() or (folder / LISTS).is_dir())


def _has_only_names(path: Path) -> bool:
    """Whether a list has names only; those of one class say 1, 0 or -1 beside each name."""
    return all(len(name.split()) == 1 for name in _names(path)[:1])


def _names(path: Path) -> list[str]:
    lines = read_regular(path, "list").decode("utf-8-sig", "surrogateescape").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _listing(folder: str) -> dict[str, int]:
    """Sizes of the files of a folder by name; empty without the folder."""
    if not os.path.isdir(folder):
        return {}
    with os.scandir(folder) as entries:
        return {one.name: one.stat(follow_symlinks=False).st_size for one in entries if not one.name.startswith(".")}


def _digest(listed: list[Any]) -> str:
    return hashlib.sha256(repr(listed).encode("utf-8", "surrogateescape")).hexdigest()
