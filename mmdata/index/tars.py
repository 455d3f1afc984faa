"""The tars that an index is made of: in a folder, or behind URLs and then fetched into the bounded cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any
from urllib.parse import unquote

from mmdata.errors import ConfigError
from mmdata.hashing import file_sha256
from mmdata.index.manifest import Manifest
from mmdata.processes import Step, map_concurrently, usable_cores
from mmdata.storage.cache import Incoming, ShardCache
from mmdata.storage.folder import RemoteFolder, local_folder
from mmdata.storage.urls import PROTOCOLS, check_plain_name, display_name, is_followed, is_http
from mmdata.tars.foreign import TAR_ENDS, expand_braces, find_shards, guess_members, refuse_not_utf8
from mmdata.tars.members import Members

READERS = 4
"""Tars behind URLs that are fetched and read concurrently."""
ASKERS = 16
"""Tars whose sizes are asked for concurrently."""
MAX_GUESSED_TARS = 16
"""Tars that are looked at for a first sample, as many as fit into half of the cache."""


class LocalTars:
    """The tars of a folder, sorted by name; or one tar.

    Args:
        source: path of the folder or of the tar.

    Attributes:
        names: of the files, in row order.
        sizes: in bytes; None as long as it is not known.
        are_remote: whether they lie behind a URL, where nothing tells a changed tar before it is read.

    Raises:
        DataError: see `find_shards`; or a name that a manifest cannot hold.
        ConfigError: `source` is a command.
    """

    are_remote = False

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._paths = find_shards(local_folder(source))
        self._folder = self._paths[0].parent
        self.names = [path.name for path in self._paths]
        for name in self.names:
            refuse_not_utf8(name)
            check_plain_name(name, f"folder '{self._folder}'")
        self.sizes: list[int | None] = [path.stat().st_size for path in self._paths]

    def __str__(self) -> str:
        return str(self._folder)

    def location(self, folder: Path) -> str:
        """What the manifest in `folder` says of where the tars lie: their folder, relative to it."""
        location = Path(os.path.relpath(self._folder.resolve(), folder.resolve())).as_posix()
        refuse_not_utf8(location)
        return location

    def place(self, number: int) -> str:
        """What messages call a tar."""
        return self.names[number]

    def identity(self, number: int) -> dict[str, Any]:
        """What tells a tar from a changed one without reading it: size in bytes and modification time."""
        status = self._paths[number].stat()
        return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}

    def guess_members(self) -> Members:
        """The members by the first samples; see `mmdata.tars.foreign.guess_members`."""
        return guess_members(self._paths)

    @contextmanager
    def at_hand(self, number: int, step: Step) -> Generator[tuple[Path, str | None]]:
        """Path of a tar that is to be read, and its SHA-256 if that is known."""
        yield self._paths[number], None

    def let_go(self, number: int) -> None:
        """A tar needs not be read: an earlier run has read it."""

    def size(self, number: int) -> int:
        """Bytes of a tar now."""
        return self._paths[number].stat().st_size

    def sha256(self, number: int) -> str:
        """Hash of a tar."""
        return file_sha256(self._paths[number])

    def close(self) -> None:
        """End all reading, also that of other threads."""


class UrlTars:
    """Tars behind URLs. Each comes into the cache, is read there as one on a disk, and leaves it.

    Its methods are those of `LocalTars` but `sha256`, which nobody knows before a tar is fetched.

    Args:
        folder: URL of their folder, with the query that each file's URL ends with.
        names: of the files, not quoted, sorted as those of a folder on a disk.
        cache: of the loader; holds the tars that are being read.
        keep: keep the tars in the cache; those that were read last stay.

    Raises:
        ConfigError: see `RemoteFolder`.
    """

    are_remote = True

    def __init__(self, folder: str, names: list[str], cache: ShardCache, *, keep: bool = False) -> None:
        self.names = names
        self.sizes: list[int | None] = [None] * len(names)
        self._folder = RemoteFolder(folder, cache)
        self._stop = Event()
        self._keep = keep
        self._lock = Lock()
        self._fetched: dict[int, Incoming] = {}  # for the guess, and not read yet

    def __str__(self) -> str:
        return str(self._folder)

    def location(self, folder: Path) -> str:
        """The URL of the tars' folder, with its query."""
        return self._folder.url

    def place(self, number: int) -> str:
        """The URL of a tar."""
        return self._folder.place(self.names[number])

    def identity(self, number: int) -> dict[str, Any]:
        """The URL: a tar that was read is not asked for again."""
        return {"url": self.place(number)}

    def guess_members(self) -> Members:
        """The members by the first samples; the tars that were looked at stay in the cache until they are read."""
        try:
            return guess_members(self._first_paths())
        except BaseException:
            self.close()
            raise

    def _first_paths(self) -> Iterator[Path]:
        for number in range(min(len(self.names), MAX_GUESSED_TARS)):
            if sum(tar.bytes for tar in self._fetched.values()) > self._folder.cache.max_bytes // 2:
                return
            self._fetched[number] = self._folder.fetch_new(self.names[number], self._stop, ignore)
            yield self._fetched[number].path

    @contextmanager
    def at_hand(self, number: int, step: Step) -> Generator[tuple[Path, str | None]]:
        """Fetch a tar that is to be read; `step` is told of the bytes that came."""
        with self._lock:
            tar = self._fetched.pop(number, None)
        tar = tar or self._folder.fetch_new(self.names[number], self._stop, step)
        try:
            yield tar.path, tar.sha256
        except BaseException:
            tar.discard()
            raise
        if self._keep:
            os.close(tar.publish())
        else:
            tar.discard()

    def let_go(self, number: int) -> None:
        """Give back the room of a tar that was fetched for the guess alone: an earlier run has read it."""
        with self._lock:
            tar = self._fetched.pop(number, None)
        if tar is not None:
            tar.discard()

    def size(self, number: int) -> int:
        """Bytes of a tar, as its server says."""
        return self._folder.file_of(self._folder.url_of(self.names[number]), self._stop).bytes

    def close(self) -> None:
        """End all reading, also that of other threads."""
        self._stop.set()
        with self._lock:
            for tar in self._fetched.values():
                tar.discard()
            self._fetched.clear()


Tars = LocalTars | UrlTars


def ignore(offset: int) -> None:
    """A `Step` that tells nobody."""


def what_changed(tars: Tars, manifest: Manifest, step: Callable[[int, int], None], *, by_size: bool) -> str | None:
    """What makes tars others than those of an index; None: they are the same.

    Args:
        tars: compared; hashes too, of those on this machine: those of a URL are compared whenever they are fetched.
        manifest: of the index.
        step: told of the number and size of each tar that was compared.
        by_size: compare sizes only.
    """
    entries = [*manifest]
    if [entry.name for entry in entries] != tars.names:
        return f"other shards ({len(entries)}, and {len(tars.names)} are to be indexed)"

    def change(number: int) -> str | None:
        size, indexed = tars.size(number), entries[number]
        if size != indexed.bytes:
            return f"has {size:,} bytes, and {indexed.bytes:,} were indexed"
        if isinstance(tars, LocalTars) and not by_size and tars.sha256(number) != indexed.sha256:
            return "has another SHA-256 than the tar that was indexed"
        return None

    threads, numbers = ASKERS if tars.are_remote else usable_cores(), range(len(entries))
    for number, found in enumerate(map_concurrently(change, numbers, threads=threads, end=tars.close)):
        if found is not None:
            return f"other contents: '{tars.place(number)}' {found}"
        step(number, entries[number].bytes)
    return None


def find_urls(given: Sequence[str]) -> tuple[str, list[str]]:
    """The folder and the names of the tars that URLs and brace patterns name, as `UrlTars` takes them.

    Raises:
        ConfigError: another protocol, no tar, a compressed one, tars of several folders, one twice, or what
            `expand_braces` raises.
        DataError: a name that no manifest can hold.
    """
    for url in given:
        if not is_followed(url):
            raise ConfigError(
                f"'{display_name(url)}': tars are indexed from a folder of this machine, or from URLs of "
                f"{', '.join(PROTOCOLS)}; copy them to one of these"
            )
    urls = [one for url in given for one in expand_braces(url)]
    folders: dict[str, str] = {}  # to the first URL of each
    for url in urls:
        folders.setdefault(_split(url)[0], url)
    names = sorted(_split(url)[1] for url in urls)
    for url in urls:
        _check_is_tar(url)
    if len(folders) > 1:
        first, second, *_ = (display_name(url) for url in folders.values())
        raise ConfigError(
            f"'{first}' and '{second}' lie in different folders: make an index of each with an --out of its own, and "
            "list both in data.shards"
        )
    if twice := next((name for name, following in pairwise(names) if name == following), None):
        raise ConfigError(f"'{display_name(given[0])}': names '{twice}' twice; each tar is indexed once")
    (folder,) = folders
    for name in names:
        check_plain_name(name, f"URL '{display_name(folder)}'")
    return folder, names


def _split(url: str) -> tuple[str, str]:
    """The URL of a tar's folder, with the query of the tar's URL, and the tar's name."""
    head, question, query = url.partition("?") if is_http(url) else (url, "", "")
    folder, _, name = head.rpartition("/")
    return f"{folder}{question}{query}", unquote(name) if is_http(url) else name


def _check_is_tar(url: str) -> None:
    name = _split(url)[1]
    if name.endswith(TAR_ENDS[1:]):
        raise ConfigError(
            f"'{display_name(url)}': compressed, which has no random access; unpack it first, or train from it "
            "without an index: `mmdata.stream(webdataset.WebDataset(URL), config)`"
        )
    if not name.endswith(".tar"):
        shown = display_name(url)
        raise ConfigError(
            f"'{shown}': not the URL of a .tar; name the tars, such as {shown.rstrip('/')}/{{0000..0009}}.tar"
        )
