"""What the files of a row were like when they were read, so that a later run notices those that have changed since.

No clock decides: a file whose size, times and inode are those that were seen is unchanged. Else its bytes are compared
by hash, so a copy of the corpus is the same corpus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mmdata.convert.sources.files import in_zip, read_member
from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import fast_hash
from mmdata.safe_read import open_regular, read_inside, spellings


class Stamp(NamedTuple):
    """Size, number of the inode, and times of the last change of content and of inode in nanoseconds."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int


class ReadSpan(NamedTuple):
    """Bytes of a file that were read, and their `fast_hash`."""

    offset: int
    length: int
    hash: int


class Seen:
    """The files that were read for a row, and those that could not be, by their paths as the corpus has them."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Stamp | None, list[ReadSpan]]] = {}

    def read(self, root: str, path: str, *, max_bytes: int) -> bytes:
        """See `read_inside`. Of files in a .zip nothing is noted: `digest_of_zip` stands for all of them."""
        if (place := in_zip(root)) is not None:
            return read_member(place, root, path, max_bytes=max_bytes)
        try:
            data, status = read_inside(root, path, max_bytes=max_bytes)
        except BadSample as bad:
            if bad.reason is not Reason.OUTSIDE_ROOT:  # nothing is asked about what lies there
                self._files[path] = _stamp_at(root, path), []
            raise
        self.note(path, status, 0, data)
        return data

    def note(self, path: str, status: os.stat_result, offset: int, data: bytes) -> None:
        """Note bytes that were read of a file."""
        _, spans = self._files.setdefault(path, (_stamp(status), []))
        spans.append(ReadSpan(offset, len(data), fast_hash(data)))

    def to_json(self) -> str:
        """The files, for `changed_file`; "" for none."""
        return json.dumps([[path, *file] for path, file in self._files.items()]) if self._files else ""


class ChangedFile(NamedTuple):
    """A file that is not what it was when it was read.

    Attributes:
        path: as the corpus has it.
        is_gone: whether there is none any more.
    """

    path: str
    is_gone: bool

    def __str__(self) -> str:
        return f"'{self.path}' {'is gone' if self.is_gone else 'has changed'}"


def changed_file(root: str, seen: str, *, now: dict[str, Stamp | None]) -> ChangedFile | None:
    """The first file of a row that is not what it was when it was read; None if all are.

    Args:
        root: folder of the corpus.
        seen: `Seen.to_json` of the row.
        now: what files are like that were looked at before; more are added.
    """
    files: list[tuple[str, list[int] | None, list[list[int]]]] = json.loads(seen)
    for path, stamp, spans in files:
        if path not in now:
            now[path] = _stamp_at(root, path)
        before, after = Stamp(*stamp) if stamp else None, now[path]
        if before != after and not _has_bytes(root, path, before, after, [ReadSpan(*span) for span in spans]):
            return ChangedFile(path, after is None)
    return None


def _has_bytes(root: str, path: str, before: Stamp | None, now: Stamp | None, spans: Sequence[ReadSpan]) -> bool:
    """Whether a file has the bytes that were read of it."""
    if before is None or now is None or before.size != now.size or not spans:
        return False
    with suppress(OSError, DataError), open(open_regular(_path_at(root, path)), "rb") as file:
        return all(_hash_at(file, span) == span.hash for span in spans)
    return False


def _hash_at(file: Any, span: ReadSpan) -> int:
    file.seek(span.offset)
    return fast_hash(file.read(span.length))


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _stamp_at(root: str, path: str) -> Stamp | None:
    with suppress(OSError, ValueError, BadSample):
        return _stamp(os.stat(_path_at(root, path)))
    return None


def _path_at(root: str, path: str) -> str:
    """The path of a file, in the spelling that exists as in `read_inside`; the first where none does."""
    written = list(spellings(root, path))
    return next(filter(os.path.exists, written), written[0])
