"""Decodes and cleans captions. Convert, index and loader read captions here, so equal bytes give equal strings."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from mmdata.errors import BadSample, Reason, excerpt

TXT, JSON, NO_CAPTION, JSON_KEY = 0, 1, 2, 3
"""Values of the index column caption_format: which member of the sample holds the captions. All rows of a corpus of
labels only are NO_CAPTION; no row of another corpus is. JSON_KEY: JSON, with the keys of `Members.caption_keys`."""

MAX_CAPTION = 65_536
"""Longest caption in characters; a longer text is some other file, not a caption."""

MAX_CAPTION_BYTES = 2**20
"""Largest caption member in bytes: the captions and, in JSON, the metadata."""

# Bidi marks, embeddings, overrides and isolates: they reorder text on a screen and mean nothing to a tokenizer.
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_BOM = "\ufeff"


def _cleaning() -> dict[int, str | None]:
    """Translation table: control characters that separate words become a space, all others vanish."""
    controls = [
        chr(code) for code in range(0xA0) if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\t\n"
    ]
    table: dict[int, str | None] = {ord(c): " " if c.isspace() and c != "\r" else None for c in controls}
    return table | dict.fromkeys(map(ord, _BIDI + _BOM))


_CLEANING = _cleaning()


def clean_caption(text: object) -> str:
    """Strip NUL, control and bidi characters, byte order marks and outer whitespace; tabs and newlines stay.

    Idempotent. `clean_caption("\\ufeffa\\x00 dog\\r\\n") == "a dog"`.

    Raises:
        BadSample: not a string or a lone surrogate (bad_caption), nothing left (empty_caption), more than
            `MAX_CAPTION` characters (caption_too_long).
    """
    if not isinstance(text, str):
        raise BadSample(Reason.BAD_CAPTION, f"caption is {type(text).__name__}, not a string")
    if len(text) > MAX_CAPTION:
        raise BadSample(Reason.CAPTION_TOO_LONG, f"caption of {len(text)} characters; at most {MAX_CAPTION}")
    cleaned = text.translate(_CLEANING).strip()
    if not cleaned:
        raise BadSample(Reason.EMPTY_CAPTION, f"caption is empty after cleaning: {text[:40]!r}")
    try:
        cleaned.encode()
    except UnicodeEncodeError as error:
        raise BadSample(Reason.BAD_CAPTION, f"lone surrogate at character {error.start}") from error
    return cleaned


def clean_captions(found: object) -> tuple[list[str], int]:
    """Captions of a string or a list of strings, and how many entries of the list were left out as empty or null.

    `["a", "", None]` gives `(["a"], 2)`.

    Raises:
        BadSample: missing_caption for None and an empty list, empty_caption where no entry has text, or what
            `clean_caption` raises for an entry.
    """
    if not isinstance(found, list):
        found = [found]
    entries = [entry for entry in cast("list[object]", found) if entry is not None]
    if not entries:
        raise BadSample(Reason.MISSING_CAPTION, "an empty list of captions")
    kept: list[str] = []
    empty: BadSample | None = None
    for entry in entries:
        try:
            kept.append(clean_caption(entry))
        except BadSample as bad:
            if bad.reason is not Reason.EMPTY_CAPTION:
                raise
            empty = empty or bad
    if empty and not kept:
        raise empty
    return kept, len(cast("list[object]", found)) - len(kept)


def captions_of(data: bytes | memoryview, caption_format: int, keys: Sequence[str] = ()) -> list[str]:
    """The cleaned captions in a caption member.

    Args:
        data: bytes of a .txt member (one caption) or a .json member ("captions" where usable, else "caption").
        caption_format: `TXT`, `JSON`, `NO_CAPTION` (gives no caption) or `JSON_KEY`, as in the index.
        keys: for JSON_KEY, the keys that can hold captions, the preferred first.

    Raises:
        BadSample: not UTF-8 (with the offset), not JSON, no caption in it, or a caption that cannot be cleaned.
    """
    if caption_format == NO_CAPTION:
        return []
    text = decode_text(data)
    if caption_format == TXT:
        return [clean_caption(text)]
    content = parse_json(text)
    fault: BadSample | None = None
    for name in keys if caption_format == JSON_KEY else ("captions", "caption"):
        if content.get(name) is not None:
            try:
                return clean_captions(content[name])[0]
            except BadSample as bad:
                fault = fault or bad
    raise fault or BadSample(Reason.MISSING_CAPTION, 'JSON member has neither "captions" nor "caption"')


def parse_json(text: str, *, strict: bool = False) -> dict[str, Any]:
    """A sample's JSON member as a dictionary.

    Args:
        text: the member.
        strict: refuse duplicate keys. Readers of foreign samples are strict; the loader reads only what they accepted.

    Raises:
        BadSample: bad_caption when it is not a JSON object.
    """
    try:
        content = json.loads(text, object_pairs_hook=unique_keys if strict else None)
    except (ValueError, RecursionError) as error:
        raise BadSample(Reason.BAD_CAPTION, f"JSON member does not parse: {error}") from error
    if not isinstance(content, dict):
        raise BadSample(Reason.BAD_CAPTION, f"JSON member holds {type(content).__name__}, not an object")
    return cast("dict[str, Any]", content)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` of the json module; raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"key {excerpt(twice)} is there twice")
    return content


def decode_text(data: bytes | memoryview) -> str:
    """Text of a member, without a byte order mark.

    Raises:
        BadSample: more than `MAX_CAPTION_BYTES`, or not UTF-8.
    """
    if len(data) > MAX_CAPTION_BYTES:
        raise BadSample(Reason.CAPTION_TOO_LONG, f"caption member of {len(data)} bytes; at most {MAX_CAPTION_BYTES}")
    try:
        return str(data, "utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise BadSample(Reason.BAD_CAPTION, f"not UTF-8 at byte {error.start}") from error


def filled(template: str | None, caption: str) -> str:
    """A template with a caption in the place of {}; None: the caption."""
    return caption if template is None else template.replace("{}", caption)
