"""The images that a conversion has written, by content: an image that comes again, byte for byte, is a duplicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmdata.hashing import hash64

_BITS = 64


class Found(NamedTuple):
    """An earlier row with the same image.

    Attributes:
        row: its number.
        says_the_same: whether its captions and its label are the same.
    """

    row: int
    says_the_same: bool


class SeenImages:
    """Digests of images, each with its row and a hash of its captions and label: about 130 bytes an image."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}  # row and hash in one integer, which takes 70 bytes less than a tuple

    def add(self, digest: bytes, row: int, captions: Sequence[str], label: int | str | None) -> None:
        """Remember the image of a row that was written; the first row of an image counts."""
        self._seen.setdefault(digest, row << _BITS | _hash(captions, label))

    def find(self, digest: bytes, captions: Sequence[str], label: int | str | None) -> Found | None:
        """The row that was written with this image, if there is one."""
        found = self._seen.get(digest)
        if found is None:
            return None
        return Found(found >> _BITS, found & (2**_BITS - 1) == _hash(captions, label))


def _hash(captions: Sequence[str], label: int | str | None) -> int:
    return hash64("\0".join([*captions, str(label)]).encode()) & (2**_BITS - 1)
