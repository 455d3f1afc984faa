"""Writes samples into a tar, with its hash and the rows of its index."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdata.errors import BadSample, Reason
from mmdata.files import end_file, naming
from mmdata.hashing import fast_hash, hash64
from mmdata.images.probe import EXTENSIONS, FORMATS, ImageInfo
from mmdata.tars.captions import JSON, MAX_CAPTION_BYTES, NO_CAPTION, TXT, clean_caption
from mmdata.tars.scan import IndexedMember, IndexRow
from mmdata.tars.tar import BLOCK, END, header, padding, split_name


@dataclass(frozen=True)
class Sample:
    """One sample, ready to be written.

    Attributes:
        key: its name, unique in the shard, without a dot in the last part.
        image: bytes of the image file, written unchanged.
        info: `probe(image)`.
        captions: each as `clean_caption` returns it: one or more in all samples of a folder, or none in all of them.
        label: class number from 0, or None; needed without captions.
        extra: further JSON of the sample, without the keys "captions" and "label".
        image_hash: `hash64(image)`, where it is known already.
    """

    key: str
    image: bytes
    info: ImageInfo
    captions: list[str]
    label: int | None = None
    extra: dict[str, Any] | None = None
    image_hash: int | None = None


class TarWriter:
    """A tar that is being written.

    Args:
        path: of the tar, which must not exist.

    Attributes:
        bytes: of the tar so far, without its end.
        rows: of the index so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb")
        self.bytes = 0
        self.rows: list[IndexRow] = []
        self._hash = hashlib.sha256()
        self._keys: set[str] = set()

    def add(self, sample: Sample, members: list[tuple[str, bytes]]) -> None:
        """Add a sample; `members` are `members_of(sample)`.

        Raises:
            ValueError: its key is in the shard already, or too long for a plain tar.
            OSError: the disk is full or broken.
        """
        if sample.key in self._keys:
            raise ValueError(
                f"sample '{sample.key}': the key is already in shard '{self.path.name}'; keys must be unique"
            )
        headers = [header(name, len(data)) for name, data in members]  # these may raise: before a byte is written
        self._keys.add(sample.key)
        indexed: list[IndexedMember] = []
        for head, (name, data) in zip(headers, members, strict=True):
            extension = name.removeprefix(f"{sample.key}.")
            indexed.append(IndexedMember(extension, self.bytes + BLOCK, len(data), fast_hash(data)))
            for piece in (head, data, padding(len(data))):
                self._put(piece)
        image, caption = indexed[0], indexed[-1]
        info, hashed = sample.info, sample.image_hash
        self.rows.append(
            IndexRow(
                key=sample.key,
                image_offset=image.offset,
                image_bytes=image.size,
                image_format=FORMATS.index(info.format),
                caption_offset=caption.offset if sample.captions else 0,
                caption_bytes=caption.size if sample.captions else 0,
                caption_format=NO_CAPTION if not sample.captions else JSON if len(members) == 3 else TXT,
                height=info.height,
                width=info.width,
                orientation=info.orientation,
                label=-1 if sample.label is None else sample.label,
                image_hash=hash64(sample.image) if hashed is None else hashed,
                image_xxh3=image.xxh3,
                captions=sample.captions,
                members=indexed[1:],
            )
        )

    def copy(self, data: bytes) -> None:
        """Add whole samples as they stand in another tar; their rows are the caller's."""
        self._put(data)

    def finish(self) -> str:
        """End the tar, which is on disk when this returns; its SHA-256."""
        self._put(END)
        with naming(self.path):
            end_file(self._file)
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Close the file; what was written of it is the caller's to remove."""
        with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()

    def _put(self, data: bytes) -> None:
        with naming(self.path):
            self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)


def members_of(sample: Sample) -> list[tuple[str, bytes]]:
    """(name, data) of image, first caption and, only if it says more, JSON. The last member holds the captions.

    A sample of a label only has image and .cls, as webdataset's users write it, and JSON where it has more to say.

    Raises:
        BadSample: more JSON than MAX_CAPTION_BYTES, or a caption that is empty or not text.
        ValueError: a sample that would not be read back as it is.
    """
    _check(sample)
    extra = sample.extra or {}
    label = {} if sample.label is None else {"label": sample.label}
    members = [(sample.key + EXTENSIONS[sample.info.format], sample.image)]
    if sample.captions:
        members.append((sample.key + ".txt", sample.captions[0].encode()))
        content = {**extra, **label, "captions": sample.captions}
        says_more = len(sample.captions) > 1 or bool(label) or bool(extra)
    else:
        members.append((sample.key + ".cls", str(sample.label).encode()))
        content, says_more = {**extra, **label}, bool(extra)
    if says_more:
        data = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        if len(data) > MAX_CAPTION_BYTES:
            raise BadSample(Reason.CAPTION_TOO_LONG, f"JSON member of {len(data)} bytes; at most {MAX_CAPTION_BYTES}")
        members.append((sample.key + ".json", data))
    return members


def size_in_tar(members: list[tuple[str, bytes]]) -> int:
    """Bytes that a sample takes in a tar."""
    return sum(BLOCK + len(data) + len(padding(len(data))) for _, data in members)


def _check(sample: Sample) -> None:
    """Raise ValueError for a sample that would not be read back as it is."""
    folders = sample.key.split("/")[:-1]
    if split_name(f"{sample.key}.jpg") != (sample.key, "jpg") or {"", ".", ".."} & set(folders) or "\0" in sample.key:
        raise ValueError(
            f"sample '{sample.key}': a key may not be empty, absolute, hold a dot, "
            "climb out of its folder or be __meta__: readers would cut or skip it"
        )
    if not sample.captions and sample.label is None:
        raise ValueError(f"sample '{sample.key}': neither a caption nor a label")
    for caption in sample.captions:
        if clean_caption(caption) != caption:
            raise ValueError(f"sample '{sample.key}': caption {caption[:40]!r} was not cleaned (clean_caption)")
    if sample.label is not None and not 0 <= sample.label < 2**63:
        raise ValueError(f"sample '{sample.key}': label {sample.label} is not a class number (0 or more)")
    if reserved := {"captions", "label"} & set(sample.extra or {}):
        raise ValueError(f"sample '{sample.key}': extra may not hold {sorted(reserved)}")
