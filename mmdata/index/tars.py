"""The tars that an index is made of: their names, and how each is read once. Here are those of a folder on a disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mmdata.images.probe import Limits
from mmdata.index.staging import ReadTar
from mmdata.storage.folder import local_folder
from mmdata.storage.listed import check_plain_name
from mmdata.tars.foreign import find_shards, guess_members, refuse_not_utf8
from mmdata.tars.members import Members
from mmdata.tars.scan import scan_shard


class Tars(Protocol):
    """Tars in one folder of a disk or behind a URL.

    Attributes:
        names: of the files, in row order.
        sizes: in bytes; None as long as it is not known.
        threads: tars that are read concurrently.
        are_remote: whether they lie behind a URL, where nothing tells a changed tar before it is read.
    """

    names: list[str]
    sizes: list[int | None]
    threads: int
    are_remote: bool

    def __str__(self) -> str:
        """Path or URL of their folder."""
        ...

    def location(self, folder: Path) -> str:
        """What the manifest in `folder` says of where the tars lie."""
        ...

    def place(self, number: int) -> str:
        """What messages call a tar."""
        ...

    def identity(self, number: int) -> dict[str, Any]:
        """What tells a tar from a changed one without reading it."""
        ...

    def guess_members(self) -> Members:
        """The members by the first samples."""
        ...

    def read(self, number: int, *, limits: Limits, members: Members, step: Callable[[int], None]) -> ReadTar:
        """Read a tar; the arguments are those of `scan_shard`."""
        ...

    def close(self) -> None:
        """End all reading, also that of other threads."""
        ...


class LocalTars:
    """The tars of a folder, sorted by name; or one tar.

    Args:
        source: path of the folder or of the tar.

    Raises:
        DataError: see `find_shards`; or a name that a manifest cannot hold.
        ConfigError: `source` is a command.
    """

    threads = 1
    are_remote = False

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._paths = find_shards(local_folder(source))
        self._folder = self._paths[0].parent
        self.names = [path.name for path in self._paths]
        for name in self.names:
            if not name.isascii():
                refuse_not_utf8(name)
        for name in self.names:
            check_plain_name(name, f"folder '{self._folder}'")
        self.sizes: list[int | None] = [path.stat().st_size for path in self._paths]

    def __str__(self) -> str:
        return str(self._folder)

    def location(self, folder: Path) -> str:
        """The folder of the tars, relative to `folder`."""
        location = Path(os.path.relpath(self._folder.resolve(), folder.resolve())).as_posix()
        if not location.isascii():
            refuse_not_utf8(location)
        return location

    def place(self, number: int) -> str:
        """The name of a tar."""
        return self.names[number]

    def identity(self, number: int) -> dict[str, Any]:
        """Size in bytes and modification time."""
        status = self._paths[number].stat()
        return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}

    def guess_members(self) -> Members:
        """See `mmdata.tars.foreign.guess_members`."""
        return guess_members(self._paths)

    def read(self, number: int, *, limits: Limits, members: Members, step: Callable[[int], None]) -> ReadTar:
        """Read a tar; the arguments are those of `scan_shard`."""
        path = self._paths[number]
        digest = hashlib.sha256()
        scan = scan_shard(path, limits=limits, members=members, step=step, name=path.name, on_bytes=digest.update)
        return ReadTar(scan, digest.hexdigest(), path.stat().st_size)

    def close(self) -> None:
        """Nothing is open."""
