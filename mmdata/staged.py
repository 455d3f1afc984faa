"""Publishes folders whole or not at all: made under a hidden name, synced, moved into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from mmdata.atomic import naming, sync_folder

OLD_NAME = ".old"


class Staged:
    """What a folder will hold, while it is made in a hidden folder inside it.

    One file, `last`, says what else belongs to it. It is withdrawn first and published last, so the folder has the old
    content, none, or the new one at any moment. What a kill has stopped is finished with `publish`, or undone with
    `retract`. Only who holds the `lock` of the folder may call a method.

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
            os.rename(published, kept)  # not removed yet: after a kill it still says what to remove
            sync_folder(kept.parent)
            sync_folder(published.parent)
        if kept.is_file():
            self._remove(self._names(self.old))
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
            os.rename(source, target)
        sync_folder(inner)
        sync_folder(self.folder)
        os.rename(self.new / self._last, self.folder / self._last)
        sync_folder(inner)

    def retract(self) -> None:
        """Remove what was made, and what a stopped `publish` has moved into place."""
        if self.is_whole:
            self._remove(self._names(self.new))
        remove(self.new)

    def _made(self) -> Iterable[str]:
        """Paths of what is published, but for the last one."""
        inner = Path(self._last).parent
        names = [name for name in os.listdir(self.new) if not name.startswith(".") and name != str(inner)]
        names += [str(inner / name) for name in os.listdir(self.new / inner)]
        return [name for name in names if name != self._last]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            remove(self.folder / name)
        inner = (self.folder / self._last).parent
        if inner.is_dir():
            sync_folder(inner)
        sync_folder(self.folder)


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
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing is done if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
