"""The tars behind URLs that an index is made of. Each is read once as a stream, several concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

from mmdata.errors import DataError
from mmdata.images.probe import Limits
from mmdata.index.manifest import Manifest
from mmdata.index.staging import ReadTar
from mmdata.index.tar_stream import TarStream
from mmdata.storage.cache import ShardCache
from mmdata.storage.concurrently import map_concurrently
from mmdata.storage.fetch import RemoteFolder
from mmdata.storage.folder import MANIFEST_NAME
from mmdata.storage.urls import TarUrls
from mmdata.tars.foreign import guess_by_samples
from mmdata.tars.members import USUAL, Members
from mmdata.tars.scan import scan_samples

READERS = 4
"""Tars that are read concurrently. Each holds a sample or two in memory."""
ASKERS = 16
"""Tars whose sizes are asked for concurrently."""
MAX_GUESSED_TARS = 16
"""Tars that are looked at for a first sample."""


class UrlTars:
    """Tars behind URLs, with the methods of `LocalTars`.

    Args:
        urls: of the tars.
        cache: of the loader.
        keep: keep the tars in the cache, as many as it holds.

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
        self._kept_bytes = 0
        self._lock = Lock()
        self._open: dict[int, TarStream] = {}
        self._in_work: set[int] = set()

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
        """The members by the first samples; the streams of the tars that were looked at go on with `read`."""
        try:
            for number in range(min(len(self.names), MAX_GUESSED_TARS)):
                stream = self._stream(number)
                stream.keeps_all = True
                found = guess_by_samples(stream.samples, stream.payload)
                stream.keeps_all = False
                if found is not None:
                    return found
        except BaseException:
            self.close()
            raise
        return USUAL

    def read(self, number: int, *, limits: Limits, members: Members, step: Callable[[int], None]) -> ReadTar:
        """Read a tar; the arguments are those of `scan_shard`."""
        stream = self._stream(number)
        with self._lock:
            self._in_work.add(number)
        try:
            name = self.names[number]
            scan = scan_samples(
                stream.samples, stream.payload, stream.hash_of, name=name, limits=limits, members=members, step=step
            )
            sha256, size = stream.finish()
            return ReadTar(scan, sha256, size)
        finally:
            with self._lock:
                self._open.pop(number, None)
                self._in_work.discard(number)
            stream.close()

    def recall(self, read: ReadTar) -> None:
        """Count a tar that an earlier run has read and kept."""
        if self._keep and self._folder.cache.touch(read.sha256):
            with self._lock:
                self._kept_bytes += read.bytes

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
        ask = partial(self._ask_size, stop=stop)
        for number, size in enumerate(map_concurrently(ask, range(len(sizes)), threads=ASKERS, end=stop.set)):
            if size not in (None, sizes[number]):
                grown = f"has {size:,} bytes, and {sizes[number]:,} were indexed"
                raise self._other(folder, f"other contents: '{self.place(number)}' {grown}")
        return manifest

    def _ask_size(self, number: int, stop: Event) -> int | None:
        stream = TarStream(self._folder, self.names[number], stop=stop)
        stream.close()
        return stream.size

    def _other(self, folder: Path, of: str) -> DataError:
        return DataError(
            f"folder '{folder}': its {MANIFEST_NAME} is of {of}; read all tars again with --overwrite, or give "
            "another folder with --out"
        )

    def close(self) -> None:
        """End all reading, also that of other threads."""
        self._stop.set()
        with self._lock:
            for number, stream in self._open.items():
                if number in self._in_work:  # the thread that reads it closes it
                    stream.interrupt()
                else:
                    stream.close()

    def _stream(self, number: int) -> TarStream:
        """The stream of a tar, which may have begun."""
        with self._lock:
            if (begun := self._open.get(number)) is not None:
                return begun
        stream = TarStream(self._folder, self.names[number], stop=self._stop, may_keep=self._may_keep)
        self.sizes[number] = stream.size
        with self._lock:
            self._open[number] = stream
        return stream

    def _may_keep(self, size: int) -> bool:
        """Whether the cache holds a tar beside those that were kept: one that makes room for the next is no use."""
        with self._lock:
            if not self._keep or self._kept_bytes + size > self._folder.cache.max_bytes:
                return False
            self._kept_bytes += size
            return True
