"""Writes files that are whole or absent: written under another name, synced, renamed. A folder may have one writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from mmdata.errors import DataError

LOCK_NAME = ".mmdata.lock"


def write_whole(path: str | os.PathLike[str], data: bytes | memoryview | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a kill at any moment leaves the old file or the new one, never a part.

    The content is first written into the same folder, under a hidden name that the next write of the file reuses.

    Args:
        path: the file.
        data: its content, or a function that writes its content into an open file.

    Raises:
        OSError: the disk is full or read-only; the old file is untouched, and no part of the new one is left.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.part")
    try:
        with naming(target), aside.open("wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (aside, os.fspath(aside)):
            error.filename, error.filename2 = os.fspath(target), None  # the caller does not know the hidden name
        with suppress(OSError):  # the folder cannot be written; the first error is the one to raise
            aside.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Add the name of the file that is being written to an OSError without a name.

    Python names the file in errors of open(), but not in errors of write, flush and fsync, which report a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_json_lines(path: str | os.PathLike[str], needs: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    """The lines of a file that a run or a conversion appends to, oldest first; none without the file.

    A last line that a kill cut short is left out.

    Args:
        path: of the file.
        needs: keys that each line has, and the types of their values.

    Raises:
        DataError: another line is not a JSON object with these keys.
    """
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where, remedy = f"'{os.fspath(path)}', line {number}", "delete the line to go on"
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(f"{where}: not JSON: {error}; {remedy}") from error
            if wrong := _what_lacks(entry, needs):
                raise DataError(f"{where}: {wrong}; {remedy}")
            yield entry


def append_json_line(path: str | os.PathLike[str], entry: Mapping[str, Any]) -> None:
    """Append a line that `read_json_lines` reads; it takes the place of a last one that a kill cut short."""
    with open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(entry).encode() + b"\n")


def _what_lacks(entry: Any, needs: Mapping[str, type]) -> str:
    """Why a value is no entry; "" if it is one."""
    if not isinstance(entry, dict):
        return f"expected a JSON object, got a {type(entry).__name__}"
    found = cast("dict[str, Any]", entry)
    lacking = [f"'{name}' ({kind.__name__})" for name, kind in needs.items() if not isinstance(found.get(name), kind)]
    return f"no {' and no '.join(lacking)} in it" if lacking else ""


def explain(error: OSError) -> str:
    """One sentence for an error of the system: the file, what happened, and the remedy.

    Example:
        'out/000001.tar': no space left on device; free some space or choose another disk, then run this again
    """
    if error.errno is None or not error.strerror:  # raised by a library, with a message of its own
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    where = " to ".join(f"'{name}'" for name in names)
    reason = f"{error.strerror[:1].lower()}{error.strerror[1:]}"
    remedy = _REMEDIES.get(error.errno, "")
    return ": ".join(filter(None, (where, "; ".join(filter(None, (reason, remedy))))))


_WRITABLE = "choose a folder that this user may write, or change its permissions"
_REMEDIES = {
    errno.ENOSPC: "free some space or choose another disk, then run this again",
    errno.EDQUOT: "this user's quota is used up: free some space or choose another disk, then run this again",
    errno.EFBIG: "the file system, or `ulimit -f`, allows no larger file: raise the limit or choose another disk",
    errno.EROFS: "choose a folder on a disk that can be written, or mount this one for writing",
    errno.EACCES: "this user has no permission: choose another path, or change its permissions",
    errno.EPERM: _WRITABLE,
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EISDIR: "a file is expected there, and it is a folder: choose another path",
    errno.EEXIST: "something is there already: choose another path, or move it away",
    errno.ENOTEMPTY: "the folder is not empty: choose another path, or move its files away",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "links lead in a circle: choose another path",
    errno.EXDEV: "it is moved to another disk: choose folders of one disk",
    errno.EMFILE: "too many files are open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open: end other programs",
    errno.ENOMEM: "memory is used up: end other programs, or ask for less",
    errno.EIO: "the disk or network failed: check it (`dmesg`), then run this again",
    errno.ESTALE: "the network file system lost the file: mount it again, then run this again",
    errno.ETXTBSY: "another program runs this file: end it first",
}


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk: without this a power cut may undo a rename."""
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class HeldElsewhere(DataError):
    """Another process, or another writer in this process, holds a folder.

    Attributes:
        by: who holds it, "process 4711 on host 'a'"; "" if the lock's file does not say so.
    """

    def __init__(self, folder: Path, by: str) -> None:
        held_by = f" ({by})" if by else ""
        super().__init__(
            f"folder '{folder}': another process is writing here{held_by}; wait for it or choose another folder"
        )
        self.by = by


_LOCKED: set[BinaryIO] = set()
"""Files of the locks that this process holds."""


def _close_in_child() -> None:
    """A forked process shares the lock, and would keep it after the death of the one that took it."""
    for file in _LOCKED:
        file.close()  # not its descriptor alone: the object would close it again, when it may be another file's
    _LOCKED.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock(
    folder: Path, *, signed: bool = False, shared: bool = False, wait: bool = False
) -> Generator[None, None, None]:
    """Hold `folder` as its only writer; the kernel releases the lock when the process ends, even if it is killed.

    Args:
        folder: that is written.
        signed: the lock's file says which process holds it. Else it is empty, as a folder that is the same bytes on
            every machine needs it.
        shared: whether others may hold it too, if all of them say so.
        wait: whether to wait while another process holds it.

    Raises:
        HeldElsewhere: another process, or another writer in this process, holds the folder.
        OSError: the folder cannot be written, or its file system has no locks.
    """
    path = folder / LOCK_NAME
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise HeldElsewhere(folder, file.read(200).decode(errors="replace").strip()) from None
        if signed:
            with suppress(OSError):  # a full disk: the lock holds, and only the name is missing
                file.truncate(0)
                file.write(f"process {os.getpid()} on host '{socket.gethostname()}'\n".encode())
                file.flush()
        _LOCKED.add(file)
        try:
            yield
        finally:
            _LOCKED.discard(file)
