"""Captions as convert, index and loader all read them. The same bytes give the same strings everywhere."""

from __future__ import annotations

import json
import unicodedata
from typing import Any, cast

from mmdata.errors import BadSample, Reason

TXT, JSON = 0, 1
"""Values of the index column caption_format: which member of the sample holds the captions."""

MAX_CAPTION = 65_536
"""Longest caption in characters; a longer one is a file that went astray, not a caption."""

MAX_CAPTION_BYTES = 2**20
"""Largest caption member in bytes: the captions, and in JSON whatever metadata lies beside them."""

# Marks, embeddings, overrides and isolates: they reorder what is shown and mean nothing to a tokenizer.
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


def captions_of(data: bytes | memoryview, caption_format: int) -> list[str]:
    """The cleaned captions in a caption member.

    Args:
        data: bytes of a .txt member (one caption) or a .json member ("captions", else "caption").
        caption_format: `TXT` or `JSON`, as in the index.

    Raises:
        BadSample: not UTF-8 (with the offset), not JSON, no caption in it, or a caption that cannot be cleaned.
    """
    text = _decode(data)
    if caption_format == TXT:
        return [clean_caption(text)]
    content = parse_json(text)
    found = content.get("captions", content.get("caption"))
    if found is None:
        raise BadSample(Reason.MISSING_CAPTION, 'JSON member has neither "captions" nor "caption"')
    captions = cast("list[object]", found) if isinstance(found, list) else [found]
    if not captions:
        raise BadSample(Reason.MISSING_CAPTION, 'JSON member has an empty list of "captions"')
    return [clean_caption(caption) for caption in captions]


def parse_json(data: bytes | memoryview | str) -> dict[str, Any]:
    """A sample's JSON member as a dictionary.

    Raises:
        BadSample: bad_caption when it is not a JSON object in UTF-8.
    """
    try:
        content = json.loads(data if isinstance(data, str) else _decode(data))
    except (ValueError, RecursionError) as error:
        raise BadSample(Reason.BAD_CAPTION, f"JSON member does not parse: {error}") from error
    if not isinstance(content, dict):
        raise BadSample(Reason.BAD_CAPTION, f"JSON member holds {type(content).__name__}, not an object")
    return cast("dict[str, Any]", content)


def _decode(data: bytes | memoryview) -> str:
    if len(data) > MAX_CAPTION_BYTES:
        raise BadSample(Reason.CAPTION_TOO_LONG, f"caption member of {len(data)} bytes; at most {MAX_CAPTION_BYTES}")
    try:
        return str(data, "utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise BadSample(Reason.BAD_CAPTION, f"not UTF-8 at byte {error.start}") from error
