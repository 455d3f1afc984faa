"""Reads a damaged tar from front to back. Each byte belongs to a member that is kept or dropped, or is skipped.

A member is taken only by a header whose checksum and magic are right. Where a header is expected and there is none, the
next one is searched at every byte. Payloads have no checksum: whether they are damaged, this reader does not know.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import BinaryIO

from mmdata.errors import DamagedShard
from mmdata.repair.accounts import Dropped
from mmdata.repair.search import find_header, is_tar_start, read_at, swallowed_header, zeros_end
from mmdata.tars.tar import BLOCK, END, MAX_PADDING, Member, header_fields, padding, read_members_from

_EXTENDED = (b"L", b"K", b"x", b"g")
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_PAYLOAD = (b"1", b"2", b"3", b"4", b"6")
"""Links, devices and FIFOs: some writers give a hard link the size of its file, and no payload."""
_NAME_RECORD = re.compile(rb"[0-9]+ path=[^\n]*\n(?:[0-9]+ [^\n]*\n)*\0*\Z")
"""The end of pax records with a name, and the zeros behind them."""
_LOOK_BEHIND = 4 * BLOCK
"""Bytes before a header that was found by searching, in which the end of its long name is looked for."""


@dataclass(frozen=True)
class Skipped:
    """Bytes of a tar that belong to no member.

    Attributes:
        offset, size: in bytes.
        what: the damage, in words.
    """

    offset: int
    size: int
    what: str


@dataclass(frozen=True)
class Lost:
    """A member whose header was read and which cannot be kept.

    Attributes:
        name: as its own header says.
        offset: of its first header, in bytes.
        reason, detail: why.
        is_named: whether the name is surely the member's; another header may give it one.
    """

    name: str
    offset: int
    reason: Dropped
    detail: str
    is_named: bool = True


@dataclass
class Salvaged:
    """What a tar holds.

    Attributes:
        members: in the tar's order.
        lost: members that cannot be kept, in the tar's order.
        skipped: bytes that belong to no member, in the tar's order; the zeros that end a tar are not skipped.
        has_end: whether the two zero blocks end the tar.
    """

    members: list[Member] = field(default_factory=list[Member])
    lost: list[Lost] = field(default_factory=list[Lost])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    has_end: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether no damage was found. A name that comes twice, or a key that comes back, is none."""
        return self.has_end and not self.lost and not self.skipped


def salvage(file: BinaryIO, *, name: str) -> Salvaged:
    """Read a tar to its end, whatever stands in it.

    Args:
        file: seekable.
        name: of the tar, for messages.
    """
    return _Salvage(file, name).read()


class _Salvage:
    """One pass over a tar."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._size = file.seek(0, os.SEEK_END)
        self._found = Salvaged()
        self._searched = False  # whether the next header was found by searching

    def read(self) -> Salvaged:
        position = 0
        while position < self._size:
            position = self._next(position)
        return self._found

    def _next(self, position: int) -> int:
        """Read what stands at an offset; returns the offset behind it."""
        block = read_at(self._file, position, BLOCK)
        if not block.strip(b"\0"):
            return self._zeros(position)
        fields = header_fields(block)
        if fields is None:
            return self._no_header(position)
        kind, size = fields
        following = position + BLOCK + size + -size % BLOCK
        if kind == b"5" and not size:  # a directory
            self._searched = False
            return following
        try:
            member = next(read_members_from(self._file, position, name=self._name), None)
        except DamagedShard as error:
            return self._refused(position, kind, following, error.what)
        if member is None:  # a directory of an old tar, before zeros
            return following
        return self._member(member)

    def _member(self, member: Member) -> int:
        """Keep a member, unless a later header stands in its payload; returns the offset of the next header."""
        following = member.offset + member.size + len(padding(member.size))
        searched, self._searched = self._searched, False
        found = swallowed_header(self._file, member, following, self._size)
        if found is not None:
            self._lose(member.name, member.start, Dropped.CUT, f"the header at byte {found} stands in its payload")
            self._searched = True
            return found
        if searched and (why := self._has_lost_name(member)):
            self._lose(member.name, member.start, Dropped.NAME_LOST, why, is_named=False)
        else:
            self._found.members.append(member)
        return following

    def _has_lost_name(self, member: Member) -> str:
        """Why the name of a member behind damage may not be its own: a header before its own gave it; "" if it is."""
        if read_at(self._file, member.start + 156, 1) in _EXTENDED:
            return ""
        field = read_at(self._file, member.start, 100)
        before = read_at(self._file, max(0, member.start - _LOOK_BEHIND), min(member.start, _LOOK_BEHIND))
        if b"\0" not in field:
            return "its header holds the first 100 bytes of a name, and the header with the whole name is damaged"
        if b"?" in field or _NAME_RECORD.search(before):
            return "the header with its name is damaged"
        return ""

    def _zeros(self, position: int) -> int:
        """Zeros are the end of the tar if only zeros follow."""
        end = zeros_end(self._file, position, self._size)
        if end == self._size:
            self._found.has_end = len(END) <= end - position <= MAX_PADDING
            return end
        self._skip(position, end, "zeros, and a header follows: damage, or a tar behind the end of another")
        self._searched = True
        return end

    def _no_header(self, position: int) -> int:
        found = find_header(self._file, position, self._size)
        end = self._size if found is None else found
        self._skip(position, end, "no header" if found is not None else "no header, to the end of the file")
        self._searched = True
        return end

    def _refused(self, position: int, kind: bytes, following: int, what: str) -> int:
        """A header that is whole, and of which the strict reader takes no member."""
        what = what.split(": ", 1)[-1]
        start = position
        while kind in _EXTENDED and following < self._size:
            # The headers of one member: the last one is that of the member itself, whose name is in those before it.
            position = following
            fields = header_fields(read_at(self._file, position, BLOCK))
            if fields is None:
                self._skip(start, position, f"extended header without its member: {what}")
                self._searched = True
                return position
            kind, size = fields
            following = position + BLOCK + size + -size % BLOCK
        if kind in _EXTENDED or following > self._size:
            self._lose(self._name_at(position), start, Dropped.CUT, what, is_named=start == position)
            if is_tar_start(self._file, position + BLOCK, following - position - BLOCK):
                return self._size
            # Where a part of the payload is missing, other members follow before the file ends.
            found = find_header(self._file, position + BLOCK, self._size)
            self._searched = True
            return self._size if found is None else found
        is_file = kind in _REGULAR
        reason = Dropped.REFUSED if is_file else Dropped.NOT_A_FILE
        self._lose(self._name_at(position), start, reason, what, is_named=start == position)
        return position + BLOCK if kind in _WITHOUT_PAYLOAD else following

    def _name_at(self, position: int) -> str:
        return read_at(self._file, position, 100).split(b"\0")[0].decode("utf-8", "backslashreplace")

    def _lose(self, name: str, offset: int, reason: Dropped, detail: str, *, is_named: bool = True) -> None:
        self._found.lost.append(Lost(name, offset, reason, detail, is_named))

    def _skip(self, start: int, end: int, what: str) -> None:
        """Count bytes as skipped, together with those directly before them."""
        last = self._found.skipped[-1] if self._found.skipped else None
        if last is not None and last.offset + last.size == start:
            self._found.skipped[-1] = Skipped(last.offset, last.size + end - start, last.what)
        else:
            self._found.skipped.append(Skipped(start, end - start, what))
