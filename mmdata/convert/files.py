"""Lists the files of a corpus, in the order of their names on any file system."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A file or folder in a folder.

    Attributes:
        name: without its folder.
        is_folder: also of a link to a folder; False for a link that leads nowhere, or back to itself.
        is_link: whether it is a symbolic link.
        size: in bytes, of what a link leads to.
    """

    name: str
    is_folder: bool
    is_link: bool
    size: int

    @property
    def is_hidden(self) -> bool:
        """Whether the user has not put it there: a name with a dot before it, or what macOS adds to archives."""
        return self.name.startswith(".") or self.name == "__MACOSX"


def list_folder(folder: str) -> list[Entry]:
    """All files and folders in a folder, sorted by name."""
    with os.scandir(folder) as found:
        return sorted(map(_entry, found), key=lambda entry: entry.name)


def _entry(found: os.DirEntry[str]) -> Entry:
    try:
        status = found.stat()
    except OSError:  # a link that leads nowhere, or back to itself
        status = found.stat(follow_symlinks=False)
    return Entry(found.name, stat.S_ISDIR(status.st_mode), found.is_symlink(), status.st_size)
