"""TODO"""

from __future__ import annotations

import hashlib


def hash64(data: bytes | memoryview) -> int:
    """First 8 bytes of the SHA-256 as a signed little-endian integer."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
