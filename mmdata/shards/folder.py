"""Files of a folder of shards, on a disk or behind a URL. Callers need not know which.

A folder holds the tars, and in its sub-folder `__mmdata__` all that mmdata keeps about them: manifest, index, ledger.
Hugging Face's `datasets` ignores names that begin with two underscores, so it takes the tars alone for the data.
Earlier versions of mmdata wrote the same files beside the tars; such folders are read as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

from mmdata.errors import ConfigError, DataError
from mmdata.safe_read import open_regular, path_of_url, read_regular
from mmdata.shards.cache import ShardCache
from mmdata.shards.pages import REMAKE, ListedShard
from mmdata.shards.remote import RemoteFolder

Folder = Path | RemoteFolder

MANIFEST_NAME = "manifest.json"
QUARANTINE_NAME = "quarantine.jsonl"
INNER_NAME = "__mmdata__"
"""The sub-folder; not hidden, as many HTTP servers refuse hidden names and `cp OUT/*` leaves them out."""
INNER = f"{INNER_NAME}/"
BESIDE = ""
"""What stands before the names of the files of a folder that an earlier version wrote."""

T = TypeVar("T")


def find_folder(location: str | os.PathLike[str], cache: ShardCache | None = None) -> Folder:
    """A path, or a URL with the cache for it (the default one unless given).

    Raises:
        ConfigError: a command, or a URL of a protocol that is not known.
    """
    name = os.fspath(location)
    if name.startswith("pipe:"):
        raise ConfigError(f"'{name}': pipe: would run a command, and nothing in data may; give a folder or a URL")
    if (path := path_of_url(name)) is not None:
        name = f"file://{os.path.abspath(path)}"
    return RemoteFolder(name, cache or ShardCache()) if "://" in name else Path(name)


def local_folder(location: str | os.PathLike[str]) -> Path:
    """A path, for what is not done from afar. A `file:` URL is one.

    Raises:
        ConfigError: another URL, or a command.
    """
    name = os.fspath(location)
    if (path := path_of_url(name)) is not None:
        return Path(path)
    if "://" in name or name.startswith("pipe:"):
        raise ConfigError(f"'{name}': a folder on this disk is needed here, no URL and no command; copy it first")
    return Path(name)


def manifest_prefix(folder: Path) -> str | None:
    """What stands before the names of manifest and index in a folder on this disk, or None where it has no manifest.

    Returns:
        "__mmdata__/", or "" for a folder that an earlier version wrote.
    """
    return next((prefix for prefix in (INNER, BESIDE) if (folder / prefix / MANIFEST_NAME).is_file()), None)


def find_ledger(folder: Path) -> Path:
    """Path of the list of rows left out of a folder's shards, whether it is there or not."""
    prefix = manifest_prefix(folder)
    return folder / (INNER if prefix is None else prefix) / QUARANTINE_NAME


def read_top(folder: Folder) -> tuple[str, bytes]:
    """The prefix of a folder's files (see `manifest_prefix`), and the content of its manifest.json.

    That of a URL is always fetched.
    """
    if isinstance(folder, RemoteFolder):
        return folder.read_first((INNER, BESIDE), MANIFEST_NAME)
    for prefix in (INNER, BESIDE):
        try:
            content = read_regular(folder / prefix / MANIFEST_NAME)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if prefix == BESIDE and folder.name == INNER_NAME:
            raise DataError(f"'{folder}': what mmdata keeps about the shards in '{folder.parent}': give that folder")
        return prefix, content
    if folder.is_file():
        raise DataError(
            f"'{folder}': a file, and a folder with a {MANIFEST_NAME} is needed; `mmdata index {folder}` makes one "
            f"beside a WebDataset tar: then give its folder, '{folder.parent}'"
        )
    if not folder.is_dir():
        raise DataError(f"folder '{folder}': no such folder")
    raise DataError(f"folder '{folder}': no {MANIFEST_NAME}; `mmdata index {folder}` makes one for WebDataset tars")


def with_file(folder: Folder, name: str, sha256: str, use: Callable[[Path], T], *, kind: str) -> T:
    """`use` of the path of a file of a folder; `kind` says what it is, for messages.

    Raises:
        DataError: there is none; and what `use` raises.
    """
    if isinstance(folder, RemoteFolder):
        return folder.with_file(name, sha256, use)
    try:
        return use(folder / name)
    except FileNotFoundError:
        raise DataError(f"{kind} '{folder / name}': no such file, and the manifest names it; {REMAKE}") from None


def shard_path(folder: Folder, location: str, entry: ListedShard) -> Path:
    """Path of a tar; of a URL, that in the cache, fetched first: it may be removed at any time."""
    if isinstance(folder, RemoteFolder):
        os.close(open_shard(folder, location, entry))
        return folder.cache.path(entry.sha256)
    return folder / location / entry.name


def shard_place(folder: Folder, location: str, entry: ListedShard) -> str:
    """Path or URL of a tar, for messages."""
    if isinstance(folder, RemoteFolder):
        return folder.place(location, entry.name)
    return str(folder / location / entry.name)


def open_shard(folder: Folder, location: str, entry: ListedShard, stop: Event | None = None) -> int:
    """A descriptor of a tar, which the caller closes; of a URL it is fetched where it is not in the cache.

    Raises:
        FileNotFoundError: there is none on this disk.
        DataError: it is not a regular file.
        DataError, ConfigError, Interrupted: see `mmdata.shards.cache.ShardCache.open`.
    """
    if isinstance(folder, RemoteFolder):
        return folder.open_file(location, entry.name, sha256=entry.sha256, size=entry.bytes, stop=stop)
    return open_regular(folder / location / entry.name, "shard")
