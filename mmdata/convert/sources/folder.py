"""A corpus as a folder of images and caption files of the same stem. The walk has one order on any file system."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mmdata.config.convert import ALL, ConvertConfig
from mmdata.convert.sources.files import PARTS, FolderEntry, Seen, list_folder, names_in
from mmdata.convert.sources.rows import InputRow, Source
from mmdata.convert.sources.tables import SUFFIXES as TABLE_SUFFIXES
from mmdata.convert.sources.tables import choose_part
from mmdata.errors import BadSample, DataError, Reason
from mmdata.tars.captions import MAX_CAPTION_BYTES
from mmdata.tars.texts import SampleTexts, TextKind, read_label, read_texts

COMMON = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".avif", ".heic", ".heif", ".hif", ".jxl"),
}
UNREAD = {".jp2", ".psd", ".svg", ".pdf", ".eps", ".fits", ".ico", ".tga", ".ppm", ".exr"}
IMAGE_SUFFIXES = COMMON | UNREAD
"""Files with these suffixes are rows even without a caption; their magic bytes decide the format later."""

SIDECAR_KINDS: tuple[TextKind, ...] = ("json", "txt", "caption")
"""Kinds of the text files of an image with the same stem."""
SIDECARS = tuple(f".{kind}" for kind in SIDECAR_KINDS)

_ABOUT_CAPTIONS = {Reason.MISSING_IMAGE: Reason.MISSING_CAPTION, Reason.IMAGE_TOO_LARGE: Reason.CAPTION_TOO_LONG}


class NeedsTable(DataError):
    """A folder has no images with captions, and tables in it may name images and captions.

    Attributes:
        tables: their paths.
    """

    def __init__(self, problem: str, folder: str, names: Sequence[str]) -> None:
        self.tables = [Path(folder, name) for name in names]
        first = shlex.quote(str(self.tables[0]))
        super().__init__(f"{problem}; it has tables ({', '.join(names[:3])}): give one as the source, as {first}")


@dataclass(frozen=True)
class FolderFiles:
    """The text files of an image in a folder.

    Attributes:
        root: folder of the corpus.
        paths: of the files, relative to it.
    """

    root: str
    paths: tuple[str, ...]

    def texts(self, seen: Seen, *, needs_caption: bool = True) -> SampleTexts:
        """Captions, label and metadata; see `read_texts`."""
        return read_texts(self._kinds(), partial(self._read, seen), needs_caption=needs_caption)

    def label(self) -> int | str | None:
        """The label that `texts` gives; None if it cannot be used."""
        return read_label(self._kinds(), partial(self._read, Seen()))

    def _kinds(self) -> list[TextKind]:
        there = {_kind(path) for path in self.paths}
        return [kind for kind in SIDECAR_KINDS if kind in there]

    def _read(self, seen: Seen, kind: TextKind) -> bytes:
        path = {_kind(path): path for path in self.paths}[kind]
        try:
            return seen.read(self.root, path, max_bytes=MAX_CAPTION_BYTES)
        except BadSample as bad:
            raise BadSample(_ABOUT_CAPTIONS.get(bad.reason, bad.reason), bad.detail) from bad


def _kind(path: str) -> TextKind:
    return os.path.splitext(path)[1].lower()[1:]


def any_caption(rows: Iterable[InputRow]) -> bool:
    """Whether the files of any row have a caption; they are read up to the first one."""
    for row in rows:
        with suppress(BadSample):
            if row.files and row.files.texts(Seen(), needs_caption=False).captions:
                return True
    return False


class FolderSource(Source):
    """Images whose captions are in a file of the same stem ending in .json, .txt or .caption, or in class folders.

    The files of a folder come in order of their names, then its sub-folders in order of theirs. Hidden files, and files
    that are neither image nor caption, are no rows; `describe` counts them. Texts without an image, such as README.txt,
    are ignored as well, unless they are more than those with one and more than half as many as the images. A link to a
    folder elsewhere is walked as that folder, once; one that leads back into the corpus is a row that cannot be used.

    Where no image has such a file, the folders are classes, as torchvision's ImageFolder numbers them: the label of
    cats/a/1.jpg is the place of "cats" among the sorted names. Folders such as train/ and val/ are parts of the corpus,
    of which `split` chooses one.
    """

    def __init__(self, folder: Path, config: ConvertConfig) -> None:
        self.root = os.path.realpath(folder)
        self._keep = [name for name in config.keep if name != ALL]
        self._takes_alone = False  # whether texts without an image are rows
        if config.split is not None:
            self.root = _part(self.root, config.split)
        self._read()
        if not self.num_rows:
            problem = f"source '{folder}': no images in it; the corpus is empty"
            tables = tables_beside(self.root)
            raise NeedsTable(problem, self.root, tables) if tables else DataError(problem)
        if not self._kinds:
            self.has_captions = False
            self._find_classes(folder, config)
        else:
            self.has_captions = self._kinds != {"json"} or any_caption(self.rows())
        self.group_by = "content" if self.has_captions else "none"

    def _read(self) -> None:
        digest, self.num_rows, self._ignored = hashlib.sha256(), 0, 0
        self._kinds, self._alone = set[str](), 0
        images = paired = 0
        for found in self._walk():
            digest.update(found.listing)
            self.num_rows += len(found.rows)
            self._ignored += found.ignored
            self._kinds |= found.kinds
            self._alone += len(found.alone)
            images += sum(row.fault is None for row in found.rows)
            paired += sum(bool(row.sidecars) for row in found.rows)
        self._takes_alone = self._alone > max(paired, images // 2)
        self.num_rows += self._alone if self._takes_alone else 0
        self._listing = digest.hexdigest()

    def _find_classes(self, folder: Path, config: ConvertConfig) -> None:
        """Take the folders for classes.

        Raises:
            NeedsTable: a table goes with the images.
            DataError: the folders are several parts, or there are not two folders.
        """
        if tables := tables_beside(self.root):
            raise NeedsTable(f"source '{folder}': its images have no captions beside them", self.root, tables)
        names = _folders(self.root)
        if config.split is None and names and all(name.lower() in PARTS for name in names):
            _part(self.root, None)  # raises for several
        seen = {self.root}
        while len(names := _folders(self.root)) == 1 and not next(self._walk()).rows:
            below = os.path.realpath(os.path.join(self.root, names[0]))
            if below in seen:  # links from folder to folder lead in a circle
                break
            seen.add(below)
            self.root = below  # flowers/, without images beside it, holds daisy/ and rose/
            self._read()
        if len(names) < 2:
            raise DataError(
                f"source '{folder}': its images have neither captions nor labels; put a .txt with the "
                "caption beside each image (1.jpg, 1.txt), or give a table of paths and captions as the source "
                "(captions.csv with the columns filepath and caption), or sort the images into a folder for each class "
                "(cat/1.jpg, dog/2.jpg) and give the folder that holds these"
            )
        self.classes = tuple(names)

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """All images, and captions that have none. See `Source.rows`."""
        return islice(self._rows(), start, None)

    def _rows(self) -> Iterator[InputRow]:
        number = 0
        # A class is its number and not its name, because "10" of the folders 0 to 11 is class 2 and not class 10.
        class_numbers = {name: i for i, name in enumerate(self.classes)}
        for found in self._walk():
            for place, sidecars, fault in [*found.rows, *(found.alone if self._takes_alone else ())]:
                extra = dict.fromkeys(self._keep)
                if "path" in extra:
                    extra["path"] = place
                label = class_numbers.get(place.split(os.sep)[0]) if os.sep in place else None
                files = FolderFiles(self.root, sidecars) if sidecars else None
                yield InputRow(number, place, place, label=label, extra=extra, files=files, fault=fault)
                number += 1

    def rows_with_labels(self) -> Iterator[InputRow]:
        """See `Source.rows_with_labels`."""
        return (row for row in self.rows() if row.label is not None or row.files)

    def describe(self) -> dict[str, Any]:
        """A hash of all names and sizes. See `Source.describe`."""
        alone = {"ignored_texts": self._alone} if self._alone and not self._takes_alone else {}
        return {"kind": "folder", "ignored_files": self._ignored, **alone, "listing_sha256": self._listing}

    def _walk(self) -> Iterator[_FolderContent]:
        """Each folder before those in it, by name; Python's stack would hold no more than a thousand levels."""
        outside = set[str]()  # folders elsewhere that are walked
        waiting = [("", False)]  # folders, and whether a link leads there
        while waiting:
            below, is_outside = waiting.pop()
            files: list[FolderEntry] = []
            folders: list[tuple[str, bool]] = []
            for entry in list_folder(os.path.join(self.root, below)):
                path = os.path.join(below, entry.name)
                if not entry.is_folder:
                    files.append(entry)
                elif entry.is_hidden:
                    continue
                elif not entry.is_link and not is_outside:
                    folders.append((path, False))
                elif (target := _target(self.root, path)) is None or target in outside:
                    files.append(entry)
                else:
                    outside.add(target)
                    folders.append((path, True))
            yield _pair(below, files)
            waiting += reversed(folders)


class _FileRow(NamedTuple):
    """A row: the path of its image, those of its text files, and what is wrong with it."""

    path: str
    sidecars: tuple[str, ...] = ()
    fault: tuple[Reason, str] | None = None


@dataclass(frozen=True)
class _FolderContent:
    """Content of one folder: rows, texts without an image, names and sizes, and the number of other files."""

    rows: list[_FileRow]
    alone: list[_FileRow]
    listing: bytes
    ignored: int

    @property
    def kinds(self) -> set[str]:
        """Extensions of the text files that go with an image."""
        return {_kind(name) for row in self.rows for name in row.sidecars}


def _pair(below: str, entries: list[FolderEntry]) -> _FolderContent:
    """Rows of one folder: images with the caption files of their stem; and texts without an image, as faults."""
    visible = [entry for entry in entries if not entry.is_hidden]
    stems: dict[str, list[str]] = {os.path.splitext(entry.name)[0]: [] for entry in visible}
    for end in SIDECARS:
        for stem, name_end in (os.path.splitext(entry.name) for entry in visible):
            if name_end.lower() == end:
                stems[stem].append(stem + name_end)
    rows: list[_FileRow] = []
    with_image: set[str] = set()
    for entry in visible:
        stem, end = os.path.splitext(entry.name)
        path = os.path.join(below, entry.name)
        if end.lower() in SIDECARS:
            continue
        if entry.is_folder:
            fault = (Reason.NOT_A_FILE, "leads to a folder that is in the corpus already, or has the corpus in it")
            rows.append(_FileRow(path, fault=fault))
        elif stems[stem] or end.lower() in IMAGE_SUFFIXES:
            with_image.add(stem)
            rows.append(_FileRow(path, tuple(os.path.join(below, name) for name in stems[stem])))
    ignored = len(entries) - len(rows) - sum(len(sidecars) for sidecars in stems.values())
    without = [sidecars[0] for stem, sidecars in sorted(stems.items()) if sidecars and stem not in with_image]
    boxes = "; texts in labels/ are boxes in YOLO's form, and no captions" if "labels" in below.split(os.sep) else ""
    fault = (Reason.MISSING_IMAGE, f"a caption without an image{boxes}")
    alone = [_FileRow(os.path.join(below, name), fault=fault) for name in without]
    sizes = (f"{os.path.join(below, entry.name)}\0{entry.stamp}\n" for entry in visible)
    return _FolderContent(rows, alone, "".join(sizes).encode("utf-8", "surrogateescape"), ignored)


def _target(root: str, path: str) -> str | None:
    """The folder that a link in a corpus leads to; None for one that is in the corpus, or has the corpus in it."""
    target = os.path.realpath(os.path.join(root, path))
    return None if os.path.commonpath([root, target]) in (root, target) else target


def _folders(folder: str) -> list[str]:
    """Names of the sub-folders that are walked, sorted."""
    found = (entry for entry in list_folder(folder) if entry.is_folder and not entry.is_hidden)
    return [entry.name for entry in found if not entry.is_link or _target(folder, entry.name)]


def _part(folder: str, split: str | None) -> str:
    """The folder of one part of a corpus; raises for None, and for a part that is not there."""
    names = _folders(folder)
    return os.path.realpath(os.path.join(folder, choose_part(Path(folder), {name: name for name in names}, split)))


def tables_beside(folder: str) -> list[str]:
    """The tables in a folder, or in its annotations/, that may name its images."""
    tables: list[str] = []
    for below in ("", "annotations"):
        path = os.path.join(folder, below)
        for name in names_in(path):
            lower = name.lower()
            if lower.endswith(TABLE_SUFFIXES) or (lower.endswith(".txt") and "caption" in lower):
                tables.append(os.path.join(below, name))
    return tables
