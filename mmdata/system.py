"""What not every system has: locks, flags and space of files, and reads at an offset. Each has a stand-in.

Linux has all of it, and macOS all but the space. On Windows a lock is of bytes of a file, and always of one holder; a
read moves the position of a file; and no process is started with an open pipe.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from threading import Lock
from typing import Any

IS_POSIX = hasattr(os, "fork")
"""Whether processes inherit pipes, and open files are renamed and removed: on all systems but Windows."""
BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags of `os.open` for bytes as they are, in a descriptor that no program inherits."""
LOCKED_BYTE = 2**30
"""Offset of the byte that is locked where a lock is of bytes: nobody else may read what is locked."""
ASK_AGAIN_S = 0.05
"""Pause between two requests for a lock, where the system does not wait."""
_position = Lock()


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock a file that was just opened, until it is closed; the kernel ends the lock with the process.

    Args:
        descriptor: of the file, open for writing.
        shared: whether others may hold the lock too, if all of them say so; on Windows they may not.
        wait: whether to wait while another one holds it.

    Raises:
        BlockingIOError: another process, or another descriptor of this one, holds the lock.
        OSError: the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        _lock_byte(descriptor, wait=wait)
    else:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _lock_byte(descriptor: int, *, wait: bool) -> None:
    msvcrt: Any = import_module("msvcrt")
    os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
    try:
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                break
            except PermissionError as error:
                if not wait:
                    raise BlockingIOError("another process holds the lock") from error
            time.sleep(ASK_AGAIN_S)
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def reserve(descriptor: int, size: int) -> None:
    """Grow a file to a size, and take the disk space now.

    A later store to a mapped page that finds none would kill the process (SIGBUS). Where the system cannot take it, the
    size alone is set.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _read_at(descriptor: int, size: int, offset: int) -> bytes:
    with _position:  # one thread moves the position
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


read_at = getattr(os, "pread", _read_at)
"""`os.pread(descriptor, size, offset)`."""


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at an offset."""
    write, left = getattr(os, "pwrite", _write_at), memoryview(data)
    while left:
        count = write(descriptor, left, offset)
        left, offset = left[count:], offset + count


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer with what is at an offset; the number of bytes that came."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    data = read_at(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)
