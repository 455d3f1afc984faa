"""Examines one row: cleans its captions, reads its image and checks that it decodes. A pure function of the row.

Image files are stored unchanged; decoding proves that they can be used. With `resize`, larger images are shrunk, and
boxes that a table gives are blurred.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from mmdata.config.convert import ALL, ConvertConfig
from mmdata.convert.row.blur import BlurBox, blur, parse_boxes
from mmdata.convert.row.fields import FieldReader
from mmdata.convert.row.resize import Resize, as_jpeg
from mmdata.convert.sources.files import Seen
from mmdata.convert.sources.rows import InputRow, Source, expected_hash, grouping, numbered_key
from mmdata.convert.sources.tables import ImageBytes
from mmdata.convert.sources.tars import PackedFiles
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.images import ImageInfo, Limits, probe
from mmdata.images.decode import check_decodes, check_size, decode_pixels, oriented, oriented_size
from mmdata.tars.texts import Loss
from mmdata.tars.write import Sample

MAX_PATH_BYTES = 4096
"""Longest path that Linux opens."""
DIGEST_BYTES = 16
"""Bytes that stand for an image file in comparisons of content."""

_HASH = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Outcome:
    """The result for one row: a sample, or the reason why there is none.

    Attributes:
        row: the row's number.
        place: the row's place in the source, for people.
        path: its image's path, as given.
        sample: without its label: numbering names of classes needs all rows before it.
        label: class number or name.
        digest: of the image file in the corpus, to find duplicates.
        fault: reason and detail if the row cannot be used.
        losses: parts of the sample's files that could not be used.
        merged_into: number of the row whose sample has this row's captions, if that one was written.
        needs_label: whether a label that cannot be numbered makes the row unusable: one of a column that somebody has
            named. Else the sample is written without it.
        seen: the files that were read, as `Seen.to_json`.
    """

    row: int
    place: str
    path: str
    sample: Sample | None = None
    label: int | str | None = None
    digest: bytes = b""
    fault: tuple[Reason, str] | None = None
    losses: dict[Loss, str] = field(default_factory=dict[Loss, str])
    merged_into: int | None = None
    needs_label: bool = True
    seen: str = ""


@dataclass(frozen=True)
class Examiner:
    """Examines rows. It holds only settings, so that it can be sent to any process.

    Args:
        root: real path of the folder that must contain all files.
        fields: reads captions, label and kept columns.
        limits: images outside them are quarantined.
        max_image_bytes: largest image file.
        resize: shrinks larger images; None shrinks none.
        quality: of the JPEGs that shrunk and blurred images become.
        decodes: whether images that are stored as they are must decode; False reads only their headers.
        blurs: whether boxes are blurred where rows have them.
        rereads: whether the files of rows that are merged are read too, because they decide which rows are.
    """

    root: str
    fields: FieldReader
    limits: Limits
    max_image_bytes: int
    resize: Resize | None
    quality: int
    decodes: bool
    blurs: bool
    rereads: bool = False

    @classmethod
    def from_config(cls, source: Source, config: ConvertConfig) -> Examiner:
        """The examiner of a source's rows that a recipe asks for."""
        limits = Limits(min_side=config.min_side)
        templates, keeps_all = tuple(config.caption_templates or ()), ALL in config.keep
        guesses = config.label_column is None
        fields = FieldReader(source.has_captions, templates, source.classes, keeps_all, guesses)
        resize = Resize(config.resize) if config.resize else None
        decodes = config.check == "full"
        blurs = config.blur_boxes is not None
        rereads = grouping(source, config) == "content"
        return cls(source.root, fields, limits, config.max_image_bytes, resize, config.quality, decodes, blurs, rereads)

    def __call__(self, row: InputRow) -> Outcome:
        """Examine one row. A fault of the row is in the result; a fault of the system is raised."""
        seen = Seen()
        return replace(self._outcome(row, seen), seen=seen.to_json())

    def _outcome(self, row: InputRow, seen: Seen) -> Outcome:
        path = _path_of(row)
        try:
            if row.merged_into is not None and self.rereads:
                self._reread(row, seen)
            if row.fault:
                raise BadSample(*row.fault)
            if row.merged_into is not None:
                return Outcome(row.number, row.place, path, merged_into=row.merged_into)
            texts, boxes = self.fields(row, seen), parse_boxes(row.boxes)
            original = self.read_image(row, seen)
            check_hash(original, row.hash)
            image, info, changed_from = self._prepare(original, boxes)
        except BadSample as bad:
            fault = (bad.reason, bad.detail)
            return Outcome(row.number, row.place, path, merged_into=row.merged_into, fault=fault)
        key = row.key or numbered_key(row.number)
        extra = _with_sizes(texts.metadata, changed_from, info) if changed_from else texts.metadata
        extra = {"blurred": len(boxes), **extra} if self.blurs else extra  # also 0: all samples have the same members
        digest = image_digest(original)
        known = hash_of(digest) if image is original else None
        captions = [*texts.captions, *row.more_captions]
        sample = Sample(key, image, info, captions, extra=extra or None, image_hash=known)
        return Outcome(
            row.number,
            row.place,
            path,
            sample,
            texts.label,
            digest,
            losses={**texts.losses, **row.losses},
            needs_label=row.files is None and not self.fields.guesses_label,
        )

    def _reread(self, row: InputRow, seen: Seen) -> None:
        """Note the files of a row whose captions another one has."""
        with suppress(BadSample):
            self.fields(row, seen)
        with suppress(BadSample):
            self.read_image(row, seen)

    def _prepare(self, original: bytes, boxes: list[BlurBox]) -> tuple[bytes, ImageInfo, ImageInfo | None]:
        """The image to store, its header and, if it was shrunk or turned upright, the header of the original."""
        info = probe(original, limits=self.limits)
        resize = self.resize if self.resize is not None and self.resize.applies(info) else None
        if resize is None and not boxes:
            if self.decodes:
                check_decodes(original, info)
            return original, info, None
        pixels = decode_pixels(original, info.format, checked=True)
        check_size(info, *pixels.shape[:2])
        image = Image.fromarray(oriented(pixels, info.orientation))
        image = blur(image, boxes) if boxes else image
        image = resize(image) if resize else image
        return *as_jpeg(
            image, original, info.format, quality=self.quality
        ), info if resize or info.orientation != 1 else None

    def say(self, row: InputRow) -> tuple[list[str], int | str | None]:
        """Captions and label of a row, for merging; its image is not read.

        Raises:
            BadSample: they cannot be used.
        """
        if row.fault:
            raise BadSample(*row.fault)
        texts = self.fields(row)
        return texts.captions, texts.label

    def digest(self, row: InputRow) -> bytes:
        """The `image_digest` of a row's image; empty after a fault, which the examination of the row names."""
        try:
            return b"" if row.fault else image_digest(self.read_image(row))
        except BadSample:
            return b""

    def read_image(self, row: InputRow, seen: Seen | None = None) -> bytes:
        """The bytes of a row's image; `seen` notes them if they are of a file.

        Raises:
            BadSample: there is none, it is too large, or it cannot be read.
        """
        seen = seen or Seen()
        if isinstance(row.files, PackedFiles):
            return row.files.image(seen, max_bytes=self.max_image_bytes)
        path = row.image
        if row.url:
            assert isinstance(path, bytes)
            return path  # whatever a server sent is no path
        if isinstance(path, bytes):
            if len(path) > self.max_image_bytes:
                detail = f"image of {len(path)} bytes; the limit is {self.max_image_bytes}"
                raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
            return path
        if path is None:
            raise BadSample(Reason.MISSING_IMAGE, "the image's path is null")
        if not isinstance(path, str):
            raise BadSample(Reason.MISSING_IMAGE, f"the image's path is {type(path).__name__}, not a string")
        if len(path) > MAX_PATH_BYTES:  # not a column of paths; the message quotes only its beginning
            raise BadSample(Reason.MISSING_IMAGE, f"the image's path has {len(path)} characters: {excerpt(path)}")
        return seen.read(self.root, path, max_bytes=self.max_image_bytes)


def image_digest(data: bytes) -> bytes:
    """The DIGEST_BYTES of an image file; the first 8 are its `hash64`."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def hash_of(digest: bytes) -> int:
    """The `hash64` of the file with this digest."""
    return int.from_bytes(digest[:8], "little", signed=True)


def _path_of(row: InputRow) -> str:
    """A row's image for the ledger, as given and not too long."""
    image = row.url or row.image
    image = image.path if isinstance(image, ImageBytes) else image
    path = image if isinstance(image, str) else "" if image is None else excerpt(image)
    return path[:MAX_PATH_BYTES]


def _with_sizes(extra: dict[str, Any], changed_from: ImageInfo, stored: ImageInfo) -> dict[str, Any]:
    """Metadata of a changed image: "original_height" and "original_width" are added, "height" and "width" updated.

    An original size in the metadata is that of an earlier original, and stays. Boxes of the original are of its pixels
    before they were turned upright, so "original_orientation" says how they were.
    """
    original = oriented_size(changed_from.height, changed_from.width, changed_from.orientation)
    sizes = {"original_height": original[0], "original_width": original[1]}
    if changed_from.orientation != 1:
        sizes["original_orientation"] = changed_from.orientation
    if (extra.get("height"), extra.get("width")) in (original, original[::-1]):  # before or after orientation
        extra = {**extra, "height": stored.height, "width": stored.width}
    return {**sizes, **extra}


def check_hash(data: bytes, expected: Any) -> None:
    """Compare an image with its hash.

    Args:
        data: of the image file.
        expected: MD5 or SHA-256, as hexadecimal digits or as 16 or 32 bytes; without one nothing is compared.

    Raises:
        BadSample: the hash differs, or is none.
    """
    text = expected_hash(expected)
    if not text:
        return
    if not _HASH.fullmatch(text):
        detail = f"the hash {excerpt(expected)} is neither an MD5 (32 digits) nor a SHA-256 (64 digits)"
        raise BadSample(Reason.BROKEN_ROW, detail)
    name = "md5" if len(text) == 32 else "sha256"
    found = hashlib.new(name, data, usedforsecurity=False).hexdigest()
    if found != text:
        raise BadSample(
            Reason.HASH_DIFFERS, f"{name} of the image's {len(data)} bytes is {found}, the table says {text}"
        )
