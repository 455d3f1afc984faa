"""A folder of shards behind a URL. Its files are fetched whole into a `ShardCache`.

HTTP is read by `http`, which streams; all other protocols by fsspec, in ranges. Both repeat requests that fail, as
`attempts` says, and neither reads more than the file has.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fsspec
import fsspec.exceptions

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.forked import new_lock
from mmdata.recognize import PRIVATE_NAME, unfinished
from mmdata.safe_read import open_regular
from mmdata.storage import http
from mmdata.storage.attempts import Failed, WrongAnswer, explained, is_missing, repeated, status_of
from mmdata.storage.cache import Incoming, Remote, ShardCache
from mmdata.storage.http import HttpFile
from mmdata.storage.listed import INNER, MANIFEST_NAME, FileRange, ListedShard

ATTEMPT_S = 300
"""Timeout of a request that is not of HTTP."""
CHUNK_BYTES = 8 * 2**20
"""Largest range of a request that is not of HTTP."""
MAX_MANIFEST_BYTES = 2**26
"""Largest manifest.json, as nothing says its size; that of a million shards has a quarter of a million bytes."""
_OPENS = 8  # times that a file may be removed from the cache between being fetched and being opened

T = TypeVar("T")


class RemoteFolder:
    """A folder behind a URL, with the methods of `LocalFolder`. Safe to share between threads and forked processes.

    Args:
        url: http(s), s3, gs, hf, file, or another protocol of fsspec; a query is appended to the URL of each file.
        cache: where files are kept.

    Raises:
        ConfigError: a chain of protocols, or one that fsspec does not know.
    """

    def __init__(self, url: str, cache: ShardCache) -> None:
        if "::" in url:
            raise ConfigError(f"'{display_name(url)}': a chain of protocols is not followed; give one URL")
        self.url = url
        self.cache = cache
        self._lock = new_lock()
        self._opened: tuple[int, Any] | None = None
        self.file_system()

    def __str__(self) -> str:
        return display_name(self.url).rstrip("/")

    @property
    def identity(self) -> str:
        """Equal for two names of the same folder."""
        return str(self)

    @property
    def joins(self) -> Path | None:
        """See `LocalFolder.joins`."""
        return None

    def read_manifest(self) -> bytes:
        """The content of manifest.json, which is always fetched.

        Raises:
            DataError, ConfigError: there is none, or it cannot be fetched.
        """
        try:
            return self._whole(self.url_of(".", INNER + MANIFEST_NAME), MAX_MANIFEST_BYTES)
        except (DataError, ConfigError) as error:
            cause = error.__cause__
            # A bucket that may not be listed answers 403 for what it does not hold: denied counts as missing.
            if not (is_missing(cause) or status_of(cause) == 403 or isinstance(cause, PermissionError)):
                raise
            missing = error
        if self.url.startswith("s3://"):
            with suppress(DataError, ConfigError):
                self._whole(self.url_of(".", f"{PRIVATE_NAME}/run.json"), MAX_MANIFEST_BYTES)
                missing = unfinished(str(self))
        raise missing

    def with_range(self, part: FileRange, use: Callable[[Path, int], T]) -> T:
        """Result of `use` on the path of a file in the cache, and where in it a part of an index file begins.

        Raises:
            DataError: `use` raises it, also of a part fetched anew; or the part has another hash.
        """
        url = self.url_of(".", part.name)

        def fetch() -> bytes:
            data = bytearray()
            with self._explaining(url, Event(), start=part.start, size=part.size, end=part.end) as file:
                while file.at < part.end and (read := file.read()):
                    data += read
            return bytes(data[: part.end - part.start])

        return self._with_cached(url, part.sha256, fetch, lambda path: use(path, 0))

    def _with_cached(self, url: str, sha256: str, fetch: Callable[[], bytes], use: Callable[[Path], T]) -> T:
        """Result of `use` on the path, in the cache, of bytes with this hash."""
        damaged: DataError | None = None
        for _ in range(_OPENS):
            path = self.cache.path(sha256)
            if not self.cache.touch(sha256):
                os.close(self._keep_small(url, sha256, fetch()))
            try:
                return use(path)
            except FileNotFoundError:  # another process needed its room in the cache
                continue
            except DataError as error:
                if damaged is not None or hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                    raise
                damaged = error
                self.cache.remove(sha256)
        raise ConfigError(
            f"'{display_name(url)}': removed from the cache '{self.cache.folder}' as soon as it is fetched; "
            f"set data.loading.cache_gb to more"
        )

    def open_shard(self, location: str, shard: ListedShard, stop: Event | None = None) -> int:
        """A descriptor of a tar, which the caller closes; the tar is fetched if it is not in the cache.

        Raises:
            DataError, ConfigError, Interrupted: see `ShardCache.open`.
        """
        url = self.url_of(location, shard.name)
        chunks = partial(self._chunks, url, shard.bytes, stop or Event())
        return self.cache.open(Remote(display_name(url), shard.sha256, shard.bytes, chunks), stop)

    def fetch_new(self, name: str, stop: Event, step: Callable[[int], None]) -> Incoming:
        """A file whose hash nobody knows yet, in the cache until it is closed.

        Args:
            name: of the file in this folder.
            stop: ends the reading.
            step: called with the bytes that have come.

        Raises:
            DataError: no such file, an answer that is not the file, the file changed meanwhile, or all attempts failed.
            ConfigError: credentials are missing or not accepted, or see `ShardCache.begin`.
            Interrupted: `stop` was set.
        """
        url = self.url_of(".", name)
        key = hashlib.sha256(url.encode()).hexdigest()
        with self._explaining(url, stop) as file:
            file.begin()
            incoming = self.cache.begin(file.name, key, file.size, stop)
            try:
                for data in iter(file.read, b""):
                    incoming.write(data)
                    step(file.at)
            except BaseException:
                incoming.discard()
                raise
            return incoming

    def size_of(self, name: str, stop: Event) -> int | None:
        """Size of a file in this folder, in bytes; None if the server does not say.

        Raises:
            DataError, ConfigError, Interrupted: see `fetch_new`.
        """
        with self._explaining(self.url_of(".", name), stop) as file:
            file.begin()
            return file.size

    def file_of(self, url: str, stop: Event) -> Remote:
        """A file of which no hash is known, for `ShardCache.open`; its server says its size and its version.

        Raises:
            DataError, ConfigError, Interrupted: see `fetch_new`; or the server does not say the size.
        """
        with self._explaining(url, stop) as file:
            file.begin()
            if file.size is None:
                raise WrongAnswer("the server does not say how many bytes it has (Content-Length); fetch it yourself")
            key = hashlib.sha256(f"{file.name}\n{file.size}\n{file.version}".encode()).hexdigest()
            return Remote(file.name, key, file.size, partial(self._chunks, url, file.size, stop), is_hash=False)

    def file(
        self, url: str, stop: Event, *, start: int = 0, size: int | None = None, end: int | None = None
    ) -> HttpFile | ObjectFile:
        """A file to be read from front to back; nothing is asked for yet. Its errors are those of the protocol."""
        file_system, name = self.file_system(), display_name(url)
        if is_http(url):  # whose server says how large the whole file is
            return HttpFile(file_system, url, name, stop, start=start, size=size, end=end)
        return ObjectFile(file_system, url, name, stop, start=start, size=size if end is None else end)

    def has_shard(self, shard: ListedShard) -> bool:
        """Whether `open_shard` returns without fetching anything; a tar in the cache counts as used now."""
        return self.cache.touch(shard.sha256)

    def shard_path(self, location: str, shard: ListedShard) -> Path:
        """Path of a tar in the cache, fetched first. It may be removed at any time."""
        os.close(self.open_shard(location, shard))
        return self.cache.path(shard.sha256)

    @contextmanager
    def _explaining(
        self, url: str, stop: Event, *, start: int = 0, size: int | None = None, end: int | None = None
    ) -> Generator[HttpFile | ObjectFile, None, None]:
        """A file to be read, whose errors are raised as ours."""
        file = self.file(url, stop, start=start, size=size, end=end)
        try:
            yield file
        except Exception as error:
            if stop.is_set():
                raise Interrupted(file.name) from error
            raise explained(error, file.name, start=file.at, attempts=max(1, file.failures)) from error
        finally:
            file.close()

    def place(self, location: str, name: str) -> str:
        """URL of a file, for messages."""
        return display_name(self.url_of(location, name))

    def _keep_small(self, url: str, sha256: str, data: bytes) -> int:
        def rest(offset: int) -> Iterator[bytes]:
            return iter([data[offset:]])

        return self.cache.open(Remote(display_name(url), sha256, len(data), rest))

    def url_of(self, location: str, name: str) -> str:
        """URL of a file in `location`, a folder relative to this one."""
        protocol, _, path = self.url.partition("://")
        path, question, query = path.partition("?") if protocol in ("http", "https") else (path, "", "")
        root, _, inside = path.partition("/")  # host or bucket; nothing for file:///
        if protocol in ("http", "https"):
            location, name = quote(location), quote(name)
        whole = posixpath.normpath(posixpath.join(inside, location, name))
        if posixpath.isabs(location) or whole.startswith("../"):
            raise DataError(f"'{self}': its tars lie in '{location}', which leads out of '{protocol}://{root}'")
        return f"{protocol}://{root}/{whole}{question}{query}"

    def _chunks(self, url: str, size: int, stop: Event, start: int) -> Iterator[bytes]:
        """The bytes of a file of `size` bytes from `start` on; for the errors see `fetch_new`."""
        with self._explaining(url, stop, start=start, size=size) as file:
            yield from iter(file.read, b"")

    def _whole(self, url: str, most: int) -> bytes:
        """A small file of unknown size.

        Raises:
            DataError, ConfigError: see `fetch_new`; or it has more than `most` bytes.
        """
        with self._explaining(url, Event()) as file:
            return file.read_small(most)

    def file_system(self) -> Any:
        """fsspec's file system; a forked process makes its own, as fsspec's threads do not survive a fork."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                protocol = self.url.partition("://")[0]
                options = http.request_options() if is_http(self.url) else {}
                try:
                    self._opened = (os.getpid(), fsspec.filesystem(protocol, **options))
                except (ImportError, ValueError) as error:
                    raise ConfigError(
                        f"'{self}': {error}; `pip install mmdata[remote]` brings s3 and gs, http and https are always "
                        "there, and other protocols need their package of fsspec"
                    ) from error
            return self._opened[1]


class ObjectFile:
    """A file that fsspec reads, in ranges, as `HttpFile` reads one over HTTP; attributes and errors are those.

    Without a `size` the version of the file is asked for before and after it is read.
    """

    def __init__(
        self, file_system: Any, url: str, name: str, stop: Event, *, start: int = 0, size: int | None = None
    ) -> None:
        self.name, self.size, self.at, self.failures = name, size, start, 0
        self._file_system, self._url, self._stop = file_system, url, stop
        self._version: tuple[int, str] | None = None

    def begin(self) -> None:
        """Ask for size and version of the file, if the size is not known."""
        if self.size is None:
            self._version = self._find_version()
            self.size = self._version[0]

    def read(self) -> bytes:
        """The next bytes, at most CHUNK_BYTES; none only at the end of the file."""
        self.begin()
        assert self.size is not None
        if self.at == self.size:
            if self._version is not None and self._find_version() != self._version:
                raise WrongAnswer(http.CHANGED_MEANWHILE)
            return b""
        end = min(self.at + CHUNK_BYTES, self.size)
        data = self._repeated(self._range, self.at, end)
        if not 0 < len(data) <= end - self.at:
            raise WrongAnswer(
                f"{len(data)} bytes came for bytes {self.at} to {end} of {self.size}: {http.CHANGED_SINCE}"
            )
        self.at += len(data)
        return data

    def read_small(self, most: int) -> bytes:
        """The whole file, which has at most `most` bytes; its size is not asked for."""
        data = self._repeated(self._range, 0, most + 1)
        if len(data) > most:
            raise WrongAnswer(f"more than {most:,} bytes; is it what mmdata wrote?")
        return data

    def close(self) -> None:
        """Nothing is open."""

    @property
    def version(self) -> str:
        """See `HttpFile.version`."""
        return "" if self._version is None else self._version[1]

    def _find_version(self) -> tuple[int, str]:
        """Size in bytes, and what tells the file from its next version."""
        self._file_system.invalidate_cache()  # a listing of before
        found: dict[str, Any] = self._repeated(self._bounded, self._file_system.info, self._url)
        versions = [str(found[name]) for name in ("ETag", "etag", "generation", "blob_id") if found.get(name)]
        return int(found["size"]), " ".join(versions)

    def _range(self, start: int, end: int) -> bytes:
        if self._url.startswith("file://"):
            with open(open_regular(self._url.removeprefix("file://"), "file"), "rb") as file:
                file.seek(start)
                return file.read(end - start)
        return self._bounded(self._file_system.cat_file, self._url, start=start, end=end)

    def _bounded(self, request: Callable[..., T], *given: Any, **named: Any) -> T:
        """A request, which fails after ATTEMPT_S where fsspec can keep a bound.

        The timeouts of its packages begin anew with each byte of a header.
        """
        bound = {"timeout": ATTEMPT_S} if self._file_system.async_impl else {}
        try:
            return request(*given, **named, **bound)
        except fsspec.exceptions.FSTimeoutError as error:
            raise Failed(f"no whole answer for {ATTEMPT_S} s") from error

    def _repeated(self, request: Callable[..., T], *given: Any) -> T:
        self.failures = 0

        def once() -> T:
            try:
                return request(*given)
            except Exception:
                self.failures += 1
                raise

        return repeated(once, self.name, self._stop)


def is_http(url: str) -> bool:
    """Whether `mmdata.storage.http` reads this URL."""
    return url.startswith(("http://", "https://"))


def display_name(url: str) -> str:
    """A file's name for messages and ledgers, without the password or signature that a URL may carry."""
    if "://" not in url:
        return url
    head, _, _ = url.partition("?")
    login = urlsplit(head).netloc.rpartition("@")[0]
    return head.replace(f"{login}@", "", 1) if login else head
