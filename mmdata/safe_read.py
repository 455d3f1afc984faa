"""Reads files whose names come from data. Opens only regular files, and only inside the corpus's root folder."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from mmdata.errors import BadSample, ConfigError, DataError, Reason, nearest
from mmdata.system import BINARY

ATTEMPTS = 3
"""How often a file that changes while it is read is read again before its row is quarantined."""
GLIMPSE_BYTES = 4096

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}


def path_of_url(name: str) -> str | None:
    """The path in a `file:` URL, with or without slashes before it; None for any other name.

    `path_of_url("file:/a/b") == path_of_url("file:///a/b") == "/a/b"`; `path_of_url("file:a/b") == "a/b"`.

    Raises:
        ConfigError: the URL names a host, or no path.
    """
    if name[:5].lower() != "file:":
        return None
    path = name[5:]
    if path.startswith("//"):
        host, slash, below = path[2:].partition("/")
        if host not in ("", "localhost"):
            raise ConfigError(
                f"'{name}': '{host}' is a host here, and file: URLs name files of this machine; write "
                f"file:///{host}{slash}{below}, or file:{host}{slash}{below} for a path below the current folder"
            )
        path = slash + below
    if not path:
        raise ConfigError(f"'{name}': a file: URL without a path; write file:/folder/name")
    return path if os.path.exists(path) else unquote(path)


def check_exists(path: Path, of: str) -> None:
    """Raise ConfigError, with the nearest name in its folder, if there is no such file; `of`: name of the setting."""
    if path.exists():
        return
    near = nearest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else None
    meant = f"; did you mean '{path.parent / near}'?" if near else ""
    raise ConfigError(f"{of}: '{path}': no such file{meant}")


def check_regular(path: str | os.PathLike[str], what: str = "file") -> None:
    """Check that a file is regular without opening it: opening a FIFO waits for a writer, and a device may do anything.

    Args:
        path: of the file.
        what: the word for the file in messages, such as "shard".

    Raises:
        DataError: it is a folder, FIFO, socket or device.
        OSError: the file does not exist.
    """
    _check_mode(os.stat(path).st_mode, path, what)


def open_regular(path: str | os.PathLike[str], what: str = "file", *, flags: int = 0) -> int:
    """A descriptor of a regular file, which the caller closes; see `check_regular`. `flags` are those of `os.open`."""
    check_regular(path, what)
    # The file may have been replaced since the check: NONBLOCK does not wait in a FIFO, and the check is repeated.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | BINARY | flags)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path, what)
    except DataError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], what: str = "file") -> bytes:
    """The bytes of a regular file; see `check_regular`."""
    with open(open_regular(path, what), "rb") as file:
        return file.read()


def _check_mode(mode: int, path: str | os.PathLike[str], what: str) -> None:
    if not stat.S_ISREG(mode):
        remedy = "; write what comes out of it to a file first" if stat.S_ISFIFO(mode) else ""
        raise DataError(
            f"{what} '{os.fspath(path)}': is a {_kind(mode)}, and only regular files are read; it was not opened"
            f"{remedy}"
        )


def read_inside(root: str, path: str, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """The bytes and the status of a regular file inside `root`.

    A link in `root` may lead out of it: who made the corpus has put it there.

    Args:
        root: real path of the corpus's folder.
        path: as the corpus gives it, relative to root or absolute; its NFC and NFD spellings are tried too. A path that
            leaves root by itself, through ".." or as an absolute one, is refused.
        max_bytes: a larger file is refused unread.

    Raises:
        BadSample: the file does not exist, is outside the root, not regular, too large, or changed while it was read.
        OSError: the system failed, not the data: too many open files, an I/O error.
    """
    real = locate(root, path)
    for _ in range(ATTEMPTS):
        try:
            before = os.stat(real)
        except OSError as error:  # removed since `locate` found it
            raise _absent(error, path) from error
        if before.st_size > max_bytes:
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{path}' has {before.st_size} bytes; the limit is {max_bytes}")
        with _open(real, path) as file:
            # Not more: as much memory is taken before a byte is read.
            data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
            after = os.fstat(file.fileno())
        if _identity(before) == _identity(after) and len(data) == after.st_size:
            return data, after
    raise BadSample(Reason.FILE_CHANGED, f"'{path}' changed while it was read, {ATTEMPTS} times")


def glimpse_inside(root: str, path: str) -> bytes:
    """The size of a file and its last GLIMPSE_BYTES: equal for equal files, and mostly different for different ones.

    Raises:
        BadSample, OSError: as `read_inside`.
    """
    real = locate(root, path)
    with _open(real, path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - GLIMPSE_BYTES))
        return b"%d " % size + file.read(GLIMPSE_BYTES)


def locate(root: str, path: str) -> str:
    """The real path of a file; see `read_inside`."""
    failure: OSError | ValueError | None = None
    for written in spellings(root, path):
        try:
            real = os.path.realpath(written, strict=True)
        except (OSError, ValueError) as error:  # ValueError: the name cannot be encoded
            failure = failure or error
            continue
        # An absolute path may name the root by a link to it.
        if not (is_inside(root, written) or is_inside(root, real)):
            raise BadSample(Reason.OUTSIDE_ROOT, f"'{path}' leads out of the corpus's folder")
        return real
    assert failure is not None
    raise _absent(failure, path)


def spellings(root: str, path: str) -> Iterator[str]:
    """What a path may mean, as it is written: in `root`, or an absolute path of anywhere.

    Raises:
        BadSample: it is no path, or leads out of `root`.
    """
    if not path or "\0" in path:
        raise BadSample(Reason.MISSING_IMAGE, f"no usable path: {path!r}")
    if "://" in path:
        raise BadSample(Reason.MISSING_IMAGE, f"'{path}' is a URL; fetch the files first and give their paths")
    for spelling in dict.fromkeys((path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path))):
        written = os.path.normpath(os.path.join(root, spelling))  # ".." undoes what is written before it, also a link
        if not is_inside(root, written) and not os.path.isabs(spelling):
            raise BadSample(Reason.OUTSIDE_ROOT, f"'{path}' leads out of the corpus's folder")
        yield written


def _absent(error: OSError | ValueError, path: str) -> BadSample | OSError:
    if isinstance(error, ValueError):
        return BadSample(Reason.MISSING_IMAGE, f"{path!r} cannot be a file name: {error}")
    if error.errno == errno.ELOOP:
        return BadSample(Reason.NOT_A_FILE, f"'{path}' is a link that leads back to itself")
    if error.errno in _ABSENT:
        return BadSample(Reason.MISSING_IMAGE, f"'{path}': {error.strerror}")
    return error


def _open(real: str, path: str) -> BinaryIO:
    """The file at a real path; NOFOLLOW: a link may have taken its place since it was found."""
    try:
        return open(open_regular(real, flags=getattr(os, "O_NOFOLLOW", 0)), "rb")
    except DataError as error:
        raise BadSample(Reason.NOT_A_FILE, f"'{path}' is no regular file, and was not opened") from error
    except OSError as error:
        raise _absent(error, path) from error


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_inside(root: str, path: str) -> bool:
    """Whether a path is a folder, or in it, as they are written."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _kind(mode: int) -> str:
    names = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"))
    return next((name for test, name in names if test(mode)), "device")
