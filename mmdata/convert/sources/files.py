"""The files of a corpus: in folders, or in a .zip, which is read in place as the folder that it would unpack to.

A path may lead through a .zip: "photos.zip/cats/1.jpg". Listings have one order on any file system.

`Seen` notes what the files of a row were like, so that a later run notices those that have changed. No clock decides:
a file whose size, times and inode are those that were seen is unchanged. Else its bytes are compared by hash, so a copy
of the corpus is the same corpus.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zipfile import ZipInfo

from mmdata import safe_read
from mmdata.errors import BadSample, DataError, Reason
from mmdata.hashing import fast_hash
from mmdata.safe_read import open_regular, read_inside, spellings
from mmdata.system import read_at

ZIP_SUFFIX = ".zip"
MAX_MEMBERS = 2**21
"""Most members of a .zip: each process holds their list in memory, which takes about 900 bytes each to make."""
MAX_HELD_BYTES = 2**30
"""Largest table in a .zip, which is held in memory."""
PARTS = frozenset(("train", "training", "val", "valid", "validation", "dev", "test", "testing"))
"""Names of folders that are parts of a corpus, not classes."""
_HEADER = struct.Struct("<4s22xHH")  # of a member of a .zip: its magic, and the lengths of two fields after it
_HEADER_MAGIC = b"PK\3\4"
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
    """See `FolderEntry.is_hidden`."""
    return (name.startswith(".") and "/" not in name) or name == "__MACOSX"  # "../a.jpg" is the name of a bad member


def in_zip(path: _Path) -> InZip | None:
    """The archive that a path is, or leads through; None for other paths.

    Raises:
        DataError: the archive cannot be read.
    """
    path = os.fspath(path)
    if ZIP_SUFFIX not in path.lower():
        return None
    parts = path.split(os.sep)
    for depth, part in enumerate(parts, 1):
        if part.lower().endswith(ZIP_SUFFIX) and os.path.isfile(archive := os.sep.join(parts[:depth])):
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
        return member.file_size, os.stat(place.archive.path).st_mtime_ns
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


def glimpse_file(root: str, path: str) -> bytes:
    """Equal for equal files, and mostly different for different ones; see `mmdata.safe_read.glimpse_inside`."""
    if (place := in_zip(root)) is None:
        return safe_read.glimpse_inside(root, path)
    member = place.archive.find(_locate(place, root, path))
    return b"" if member is None else b"%d %d" % (member.file_size, member.CRC)


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


def _member_entry(name: str, member: ZipInfo | None) -> FolderEntry:
    if member is None:
        return FolderEntry(name, is_folder=True, is_link=False, stamp="")
    stamp = f"{member.file_size} {member.CRC:08x}"
    return FolderEntry(name, is_folder=False, is_link=is_link(member), stamp=stamp)


class Zip:
    """The list of members of an archive. Each is read at random, from any process.

    A member is read up to the size that the list says, and must have its CRC. Names that lead out of the archive are
    listed as they are, for their reader to refuse.

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
        self.folders: dict[str, dict[str, ZipInfo | None]] = {"": {}}
        digest = hashlib.sha256()
        for name, member in sorted(self._members(), key=lambda named: named[0]):
            digest.update(f"{name}\0{member.file_size} {member.CRC}\n".encode("utf-8", "surrogateescape"))
            self._add(name, member)
        self.digest = digest.hexdigest()

    def find(self, path: str) -> ZipInfo | None:
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
        if is_link(member):
            raise BadSample(Reason.NOT_A_FILE, f"'{path}' is a link in a zip, which is not followed")
        size = member.file_size
        if size > max_bytes:
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"'{path}' has {size} bytes; the limit is {max_bytes}")
        if member.compress_type not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
            kind = f"method {member.compress_type} of zip"
            raise BadSample(
                Reason.UNSUPPORTED_FORMAT, f"'{path}' is packed by {kind}, which is not read; unpack the archive"
            )
        with open(self.path, "rb") as file, suppress(zipfile.BadZipFile, zlib.error, EOFError):
            # Not ZipFile.open: it seeks in a file that processes share.
            file.seek(member.header_offset)
            magic, *lengths = _HEADER.unpack(file.read(_HEADER.size).ljust(_HEADER.size))
            file.seek(sum(lengths), os.SEEK_CUR)
            data = zipfile.ZipExtFile(file, "r", member).read(size + 1)
            if magic == _HEADER_MAGIC and len(data) == size:
                return data
        raise BadSample(Reason.CORRUPT_IMAGE, f"'{path}' is damaged in the zip: its bytes do not have its CRC")

    def _members(self) -> Iterator[tuple[str, ZipInfo]]:
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
            yield info.filename.replace("\\", "/"), info

    def _add(self, name: str, member: ZipInfo) -> None:
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


def is_link(member: ZipInfo) -> bool:
    """Whether a member of an archive is a symbolic link."""
    return stat.S_ISLNK(member.external_attr >> 16)


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
            return place.archive.read(_locate(place, root, path), max_bytes=max_bytes)
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
        descriptor = file.fileno()
        return all(fast_hash(read_at(descriptor, span.length, span.offset)) == span.hash for span in spans)
    return False


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
