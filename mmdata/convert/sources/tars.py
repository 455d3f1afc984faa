"""A corpus of WebDataset tars, read strictly. Keys, captions, labels and metadata are kept.

The tars are read twice, their headers first: a damaged tar raises before anything is written.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mmdata.config.convert import ALL, ConvertConfig
from mmdata.convert.sources.files import Seen
from mmdata.convert.sources.folder import IMAGE_SUFFIXES, any_caption
from mmdata.convert.sources.rows import InputRow, Source, fits_header
from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import hash64
from mmdata.index import Manifest
from mmdata.storage.folder import has_manifest
from mmdata.tars.foreign import find_shards, guess_members
from mmdata.tars.members import USUAL, Members
from mmdata.tars.samples import TEXT_MEMBERS, Group, SampleReader, image_member, label_of, split_sample, texts_of
from mmdata.tars.tar import Member, read_members
from mmdata.tars.texts import SampleTexts


def is_packed(path: Path) -> bool:
    """Whether a path is a tar, or a folder with tars and without images."""
    if not path.is_dir():
        return path.is_file() and path.suffix == ".tar"
    suffixes = {os.path.splitext(entry.name)[1].lower() for entry in path.iterdir() if not entry.name.startswith(".")}
    return ".tar" in suffixes and not suffixes & IMAGE_SUFFIXES


@dataclass(frozen=True)
class PackedFiles:
    """The files of a sample in a tar.

    Attributes:
        root: folder of the tar, which is the corpus.
        tar: name of the tar in it.
        group: the sample's members, by extension.
        members: which of them are image, caption and label.
        indexed: offset and hash of the image in the tar's index; None without an index.
    """

    root: str
    tar: str
    group: Group
    members: Members = USUAL
    indexed: tuple[int, int] | None = None

    def image(self, seen: Seen, *, max_bytes: int) -> bytes:
        """The image's bytes; `seen` notes them.

        Raises:
            BadSample: there is none, it is larger than `max_bytes`, or it is not the image that was indexed.
        """
        member = image_member(self.group, partial(self._read, seen), self.members)
        if member.size > max_bytes:
            detail = f"'{member.name}' has {member.size} bytes; the limit is {max_bytes}"
            raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
        data = self._read(seen, member)
        if self.indexed is not None and self.indexed[0] == member.offset and self.indexed[1] != hash64(data):
            raise BadSample(
                Reason.FILE_CHANGED, f"'{member.name}' is not the image indexed; `mmdata verify` tells what changed"
            )
        return data

    def texts(self, seen: Seen, *, needs_caption: bool = True) -> SampleTexts:
        """Captions, label and metadata; see `texts_of`."""
        return texts_of(self.group, partial(self._read, seen), needs_caption=needs_caption, members=self.members)

    def label(self) -> int | str | None:
        """The label that `texts` gives; None if it cannot be used."""
        return label_of(self.group, partial(self._read, Seen()), self.members)

    def _read(self, seen: Seen, member: Member) -> bytes:
        path = os.path.join(self.root, self.tar)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(member.offset)
            data = file.read(member.size)
        if len(data) < member.size:
            raise DataError(f"shard '{path}': became shorter while it was read; convert again when it is whole")
        seen.note(self.tar, status, member.offset, data)
        return data


class PackedSource(Source):
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

    def __init__(self, path: Path, config: ConvertConfig) -> None:
        self._tars = find_shards(path)
        folder = self._tars[0].parent
        self.root = os.path.realpath(folder)
        self._keep = [name for name in config.keep if name != ALL]
        self._numbers: dict[str, int] | None = None
        self._manifest = Manifest.read(folder) if has_manifest(folder) else None
        if self._manifest is not None:
            self.classes = tuple((self._manifest.accounts or {}).get("classes", ()))
        keys, kinds, listing = self._scan()
        self.num_rows, self._listing = len(keys), listing
        self._with_tar = bool(keys) and len(np.unique(np.frombuffer(keys, np.int64))) < len(keys)
        if not keys:
            raise DataError(f"source '{path}': no samples in its tars; the corpus is empty")
        self._members = self._choose_members(config)
        labels = self._members.label
        self._may_have_labels = bool(labels) or (labels is not None and bool(kinds & {"cls", "json"}))
        self.classes = self.classes if self._may_have_labels else ()
        self.has_captions = (
            bool(self._members.caption) or "txt" in kinds or ("json" in kinds and any_caption(self.rows()))
        )

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """All samples. See `Source.rows`."""
        return islice(self._rows(), start, None)

    def _rows(self) -> Iterator[InputRow]:
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

    def _scan(self) -> tuple[array[int], set[str], str]:
        """Read all headers: hashes of the keys, kinds of texts, and a hash of the names and sizes of the tars."""
        keys, kinds, listing, self._ignored = array("q"), set[str](), hashlib.sha256(), 0
        before: tuple[str, Group] | None = None  # the last tar with samples, and its last sample
        for tar in self._tars:
            with tar.open("rb") as file:
                reader = SampleReader(read_members(file, name=tar.name), name=tar.name)
                for group in reader:
                    if before and before[0] != tar.name:
                        _refuse_split(*before, tar.name, group)
                    before = tar.name, group
                    keys.append(hash64((_plain(group.key) or group.key).encode()))
                    texts = group.members.keys() & set(TEXT_MEMBERS)
                    self._ignored += max(0, len(group.members) - 1 - len(texts))
                    kinds |= texts
                self._ignored += reader.ignored
                listing.update(f"{tar.name}\0{file.seek(0, os.SEEK_END)}\n".encode("utf-8", "surrogateescape"))
        return keys, kinds, listing.hexdigest()

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
        files = PackedFiles(self.root, tar.name, group, self._members, image)
        return InputRow(number, place, group.key, extra=extra, files=files, key=key, fault=fault)


def _refuse_split(tar: str, last: Group, following: str, first: Group) -> None:
    if last.key == first.key and not last.members.keys() & first.members.keys():
        raise split_sample(first.key, tar, following)


def _plain(key: str) -> str | None:
    """A key without empty or "." folders; None if it is absolute or climbs out of its folder."""
    folders = key.split("/")
    if key.startswith("/") or ".." in folders:
        return None
    return "/".join(folder for folder in folders if folder not in ("", "."))
