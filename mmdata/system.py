"""What not every system has: locks of files, reads at an offset, forks. Each is asked for, and has a stand-in.

Linux and macOS have all but memory files, which are of Linux. On Windows a lock is of one byte, far behind the end of a
file, and always of one holder; a read moves the position of a file; no process is started with an open pipe.
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
    """Lock an open file until it is closed; the kernel ends the lock with the process.

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
        while not _lock_byte(descriptor, "LK_NBLCK"):
            if not wait:
                raise BlockingIOError("the lock is held by another process") from None
            time.sleep(ASK_AGAIN_S)
    else:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def unlock_file(descriptor: int) -> None:
    """Release the lock of an open file, also of those that a forked child has inherited."""
    try:
        import fcntl
    except ImportError:
        _lock_byte(descriptor, "LK_UNLCK")
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock_byte(descriptor: int, action: str) -> bool:
    """Whether Windows' own function could do it; the position in the file stays."""
    msvcrt: Any = import_module("msvcrt")
    with _position:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, getattr(msvcrt, action), 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)
    return True


def _read_at(descriptor: int, size: int, offset: int) -> bytes:
    with _position:  # one thread moves the position
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def _write_at(descriptor: int, data: bytes, offset: int) -> int:
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def _read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    data = read_at(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def _preadv(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


read_at = getattr(os, "pread", _read_at)
"""`os.pread(descriptor, size, offset)`."""
write_at = getattr(os, "pwrite", _write_at)
"""`os.pwrite(descriptor, data, offset)`."""
read_into = _preadv if hasattr(os, "preadv") else _read_into
"""Fills a buffer with what is at an offset: `read_into(descriptor, buffer, offset)` gives the number of bytes."""


def at_fork(**calls: Any) -> None:
    """`os.register_at_fork`, where processes can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)
