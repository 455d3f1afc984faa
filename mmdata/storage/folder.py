"""Where shards lie: a folder on a disk or behind a URL, with the same methods, so that callers need not know which.

A folder holds the tars, and its sub-folder `__mmdata__` holds manifest, index and ledger. Hugging Face's `datasets`
ignores names that begin with two underscores, so it takes only the tars for data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import ClassVar, TypeVar

from mmdata.errors import ConfigError, DataError
from mmdata.recognize import Kind, recognize, refuse_unfinished
from mmdata.safe_read import open_regular, path_of_url, read_regular
from mmdata.storage.cache import ShardCache
from mmdata.storage.fetch import RemoteFolder, display_name
from mmdata.storage.listed import INNER, INNER_NAME, MANIFEST_NAME, FileRange, ListedShard
from mmdata.storage.urls import PROTOCOLS, is_followed

QUARANTINE_NAME = "quarantine.jsonl"
JOINS_NAME = "joins"
"""The sub-folder of `__mmdata__` with the side files: columns of tables, aligned to the rows of the index."""

T = TypeVar("T")


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine's disks. Its methods are those of `RemoteFolder`; its text is for messages."""

    path: Path
    cache: ClassVar[None] = None

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str:
        """Equal for two names of the same folder."""
        return os.path.realpath(self.path)

    @property
    def joins(self) -> Path | None:
        """The folder for joins with the index; None where a folder cannot be written at all."""
        return self.path / INNER_NAME / JOINS_NAME

    def read_manifest(self) -> bytes:
        """The content of manifest.json.

        Raises:
            DataError: there is none; or the folder is the `__mmdata__` of another.
        """
        try:
            return read_regular(self.path / INNER / MANIFEST_NAME)
        except (FileNotFoundError, NotADirectoryError):
            pass
        if self.path.name == INNER_NAME and (self.path / MANIFEST_NAME).is_file():
            raise DataError(f"'{self}': what mmdata keeps about the shards in '{self.path.parent}': give that folder")
        refuse_unfinished(self.path)
        raise DataError(self._what_is_here(MANIFEST_NAME))

    def _what_is_here(self, name: str) -> str:
        """A message for a folder without the file that makes it one of shards."""
        kind = recognize(self.path)
        if kind is Kind.ABSENT:
            return f"folder '{self}': no such folder"
        if kind is Kind.TAR or self.path.suffix == ".tar":
            return (
                f"'{self}': a file, and a folder with a {name} is needed; `mmdata index {self}` makes one "
                f"beside a WebDataset tar: then give its folder, '{self.path.parent}'"
            )
        if not self.path.is_dir() or kind is Kind.RUN:
            own = f"; its config '{self.path / 'config.yaml'}' names them" if kind is Kind.RUN else ""
            return f"'{self}' is {kind.value}; a folder of shards (with a {name}) is needed{own}"
        parts = sorted(path.parent.parent.name for path in self.path.glob(f"*/{INNER_NAME}/{name}"))
        if parts:
            return f"folder '{self}': no {name}; it holds folders of shards: give '{self.path / parts[0]}'" + (
                f" ({', '.join(parts)})" if len(parts) > 1 else ""
            )
        made = f"folder '{self}': no {name}; `mmdata index {self}` makes one for WebDataset tars"
        return made if kind is Kind.TARS else f"{made}, `mmdata convert {self} OUT` shards of images and captions"

    def with_range(self, part: FileRange, use: Callable[[Path, int], T]) -> T:
        """Result of `use` on the path of a file, and where in it a part of an index file begins.

        Raises:
            FileNotFoundError: there is none; and what `use`, which checks the content, raises.
        """
        return use(self.path / part.name, part.start)

    def open_shard(self, location: str, shard: ListedShard, stop: Event | None = None) -> int:
        """A descriptor of a tar, which the caller closes.

        Raises:
            FileNotFoundError: there is none.
            DataError: it is not a regular file.
        """
        return open_regular(self.shard_path(location, shard), "shard")

    def has_shard(self, shard: ListedShard) -> bool:
        """Whether `open_shard` returns without fetching anything."""
        return True

    def shard_path(self, location: str, shard: ListedShard) -> Path:
        """Path of a tar."""
        return self.path / location / shard.name

    def place(self, location: str, name: str) -> str:
        """Path of a file, for messages."""
        return str(self.path / location / name)


@dataclass(frozen=True)
class IndexFolder(LocalFolder):
    """A folder on this machine's disks with the index of tars that lie behind a URL, which is the manifest's location.

    Attributes:
        tars: their folder.
    """

    tars: RemoteFolder = field(kw_only=True)

    @property
    def cache(self) -> ShardCache:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where the tars are kept."""
        return self.tars.cache

    def open_shard(self, location: str, shard: ListedShard, stop: Event | None = None) -> int:
        """See `RemoteFolder.open_shard`."""
        return self.tars.open_shard(".", shard, stop)

    def has_shard(self, shard: ListedShard) -> bool:
        """See `RemoteFolder.has_shard`."""
        return self.tars.has_shard(shard)

    def shard_path(self, location: str, shard: ListedShard) -> Path:
        """See `RemoteFolder.shard_path`."""
        return self.tars.shard_path(".", shard)

    def place(self, location: str, name: str) -> str:
        """URL of a tar, or path of a file of the index, for messages."""
        return self.tars.place(".", name) if "://" in location else super().place(location, name)


Folder = LocalFolder | RemoteFolder
Location = str | os.PathLike[str]
"""A path or a URL."""


def find_folder(location: Location, cache: ShardCache | None = None) -> Folder:
    """The folder at a path or a URL. Nothing else decides whether a folder is local.

    A `file:` URL is a RemoteFolder: this is how the files of a slow disk get into the cache.

    Args:
        location: a path or a URL.
        cache: for the files behind a URL; default: `ShardCache()`.

    Raises:
        ConfigError: a command, or a URL of a protocol that is not known.
    """
    name = os.fspath(location)
    if name.startswith("pipe:"):
        raise ConfigError(f"'{name}': pipe: would run a command, and nothing in data may; give a folder or a URL")
    if (path := path_of_url(name)) is not None:
        name = f"file://{os.path.abspath(path)}"
    return RemoteFolder(name, cache or ShardCache()) if "://" in name else LocalFolder(Path(name))


def folder_of_index(folder: Folder, tars: str, cache: ShardCache | None = None) -> Folder:
    """The folder of an index, whose manifest names the place of the tars.

    Args:
        folder: with the manifest.
        tars: the manifest's location: a folder relative to `folder`, or a URL.
        cache: see `find_folder`.

    Raises:
        DataError: a command; or a URL that is of a strange protocol, or in a manifest that lies behind a URL itself.
    """
    if "://" not in tars and not tars.startswith("pipe:"):
        return folder
    if isinstance(folder, RemoteFolder) or not is_followed(tars):
        raise DataError(
            f"'{folder}': location '{display_name(tars)}' is not a folder; commands and URLs are never followed, "
            f"except those of {', '.join(PROTOCOLS)} in an index on this machine (`mmdata index URL --out FOLDER`)"
        )
    return IndexFolder(folder.path, tars=RemoteFolder(tars, cache or ShardCache()))


def local_folder(location: Location) -> Path:
    """The path of a folder on this machine's disks, for programs that cannot work on a URL. A `file:` URL is a path.

    Raises:
        ConfigError: another URL, or a command.
    """
    name = os.fspath(location)
    if (path := path_of_url(name)) is not None:
        return Path(path)
    if "://" in name or name.startswith("pipe:"):
        raise ConfigError(f"'{name}': a folder on this disk is needed here, no URL and no command; copy it first")
    return Path(name)


def has_manifest(folder: Path) -> bool:
    """Whether a folder on this disk has a manifest, and so is whole."""
    return (folder / INNER / MANIFEST_NAME).is_file()


def find_ledger(folder: Path) -> Path:
    """Path of the list of rows left out of a folder's shards, whether or not the file exists."""
    return folder / INNER / QUARANTINE_NAME
