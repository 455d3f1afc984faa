"""A hash of each member of tars without images, kept beside their index: by it a member that was rewritten is found.

A file of 64-bit numbers (little-endian): where the hashes of each sample begin, then the hashes. It stays on the disk,
and a sample's are read when one of its members is: in memory they would be as large as the keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from mmdata.hashing import fast_hash
from mmdata.index.store import OpenShard
from mmdata.safe_read import open_regular, read_regular
from mmdata.tars.tar import Member

HASHES_NAME = "members.hashes"
CHUNK_BYTES = 2**24
WORD = np.dtype("<i8")


def hash_member(extension: str, data: bytes) -> int:
    """XXH3 of a member's bytes, seeded by its extension: the members of a sample need no order."""
    return xxhash.xxh3_64_intdigest(data, _seed(extension))


def hash_in_file(file: BinaryIO, extension: str, member: Member) -> int:
    """The same of a member in an open tar, which may be larger than memory."""
    file.seek(member.offset)
    digest = xxhash.xxh3_64(seed=_seed(extension))
    left = member.size
    while left and (data := file.read(min(left, CHUNK_BYTES))):
        digest.update(data)
        left -= len(data)
    return digest.intdigest()


class HashWriter:
    """Collects the hashes of samples, in their order: 8 bytes a member and 8 a sample."""

    def __init__(self) -> None:
        self._ends, self._hashes = array("q", [0]), array("Q")

    @property
    def members(self) -> int:
        """Hashes so far."""
        return len(self._hashes)

    def add(self, hashes: Iterable[int]) -> None:
        """Those of the members of the next sample."""
        self._hashes.extend(hashes)
        self._ends.append(len(self._hashes))

    def content(self) -> bytes:
        """The content of the file."""
        return np.array(self._ends, WORD).tobytes() + np.array(self._hashes, "<u8").tobytes()


class MemberHashes:
    """The hashes of the members of samples.

    Args:
        path: of the file.
        samples: how many there are.
        members: how many hashes there are.

    Raises:
        ValueError: the file has another size.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, samples: int, members: int) -> None:
        self.path, self._begin = path, (samples + 1) * WORD.itemsize
        self._file = OpenShard(open_regular(path, "file of hashes"), cached=False)
        if self._file.size != self._begin + members * WORD.itemsize:
            raise ValueError(f"{path.name} has {self._file.size:,} bytes, which are not those of {members:,} hashes")

    def of(self, sample: int) -> frozenset[int]:
        """The hashes of a sample's members."""
        begin, end = self._words(sample * WORD.itemsize, 2)
        return frozenset(self._words(self._begin + begin * WORD.itemsize, end - begin))

    def checksum(self) -> int:
        """Of the whole file."""
        return fast_hash(read_regular(self.path))

    def _words(self, offset: int, count: int) -> Sequence[int]:
        data = self._file.read(offset, count * WORD.itemsize) or b""
        if len(data) != count * WORD.itemsize:
            raise ValueError(f"'{self.path}' became shorter while it was read")
        return np.frombuffer(data, "<u8").tolist()


def _seed(extension: str) -> int:
    return xxhash.xxh3_64_intdigest(extension.encode())
