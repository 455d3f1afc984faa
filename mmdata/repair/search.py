"""Finds headers of tar members in bytes that may be anything."""

from __future__ import annotations

from typing import BinaryIO

from mmdata.tars.tar import BLOCK, Member, header_fields

_MAGIC = b"ustar"
_MAGIC_AT = 257
_CHUNK = 1 << 20  # bytes


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """The bytes at an offset, fewer at the end of the file."""
    file.seek(offset)
    return file.read(size)


def zeros_end(file: BinaryIO, start: int, size: int) -> int:
    """Offset of the block behind the zeros at `start`, in steps of 512 bytes; `size` if only zeros follow."""
    at = start
    while chunk := read_at(file, at, _CHUNK):
        if tail := chunk.lstrip(b"\0"):
            other = at + len(chunk) - len(tail)
            return max(other - (other - start) % BLOCK, start)
        at += len(chunk)
    return size


def find_header(file: BinaryIO, start: int, end: int) -> int | None:
    """Offset of the first header at `start` or behind it, of which the whole block lies before `end`.

    Headers of today's formats are found at every byte, by their magic. Those of old tars (v7) have none: they are found
    only in steps of 512 bytes from `start` on.
    """
    at = start
    while at + BLOCK <= end:
        chunk = read_at(file, at, min(_CHUNK + BLOCK, end - at))
        found = [place for place in (_by_magic(chunk), _by_steps(chunk)) if place is not None]
        if found:
            return at + min(found)
        at += _CHUNK
    return None


def _by_magic(chunk: bytes) -> int | None:
    at = chunk.find(_MAGIC, _MAGIC_AT)
    while at >= 0:
        place = at - _MAGIC_AT
        # The checksum is a sum: a header that was shifted by a lost zero has a right one, and an empty name.
        if chunk[place] and header_fields(chunk[place : place + BLOCK]) is not None:
            return place
        at = chunk.find(_MAGIC, at + 1)
    return None


def _by_steps(chunk: bytes) -> int | None:
    for place in range(0, min(len(chunk) - BLOCK + 1, _CHUNK), BLOCK):
        block = chunk[place : place + BLOCK]
        if not block[_MAGIC_AT : _MAGIC_AT + 8].strip(b"\0") and block[148:156].strip(b"\0"):
            fields = header_fields(block)
            if fields is not None:
                return place
    return None


def is_tar_start(file: BinaryIO, offset: int, size: int) -> bool:
    """Whether a payload looks like a tar in the tar: whole blocks, and a header at its start."""
    return size > 0 and size % BLOCK == 0 and header_fields(read_at(file, offset, BLOCK)) is not None


def swallowed_header(file: BinaryIO, member: Member, following: int, size: int) -> int | None:
    """Offset of a header in the payload of a member that is that of a later member; None if there is none.

    Where a part of a payload is missing, its member reaches over the headers behind it. The payload of a whole member
    may hold headers too, if it is a tar, or an archive with a tar in it.

    Args:
        file: the tar.
        member: whose payload is searched.
        following: offset at which the next header is expected.
        size: of the file, in bytes.
    """
    if is_tar_start(file, member.offset, member.size):
        return None
    is_end = following >= size or zeros_end(file, following, size) == size
    is_expected = is_end or header_fields(read_at(file, following, BLOCK)) is not None
    at = member.offset
    while (found := _find_by_magic(file, at, min(following + BLOCK, size))) is not None and found < following:
        end = _chain_end(file, found, following)
        if end >= following:
            is_later = end == following or not is_expected
        elif not read_at(file, end, BLOCK).strip(b"\0"):  # the end of a tar: of this one, or of one in the payload
            is_later = is_end and following < size and zeros_end(file, end, size) == size
        else:
            is_later = not is_expected
        if is_later:
            return found
        at = end
    return None


def _find_by_magic(file: BinaryIO, start: int, end: int) -> int | None:
    at = start
    while at + BLOCK <= end:
        chunk = read_at(file, at, min(_CHUNK + BLOCK, end - at))
        if (place := _by_magic(chunk)) is not None:
            return at + place
        at += _CHUNK
    return None


def _chain_end(file: BinaryIO, start: int, stop: int) -> int:
    """Follow headers from member to member: the offset at which there is none, or the first at `stop` or behind it."""
    at = start
    while at < stop and (fields := header_fields(read_at(file, at, BLOCK))) is not None:
        at += BLOCK + fields[1] + -fields[1] % BLOCK
    return at
