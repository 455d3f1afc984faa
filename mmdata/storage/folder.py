"""Where shards lie: a folder on a disk or behind a URL, with the same methods, so that callers need not know which.

A folder holds the tars, and its sub-folder `__mmdata__` holds manifest, index and ledger. Hugging Face's `datasets`
ignores names that begin with two underscores, so it takes only the tars for data. What lies behind a URL is fetched
whole into a `ShardCache`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar
from urllib.parse import quote

from mmdata.errors import ConfigError, DataError
from mmdata.recognize import PRIVATE_NAME, Kind, near, recognize, refuse_unfinished, unfinished
from mmdata.safe_read import open_regular, path_of_url, read_regular
from mmdata.storage.attempts import Absent, status_of
from mmdata.storage.cache import Incoming, Remote, ShardCache
from mmdata.storage.remote import RemoteFile
from mmdata.storage.urls import PROTOCOLS, FileSystem, display_name, is_followed, is_http

MANIFEST_NAME = "manifest.json"
INNER_NAME = "__mmdata__"
"""The sub-folder; not hidden, as many HTTP servers refuse hidden names and `cp OUT/*` leaves them out."""
INNER = f"{INNER_NAME}/"
QUARANTINE_NAME = "quarantine.jsonl"
ROWS_NAME = "rows"
"""The sub-folder of `__mmdata__` with the list of all input rows of a conversion, as Parquet."""
JOINS_NAME = "joins"
"""The sub-folder of `__mmdata__` with the side files: columns of tables, aligned to the rows of the index."""

MAX_MANIFEST_BYTES = 2**26
"""Largest manifest.json, as nothing says its size; that of a million shards has a quarter of a million bytes."""
_OPENS = 8  # times that a file may be removed from the cache between being fetched and being opened

T = TypeVar("T")


@dataclass(frozen=True)
class ListedShard:
    """The manifest's entry of one shard, without its histogram.

    Attributes:
        name: file name of the tar, in the manifest's `location`.
        bytes, sha256: of the tar.
        rows: samples in the index.
        index_offset, index_bytes: where the columns of its rows lie in an index file.
        index_sha256, index_xxh3: hashes of these bytes.
        images: rows that have an image: all, or none.
        captions: captions of all rows: one or more a row, or 0 in a corpus of labels only.
        labels: rows that have a label.
    """

    name: str
    bytes: int
    sha256: str
    rows: int
    index_offset: int
    index_bytes: int
    index_sha256: str
    index_xxh3: int
    images: int
    captions: int
    labels: int


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, end) of a file of `size` bytes, and their SHA-256."""

    name: str
    sha256: str
    start: int
    end: int
    size: int


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine's disks. Its methods are those of `RemoteFolder`; its text is for messages."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def cache(self) -> None:
        """None: its files lie on this disk and need no cache."""

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
            return f"folder '{self}': no such folder{near(str(self))}"
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
        """Result of `use` on the path of a file, and where in it a part begins. `use` checks the content.

        Raises:
            FileNotFoundError: there is none; and what `use`, which checks the content, raises.
        """
        return use(self.path / part.name, part.start)

    def below(self, location: str) -> LocalFolder:
        """The folder at a path relative to this one."""
        return LocalFolder(self.path / location)

    def open_shard(self, shard: ListedShard, stop: Event | None = None) -> int:
        """A descriptor of a tar, which the caller closes.

        Raises:
            FileNotFoundError: there is none.
            DataError: it is not a regular file.
        """
        return open_regular(self.shard_path(shard), "shard")

    def shard_path(self, shard: ListedShard) -> Path:
        """Path of a tar."""
        return self.path / shard.name

    def place(self, name: str) -> str:
        """Path of a file, for messages."""
        return str(self.path / name)


class RemoteFolder:
    """A folder behind a URL, with the methods of `LocalFolder`. Safe to share between threads and forked processes.

    Args:
        url: of a protocol of fsspec; a query is appended to the URL of each file.
        cache: where files are kept.

    Raises:
        ConfigError: see `FileSystem`.
    """

    joins: Path | None = None
    """See `LocalFolder.joins`."""

    def __init__(self, url: str, cache: ShardCache) -> None:
        self.url = url
        self.cache = cache
        self._files = FileSystem(url)

    def __str__(self) -> str:
        return display_name(self.url).rstrip("/")

    @property
    def identity(self) -> str:
        """Equal for two names of the same folder."""
        return str(self)

    def read_manifest(self) -> bytes:
        """The content of manifest.json, which is always fetched.

        Raises:
            DataError, ConfigError: there is none, or it cannot be fetched.
        """
        try:
            return self._small(INNER + MANIFEST_NAME)
        except (DataError, ConfigError) as error:
            # A bucket that may not be listed answers 403 for what it does not hold: denied counts as missing.
            denied = status_of(error.__cause__) == 403 or isinstance(error.__cause__, PermissionError)
            if not isinstance(error, Absent) and not denied:
                raise
            missing = error
        if self.url.startswith("s3://"):
            with suppress(DataError, ConfigError):
                self._small(f"{PRIVATE_NAME}/run.json")
                missing = unfinished(str(self))
        raise missing

    def with_range(self, part: FileRange, use: Callable[[Path, int], T]) -> T:
        """Result of `use` on the path, in the cache, of a part of a small file, and where in it the part begins: at 0.

        Raises:
            DataError: `use` raises it, also of a part fetched anew; or the part has another hash.
        """
        url, path = self.url_of(part.name), self.cache.path(part.sha256)
        chunks = partial(self._chunks, url, Event(), size=part.size, start=part.start, end=part.end)
        remote = Remote(display_name(url), part.sha256, part.end - part.start, chunks)
        damaged: DataError | None = None
        for _ in range(_OPENS):
            os.close(self.cache.open(remote))
            try:
                return use(path, 0)
            except FileNotFoundError:  # another process needed its room in the cache
                continue
            except DataError as error:
                if damaged is not None or hashlib.sha256(path.read_bytes()).hexdigest() == part.sha256:
                    raise
                damaged = error
                self.cache.remove(part.sha256)
        raise ConfigError(
            f"'{remote.name}': removed from the cache '{self.cache.folder}' as soon as it is fetched; "
            f"set data.loading.cache_gb to more"
        )

    def below(self, location: str) -> RemoteFolder:
        """The folder at a path relative to this one."""
        return RemoteFolder(self.url_of(location), self.cache)

    def open_shard(self, shard: ListedShard, stop: Event | None = None) -> int:
        """A descriptor of a tar, which the caller closes; the tar is fetched if it is not in the cache.

        Raises:
            DataError, ConfigError, Interrupted: see `ShardCache.open`.
        """
        url = self.url_of(shard.name)
        chunks = partial(self._chunks, url, stop or Event(), size=shard.bytes)
        return self.cache.open(Remote(display_name(url), shard.sha256, shard.bytes, chunks), stop)

    def shard_path(self, shard: ListedShard) -> Path:
        """Path of a tar in the cache, fetched first. It may be removed at any time."""
        os.close(self.open_shard(shard))
        return self.cache.path(shard.sha256)

    def place(self, name: str) -> str:
        """URL of a file, for messages."""
        return display_name(self.url_of(name))

    def fetch_new(self, name: str, stop: Event, step: Callable[[int], None]) -> Incoming:
        """A file whose hash nobody knows yet, in the cache until it is ended.

        Args:
            name: of the file in this folder.
            stop: ends the reading.
            step: called with the bytes that have come.

        Raises:
            DataError, ConfigError, Interrupted: see `repeated` and `ShardCache.fetch`; or the server does not say the
                size.
        """
        with self._begun(self.url_of(name), stop) as (file, remote):
            return self.cache.fetch(remote._replace(chunks=lambda: iter(file.read, b"")), stop, step)

    def file_of(self, url: str, stop: Event) -> Remote:
        """A file of which no hash is known, for `ShardCache.open`; its server says its size and its version.

        Raises:
            DataError, ConfigError, Interrupted: see `fetch_new`.
        """
        with self._begun(url, stop) as (_, remote):
            return remote

    @contextmanager
    def _begun(self, url: str, stop: Event) -> Generator[tuple[RemoteFile, Remote], None, None]:
        with closing(RemoteFile(self._files, url, stop)) as file:
            file.begin()
            if file.size is None:
                raise DataError(
                    f"'{file.name}': the server does not say how many bytes it has (Content-Length); fetch it yourself"
                )
            key = hashlib.sha256(f"{file.name}\n{file.size}\n{file.version}".encode()).hexdigest()
            chunks = partial(self._chunks, url, stop, size=file.size)
            yield file, Remote(file.name, key, file.size, chunks, is_hash=False)

    def url_of(self, path: str) -> str:
        """URL of what lies at a path relative to this folder.

        Raises:
            DataError: the path leads out of the host or bucket.
        """
        protocol, _, rest = self.url.partition("://")
        folder, question, query = rest.partition("?") if is_http(self.url) else (rest, "", "")
        root, _, inside = folder.partition("/")  # host or bucket; nothing for file:///
        whole = posixpath.normpath(posixpath.join(inside, quote(path) if is_http(self.url) else path))
        if posixpath.isabs(path) or whole.partition("/")[0] == "..":
            raise DataError(f"'{self}': its tars lie in '{path}', which leads out of '{protocol}://{root}'")
        return f"{protocol}://{root}/{whole}{question}{query}"

    def _chunks(self, url: str, stop: Event, *, size: int, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of a file of `size` bytes from `start` on; for the errors see `fetch_new`."""
        with closing(RemoteFile(self._files, url, stop, start=start, size=size, end=end)) as file:
            yield from iter(file.read, b"")

    def _small(self, name: str) -> bytes:
        """A small file of unknown size."""
        return RemoteFile(self._files, self.url_of(name), Event()).read_small(MAX_MANIFEST_BYTES)


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
        shown = display_name(name)
        raise ConfigError(f"'{shown}': pipe: would run a command, and nothing in data may; give a folder or a URL")
    if (path := path_of_url(name)) is not None:
        name = f"file://{os.path.abspath(path)}"
    return RemoteFolder(name, cache or ShardCache()) if "://" in name else LocalFolder(Path(name))


def tars_of(folder: Folder, location: str, cache: ShardCache | None = None) -> Folder:
    """The folder with the tars of an index.

    Args:
        folder: of the index.
        location: what its manifest says of the tars: a folder relative to `folder`, or a URL.
        cache: see `find_folder`.

    Raises:
        DataError: a command; or a URL that is of a strange protocol, or in a manifest that lies behind a URL itself.
    """
    if "://" not in location and not location.startswith("pipe:"):
        return folder.below(location)
    if isinstance(folder, RemoteFolder) or not is_followed(location):
        raise DataError(
            f"'{folder}': location '{display_name(location)}' is not a folder; commands and URLs are never followed, "
            f"except those of {', '.join(PROTOCOLS)} in an index on this machine (`mmdata index URL --out FOLDER`)"
        )
    return RemoteFolder(location, cache or ShardCache())


def local_folder(location: Location) -> Path:
    """The path of a folder on this machine's disks, for programs that cannot work on a URL. A `file:` URL is a path.

    Raises:
        ConfigError: another URL, or a command.
    """
    name = os.fspath(location)
    if (path := path_of_url(name)) is not None:
        return Path(path)
    if "://" in name or name.startswith("pipe:"):
        shown = display_name(name)
        raise ConfigError(f"'{shown}': a folder on this disk is needed here, no URL and no command; copy it first")
    return Path(name)


def has_manifest(folder: Path) -> bool:
    """Whether a folder on this disk has a manifest, and so is whole."""
    return (folder / INNER / MANIFEST_NAME).is_file()


def find_ledger(folder: Path) -> Path:
    """Path of the list of rows left out of a folder's shards, whether or not the file exists."""
    return folder / INNER / QUARANTINE_NAME
