"""Examines one row: cleans its captions, reads its image and decodes it in full. A pure function of the row.

Image files are stored unchanged; decoding proves that they can be used. With `resize`, larger images are shrunk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from mmdata.convert.recipe import RESERVED, ConvertConfig
from mmdata.convert.rows import Row, Source
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.safe_read import read_inside
from mmdata.shards import ImageInfo, Limits, Sample, probe
from mmdata.shards.captions import MAX_CAPTION_BYTES, clean_captions
from mmdata.shards.images.decoder_warnings import name_warnings
from mmdata.shards.images.probe import sniff
from mmdata.shards.texts import Loss, TextKind, Texts, parse_label, read_texts

JSON_BYTES_ASIDE = 256
"""Bytes of a sample's JSON member reserved for its label, the sizes of a shrunk image, names and brackets."""

MAX_PATH_BYTES = 4096
"""Longest path that Linux opens."""

SIDECAR_KINDS: tuple[TextKind, ...] = ("json", "txt", "caption")
"""Extensions of the text files of an image with the same stem."""

_ABOUT_CAPTIONS = {Reason.MISSING_IMAGE: Reason.MISSING_CAPTION, Reason.IMAGE_TOO_LARGE: Reason.CAPTION_TOO_LONG}


@dataclass(frozen=True)
class Examined:
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
        is_table: whether the row is of a table. A label that cannot be numbered makes a table's row unusable; a sample
            of files is written without it.
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
    is_table: bool = True


Examine = Callable[[Row], Examined]


@dataclass(frozen=True)
class Examiner:
    """Examines rows. It holds only settings, so that it can be sent to any process.

    Args:
        root: real path of the folder that must contain all files.
        limits: images outside them are quarantined.
        max_image_bytes: largest image file.
        resize: shorter side, in pixels, to which larger images are shrunk; None shrinks none.
        quality: JPEG quality of shrunk images.
    """

    root: str
    limits: Limits
    max_image_bytes: int
    resize: int | None
    quality: int

    @classmethod
    def from_config(cls, source: Source, config: ConvertConfig) -> Examiner:
        """The examiner of a source's rows that a recipe asks for."""
        limits = Limits(min_side=config.min_side, max_aspect=config.max_aspect, max_pixels=config.max_pixels)
        return cls(source.root, limits, config.max_image_bytes, config.resize, config.quality)

    def __call__(self, row: Row) -> Examined:
        """Examine one row. A fault of the row is in the result; a fault of the system is raised."""
        path = _path_of(row)
        try:
            if row.fault:
                raise BadSample(*row.fault)
            if row.merged_into is not None:
                return Examined(row.number, row.place, path, merged_into=row.merged_into)
            fields = self.fields(row)
            original = self.read_image(row)
            with name_warnings(lambda: row.place):
                image, info, shrunk_from = self._prepare(original)
        except BadSample as bad:
            fault = (bad.reason, bad.detail)
            return Examined(row.number, row.place, path, merged_into=row.merged_into, fault=fault)
        key = row.packed.key if row.packed else f"{row.number:09d}"
        extra = _with_sizes(fields.extra, shrunk_from, info) if shrunk_from else fields.extra
        sample = Sample(key, image, info, [*fields.captions, *row.more_captions], extra=extra or None)
        return Examined(
            row.number,
            row.place,
            path,
            sample,
            fields.label,
            image_digest(original),
            losses={**fields.losses, **row.losses},
            is_table=not (row.packed or row.sidecars),
        )

    def fields(self, row: Row) -> Fields:
        """Captions, label and kept columns of a row; see `read_fields`."""
        return read_fields(row, self.root)

    def _prepare(self, original: bytes) -> tuple[bytes, ImageInfo, tuple[int, int] | None]:
        """The image to store, its header and, if it was shrunk, (height, width) of the original as displayed."""
        # Not at the head: torch takes seconds to import, and a wrong flag or an empty corpus is reported before that.
        from mmdata.convert.resize import Resize
        from mmdata.transform.image import decode, orient

        info = probe(original, limits=self.limits)
        pixels = decode(original, format=info.format, checked=True)
        if tuple(pixels.shape) != (3, info.height, info.width):
            raise BadSample(
                Reason.CORRUPT_IMAGE,
                f"header says {info.width}×{info.height} pixels, there are {pixels.shape[2]}×{pixels.shape[1]}",
            )
        if self.resize is None or not (resize := Resize(self.resize, self.quality)).applies(info):
            return original, info, None
        upright = orient(pixels, info.orientation)
        return *resize(upright, original, info.format), (int(upright.shape[1]), int(upright.shape[2]))

    def read_image(self, row: Row) -> bytes:
        """The bytes of a row's image.

        Raises:
            BadSample: there is none, it is too large, or it cannot be read.
        """
        if row.packed:
            return row.packed.image(max_bytes=self.max_image_bytes)
        path = row.image
        if isinstance(path, bytes):  # a binary column: an image, or a path whose column has the wrong type
            if sniff(path) or not (text := _path_in(path)):
                if len(path) > self.max_image_bytes:
                    detail = f"image of {len(path)} bytes; the limit is {self.max_image_bytes}"
                    raise BadSample(Reason.IMAGE_TOO_LARGE, detail)
                return path
            path = text
        if path is None:
            raise BadSample(Reason.MISSING_IMAGE, "the image's path is null")
        if not isinstance(path, str):
            raise BadSample(Reason.MISSING_IMAGE, f"the image's path is {type(path).__name__}, not a string")
        if len(path) > MAX_PATH_BYTES:  # not a column of paths; the message quotes only its beginning
            raise BadSample(Reason.MISSING_IMAGE, f"the image's path has {len(path)} characters: {excerpt(path)}")
        return read_inside(self.root, path, max_bytes=self.max_image_bytes)


@dataclass(frozen=True)
class Digester:
    """Reads the images of rows and hashes them; an `Examine` whose results have only a digest, empty after a fault."""

    examiner: Examiner

    def __call__(self, row: Row) -> Examined:
        """Hash the image of one row."""
        try:
            digest = b"" if row.fault else image_digest(self.examiner.read_image(row))
        except BadSample:
            digest = b""  # the examination of the row names the fault
        return Examined(row.number, row.place, _path_of(row), digest=digest)


def image_digest(data: bytes) -> bytes:
    """The 16 bytes that stand for an image file in comparisons of content; the first 8 are its `hash64`."""
    return hashlib.sha256(data).digest()[:16]


def _path_of(row: Row) -> str:
    """A row's image for the ledger, as given and not too long."""
    image = row.image
    path = image if isinstance(image, str) else "" if image is None else excerpt(image)
    return path[:MAX_PATH_BYTES]


def _path_in(data: bytes) -> str:
    """A path written as bytes; "" if the bytes are something else."""
    if len(data) > MAX_PATH_BYTES:
        return ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


@dataclass(frozen=True)
class Fields:
    """The text of a row, ready to be stored; its label is not numbered yet."""

    captions: list[str]
    label: int | str | None
    extra: dict[str, Any]
    losses: dict[Loss, str]


def read_fields(row: Row, root: str) -> Fields:
    """Captions, label and kept columns of a row, from the row itself or from the files of its sample.

    A sample of a tar keeps all its metadata, unless the settings choose.

    Raises:
        BadSample: no caption, or one that cannot be cleaned; in a table, a label or a kept column that cannot be
            stored. A sample of files loses those parts, and files that cannot be read (see `read_texts`).
    """
    if not (row.packed or row.sidecars):
        return Fields(_captions(row.captions), _table_label(row.label), _extra(row.extra), {})
    texts = row.packed.texts() if row.packed else _sidecar_texts(row.sidecars, root)
    losses = dict(texts.losses)
    extra = {name: value if value is not None else texts.metadata.get(name) for name, value in row.extra.items()}
    if row.packed and not extra:
        extra = {name: value for name, value in texts.metadata.items() if name not in RESERVED}
    room = MAX_CAPTION_BYTES - JSON_BYTES_ASIDE - len(json.dumps(texts.captions, ensure_ascii=False).encode())
    return Fields(texts.captions, texts.label, _storable(extra, losses, room=room), losses)


def _sidecar_texts(sidecars: Iterable[str], root: str) -> Texts:
    """Captions, label and metadata in the text files of an image."""
    paths = {os.path.splitext(path)[1].lower(): path for path in sidecars}

    def read(kind: TextKind) -> bytes:
        try:
            return read_inside(root, paths[f".{kind}"], max_bytes=MAX_CAPTION_BYTES)
        except BadSample as bad:
            raise BadSample(_ABOUT_CAPTIONS.get(bad.reason, bad.reason), bad.detail) from bad

    return read_texts([kind for kind in SIDECAR_KINDS if f".{kind}" in paths], read)


def _captions(values: Iterable[Any]) -> list[str]:
    """All captions of a table's row, cleaned; empty ones are left out if another has text."""
    present: list[Any] = []
    for value in values:
        present.extend(cast("list[Any]", value) if isinstance(value, list) else [value])
    if all(value is None for value in present):
        raise BadSample(Reason.MISSING_CAPTION, "the row has no caption")
    for value in present:
        _check_unicode(value)
    return clean_captions(present)[0]


def _check_unicode(value: Any) -> None:
    """Raise BadSample with the offset in bytes for text that is not Unicode."""
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        what = f"invalid UTF-8 (0x{code - 0xDC00:02x})" if 0xDC80 <= code <= 0xDCFF else "a lone surrogate"
        offset = len(value[: error.start].encode())
        raise BadSample(Reason.BAD_CAPTION, f"{what} at byte {offset} of the caption") from error


def _table_label(value: Any) -> int | str | None:
    """A table's label; True and False, of a column of booleans, are the classes 1 and 0."""
    return parse_label(int(value) if isinstance(value, bool) else value)


def _with_sizes(extra: dict[str, Any], original: tuple[int, int], smaller: ImageInfo) -> dict[str, Any]:
    """Metadata of a shrunk image: "original_height" and "original_width" are added, "height" and "width" updated.

    An original size in the metadata is that of an earlier original, and stays.
    """
    sizes = {"original_height": original[0], "original_width": original[1]}
    if (extra.get("height"), extra.get("width")) in (original, original[::-1]):  # before or after orientation
        extra = {**extra, "height": smaller.height, "width": smaller.width}
    return {**sizes, **extra}


def _extra(values: dict[str, Any]) -> dict[str, Any]:
    """Kept columns as JSON: NaN becomes null, paths are normalised to NFC.

    Raises:
        BadSample: a value cannot be stored.
    """
    losses: dict[Loss, str] = {}
    extra = _storable(values, losses)
    if losses:
        raise BadSample(Reason.BROKEN_ROW, losses[Loss.METADATA_UNUSABLE])
    return extra


def _storable(values: dict[str, Any], losses: dict[Loss, str], *, room: int | None = None) -> dict[str, Any]:
    """The values that JSON can hold, as `_extra` returns them; the others become a loss.

    Args:
        values: by name.
        losses: gets at most one more entry.
        room: bytes of JSON for all values; None: the writer refuses a sample with too many.
    """
    extra: dict[str, Any] = {}
    size = 0
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            value = None
        if name == "path" and isinstance(value, str):
            value = unicodedata.normalize("NFC", value)
        try:
            size += len(json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            why = f"column {excerpt(name)} cannot be kept as JSON: {excerpt(str(error))}"
            losses.setdefault(Loss.METADATA_UNUSABLE, why)
            continue
        if room is not None and size > room:
            why = f"column {excerpt(name)} and those after it cannot be kept: more than {room} bytes of JSON in all"
            losses.setdefault(Loss.METADATA_UNUSABLE, why)
            break
        extra[name] = value
    return extra
