"""A corpus of WebDataset tars, read strictly. Keys, captions, labels and metadata are kept.

The tars are read twice, their headers first: a damaged tar raises before anything is written.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.config.convert import ALL, ConvertConfig, Grouping
from mmdata.convert.sources.files import Seen
from mmdata.convert.sources.folder import IMAGE_SUFFIXES
from mmdata.convert.sources.rows import InputRow, PackedFiles, fits_header
from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import hash64
from mmdata.index import Manifest
from mmdata.storage.folder import has_manifest
from mmdata.tars.foreign import find_shards, guess_members
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import TEXT_MEMBERS, Group, SampleReader, split_sample
from mmdata.tars.tar import read_members


def is_packed(path: Path) -> bool:
    """Whether a path is a tar, or a folder with tars and without images."""
    if not path.is_dir():
        return path.is_file() and path.suffix == ".tar"
    suffixes = {os.path.splitext(entry.name)[1].lower() for entry in path.iterdir() if not entry.name.startswith(".")}
    return ".tar" in suffixes and not suffixes & IMAGE_SUFFIXES


class PackedSource:
    """The samples of tars, in the order of the tars' names.

    A sample keeps its key. If any two samples have the same key, every key gets the tar's name as a prefix:
    "train-0001/000012". A key that climbs out of its folder is a fault; "./a" and "a" are the same key; a key that is
    too long for a plain tar is replaced by "row-" and the row's number.

    Args:
        path: a tar, or a folder of tars.
        config: the settings about members and columns to keep are used.

    Raises:
        DataError: no tar, a damaged one, a sample split over two.
    """

    group_by: Grouping = "none"
    rows_are_exact = True

    def __init__(self, path: Path, config: ConvertConfig) -> None:
        self._tars = find_shards(path)
        folder = self._tars[0].parent
        self.root = os.path.realpath(folder)
        self._keep = [name for name in config.keep if name != ALL]
        self._numbers: dict[str, int] | None = None
        self.classes: tuple[str, ...] = ()
        self._manifest = Manifest.read(folder) if has_manifest(folder) else None
        if self._manifest is not None:
            self.classes = tuple((self._manifest.accounts or {}).get("classes", ()))
        keys, self._ignored, listing, kinds = array("q"), 0, hashlib.sha256(), set[str]()
        for scan in _scan(self._tars):
            keys.extend(scan.keys)
            self._ignored += scan.ignored
            listing.update(scan.listing)
            kinds |= scan.kinds
        self.rows_at_most = len(keys)
        self._listing = listing.hexdigest()
        self._with_tar = bool(keys) and len(np.unique(np.frombuffer(keys, np.int64))) < len(keys)
        if not keys:
            raise DataError(f"source '{path}': no samples in its tars; the corpus is empty")
        self._members = self._choose_members(config)
        labels = self._members.label
        self._may_have_labels = bool(labels) or (labels is not None and bool(kinds & {"cls", "json"}))
        self.classes = self.classes if self._may_have_labels else ()
        self.has_captions = bool(self._members.caption) or "txt" in kinds or ("json" in kinds and self._finds_caption())

    def rows(self) -> Iterator[InputRow]:
        """All samples. See `Source.rows`."""
        number = 0
        for tar in self._tars:
            indexed = self._indexed(tar)
            with tar.open("rb") as file:
                for group in SampleReader(read_members(file, name=tar.name), name=tar.name):
                    yield self._row(number, tar, group, indexed)
                    number += 1

    def rows_with_labels(self) -> Iterator[InputRow]:
        """See `Source.rows_with_labels`. The tars are not read again where they have no member with a label."""
        return self.rows() if self._may_have_labels else iter(())

    def describe(self) -> dict[str, Any]:
        """A hash of the tars' names and sizes. See `Source.describe`."""
        chosen = {"members": self._members.content()} if self._members != USUAL else {}
        return {
            "kind": "shards",
            **chosen,
            "shards": len(self._tars),
            "ignored_members": self._ignored,
            "listing_sha256": self._listing,
        }

    def _choose_members(self, config: ConvertConfig) -> Members:
        """The members that the settings name, else those of the tars' index, else those that the first samples show."""
        given = Members.parse(
            image=config.image_column, caption=",".join(config.caption_columns or ()), label=config.label_column
        )
        if given.image or given.caption or given.label:
            return given
        found = guess_members(self._tars) if self._manifest is None else self._manifest.members
        return replace(found, label=None) if given.label is None else found

    def _finds_caption(self) -> bool:
        """Whether a sample without a .txt has a caption: JSON members are read up to the first one that has."""
        for row in self.rows():
            assert row.packed
            with suppress(BadSample):
                if row.packed.texts(Seen(), needs_caption=False).captions:
                    return True
        return False

    def _indexed(self, tar: Path) -> dict[int, int]:
        """Hashes of a tar's images by offset, from the index in the same folder; empty without one."""
        if self._manifest is None or self._manifest.location != ".":
            return {}
        if self._numbers is None:
            self._numbers = {entry.name: number for number, entry in enumerate(self._manifest)}
        if (number := self._numbers.get(tar.name)) is None:
            return {}
        columns = self._manifest.columns(number)
        offsets, hashes = columns.fixed("image_offset").tolist(), columns.fixed("image_hash").tolist()
        return dict(zip(offsets, hashes, strict=True))

    def _row(self, number: int, tar: Path, group: Group, indexed: dict[int, int]) -> InputRow:
        extra = dict.fromkeys(self._keep)
        if "path" in extra:
            extra["path"] = f"{tar.name}/{group.key}"
        key = _plain(group.key)
        fault = None
        if key is None:
            fault, key = (Reason.OUTSIDE_ROOT, "the key is absolute or climbs out of its folder"), group.key
        elif self._with_tar:
            key = f"{tar.stem}/{key}"
        place = f"{tar.name}, sample '{group.key}'"
        key = key if fits_header(key) else f"row-{number:09d}"
        offset = next((member.offset for member in group.members.values() if member.offset in indexed), None)
        image = None if offset is None else (offset, indexed[offset])
        packed = PackedFiles(self.root, tar.name, group, key, self._members, image)
        return InputRow(number, place, group.key, extra=extra, packed=packed, fault=fault)


@dataclass(frozen=True)
class _Scan:
    """Headers of one tar.

    Attributes:
        keys: hashes of its samples' keys.
        ignored: number of members that are not carried over.
        listing: its name and size.
        kinds: extensions of its text members.
    """

    keys: array[int]
    ignored: int
    listing: bytes
    kinds: set[str]


def _scan(tars: Iterable[Path]) -> Iterator[_Scan]:
    before: tuple[str, Group] | None = None  # the last tar with samples, and its last sample
    for tar in tars:
        keys, unread, kinds = array("q"), 0, set[str]()
        with tar.open("rb") as file:
            reader = SampleReader(read_members(file, name=tar.name), name=tar.name)
            last: Group | None = None
            for group in reader:
                if last is None and before:
                    _refuse_split(*before, tar.name, group)
                keys.append(hash64((_plain(group.key) or group.key).encode()))
                texts = group.members.keys() & set(TEXT_MEMBERS)
                unread += max(0, len(group.members) - 1 - len(texts))
                kinds |= texts
                last = group
            before = (tar.name, last) if last else before
            size = file.seek(0, os.SEEK_END)
        listing = f"{tar.name}\0{size}\n".encode("utf-8", "surrogateescape")
        yield _Scan(keys, reader.ignored + unread, listing, kinds)


def _refuse_split(tar: str, last: Group, following: str, first: Group) -> None:
    if last.key == first.key and not last.members.keys() & first.members.keys():
        raise split_sample(first.key, tar, following)


def _plain(key: str) -> str | None:
    """A key without empty or "." folders; None if it is absolute or climbs out of its folder."""
    folders = key.split("/")
    if key.startswith("/") or ".." in folders:
        return None
    return "/".join(folder for folder in folders if folder not in ("", "."))
