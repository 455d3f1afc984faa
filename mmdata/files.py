"""Files and folders that are whole or absent: written under another name, synced, renamed; a folder has one writer."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from mmdata.errors import DataError
from mmdata.processes import held
from mmdata.system import BINARY, IS_POSIX, lock_file

LOCK_NAME = ".mmdata.lock"
OLD_NAME = ".old"
SHIPPED = Path(__file__).parent / "_shipped"


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
            end_file(file)
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


def end_file(file: BinaryIO) -> None:
    """Put a file that was written on disk, and close it."""
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())
        file.close()


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


def _what_lacks(entry: Any, needs: Mapping[str, type]) -> str:
    """Why a value is no entry; "" if it is one."""
    if not isinstance(entry, dict):
        return f"expected a JSON object, got a {type(entry).__name__}"
    found = cast("dict[str, Any]", entry)
    lacking = [f"'{name}' ({kind.__name__})" for name, kind in needs.items() if not isinstance(found.get(name), kind)]
    return f"no {' and no '.join(lacking)} in it" if lacking else ""


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk: without this a power cut may undo a rename. Windows does so by itself."""
    if not IS_POSIX:
        return
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


@contextmanager
def lock(
    folder: Path, *, signed: bool = False, shared: bool = False, wait: bool = False
) -> Generator[None, None, None]:
    """Hold `folder` as its only writer; the kernel releases the lock when the process ends, even if it is killed.

    Args:
        folder: that is written.
        signed: the lock's file says which process holds it. Else it is empty, as a folder that is the same bytes on
            every machine needs it.
        shared: whether others may hold it too, if all of them say so; on Windows they may not.
        wait: whether to wait while another process holds it.

    Raises:
        HeldElsewhere: another process, or another writer in this process, holds the folder.
        OSError: the folder cannot be written, or its file system has no locks.
    """
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
    held.add(descriptor)
    try:
        try:
            lock_file(descriptor, shared=shared, wait=wait)
        except BlockingIOError:
            raise HeldElsewhere(folder, os.read(descriptor, 200).decode(errors="replace").strip()) from None
        if signed:
            with suppress(OSError):  # a full disk: the lock holds, and only the name is missing
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on host '{socket.gethostname()}'\n".encode())
        yield
    finally:
        if descriptor in held:  # not in a forked child, which has closed it
            held.discard(descriptor)
            os.close(descriptor)


class Staged:
    """What a folder will hold, while it is made in a hidden folder inside it.

    One file, `last`, says what else belongs to it. It is withdrawn first and published last, so the folder has the old
    content, none, or the new one at any moment. What a kill has stopped is finished with `publish`. Only who holds the
    `lock` of the folder may call a method.

    Args:
        folder: where it is published; it may hold files of others.
        new: where it is made, with the same paths as in `folder`. Names that begin with a dot are not published.
        last: path of a file in a sub-folder, relative to either.
        names: of a folder with that file, the paths of all else that is published, found by that file alone.

    Attributes:
        folder, new: as given.
        old: has the file `last` of the content that is being withdrawn.
    """

    def __init__(self, folder: Path, new: Path, *, last: str, names: Callable[[Path], Iterable[str]]) -> None:
        self.folder, self.new, self.old = folder, new, new / OLD_NAME
        self._last, self._names = last, names

    @property
    def is_whole(self) -> bool:
        """Whether everything was made, and is only to be moved."""
        return (self.new / self._last).is_file()

    def withdraw(self) -> None:
        """Remove what is published now. It may be killed at any point and repeated."""
        published, kept = self.folder / self._last, self.old / self._last
        if published.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.replace(published, kept)  # not removed yet: after a kill it still says what to remove
            sync_folder(kept.parent)
            sync_folder(published.parent)
        if kept.is_file():
            for name in self._names(self.old):
                remove(self.folder / name)
            if published.parent.is_dir():
                sync_folder(published.parent)
            sync_folder(self.folder)
            kept.unlink()
            sync_folder(kept.parent)

    def publish(self) -> None:
        """Withdraw what is published, and move all into place. It may be killed at any point and repeated."""
        assert self.is_whole
        self.withdraw()
        inner = (self.folder / self._last).parent
        inner.mkdir(exist_ok=True)
        for name in sorted(self._made()):
            source, target = self.new / name, self.folder / name
            if target.is_dir() and source.is_dir() and not source.is_symlink():
                shutil.rmtree(target)
            os.replace(source, target)
        sync_folder(inner)
        sync_folder(self.folder)
        os.replace(self.new / self._last, self.folder / self._last)
        sync_folder(inner)

    def _made(self) -> Iterable[str]:
        """Paths of what is published, but for the last one."""
        inner = Path(self._last).parent
        names = [name for name in os.listdir(self.new) if not name.startswith(".") and name != str(inner)]
        names += [(inner / name).as_posix() for name in os.listdir(self.new / inner)]
        return [name for name in names if name != self._last]


@contextmanager
def whole_folder(folder: Path) -> Generator[Path, None, None]:
    """An empty folder, which takes its place when the block ends, unless the block fails or removes it.

    Args:
        folder: the place; an empty folder may be there, or none. What a killed run has left beside it is removed.
    """
    aside = folder.with_name(f".{folder.name}.part")
    remove(aside)
    aside.mkdir(parents=True)
    try:
        yield aside
        if aside.exists():
            sync_tree(aside)
            if folder.is_dir() and not IS_POSIX:  # there no folder takes the place of another one
                folder.rmdir()
            os.rename(aside, folder)
            sync_folder(folder.parent)
    finally:
        remove(aside)


def sync_tree(folder: Path) -> None:
    """Sync a folder to disk, with all files and folders in it."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with naming(path), path.open("rb" if IS_POSIX else "r+b") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing is done if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_inside(link: Path, target: str) -> None:
    """Make a link to a folder below that of the link; a copy where links are not allowed, as on Windows."""
    try:
        link.symlink_to(target)
    except OSError:  # raised again if something has its place
        shutil.copytree(link.parent / target, link)


def shipped(*parts: str) -> Path:
    """A file or folder of configs/ or datasets/, from the installed package or else from the checkout.

    Example:
        shipped("configs", "scenes.yaml")
    """
    root = SHIPPED if SHIPPED.is_dir() else Path(__file__).parents[1]
    return root.joinpath(*parts)
