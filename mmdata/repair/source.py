"""A damaged tar, opened for reading: as it lies, or the part of a gzip-compressed one that can be unpacked."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from mmdata.atomic import naming
from mmdata.safe_read import open_regular
from mmdata.tars.given_tars import GZIPPED

if TYPE_CHECKING:
    from zlib import _Decompress  # pyright: ignore[reportPrivateUsage]

_PACKED_CHUNK = 1 << 16  # bytes; of zeros, these unpack to 64 MiB at most
_GZIP = b"\x1f\x8b"


class Source(NamedTuple):
    """A tar to be read.

    Attributes:
        name: of the file.
        out: name of the repaired tar, which is never compressed.
        file: the tar, unpacked.
        damage: where and why unpacking ended; "" for a whole file.
    """

    name: str
    out: str
    file: BinaryIO
    damage: str = ""


def repaired_name(name: str) -> str:
    """The name of a repaired tar: "x.tar" for "x.tar", "x.tar.gz" and "x.tgz"."""
    for end in GZIPPED:
        if name.endswith(end):
            return name.removesuffix(end) + ".tar"
    return name


def open_source(path: Path, unpacked: Path) -> Source:
    """Open a tar; the caller closes its file.

    Args:
        path: of the tar.
        unpacked: where to write the content of a compressed one; it is removed when the file is closed.

    Raises:
        DataError: not a regular file.
        OSError: it cannot be read, or the disk is full.
    """
    file = os.fdopen(open_regular(path, "shard"), "rb")
    start = file.read(len(_GZIP))
    if start != _GZIP:
        return Source(path.name, repaired_name(path.name), file)
    with file, naming(unpacked):
        plain = unpacked.open("w+b")
        unpacked.unlink()  # the content stays for as long as the file is open
        try:
            damage = _unpack(file, plain)
        except BaseException:
            plain.close()
            raise
    return Source(path.name, repaired_name(path.name), plain, damage)


def _unpack(file: BinaryIO, plain: BinaryIO) -> str:
    """Write the content of a gzip file up to its damage; returns what that is, "" for none."""
    file.seek(0)
    unpack = zlib.decompressobj(31)
    pending = b""
    while data := pending or file.read(_PACKED_CHUNK):
        before = unpack.copy()  # an error takes the content before it in the same chunk with it
        try:
            plain.write(unpack.decompress(data))
        except zlib.error as error:
            good = _unpack_bytewise(before, data, plain)
            place = file.tell() - len(data) + good
            return f"gzip: damaged at byte {place} of the compressed file ({error}); what follows cannot be unpacked"
        pending = b""
        if unpack.eof:
            pending = _behind_zeros(unpack.unused_data, file)
            if not pending:
                break
            if not pending.startswith(_GZIP[:1]):
                return "gzip: other data follows its end, and was not read"
            unpack = zlib.decompressobj(31)
    plain.flush()
    if not unpack.eof:
        size = os.fstat(file.fileno()).st_size
        return f"gzip: the compressed file is cut, after {size} bytes"
    return ""


def _behind_zeros(data: bytes, file: BinaryIO) -> bytes:
    """What follows the zeros behind a member, however many these are; b"" if the file ends with them."""
    while not (rest := data.lstrip(b"\0")) and (data := file.read(_PACKED_CHUNK)):
        pass
    return rest


def _unpack_bytewise(unpack: _Decompress, data: bytes, plain: BinaryIO) -> int:
    """Write the content of the bytes before an error; returns how many these are."""
    for at in range(len(data)):
        try:
            plain.write(unpack.decompress(data[at : at + 1]))
        except zlib.error:
            return at
    return len(data)
