"""Compares the bytes of an image with the hash that a table gives."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from mmdata.errors import BadSample, Reason, excerpt

_HASH = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


def expected_hash(expected: Any) -> str:
    """The cell of a hash in one spelling; "" for an empty cell, which is one of blanks too."""
    if expected is None:
        return ""
    return expected.hex() if isinstance(expected, bytes) else str(expected).strip().lower()


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
