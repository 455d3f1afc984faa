"""What happens to one row: its captions cleaned, its image read and decoded once in full. A pure function of the row.

Images are kept as they are, and decoding only proves that they can be used; with `resize`, larger ones are made small.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from mmdata.convert.recipe import RESERVED, ConvertConfig
from mmdata.convert.rows import PackedFiles, Row
from mmdata.errors import BadSample, Reason
from mmdata.files import read_inside
from mmdata.shards import ImageInfo, Limits, Sample, captions_of, clean_caption, probe
from mmdata.shards.captions import TXT, parse_json
from mmdata.shards.decoder_warnings import naming

MAX_SIDECAR = 16 * 2**20
"""Largest caption file in bytes."""

_ABOUT_CAPTIONS = {Reason.MISSING_IMAGE: Reason.MISSING_CAPTION, Reason.IMAGE_TOO_LARGE: Reason.CAPTION_TOO_LONG}


@dataclass(frozen=True)
class Examined:
    """The result for one row: a sample, or the reason there is none.

    Attributes:
        row: the row's number.
        place: where it stands in the source.
        path: its image's path, as given.
        sample: without its label, which takes all rows to number.
        label: class number or name.
        digest: of the bytes of the image as the corpus has it, to find duplicates.
        fault: reason and detail where the row cannot be used.
    """

    row: int
    place: str
    path: str
    sample: Sample | None = None
    label: int | str | None = None
    digest: bytes = b""
    fault: tuple[Reason, str] | None = None


Examine = Callable[[Row], Examined]


@dataclass(frozen=True)
class Examiner:
    """Examines rows; holds settings only, so that it can be sent to any process.

    Args:
        root: real path of the folder that all files must lie in.
        limits: which images are refused from their header.
        max_image_bytes: largest image file.
        resize: shorter side to which larger images are shrunk; None keeps all.
        quality: JPEG quality of those.
    """

    root: str
    limits: Limits
    max_image_bytes: int
    resize: int | None
    quality: int

    @classmethod
    def from_config(cls, root: str, config: ConvertConfig) -> Examiner:
        """The examiner that a recipe asks for."""
        limits = Limits(min_side=config.min_side, max_aspect=config.max_aspect, max_pixels=config.max_pixels)
        return cls(root, limits, config.max_image_bytes, config.resize, config.quality)

    def __call__(self, row: Row) -> Examined:
        """Examine one row; what is wrong with it is in the result, what is wrong with the system is raised."""
        path = row.image if isinstance(row.image, str) else "" if row.image is None else repr(row.image)
        try:
            if row.fault:
                raise BadSample(*row.fault)
            fields = read_fields(row, self.root)
            label, extra = _label(fields.label), _extra(fields.extra)
            original = self._read_image(row)
            with naming(lambda: row.place):
                image, info, shrunk_from = self._prepare(original)
        except BadSample as bad:
            return Examined(row.number, row.place, path, fault=(bad.reason, bad.detail))
        key = row.packed.key if row.packed else f"{row.number:09d}"
        if shrunk_from:
            extra = _with_sizes(extra, shrunk_from, info)
        sample = Sample(key, image, info, fields.captions, extra=extra or None)
        return Examined(row.number, row.place, path, sample, label, hashlib.sha256(original).digest()[:16])

    def _prepare(self, original: bytes) -> tuple[bytes, ImageInfo, tuple[int, int] | None]:
        """The image that is stored; and, where it is a smaller one, (height, width) of the original as displayed."""
        # torch takes seconds to import: a wrong flag or an empty corpus is told before that
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

    def _read_image(self, row: Row) -> bytes:
        if row.packed:
            return row.packed.image(max_bytes=self.max_image_bytes)
        path = row.image
        if path is None:
            raise BadSample(Reason.MISSING_IMAGE, "the image's path is null")
        if not isinstance(path, str):
            raise BadSample(Reason.MISSING_IMAGE, f"the image's path is {type(path).__name__}, not a string")
        return read_inside(self.root, path, max_bytes=self.max_image_bytes)


@dataclass(frozen=True)
class Fields:
    """What a row says of its image; captions are cleaned, the rest is as found."""

    captions: list[str]
    label: Any
    extra: dict[str, Any]


def read_fields(row: Row, root: str) -> Fields:
    """Captions, label and kept columns of a row, from the row itself or from the files beside its image.

    A sample of a tar keeps all its metadata, unless the settings say which.

    Raises:
        BadSample: no caption, or one that cannot be cleaned.
    """
    if row.packed:
        contents = _read_packed(row.packed)
    elif row.sidecars:
        contents = {os.path.splitext(path)[1].lower(): _read_sidecar(root, path) for path in row.sidecars}
    else:
        return Fields(_captions(row.captions), row.label, row.extra)
    described = parse_json(contents.pop(".json")) if ".json" in contents else {}
    found: Any = described.get("captions")
    for data in contents.values() if found is None else ():
        found = captions_of(data, TXT)
        break
    if found is None:
        found = described.get("caption")
    extra = {name: value if value is not None else described.get(name) for name, value in row.extra.items()}
    if not row.packed:
        return Fields(_captions((found,)), described.get("label"), extra)
    extra = extra or {name: value for name, value in described.items() if name not in RESERVED}
    return Fields(_captions((found,)), _packed_label(row.packed, described), extra)


def _read_packed(packed: PackedFiles) -> dict[str, bytes]:
    texts = {end: packed.text(end[1:], max_bytes=MAX_SIDECAR) for end in (".json", ".txt")}
    return {end: data for end, data in texts.items() if data is not None}


def _packed_label(packed: PackedFiles, described: dict[str, Any]) -> Any:
    """The .cls member, else the JSON's "label" where that is a class number or a name: others mean other things."""
    member = packed.text("cls", max_bytes=MAX_SIDECAR)
    if member is not None:
        return member.decode("utf-8", "backslashreplace")
    label = described.get("label")
    return label if isinstance(label, str) or (type(label) is int and label >= 0) else None


def _read_sidecar(root: str, path: str) -> bytes:
    try:
        return read_inside(root, path, max_bytes=MAX_SIDECAR)
    except BadSample as bad:
        raise BadSample(_ABOUT_CAPTIONS.get(bad.reason, bad.reason), bad.detail) from bad


def _captions(values: Iterable[Any]) -> list[str]:
    """All captions, cleaned; empty ones are left out where another has text."""
    present: list[Any] = []
    for value in values:
        present.extend(cast("list[Any]", value) if isinstance(value, list) else [value])
    present = [value for value in present if value is not None]
    if not present:
        raise BadSample(Reason.MISSING_CAPTION, "the row has no caption")
    kept: list[str] = []
    empty: BadSample | None = None
    for value in present:
        try:
            _check_unicode(value)
            kept.append(clean_caption(value))
        except BadSample as bad:
            if bad.reason is not Reason.EMPTY_CAPTION:
                raise
            empty = bad
    if not kept and empty:
        raise empty
    return kept


def _check_unicode(value: Any) -> None:
    """Refuse text that is not Unicode, with the place in bytes."""
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        what = f"invalid UTF-8 (0x{code - 0xDC00:02x})" if 0xDC80 <= code <= 0xDCFF else "a lone surrogate"
        offset = len(value[: error.start].encode())
        raise BadSample(Reason.BAD_CAPTION, f"{what} at byte {offset} of the caption") from error


def _label(value: Any) -> int | str | None:
    """A class number from 0, a class name, or None; -1 is none, as in the index."""
    if isinstance(value, str):
        value = value.strip()
        if re.fullmatch(r"-?[0-9]{1,18}", value):
            value = int(value)
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    if value is None or value == "" or value == -1:
        return None
    if isinstance(value, int) and 0 <= value < 2**63:
        return int(value)
    if isinstance(value, str) and value.isprintable():
        return value
    raise BadSample(Reason.BROKEN_ROW, f"label {value!r} is neither a class number from 0 nor a name")


def _with_sizes(extra: dict[str, Any], original: tuple[int, int], smaller: ImageInfo) -> dict[str, Any]:
    """Metadata of an image that was shrunk: the size it had, and a "height" and "width" that say what it has now.

    An original size that is there already is that of an earlier original, and stays.
    """
    sizes = {"original_height": original[0], "original_width": original[1]}
    if (extra.get("height"), extra.get("width")) in (original, original[::-1]):  # before or after orientation
        extra = {**extra, "height": smaller.height, "width": smaller.width}
    return {**sizes, **extra}


def _extra(values: dict[str, Any]) -> dict[str, Any]:
    """Kept columns as JSON: NaN becomes null, paths take their NFC spelling."""
    extra = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
    path = extra.get("path")
    if isinstance(path, str):
        extra["path"] = unicodedata.normalize("NFC", path)
    for name, value in extra.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise BadSample(Reason.BROKEN_ROW, f"column '{name}' cannot be kept as JSON: {error}") from error
    return extra
