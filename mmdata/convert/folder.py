"""A corpus as a folder of images and caption files of the same stem. The walk has one order on any file system."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdata.convert.recipe import ConvertConfig
from mmdata.convert.rows import Row
from mmdata.convert.tables import SUFFIXES as TABLE_SUFFIXES
from mmdata.errors import DataError, Reason

SIDECARS = (".json", ".txt", ".caption")
COMMON = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".avif"}
UNREAD = {".heic", ".heif", ".jxl", ".jp2", ".psd", ".svg", ".pdf", ".eps", ".fits", ".ico", ".tga", ".ppm", ".exr"}
IMAGE_SUFFIXES = COMMON | UNREAD
"""Files with these suffixes are rows even without a caption; their magic bytes decide the format later."""


class FolderSource:
    """Images whose captions are in a file of the same stem ending in .json, .txt or .caption.

    The files of a folder come in order of their names, then its sub-folders in order of theirs. Hidden files, and files
    that are neither image nor caption, are no rows; `describe` counts them.
    """

    classes: tuple[str, ...] = ()
    may_repeat = False

    def __init__(self, folder: Path, config: ConvertConfig) -> None:
        self.root = os.path.realpath(folder)
        self._keep = config.keep
        digest, self.rows_at_most, self._ignored = hashlib.sha256(), 0, 0
        for found in self._walk(""):
            digest.update(found.listing)
            self.rows_at_most += len(found.rows)
            self._ignored += found.ignored
        self._listing = digest.hexdigest()
        if not self.rows_at_most:
            tables = sorted(name for name in os.listdir(self.root) if name.lower().endswith(TABLE_SUFFIXES))
            hint = f"; it has tables ({', '.join(tables[:3])}): name one with --table" if tables else ""
            raise DataError(f"source '{folder}': no images in it; the corpus is empty{hint}")

    def rows(self) -> Iterator[Row]:
        """All images, and captions that have none. See `Source.rows`."""
        number = 0
        for found in self._walk(""):
            for place, sidecars, fault in found.rows:
                extra = dict.fromkeys(self._keep)
                if "path" in extra:
                    extra["path"] = place
                yield Row(number, place, place, extra=extra, sidecars=sidecars, fault=fault)
                number += 1

    def describe(self) -> dict[str, Any]:
        """A hash of all names and sizes. See `Source.describe`."""
        return {"kind": "folder", "ignored_files": self._ignored, "listing_sha256": self._listing}

    def _walk(self, below: str) -> Iterator[_Found]:
        files: list[os.DirEntry[str]] = []
        folders: list[str] = []
        with os.scandir(os.path.join(self.root, below)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    files.append(entry)
        yield _pair(below, files)
        for name in folders:
            if not name.startswith("."):
                yield from self._walk(os.path.join(below, name))


@dataclass(frozen=True)
class _Found:
    """Content of one folder: rows as (path, sidecars, fault), names and sizes, and the number of other files."""

    rows: list[tuple[str, tuple[str, ...], tuple[Reason, str] | None]]
    listing: bytes
    ignored: int


def _pair(below: str, entries: list[os.DirEntry[str]]) -> _Found:
    """Rows of one folder: images with the caption files of their stem, and captions without an image, as faults."""
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    stems: dict[str, list[str]] = {os.path.splitext(entry.name)[0]: [] for entry in visible}
    for end in SIDECARS:
        for stem, name_end in (os.path.splitext(entry.name) for entry in visible):
            if name_end.lower() == end:
                stems[stem].append(stem + name_end)
    rows: list[tuple[str, tuple[str, ...], tuple[Reason, str] | None]] = []
    with_image: set[str] = set()
    for entry in visible:
        stem, end = os.path.splitext(entry.name)
        path = os.path.join(below, entry.name)
        if end.lower() in SIDECARS:
            continue
        if entry.is_symlink() and entry.is_dir():
            fault = (Reason.NOT_A_FILE, "a link to a folder is not followed; convert that folder for itself")
            rows.append((path, (), fault))
        elif stems[stem] or end.lower() in IMAGE_SUFFIXES:
            with_image.add(stem)
            rows.append((path, tuple(os.path.join(below, name) for name in stems[stem]), None))
    ignored = len(entries) - len(rows) - sum(len(sidecars) for sidecars in stems.values())
    for stem, sidecars in sorted(stems.items()):
        if sidecars and stem not in with_image:
            rows.append((os.path.join(below, sidecars[0]), (), (Reason.MISSING_IMAGE, "a caption without an image")))
    sizes = (f"{os.path.join(below, e.name)}\0{e.stat(follow_symlinks=False).st_size}\n" for e in visible)
    return _Found(rows, "".join(sizes).encode("utf-8", "surrogateescape"), ignored)
