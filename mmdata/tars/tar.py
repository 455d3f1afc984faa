"""A strict tar reader. It raises an error with an offset for everything that other readers skip or silently end on.

`tarfile` is not used for reading: it ends without an error on a damaged header and on a file without end blocks.
Source of the formats: POSIX.1-2017 "pax", and "Basic Tar Format" in the manual of GNU tar.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple, NoReturn, Protocol

from mmdata.errors import DamagedShard

BLOCK = 512
END = bytes(2 * BLOCK)
"""The two zero blocks that end a tar."""

MAX_PADDING = 2**30
"""Most zeros behind the end blocks; writers fill a tar up to 10 KB, or to the block size of a tape."""
_MAX_EXTENDED = 1 << 20  # bytes of a long name or of pax records; a name needs a few hundred
_ASCII = bytes(range(128))
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_PAX_RECORD = re.compile(rb"([0-9]{1,7}) ")
_META = re.compile(r"__[^/]*__($|/)")
_REGULAR = (b"0", b"\0", b"7")
_EXTENDED = (b"L", b"x", b"g")  # GNU long name, pax, global pax
_REFUSED = {
    b"K": "the long target of a link",
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"S": "a sparse file",
    b"M": "a continued file of a multi-volume tar",
}


class Seekable(Protocol):
    """What a tar is read from: an open file, or a shard of a store."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Set the position; returns it."""
        ...

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, fewer at the end."""
        ...


class Member(NamedTuple):
    """A regular file of a tar.

    Attributes:
        name: as it stands in the tar; bytes that are not UTF-8 become "\\xNN".
        offset, size: of the payload, in bytes.
        start: offset of the first header block that belongs to it.
        split: key and extension, see `split_name`.
        xxh3: `fast_hash` of the payload; 0 where only headers are read.
    """

    name: str
    offset: int
    size: int
    start: int
    split: tuple[str, str] | None = None
    xxh3: int = 0


def header(name: str, size: int) -> bytes:
    """The ustar header of a file, the same for the same arguments: no clock, no user, mode 0644.

    Raises:
        ValueError: a name that ustar cannot hold (over 100 bytes without a "/" to split at), or 8 GiB and more.
    """
    data = name.encode()
    if len(data) > _NAME_BYTES or not 0 <= size < _MOST_BYTES or data.endswith(b"/"):
        return _header_of_tarfile(name, size)
    # As tarfile writes it, from one header that it has written: 12 times as fast.
    digits = b"%011o" % size
    checksum = _EMPTY_SUM + sum(data) + sum(digits) - sum(b"00000000000")
    head = _EMPTY
    return b"".join(
        (data.ljust(_NAME_BYTES, b"\0"), head[100:124], digits, head[135:148], b"%06o\0 " % checksum, head[156:])
    )


def _header_of_tarfile(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


_NAME_BYTES, _MOST_BYTES = 100, 8**11
_EMPTY = _header_of_tarfile("", 0)
_EMPTY_SUM = sum(_EMPTY[:148]) + sum(b" " * 8) + sum(_EMPTY[156:])


def padding(size: int) -> bytes:
    """Zeros that fill a payload of `size` bytes to whole blocks."""
    return bytes(-size % BLOCK)


def split_name(name: str) -> tuple[str, str] | None:
    """Key and lower-case extension of a member, split as webdataset does; None if it belongs to no sample.

    `split_name("a.b/0001.seg.PNG") == ("a.b/0001", "seg.png")`; `__meta__` members and names without an extension
    belong to no sample.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension or (name.startswith("__") and _META.match(name)):
        return None
    return folder + slash + stem, extension.lower()


def read_members(file: Seekable, *, name: str) -> Iterator[Member]:
    """The regular files of a tar, in order; directories are skipped. Payloads are not read.

    Args:
        file: seekable; its position does not matter, and the caller may change it between members.
        name: the shard, for messages.

    Raises:
        DamagedShard: anything but a whole, plain tar: cut short, a damaged header, no end blocks, data behind them, a
            link, device or sparse file, a size that is negative, overridden or larger than the file, a duplicate
            member. The message names the offset, and the end of the last good sample.
    """
    yield from _TarReader(file, name).members()


class _TarReader:
    """One pass over a tar's headers."""

    def __init__(self, file: Seekable, shard: str) -> None:
        self._file = file
        self._shard = shard
        self._size = file.seek(0, os.SEEK_END)
        self._sample: tuple[str, int] = ("", 0)  # key and start of the current sample

    def members(self) -> Iterator[Member]:
        seen: dict[str, int] = {}
        position = 0
        while True:
            member, position = self._member(position)
            if member is None:
                break
            if member.name in seen:
                self._fail(member.start, f"member '{member.name}' stands already at byte {seen[member.name]}")
            seen[member.name] = member.start
            yield member
        self._check_end(position)

    def _member(self, start: int) -> tuple[Member | None, int]:
        """The next regular file and the offset behind its padding; at the end blocks None and their offset."""
        position = start
        given: dict[bytes, str] = {}  # kind of extended header -> the name in it
        while (block := self._block(position)).strip(b"\0"):
            kind, size = self._checked(block, position)
            payload = position + BLOCK
            following = payload + size + -size % BLOCK
            if kind in _EXTENDED:
                if kind in given:
                    self._fail(position, "two extended headers of one kind for one member")
                given[kind] = self._extended_name(kind, position, size)
                position = following
                continue
            name = self._name(block, given, position)
            split = split_name(name)
            if split and split[0] != self._sample[0]:
                self._sample = (split[0], start)
            self._check_whole(payload, size, position)
            if kind in _REGULAR and not (kind == b"\0" and name.endswith("/")):
                return Member(name, payload, size, start, split), following
            if kind not in (b"5", b"\0"):
                what = _REFUSED.get(kind, f"of unknown type {kind!r}")
                self._fail(position, f"member '{name}' is {what}; shards hold regular files only")
            if size:
                self._fail(position, f"directory '{name}' with a payload of {size} bytes")
            start, position, given = following, following, {}
        if given:
            self._fail(start, "an extended header with no member behind it")
        return None, position

    def _check_whole(self, payload: int, size: int, position: int) -> None:
        if payload + size + -size % BLOCK > self._size:
            self._fail(position, f"a member of {size} bytes, and the file ends after {self._size - payload}: cut")

    def _extended_name(self, kind: bytes, position: int, size: int) -> str:
        """The name in an extended header, of the next member (long name, pax) or of all (global pax); "" for none."""
        self._check_whole(position + BLOCK, size, position)
        if size > _MAX_EXTENDED:
            self._fail(position, f"an extended header of {size} bytes")
        data = self._read(position + BLOCK, size)
        if kind == b"L":
            return self._text(data.removesuffix(b"\0"), position)
        path = self._pax_path(data, position)
        if kind == b"g" and path:
            self._fail(position, "a global pax header that names a member")
        return path

    def _name(self, block: bytes, given: dict[bytes, str], position: int) -> str:
        if names := {name for name in given.values() if name} if given else None:
            if len(names) > 1:
                self._fail(position, f"two names for one member: {sorted(names)}")
            return names.pop()
        name = self._text(block[:100].split(b"\0")[0], position)
        # The prefix exists only in POSIX headers; GNU headers keep times in these bytes.
        prefix = block[345:500].split(b"\0")[0] if block[257:263] == b"ustar\0" else b""
        return f"{self._text(prefix, position)}/{name}" if prefix else name

    def _checked(self, block: bytes, position: int) -> tuple[bytes, int]:
        """Type and payload size of a header block, whose checksum and magic are checked."""
        field = _OCTAL.fullmatch(block[148:156])
        rest = (block[:148] + b" " * 8 + block[156:]).translate(None, b"\0")  # zeros, most of a header, add nothing
        beyond = -1 if field is None else sum(rest) - int(field[1], 8)
        if beyond and beyond != 256 * len(rest.translate(None, _ASCII)):  # old tars summed signed bytes
            self._fail(position, "header checksum does not match: damaged, or not a tar")
        if block[257:265] not in (b"ustar\x0000", b"ustar  \0", bytes(8)):
            self._fail(position, f"not a tar header: magic {block[257:265]!r}")
        size = block[124:136]
        if octal := _OCTAL.fullmatch(size):
            return block[156:157], int(octal[1], 8)
        if size[0] == 0xFF:
            self._fail(position, "a negative size")
        if size[0] != 0x80:
            self._fail(position, f"size field {size!r} is no number")
        return block[156:157], int.from_bytes(size[1:], "big")  # `_check_whole` refuses a size larger than the file

    def _pax_path(self, data: bytes, position: int) -> str:
        """The "path" of pax records ("LENGTH KEY=VALUE\\n"; LENGTH counts its own digits), or ""."""
        path, at = "", 0
        while at < len(data):
            length = _PAX_RECORD.match(data, at)
            record = data[length.end() : at + int(length[1])] if length else b""
            key, equals, value = record.partition(b"=")
            if not length or not equals or not value.endswith(b"\n") or at + int(length[1]) > len(data):
                self._fail(position, "pax records do not parse")
            at += int(length[1])
            if key == b"size":
                self._fail(position, f"a pax record that overrides the size: {value[:-1][:40]!r}")
            if key.startswith(b"GNU.sparse") or key == b"SCHILY.realsize":
                self._fail(position, "a sparse file (pax)")
            if key == b"path":
                path = self._text(value[:-1], position)
        return path

    def _text(self, data: bytes, position: int) -> str:
        if not data or b"\0" in data:
            self._fail(position, f"a name that is empty or holds a NUL: {data[:40]!r}")
        return data.decode("utf-8", "backslashreplace")

    def _check_end(self, position: int) -> None:
        """Check that a second zero block follows, and only zeros: writers fill a tar up to a record size."""
        if self._read(position + BLOCK, BLOCK) != bytes(BLOCK):
            self._fail(position, "a lone zero block where two must end the tar: cut or damaged")
        at = position + 2 * BLOCK
        while chunk := self._read(at, 1 << 20):
            if tail := chunk.lstrip(b"\0"):
                at += len(chunk) - len(tail)
                self._fail(
                    at, "data behind the end blocks, which other readers never see: concatenated tars, or damage"
                )
            at += len(chunk)
            if at - position > MAX_PADDING:
                self._fail(at, f"more than {MAX_PADDING:,} bytes of zeros behind the end blocks")

    def _block(self, position: int) -> bytes:
        block = self._read(position, BLOCK)
        if position == 0:
            for start, what, remedy in _OTHER_FILES:
                if start.match(block):
                    raise DamagedShard(f"shard '{self._shard}': {what}", remedy)
        if not block:
            self._fail(position, "the file ends without end blocks: cut")
        if len(block) < BLOCK:
            self._fail(position, f"the file ends after {len(block)} bytes of a header: cut")
        return block

    def _read(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        return self._file.read(size)

    def _fail(self, position: int, what: str) -> NoReturn:
        raise DamagedShard(
            f"shard '{self._shard}', byte {position}: {what}",
            f"the last sample that is surely good ends at byte {self._sample[1]}: fetch or convert the shard again, or "
            "cut the file there and append 1,024 zero bytes",
            self._sample,
        )


_OTHER_FILES = tuple(
    (re.compile(start), what, remedy)
    for start, what, remedy in (
        (
            rb"(?i:\s*(\xef\xbb\xbf)?\s*<(!doctype html|html|head|script))",
            "is an HTML page, not a tar: a page of login or of an error was saved in its place",
            "open its URL in a browser, and fetch it again with credentials",
        ),
        (
            rb'(?i:\s*(\xef\xbb\xbf)?\s*(<\?xml|\{"))',
            "is text, not a tar: a server's error was saved in its place",
            "read it, and fetch the shard again",
        ),
        (
            rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd",
            "compressed, which has no random access",
            "unpack it first",
        ),
        (rb"PK\x03\x04|PAR1", "is a ZIP archive or a Parquet table, not a tar", "use `mmdata convert`"),
        (
            rb"version https://git-lfs",
            "is a pointer of Git LFS, not a tar",
            "fetch the file itself with `git lfs pull`",
        ),
    )
)
"""Files that are often found in a tar's place, by their first bytes; what they are, and the remedy."""
