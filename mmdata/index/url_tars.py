"""The tars behind URLs that an index is made of. Each comes into the cache, is read as one on a disk, and leaves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any
from urllib.parse import unquote

from mmdata.errors import ConfigError, DataError
from mmdata.images.probe import Limits
from mmdata.index.manifest import Manifest
from mmdata.index.staging import ReadTar
from mmdata.processes import map_concurrently
from mmdata.storage.cache import Incoming, ShardCache
from mmdata.storage.folder import MANIFEST_NAME, RemoteFolder
from mmdata.storage.urls import PROTOCOLS, check_plain_name, display_name, is_followed, is_http
from mmdata.tars.foreign import expand_braces, guess_members
from mmdata.tars.members import Members
from mmdata.tars.scan import scan_shard

READERS = 4
"""Tars that are fetched and read concurrently."""
ASKERS = 16
"""Tars whose sizes are asked for concurrently."""
MAX_GUESSED_TARS = 16
"""Tars that are looked at for a first sample, as many as fit into half of the cache."""
_PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class TarUrls:
    """Tars in one folder behind a URL.

    Attributes:
        folder: URL, with the query that each file's URL ends with.
        names: of the files, not quoted, sorted as those of a folder on a disk.
    """

    folder: str
    names: list[str]

    def __str__(self) -> str:
        return display_name(self.folder)


class UrlTars:
    """Tars behind URLs, with the methods of `LocalTars`.

    Args:
        urls: of the tars.
        cache: of the loader; holds the tars that are being read.
        keep: keep the tars in the cache; those that were read last stay.

    Raises:
        ConfigError: see `RemoteFolder`.
    """

    are_remote = True

    def __init__(self, urls: TarUrls, cache: ShardCache, *, keep: bool = False) -> None:
        self.names = urls.names
        self.sizes: list[int | None] = [None] * len(self.names)
        self.threads = min(READERS, len(self.names))
        self._folder = RemoteFolder(urls.folder, cache)
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
        return self._folder.place(".", self.names[number])

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
            self._fetched[number] = self._folder.fetch_new(self.names[number], self._stop, lambda offset: None)
            yield self._fetched[number].path

    def read(self, number: int, *, limits: Limits, members: Members, step: Callable[[int], None]) -> ReadTar:
        """Fetch a tar and read it; `step` is called with the bytes that came, the rest is as for `scan_shard`."""
        name = self.names[number]
        with self._lock:
            tar = self._fetched.pop(number, None)
        tar = tar or self._folder.fetch_new(name, self._stop, step)
        try:
            scan = scan_shard(tar.path, limits=limits, members=members, name=name)
        except BaseException:
            tar.discard()
            raise
        if self._keep:
            os.close(tar.publish())
        else:
            tar.discard()
        return ReadTar(scan, tar.sha256, tar.bytes)

    def fill_cache(self, manifest: Manifest) -> int:
        """Fetch the indexed tars that are not in the cache, as many as it holds; how many are in it then.

        Raises:
            DataError, ConfigError: see `ShardCache.open`.
        """
        cache = self._folder.cache
        here = {entry.sha256: cache.touch(entry.sha256) for entry in manifest}
        room = cache.max_bytes - sum({entry.sha256: entry.bytes for entry in manifest if here[entry.sha256]}.values())
        missing: list[int] = []
        for number, entry in enumerate(manifest):
            if not here[entry.sha256] and entry.bytes <= room:
                here[entry.sha256] = True
                room -= entry.bytes
                missing.append(number)
        stop = Event()
        fetch = partial(manifest.open_shard, stop=stop)
        for descriptor in map_concurrently(fetch, missing, threads=READERS, end=stop.set):
            os.close(descriptor)
        return sum(cache.touch(entry.sha256) for entry in manifest)

    def known(self, folder: Path, members: Members | None, tokenizer: str | None) -> Manifest:
        """The manifest of an index of these tars; their sizes are asked for, and none is read.

        It may say that the tars lie elsewhere: a tar is compared with its hash whenever it is fetched.

        Raises:
            DataError: the index in `folder` is of other tars, members or another tokenizer, or a tar has another size
                now.
        """
        manifest = Manifest.read(folder, self._folder.cache)
        listed = [entry.name for entry in manifest]
        if listed != self.names:
            raise self._other(folder, f"other shards ({len(listed)}, and {len(self.names)} are to be indexed)")
        if members is not None and members != manifest.members:
            raise self._other(folder, f"other members (captions: {manifest.members.content()})")
        if tokenizer is not None and manifest.tokenizer not in (None, tokenizer):
            raise self._other(folder, f"another tokenizer ({manifest.tokenizer}; the one given: {tokenizer})")
        sizes = [entry.bytes for entry in manifest]
        self.sizes = [*sizes]
        stop = Event()
        urls = [self._folder.url_of(".", name) for name in listed]
        ask = partial(self._folder.file_of, stop=stop)
        for number, file in enumerate(map_concurrently(ask, urls, threads=ASKERS, end=stop.set)):
            if file.bytes != sizes[number]:
                grown = f"has {file.bytes:,} bytes, and {sizes[number]:,} were indexed"
                raise self._other(folder, f"other contents: '{self.place(number)}' {grown}")
        return manifest

    def _other(self, folder: Path, of: str) -> DataError:
        return DataError(
            f"folder '{folder}': its {MANIFEST_NAME} is of {of}; read all tars again with --overwrite, or give "
            "another folder with --out"
        )

    def close(self) -> None:
        """End all reading, also that of other threads."""
        self._stop.set()
        with self._lock:
            for tar in self._fetched.values():
                tar.discard()
            self._fetched.clear()


def find_urls(given: Sequence[str]) -> TarUrls:
    """The tars that URLs and brace patterns name.

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
    return TarUrls(folder, names)


def _split(url: str) -> tuple[str, str]:
    """The URL of a tar's folder, with the query of the tar's URL, and the tar's name."""
    head, question, query = url.partition("?") if is_http(url) else (url, "", "")
    folder, _, name = head.rpartition("/")
    return f"{folder}{question}{query}", unquote(name) if is_http(url) else name


def _check_is_tar(url: str) -> None:
    name = _split(url)[1]
    if name.endswith(_PACKED):
        raise ConfigError(
            f"'{display_name(url)}': compressed, which has no random access; unpack it first, or train from it "
            "without an index: `mmdata.stream(webdataset.WebDataset(URL), config)`"
        )
    if not name.endswith(".tar"):
        shown = display_name(url)
        raise ConfigError(
            f"'{shown}': not the URL of a .tar; name the tars, such as {shown.rstrip('/')}/{{0000..0009}}.tar"
        )
