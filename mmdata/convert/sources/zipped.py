"""A .zip of a corpus, read in place: its members are listed once, and each is read at random, from any process.

A member is read up to the size that the list of members says, and must have its CRC. Names that lead out of the archive
are listed as they are, for their reader to refuse.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from mmdata.errors import BadSample, DataError, Reason

SUFFIX = ".zip"
MAX_MEMBERS = 2**21
"""Most members of an archive: each process holds their list in memory, which takes about 900 bytes each to make."""
_HEADER = struct.Struct("<4s22xHH")
_HEADER_MAGIC = b"PK\3\4"


class ZippedFile(NamedTuple):
    """A file in an archive.

    Attributes:
        offset: of its header.
        packed: bytes that it takes.
        size: in bytes.
        crc: CRC-32 of its bytes.
        method: of its compression.
        is_link: whether it is a symbolic link.
    """

    offset: int
    packed: int
    size: int
    crc: int
    method: int
    is_link: bool


class Zip:
    """The list of members of an archive.

    Args:
        path: of the archive.

    Attributes:
        path: as given.
        folders: by the path of each folder, "" for the outermost, its files by name, and None for each folder in it.
        digest: of all names, sizes and CRCs, equal for equal content.

    Raises:
        DataError: no whole archive, an encrypted one, a member twice, a file with the name of a folder, too many
            members, or members that overlap.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.folders: dict[str, dict[str, ZippedFile | None]] = {"": {}}
        digest = hashlib.sha256()
        for name, member in sorted(self._members()):
            digest.update(f"{name}\0{member.size} {member.crc}\n".encode("utf-8", "surrogateescape"))
            self._add(name, member)
        self.digest = digest.hexdigest()

    def find(self, path: str) -> ZippedFile | None:
        """The file at a path in the archive; None for a folder, and for what is not there."""
        folder, _, name = path.rpartition("/")
        return self.folders.get(folder, {}).get(name)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """The bytes of a member.

        Raises:
            BadSample: there is none, it is a link or too large, it is damaged, or packed by a method that is not read.
        """
        member = self.find(path)
        if member is None:
            raise BadSample(Reason.MISSING_IMAGE, f"'{path}': not in '{os.path.basename(self.path)}'")
        if member.is_link:
            raise BadSample(Reason.NOT_A_FILE, f"'{path}' is a link in a zip, which is not followed")
        if member.size > max_bytes:
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{path}' has {member.size} bytes; the limit is {max_bytes}")
        with open(self.path, "rb", buffering=0) as file:
            magic, *lengths = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, member.offset).ljust(_HEADER.size))
            most = member.size + member.size // 8 + 4096  # what deflate can make of it
            data = os.pread(file.fileno(), min(member.packed, most), member.offset + _HEADER.size + sum(lengths))
        if member.method == zipfile.ZIP_DEFLATED:
            data = _inflate(data, member.size)
        elif member.method != zipfile.ZIP_STORED:
            detail = f"'{path}' is packed by method {member.method} of zip, which is not read; unpack the archive"
            raise BadSample(Reason.UNSUPPORTED_FORMAT, detail)
        if magic != _HEADER_MAGIC or len(data) != member.size or zlib.crc32(data) != member.crc:
            raise BadSample(Reason.CORRUPT_IMAGE, f"'{path}' is damaged in the zip: its bytes do not have its CRC")
        return data

    def _members(self) -> Iterator[tuple[str, ZippedFile]]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, UnicodeError) as error:
            raise DataError(f"zip '{self.path}': not whole ({error}); fetch it again") from error
        if len(infos) > MAX_MEMBERS:
            raise DataError(
                f"zip '{self.path}': {len(infos):,} members, and {MAX_MEMBERS:,} are read at most; unpack it, and "
                "convert the folder"
            )
        if any(info.flag_bits & 1 for info in infos):
            raise DataError(f"zip '{self.path}': is encrypted; unpack it with its password, and convert the folder")
        ends = sorted((info.header_offset, info.header_offset + info.compress_size) for info in infos)
        if any(end > after for (_, end), (after, _) in pairwise(ends)):
            raise DataError(f"zip '{self.path}': its members overlap, as in a bomb; it is not read")
        for info in infos:
            name = info.filename.replace("\\", "/")
            mode = info.external_attr >> 16
            where = (info.header_offset, info.compress_size, info.file_size, info.CRC, info.compress_type)
            yield name, ZippedFile(*where, is_link=stat.S_ISLNK(mode))

    def _add(self, name: str, member: ZippedFile) -> None:
        parts = name.split("/")
        if {".", "..", ""} & set(parts[:-1]) or parts[-1] in (".", ".."):
            parts = [name]  # it is absolute, or leads out
        for depth in range(len(parts) - 1):
            above, folder = "/".join(parts[:depth]), "/".join(parts[: depth + 1])
            if self.folders[above].get(parts[depth]) is not None:
                raise DataError(f"zip '{self.path}': holds '{folder}' as a file and as a folder; make it anew")
            self.folders[above][parts[depth]] = None
            self.folders.setdefault(folder, {})
        if not parts[-1]:
            return
        files = self.folders["/".join(parts[:-1])]
        if files.get(parts[-1]) is not None:
            raise DataError(f"zip '{self.path}': holds '{name}' twice; make it anew")
        files[parts[-1]] = member


def open_zip(path: str) -> Zip:
    """The list of members of an archive, which is read again if the file has changed."""
    status = os.stat(path)
    return _open(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _open(path: str, identity: tuple[int, ...]) -> Zip:
    return Zip(path)


def _inflate(data: bytes, size: int) -> bytes:
    """Up to one byte more than `size` of what deflated data holds; nothing of damaged data."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error:
        return b""
