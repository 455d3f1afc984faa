"""A folder of shards behind a URL. Its files are fetched whole, with fsspec, into a `ShardCache`.

A request asks for a range of a file. A request that fails is logged, and repeated after a wait, from where the last one
ended: ATTEMPTS times, and not when BUDGET_S have passed since the first failure. A
failure that waiting cannot mend (no such file, no credentials, a response that is not the file) is raised immediately.
No request reads more bytes than it asked for, or than the manifest says that the file has.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fsspec
import fsspec.exceptions
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_base

from mmdata.errors import ConfigError, DataError, Interrupted, counted
from mmdata.forked import new_lock
from mmdata.recognize import PRIVATE_NAME, unfinished
from mmdata.safe_read import open_regular
from mmdata.storage import http
from mmdata.storage.cache import Remote, ShardCache
from mmdata.storage.concurrently import map_concurrently
from mmdata.storage.extract import Extract
from mmdata.storage.http import Span, WrongAnswer
from mmdata.storage.listed import ListedShard

logger = logging.getLogger("mmdata")

ATTEMPTS = 8
"""Requests for the same range before an error is raised: about a minute of waiting."""
WAIT_S = 0.5
"""Upper bound of the wait before the second request. The bound doubles with each request; the wait is a random part."""
MAX_WAIT_S = 30
"""Largest bound of a wait."""
BUDGET_S = 180
"""No request for a range is made again when so much time has passed since the first one."""
ATTEMPT_S = 300
"""Timeout of a request that is not of HTTP."""
CHUNK_BYTES = 8 * 2**20
"""Largest range of a request."""
EXTRACT_THREADS = 8
"""Concurrent requests for the ranges of one extract."""
MAX_MANIFEST_BYTES = 2**26
"""Largest manifest.json, as nothing says its size; that of a million shards has a quarter of a million bytes."""
MAX_INDEX_BYTES = 2**30
"""Largest index file or page of the manifest; the index of a million rows has some 200 million bytes."""
_OPENS = 8  # times that a file may be removed from the cache between being fetched and being opened

_DENIED = {401, 403, 407}
_FINAL = {400, 404, 405, 410, 416, 501}  # statuses that another request will not change
_NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "RefreshError",
    "GatedRepoError",
}
"""Names of exceptions of botocore, google.auth and huggingface_hub, so that none of them has to be imported."""

_QUERY = re.compile(r"\?[^\s'\">]+")

GIVE_CREDENTIALS = (
    "give the credentials that this protocol takes from the environment "
    "(AWS_PROFILE or AWS_ACCESS_KEY_ID for s3, GOOGLE_APPLICATION_CREDENTIALS for gs, HF_TOKEN for hf)"
)
"""The remedy in the error of a request that was denied."""

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

    def read_first(self, prefixes: Sequence[str], name: str) -> tuple[str, bytes]:
        """Prefix and content of the first file that exists among prefix + name. The file is always fetched.

        Raises:
            DataError, ConfigError: none exists; the error is that of the first.
        """
        missing: DataError | ConfigError | None = None
        for prefix in prefixes:
            try:
                return prefix, self._whole(self.url_of(".", prefix + name), MAX_MANIFEST_BYTES)
            except (DataError, ConfigError) as error:
                cause = error.__cause__
                # A bucket that may not be listed answers 403 for what it does not hold: denied counts as missing.
                if not (is_missing(cause) or _status(cause) == 403 or isinstance(cause, PermissionError)):
                    raise
                missing = missing or error
        assert missing is not None
        if self.url.startswith("s3://"):
            with suppress(DataError, ConfigError):
                self._whole(self.url_of(".", f"{PRIVATE_NAME}/run.json"), MAX_MANIFEST_BYTES)
                missing = unfinished(str(self))
        raise missing

    def with_file(self, name: str, sha256: str, use: Callable[[Path], T]) -> T:
        """Result of `use` on the path, in the cache, of a small file with this hash.

        Raises:
            DataError: `use` raises it, also of a file fetched anew; or the file has another hash.
        """
        url = self.url_of(".", name)
        damaged: DataError | None = None
        for _ in range(_OPENS):
            path = self.cache.path(sha256)
            if not self.cache.touch(sha256):
                os.close(self._keep_small(url, sha256))
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
        chunks = partial(self.chunks, url, shard.bytes, stop or Event())
        return self.cache.open(Remote(display_name(url), shard.sha256, shard.bytes, chunks), stop)

    def open_extract(self, location: str, shard: ListedShard, extract: Extract, stop: Event | None = None) -> int:
        """A descriptor of an extract of a tar, which the caller closes; it is fetched if it is not in the cache.

        Its size and that of the tar are compared, its content is not: the index has hashes of the members.

        Raises:
            NoRanges: the server sends whole tars alone.
            DataError, ConfigError, Interrupted: see `ShardCache.open`.
        """
        url = self.url_of(location, shard.name)
        stop = stop or Event()
        key = extract.key(shard.sha256)

        def chunks(offset: int) -> Iterator[bytes]:
            assert offset == 0
            ask = partial(self._piece, url, stop)
            yield from map_concurrently(ask, extract.pieces(), threads=EXTRACT_THREADS, end=lambda: None, ahead=2)

        return self.cache.open(Remote(display_name(url), key, extract.bytes, chunks, is_hash=False), stop)

    def has_extract(self, shard: ListedShard, extract: Extract) -> bool:
        """Whether `open_extract` returns without fetching anything; an extract in the cache counts as used now."""
        return self.cache.touch(extract.key(shard.sha256))

    def has_shard(self, shard: ListedShard) -> bool:
        """Whether `open_shard` returns without fetching anything; a tar in the cache counts as used now."""
        return self.cache.touch(shard.sha256)

    def shard_path(self, location: str, shard: ListedShard) -> Path:
        """Path of a tar in the cache, fetched first. It may be removed at any time."""
        os.close(self.open_shard(location, shard))
        return self.cache.path(shard.sha256)

    def version_of(self, url: str, stop: Event) -> tuple[int, str]:
        """Size in bytes, and what tells the file from its next version, as a server of objects says; not for HTTP.

        Raises:
            Exception: that of the last attempt.
        """
        file_system = self.file_system()
        file_system.invalidate_cache()  # a listing of before
        retrying = repeat_requests(display_name(url), stop)
        found: dict[str, Any] = retrying(within_attempt, file_system, file_system.info, url)
        versions = [str(found[name]) for name in ("ETag", "etag", "generation", "blob_id") if found.get(name)]
        return int(found["size"]), " ".join(versions)

    def file_of(self, url: str, stop: Event) -> Remote:
        """A file of which no hash is known, for `ShardCache.open`; the server says its size and its version.

        Raises:
            DataError, ConfigError, Interrupted: see `_request`; or the server does not say the size.
        """
        name, retrying = display_name(url), repeat_requests(display_name(url), stop)
        try:
            if is_http(url):
                size, version = retrying(http.version_of, self.file_system(), url, name)
            else:
                size, version = self.version_of(url, stop)
        except Exception as error:
            if stop.is_set():
                raise Interrupted(name) from error
            raise _explained(error, name, 0, retrying.statistics.get("attempt_number", 1)) from error
        key = hashlib.sha256(f"{name}\n{size}\n{version}".encode()).hexdigest()
        return Remote(name, key, size, partial(self.chunks, url, size, stop), is_hash=False)

    def place(self, location: str, name: str) -> str:
        """URL of a file, for messages."""
        return display_name(self.url_of(location, name))

    def _keep_small(self, url: str, sha256: str) -> int:
        data = self._whole(url, MAX_INDEX_BYTES)

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

    def chunks(self, url: str, size: int, stop: Event, offset: int) -> Iterator[bytes]:
        """The bytes of a file of `size` bytes from `offset` on, a request for each CHUNK_BYTES.

        Raises:
            DataError, ConfigError, Interrupted: see `_request`; or the file ends earlier.
        """
        while offset < size:
            span = Span(offset, min(offset + CHUNK_BYTES, size), size)
            data = self._request(url, span, stop)
            if not 0 < len(data) <= size - offset:
                raise self._changed(url, len(data), span)
            yield data
            offset += len(data)

    def _piece(self, url: str, stop: Event, span: Span) -> bytes:
        data = self._request(url, span, stop)
        if len(data) == span.end - span.start:
            return data
        if len(data) == span.size - span.start:  # all that follows, from a server that knows no ranges
            raise NoRanges(display_name(url))
        raise self._changed(url, len(data), span)

    def _changed(self, url: str, came: int, span: Span) -> DataError:
        return DataError(
            f"'{display_name(url)}': {came} bytes came for bytes {span.start} to {span.end} of {span.size}: the file "
            "changed since it was indexed; index it anew, or put back the file that was indexed"
        )

    def _whole(self, url: str, most: int) -> bytes:
        """A small file of unknown size.

        Raises:
            DataError: see `_request`; or it has more than `most` bytes.
        """
        data = self._request(url, None, Event(), most=most)
        if len(data) > most:
            raise DataError(f"'{display_name(url)}': more than {most:,} bytes; is it what mmdata wrote?")
        return data

    def _request(self, url: str, span: Span | None, stop: Event, *, most: int = 0) -> bytes:
        """Bytes of a file; failed requests are repeated. Without a span, the first `most` + 1 bytes or fewer.

        Raises:
            DataError: no such file, a response that is not the file, or all attempts failed.
            ConfigError: credentials are missing or not accepted.
            Interrupted: `stop` was set.
        """
        file_system, name = self.file_system(), display_name(url)
        retrying = repeat_requests(name, stop)
        start, end = (span.start, span.end) if span else (0, most + 1)
        try:
            if is_http(url):
                return retrying(http.read_http, file_system, url, name, span=span, most=most, stop=stop)
            if url.startswith("file://"):
                return _read_local(url.removeprefix("file://"), start, end)
            return retrying(read_range, file_system, url, start, end)
        except Exception as error:
            if stop.is_set():
                raise Interrupted(name) from error
            attempts = retrying.statistics.get("attempt_number", 1)
            raise _explained(error, name, start, attempts) from error

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


class NoRanges(Exception):
    """A server that sends whole files alone was asked for a part of one; names the file."""


class _AfterFirstFailure(stop_base):
    """Ends the attempts when `most_s` have passed since the first failure."""

    def __init__(self, most_s: float) -> None:
        self._most_s, self._first = most_s, inf

    def __call__(self, retry_state: RetryCallState) -> bool:
        assert retry_state.outcome_timestamp is not None
        self._first = min(self._first, retry_state.outcome_timestamp)
        return retry_state.outcome_timestamp - self._first >= self._most_s


def repeat_requests(name: str, stop: Event, *, failures: int = 0, budget_s: float | None = None) -> Retrying:
    """Repeats a request that fails, as long as waiting may help; `stop` ends the waiting.

    There are ATTEMPTS, of which `failures` have been used up. None is begun when `budget_s`, by default BUDGET_S, have
    passed since the first failure; an answer that comes slowly costs nothing of that. Each failure that is followed by
    another attempt is logged; the last one is raised.

    Args:
        name: of the file, for the log.
    """

    def log(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None
        logger.warning(
            "'%s': attempt %d of %d failed (%s); the next one in %.1f s",
            name,
            failures + state.attempt_number,
            ATTEMPTS,
            cause_of(error),
            state.next_action.sleep if state.next_action else 0.0,
        )

    is_over = _AfterFirstFailure(BUDGET_S if budget_s is None else budget_s)
    return Retrying(
        stop=stop_after_attempt(max(1, ATTEMPTS - failures)) | is_over | stop_when_event_set(stop),
        before_sleep=log,
        wait=wait_random_exponential(multiplier=WAIT_S, max=MAX_WAIT_S),
        retry=retry_if_exception(_may_pass),
        sleep=sleep_using_event(stop),
        reraise=True,
    )


def read_range(file_system: Any, url: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file that is not behind HTTP."""
    return within_attempt(file_system, file_system.cat_file, url, start=start, end=end)


def within_attempt(file_system: Any, request: Callable[..., T], *given: Any, **named: Any) -> T:
    """A request to a file system of fsspec, which fails after ATTEMPT_S where fsspec can keep a bound.

    The timeouts of its packages begin anew with each byte of a header.
    """
    bound = {"timeout": ATTEMPT_S} if file_system.async_impl else {}
    try:
        return request(*given, **named, **bound)
    except fsspec.exceptions.FSTimeoutError as error:
        raise http.Failed(f"no whole answer for {ATTEMPT_S} s") from error


def is_http(url: str) -> bool:
    """Whether `mmdata.storage.http` reads this URL."""
    return url.startswith(("http://", "https://"))


def _read_local(path: str, start: int, end: int) -> bytes:
    with open(open_regular(path, "file"), "rb") as file:
        file.seek(start)
        return file.read(end - start)


def display_name(url: str) -> str:
    """A file's name for messages and ledgers, without the password or signature that a URL may carry."""
    if "://" not in url:
        return url
    head, _, _ = url.partition("?")
    login = urlsplit(head).netloc.rpartition("@")[0]
    return head.replace(f"{login}@", "", 1) if login else head


def _status(error: BaseException | None) -> int | None:
    """The HTTP status in an exception of aiohttp, botocore, gcsfs or huggingface_hub, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif hasattr(error, "status"):
        found = getattr(error, "status", None)
    else:
        found = getattr(response, "status_code", getattr(error, "code", None))
    return int(found) if str(found).isdecimal() else None


def cause_of(error: BaseException) -> str:
    """Type and message of a failed request, in one line: what the server or the network said."""
    # s3fs takes args[0] of the OSError of a failed read. A timeout of fsspec has no arguments, so that an IndexError
    # comes instead; the exceptions that led to it have the server's message.
    while isinstance(error, IndexError) or not str(error):
        deeper = error.__cause__ or error.__context__
        if deeper is None:
            break
        error = deeper
    # The signature in a URL's query is a secret.
    return _QUERY.sub("?…", f"{type(error).__name__}: {error}".replace("\n", " "))[:300]


def is_denied(error: BaseException) -> bool:
    """Whether credentials are missing or not accepted."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, PermissionError) or bool(names & _NO_CREDENTIALS) or _status(error) in _DENIED


def is_missing(error: BaseException | None) -> bool:
    """Whether the server says that the file or its bucket does not exist."""
    return isinstance(error, FileNotFoundError) or _status(error) in (404, 410)


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    final = (
        *(FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError),
        *(WrongAnswer, ConfigError, DataError, Interrupted),
    )
    return not (
        not isinstance(error, Exception) or isinstance(error, final) or is_denied(error) or _status(error) in _FINAL
    )


def _explained(error: Exception, name: str, start: int, attempts: int) -> Exception:
    if isinstance(error, DataError):
        return error
    if isinstance(error, WrongAnswer):
        return DataError(f"'{name}': {error}")
    cause = cause_of(error)
    if is_denied(error):
        return ConfigError(f"'{name}': access denied ({cause}); {GIVE_CREDENTIALS}")
    if is_missing(error):
        return DataError(f"'{name}': no such file; upload it, or correct the URL")
    if _status(error) == 416:
        return DataError(f"'{name}': ends before byte {start}: shorter than indexed; upload it again, or index it anew")
    return DataError(
        f"'{name}': cannot be fetched, {counted(attempts, 'attempt')} from byte {start} on, the last one: {cause}; "
        "is the server up, and the network? Start again when it is: what was finished is not fetched again"
    )
