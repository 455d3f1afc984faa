"""The files of a corpus: in folders, or in a .zip, which is read in place as the folder that it would unpack to.

A path may lead through a .zip: "photos.zip/cats/1.jpg". Listings have one order on any file system.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mmdata import safe_read
from mmdata.convert.sources.zipped import SUFFIX, Zip, ZippedFile, open_zip
from mmdata.errors import BadSample, DataError, Reason

MAX_HELD_BYTES = 2**30
"""Largest table in a .zip, which is held in memory."""
PARTS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing"))
"""Names of folders that are parts of a corpus, not classes."""
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class FolderEntry:
    """A file or folder in a folder.

    Attributes:
        name: without its folder.
        is_folder: also of a link to a folder; False for a link that leads nowhere, or back to itself.
        is_link: whether it is a symbolic link.
        stamp: the size of a file, of what a link leads to; in a .zip also its CRC. "" for folders and hidden files.
    """

    name: str
    is_folder: bool
    is_link: bool
    stamp: str

    @property
    def is_hidden(self) -> bool:
        """Whether the user has not put it there: a name with a dot before it, or what macOS adds to archives."""
        return is_hidden(self.name)


class InZip(NamedTuple):
    """A place in an archive; `below` is the path in it, "" for the whole."""

    archive: Zip
    below: str


def is_hidden(name: str) -> bool:
    """See `Entry.is_hidden`."""
    return (name.startswith(".") and "/" not in name) or name == "__MACOSX"  # "../a.jpg" is the name of a bad member


def in_zip(path: _Path) -> InZip | None:
    """The archive that a path is, or leads through; None for other paths.

    Raises:
        DataError: the archive cannot be read.
    """
    path = os.fspath(path)
    if SUFFIX not in path.lower():
        return None
    parts = path.split(os.sep)
    for depth, part in enumerate(parts, 1):
        if part.lower().endswith(SUFFIX) and os.path.isfile(archive := os.sep.join(parts[:depth])):
            below = os.path.normpath(os.sep.join(parts[depth:])) if parts[depth:] else ""
            return InZip(open_zip(os.path.realpath(archive)), "" if below == "." else below)
    return None


def exists(path: _Path) -> bool:
    """Whether there is such a file or folder."""
    return os.path.exists(path) or is_file(path) or is_folder(path)


def is_folder(path: _Path) -> bool:
    """Whether a path is a folder, or a .zip."""
    if (place := in_zip(path)) is None:
        return os.path.isdir(path)
    return place.below in place.archive.folders


def is_file(path: _Path) -> bool:
    """Whether a path is a file, and no .zip."""
    if (place := in_zip(path)) is None:
        return os.path.isfile(path)
    return place.archive.find(place.below) is not None


def list_folder(folder: _Path) -> list[FolderEntry]:
    """All files and folders in a folder, sorted by name."""
    if (place := in_zip(folder)) is not None:
        found = sorted(place.archive.folders[place.below].items())
        return [_member_entry(name, member) for name, member in found]
    with os.scandir(folder) as entries:
        return sorted(map(_entry, entries), key=lambda entry: entry.name)


def names_in(folder: _Path) -> list[str]:
    """Names of all that is in a folder, sorted; none if there is no such folder."""
    if (place := in_zip(folder)) is not None:
        return sorted(place.archive.folders.get(place.below, ()))
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def folders_in(folder: _Path) -> list[str]:
    """Names of the folders in a folder, sorted. A .zip in it is a file, which is not looked into."""
    return [entry.name for entry in list_folder(folder) if entry.is_folder]


def check_file(path: Path, what: str) -> None:
    """Raise DataError for what is no regular file; see `check_regular`."""
    if not is_file(path):
        safe_read.check_regular(path, what)


def size_and_time(path: Path) -> tuple[int, int]:
    """Size of a file in bytes, and when it was written, in ns; of a member, when its archive was."""
    if (place := in_zip(path)) is not None and (member := place.archive.find(place.below)) is not None:
        return member.size, os.stat(place.archive.path).st_mtime_ns
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def open_file(path: Path) -> BinaryIO:
    """A file for reading.

    Raises:
        DataError: it is a member of an archive that is damaged, or too large to be held.
    """
    if (place := in_zip(path)) is None:
        return path.open("rb")
    try:
        return io.BytesIO(place.archive.read(place.below, max_bytes=MAX_HELD_BYTES))
    except BadSample as bad:
        raise DataError(f"'{path}': {bad.detail}; unpack the archive, and convert the folder") from bad


def read_member(place: InZip, root: str, path: str, *, max_bytes: int) -> bytes:
    """Read a file inside `root`, which is `place`; see `mmdata.safe_read.read_inside`."""
    return place.archive.read(_locate(place, root, path), max_bytes=max_bytes)


def glimpse_file(root: str, path: str) -> bytes:
    """Equal for equal files, and mostly different for different ones; see `mmdata.safe_read.glimpse_inside`."""
    if (place := in_zip(root)) is None:
        return safe_read.glimpse_inside(root, path)
    member = place.archive.find(_locate(place, root, path))
    return b"" if member is None else b"%d %d" % (member.size, member.crc)


def corpus_folder(path: Path) -> Path:
    """Where the corpus begins: in a .zip with nothing but one folder at its top it is that folder."""
    while in_zip(path) is not None and is_folder(path):
        there = [entry for entry in list_folder(path) if not entry.is_hidden]
        if len(there) != 1 or not there[0].is_folder or there[0].name.lower() in PARTS:
            break
        path = path / there[0].name
    return path


def digest_of_zip(root: str) -> dict[str, str]:
    """Of a root in an archive, what changes with any of its members; empty for a folder."""
    place = in_zip(root)
    return {} if place is None else {"zip_sha256": place.archive.digest}


def _locate(place: InZip, root: str, path: str) -> str:
    """The path in the archive of a file inside `root`, in the spelling that is there."""
    found: list[str] = []
    for written in safe_read.spellings(root, path):
        if not safe_read.is_inside(root, written):
            raise BadSample(Reason.OUTSIDE_ROOT, f"'{path}' leads out of the corpus's folder")
        found.append(os.path.normpath(os.path.join(place.below, os.path.relpath(written, root))))
    return next((one for one in found if place.archive.find(one) is not None), found[0])


def _entry(found: os.DirEntry[str]) -> FolderEntry:
    is_folder, stamp = False, ""
    with suppress(OSError):  # a link that leads nowhere, or back to itself, or what has vanished meanwhile
        is_folder = found.is_dir()
        if not is_folder and not is_hidden(found.name):
            stamp = f"{found.stat().st_size}"
    return FolderEntry(found.name, is_folder, found.is_symlink(), stamp)


def _member_entry(name: str, member: ZippedFile | None) -> FolderEntry:
    if member is None:
        return FolderEntry(name, is_folder=True, is_link=False, stamp="")
    return FolderEntry(name, is_folder=False, is_link=member.is_link, stamp=f"{member.size} {member.crc:08x}")
