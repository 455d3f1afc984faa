"""Which members of a sample are its image, its caption and its label, and the values in its further members.

A selector is the extension of a member (`jpg`, `caption.txt`), or the extension of a JSON member with a key in it
(`json:TEXT`, `meta.json:alt`). Of several, the first that a sample can use is taken. Selectors of captions and labels
replace the usual ones, they do not add to them.

Values are JSON, arrays of numpy (.npy, .npz) and texts. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from mmdata.errors import BadSample, ConfigError, Reason, excerpt, meant
from mmdata.images.pillow import DECODER_ERRORS, check_pixels, open_image
from mmdata.tars.captions import unique_keys

_WORDS = {
    "json": "JSON",
    "npy": "an array of numpy (.npy)",
    "npz": "arrays of numpy (.npz)",
    "png": "a PNG",
    "txt": "a text",
}
KINDS = tuple(_WORDS)
"""Last parts of the extensions of members that have values: `syn.json` is a member of kind json."""
KNOWN = "json, json:KEY, npy, npz:NAME, png and txt"
"""Selectors, for messages."""
MAX_BYTES = 2**28
"""Largest member, and largest array in one, 256 MiB."""
MAX_HEADER = 10_000
"""Largest header of a .npy, in bytes; numpy's own limit."""
EXACT = 2**53
"""Whole numbers up to this one are all floats (float64), too."""
_DAMAGE = (*DECODER_ERRORS, zipfile.BadZipFile, zlib.error)
"""What numpy, zipfile and Pillow raise for damaged files; RuntimeError if they are encrypted or packed in other ways.
"""
_INTEGERS = {"u2": np.int32, "u4": np.int64, "u8": np.int64}
"""Types that torch computes little with, and what they become."""

_SELECTOR = re.compile(r"[^\s:/,]+(:[^:,]+)?")


@dataclass(frozen=True)
class Selector:
    """A member, or a key in a JSON member.

    Attributes:
        extension: lower case, without the first dot.
        key: in the JSON object; "" for the whole member.
    """

    extension: str
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Read a selector; raises ConfigError for anything else."""
        if not _SELECTOR.fullmatch(text):
            raise ConfigError(
                f"member '{text}': expected the extension of a member (jpg, caption.txt), or a JSON member and a key "
                "in it (json:TEXT)"
            )
        extension, _, key = text.partition(":")
        return cls(extension.removeprefix(".").lower(), key)

    def __str__(self) -> str:
        return f"{self.extension}:{self.key}" if self.key else self.extension

    @property
    def words(self) -> str:
        """For messages: `.txt`, or `the .json's "TEXT"`."""
        return f'the .{self.extension}\'s "{self.key}"' if self.key else f".{self.extension}"


@dataclass(frozen=True)
class Members:
    """The members of a sample, by selectors; an empty tuple stands for the usual ones. `label` None: no label is read.

    Example:
        Members.parse(caption="json:TEXT", image="png,jpg")
    """

    image: tuple[Selector, ...] = ()
    caption: tuple[Selector, ...] = ()
    label: tuple[Selector, ...] | None = ()

    @classmethod
    def parse(cls, *, image: str | None = None, caption: str | None = None, label: str | None = None) -> Members:
        """Read selectors, several separated by commas, the preferred first; None and "" stand for the usual members.

        A `label` of "" stands for no label.

        Raises:
            ConfigError: a text is no selector, an image is said to be in JSON, or captions are said to be in JSON
                members of several extensions, or in a member and in a key of it.
        """
        given = {"image": image, "caption": caption, "label": label}
        found = {
            name: tuple(Selector.parse(one.strip()) for one in (text or "").split(",") if one.strip())
            for name, text in given.items()
        }
        if in_json := [selector for selector in found["image"] if selector.key]:
            raise ConfigError(f"image '{in_json[0]}': an image is a member of its own, not a value in JSON")
        # An index keeps where the member of a row lies, but not its extension: it must be one that tells the keys.
        keyed = {selector.extension for selector in found["caption"] if selector.key}
        if len(keyed) > 1 or keyed & {selector.extension for selector in found["caption"] if not selector.key}:
            raise ConfigError(
                f"captions '{caption}': keys may be named in one JSON member only, and not beside the whole member; "
                "name those of one, such as json:TEXT,json:alt"
            )
        return cls(found["image"], found["caption"], None if label == "" else found["label"])

    @classmethod
    def from_content(cls, content: Mapping[str, Sequence[str]] | None) -> Members:
        """The inverse of `content`."""
        return cls.parse(**{name: ",".join(selectors) for name, selectors in (content or {}).items()})

    def content(self) -> dict[str, list[str]]:
        """As JSON, without what is not given."""
        given = {name: selectors for name, selectors in vars(self).items() if selectors != ()}
        return {name: [str(selector) for selector in selectors or ()] for name, selectors in given.items()}

    @property
    def caption_keys(self) -> tuple[str, ...]:
        """The JSON keys among the selectors of captions."""
        return tuple(selector.key for selector in self.caption if selector.key)


USUAL = Members()
"""The usual members: see `read_texts` and `image_member`."""

GUESSED_KEYS = ("TEXT", "text", "title", "description", "alt_text", "alt")
"""Keys that hold captions in the JSON of known corpora, such as LAION's "TEXT"."""
GUESSED_EXTENSIONS = ("text", "caption.txt", "caption", "cap")
"""Extensions of known corpora's captions."""


def guess_captions(samples: Sequence[tuple[Sequence[str], Mapping[str, object]]]) -> Members | None:
    """The selector of captions that fits all samples, where exactly one of the known names does; else None.

    Args:
        samples: (extensions of the members, JSON) of some samples without usual captions.

    Example:
        guess_captions([(("jpg", "json"), {"TEXT": "a dog", "url": "…"})]) gives Members.parse(caption="json:TEXT")
    """
    fits = [
        Selector("json", key)
        for key in GUESSED_KEYS
        if samples and all(isinstance(content.get(key), str) and str(content[key]).strip() for _, content in samples)
    ]
    fits += [Selector(ext) for ext in GUESSED_EXTENSIONS if samples and all(ext in found for found, _ in samples)]
    return Members(caption=(fits[0],)) if len(fits) == 1 else None


def kind_of(selector: Selector, *, of: str) -> str:
    """One of `KINDS`, by a member's extension.

    Raises:
        ConfigError: another extension, `npz` without the name of an array, or a key where there is none.
    """
    kind = selector.extension.rpartition(".")[2]
    if kind not in KINDS:
        raise ConfigError(
            f"{of}: member '{selector}': its extension does not say what values it has; known are {KNOWN}, also "
            "behind a dot, as in syn.json:KEY"
        )
    if kind == "npz" and not selector.key:
        raise ConfigError(f"{of}: member '{selector}': name one of its arrays, as in {selector}:NAME")
    if kind in ("npy", "png", "txt") and selector.key:
        raise ConfigError(f"{of}: member '{selector}': .{kind} has no keys; write {selector.extension}")
    return kind


def open_member(data: bytes, kind: str) -> Any:
    """What a member holds: a JSON value, an array, a text, or a .npz from which `pick` takes an array.

    A PNG is an array (h, w) of its numbers, such as classes; its palette is not applied.

    Raises:
        BadSample: it is damaged, or would have to be unpickled.
    """
    try:
        if kind == "json":
            return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_keys)
        if kind == "txt":
            return data.decode("utf-8-sig")
        if kind == "png":
            return _numbers_of_pixels(data)
        return zipfile.ZipFile(io.BytesIO(data)) if kind == "npz" else _array(data)
    except UnicodeDecodeError as error:
        raise BadSample(Reason.BAD_FIELD, f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise BadSample(Reason.BAD_FIELD, "JSON is nested too deeply") from error
    except _DAMAGE as error:
        raise BadSample(Reason.BAD_FIELD, f"not {_WORDS[kind]}: {excerpt(str(error), 120)}") from error


def pick(opened: Any, selector: Selector) -> Any:
    """The value that a selector names in a member: of a key, an array of .npz, or all of it. None: there is none.

    A key with dots is looked up as it stands, and else part by part in nested objects. In a list of objects the further
    parts are looked up in each of them; the value is then the list of what they have, None for one without it.

    Raises:
        BadSample: the array is damaged, or would have to be unpickled.

    Example:
        json:boxes.category of {"boxes": [{"category": "dog"}, {}]} is ["dog", None]
    """
    if isinstance(opened, zipfile.ZipFile):
        return _array_of(opened, selector.key)
    if not selector.key:
        return opened
    if isinstance(opened, dict) and selector.key in opened:
        return cast("dict[str, Any]", opened)[selector.key]
    return _follow(opened, selector.key.split("."))


def _follow(value: Any, parts: list[str]) -> Any:
    """What lies at a path in nested objects; None if nothing does."""
    for number, part in enumerate(parts):
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(part)
        if isinstance(value, list) and (rest := parts[number + 1 :]):
            return [_follow(one, rest) for one in cast("list[Any]", value)]
    return value


def names_in(opened: Any) -> list[str]:
    """The keys of a JSON object, or the arrays of a .npz; empty for anything else."""
    if isinstance(opened, zipfile.ZipFile):
        return [name.removesuffix(".npy") for name in opened.namelist()]
    return [str(name) for name in cast("dict[Any, Any]", opened)] if isinstance(opened, dict) else []


def absent(selector: Selector, opened: Any) -> str:
    """For messages: that a member has no such value, which keys it has, and the one that may be meant."""
    names = names_in(opened)
    if not selector.key or selector.key in names:
        return f"'{selector.key}' is null" if selector.key else "is null"
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"no '{selector.key}'{meant(selector.key, names)}; it has {shown or 'no keys'}"


def as_array(value: object) -> NDArray[Any] | None:
    """A number, a list of numbers, however nested, or an array as an array; None for anything else.

    Whole numbers of JSON are int64, others float64; lists whose rows differ in length are none.
    """
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, (bool, int, float, list)):
        return None
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # lists of different lengths
        return None
    return array if array.dtype.kind in "bif" and array.size else None


def _numbers_of_pixels(data: bytes) -> NDArray[np.uint8]:
    """The numbers (h, w) that a PNG of one channel has; raises BadSample, or what Pillow raises."""
    with open_image(data, "PNG") as image:
        check_pixels(image.height, image.width)
        if image.mode not in ("1", "L", "P", "I;16", "I"):
            raise BadSample(Reason.BAD_FIELD, f"a PNG of mode {image.mode}; expected one number for each pixel")
        numbers = np.asarray(image)
    if numbers.dtype.itemsize > 1 and numbers.max() > 255:
        raise BadSample(Reason.BAD_FIELD, f"a PNG with the number {numbers.max()}; they are at most 255")
    return numbers.astype(np.uint8)


def _array_of(file: zipfile.ZipFile, name: str) -> NDArray[Any] | None:
    """An array of a .npz; None if it has none of this name."""
    try:
        entry = file.getinfo(f"{name}.npy")
    except KeyError:
        return None
    if entry.file_size > MAX_BYTES:
        raise BadSample(Reason.BAD_FIELD, f"array '{name}' of {entry.file_size:,} bytes; at most {MAX_BYTES:,}")
    try:
        return _array(file.read(entry))
    except _DAMAGE as error:
        raise BadSample(Reason.BAD_FIELD, f"array '{name}': {excerpt(str(error), 120)}") from error


def _array(data: bytes) -> NDArray[Any]:
    """The array of a .npy, in a type of torch's. Memory is taken only for what the file holds.

    Raises:
        ValueError: it is damaged, or of a type that is no number.
    """
    # The arrays of a corpus have the same header, and to parse it takes ten times as long as all else.
    size = int.from_bytes(data[8:10] if data[6:7] == b"\1" else data[8:12], "little")
    start = size + (10 if data[6:7] == b"\1" else 12)
    if start > len(data) or size > MAX_HEADER:
        raise ValueError("cut, or not an array")
    shape, in_fortran, dtype = _header(data[:start])
    values = memoryview(data)[start:]
    if math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{len(values):,} bytes of values for an array {shape} of {dtype}")
    array = np.frombuffer(values, dtype).reshape(shape, order="F" if in_fortran else "C")
    wider = _INTEGERS.get(dtype.str[1:])
    if wider is None:
        return array.astype(dtype.newbyteorder("="), copy=False)
    if dtype.itemsize == 8 and array.size and array.max() >= 2**63:
        raise ValueError("whole numbers above 2^63 - 1")
    return array.astype(wider)


@lru_cache(maxsize=256)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran's order, and type, of the header of a .npy.

    Raises:
        ValueError: it is damaged, or of a type that is no number.
    """
    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of version {version}, which holds no numbers")
    try:
        shape, in_fortran, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    except Exception as error:  # a header is a Python literal: tokenize, ast and dtype raise errors of many kinds
        raise ValueError(f"its header does not parse: {error}") from error
    if dtype.hasobject:
        raise ValueError("an array of objects, which would have to be unpickled, and pickles can run any code")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"an array of {dtype}; known are bool, whole numbers and floats of up to 64 bits")
    return shape, in_fortran, dtype
