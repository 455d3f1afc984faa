"""Files over HTTP. A response is checked before its body is read, and no more is read than the file has.

Servers send login pages, compress a file that was requested as it is, redirect in circles, send without end, or slow to
a crawl. Each of these raises an error that names it; none fills memory, and none makes the caller wait in silence.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec.asyn

from mmdata.errors import Interrupted
from mmdata.storage.attempts import Failed, WrongAnswer, repeated

if TYPE_CHECKING:  # programs that read local shards do without aiohttp
    from aiohttp import ClientResponse

logger = logging.getLogger("mmdata")

CONNECT_S = 30
"""Timeout of a connection."""
SILENCE_S = 60
"""Timeout of a read that gets no byte."""
ANSWER_S = 60
"""Timeout from a request to the end of the response's headers, redirects included."""
WHOLE_S = 180
"""Timeout of a small file of unknown size, which may take one second more for each MB that it may have."""
LEAST_BYTES_PER_S = 1000
SLOW_S = 30.0
"""Waiting this long at less than LEAST_BYTES_PER_S gives a warning; as long again, and the request has failed."""
MAX_REDIRECTS = 10
READ_BYTES = 2**20
"""Most bytes that `HttpFile.read` gives."""
PIECE_BYTES = 2**18
"""Bytes that may fail `attempts.ATTEMPTS` times."""
STOP_S = 0.1
"""Time after which a request that is to be stopped notices it."""

_sync: Any = fsspec.asyn.sync  # it is annotated as if it returned nothing
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_HTML = ("text/html", "application/xhtml+xml")
CHANGED_SINCE = "the file changed since it was indexed; index it anew, or put back the file that was indexed"
CHANGED_MEANWHILE = "the file changed on the server while it was read; start again when it is complete"

T = TypeVar("T")


def request_options() -> dict[str, Any]:
    """Options for fsspec's HTTP file system.

    A request may take as long as bytes arrive; aiohttp's default limit is 5 minutes in all. The body is not
    decompressed, so that a range of it is a range of the file.
    """
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    return {
        "headers": {"Accept-Encoding": "identity"},
        "client_kwargs": {"timeout": timeout, "auto_decompress": False},
    }


class HttpFile:
    """A file over HTTP, read once from front to back. A failed request goes on at the byte where it ended.

    Each PIECE_BYTES have the attempts and waits of `repeated`: a server that ends each connection after some
    hundred KB is read to the end, and one that ends each after a few bytes is given up.

    Args:
        file_system: fsspec's for HTTP, with `request_options`.
        url: of the file.
        name: for messages.
        stop: ends the reading, and the waiting between two requests.
        start: offset of the first byte to read.
        size: bytes that the file must have; None: not known.
        end: offset behind the last byte that is asked for, and the caller reads no further; None: all are.

    Attributes:
        size: bytes of the whole file; None if the server has not said it.
        at: offset of the next byte.
        failures: failed requests for the piece that is read.

    Raises:
        FileNotFoundError, WrongAnswer, Failed: when all attempts have failed; so do all methods.
        Interrupted: `stop` was set.
    """

    def __init__(
        self,
        file_system: Any,
        url: str,
        name: str,
        stop: Event,
        *,
        start: int = 0,
        size: int | None = None,
        end: int | None = None,
    ) -> None:
        self.name, self.size, self.at, self.failures = name, size, start, 0
        self._request = (file_system, url, name, stop)
        self._stop, self._end = stop, end
        self._is_indexed = size is not None
        self._piece = start  # offset of the piece that is read
        self._first: _Answer | None = None
        self._answer: _Answer | None = None  # None before the first request, and after a failure

    def begin(self) -> None:
        """Ask for the file, which sets `size`; no byte of it is read."""
        repeated(self._ask, self.name, self._stop)

    @property
    def version(self) -> str:
        """What tells the file from its next version; "" before `begin`, or if the server does not say."""
        return "" if self._first is None else self._first.etag or self._first.modified

    def read(self) -> bytes:
        """The next bytes, at most READ_BYTES; none only at the end of the file."""
        if self.at - self._piece >= PIECE_BYTES:
            self._piece, self.failures = self.at, 0
        return repeated(self._read_once, self.name, self._stop, failures=self.failures)

    def read_small(self, most: int) -> bytes:
        """The whole file, which has at most `most` bytes, of one request; another one begins anew."""

        def once() -> bytes:
            self._first = self.size = None
            answer = self._ask()
            with self._counting():
                data = answer.read(most + 1, within_s=WHOLE_S + most / 1e6)
                data += answer.read(most + 1 - len(data), within_s=WHOLE_S)  # nothing, or why it ended
                if len(data) > most:
                    raise WrongAnswer(
                        f"the answer goes on after the {most:,} bytes that it may have; is it what mmdata wrote?"
                    )
            return data

        return repeated(once, self.name, self._stop)

    def close(self) -> None:
        """End the connection."""
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def _read_once(self) -> bytes:
        if self._answer is None and self.at == self.size:
            return b""  # the connection broke behind the last byte, or all had come before
        answer = self._answer or self._ask()
        with self._counting():
            left = READ_BYTES if self.size is None else self.size - self.at
            data = answer.read(min(READ_BYTES, left + 1))  # one byte more shows a body that is too long
            if len(data) > left:
                why = CHANGED_SINCE if self._is_indexed else CHANGED_MEANWHILE
                raise WrongAnswer(f"the answer goes on after the {self.size:,} bytes that it may have; {why}")
            if not data and self.size is not None and left:
                raise Failed(f"the answer ended at byte {self.at:,} of {self.size:,}")
        self.at += len(data)
        return data

    def _ask(self) -> _Answer:
        with self._counting():
            self._answer = answer = _Answer(*self._request, start=self.at, end=self._end)
            first = self._first or answer
            version = (first.etag, answer.etag) if first.etag and answer.etag else (first.modified, answer.modified)
            # What was indexed is compared with its hash, and mirrors may call one version by several names.
            if not self._is_indexed and all(version) and version[0] != version[1]:
                raise WrongAnswer(CHANGED_MEANWHILE)
            if self.size is not None and answer.size not in (None, self.size):
                raise WrongAnswer(answer.other_size(self.size) if self._is_indexed else CHANGED_MEANWHILE)
            answer.skip()
        self._first = first
        self.size = answer.size if self.size is None else self.size
        return answer

    @contextmanager
    def _counting(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception:
            self.failures += 1
            self.close()
            raise


class _Answer:
    """The answer to a request for the bytes of a file from `start` on, or to `end`: checked headers, and the body.

    Attributes:
        size: bytes of the whole file; None if the server does not say.
        etag, modified: what the server says of the file's version (ETag, Last-Modified); "" without it.
    """

    def __init__(self, file_system: Any, url: str, name: str, stop: Event, *, start: int, end: int | None) -> None:
        self._loop, self._stop, self._rate, self._start = file_system.loop, stop, _Rate(name), start
        self._failure: Exception | None = None  # after the bytes that were given last
        self._response: ClientResponse = _sync(self._loop, _respond, file_system, url, (start, end), stop)
        headers = self._response.headers
        self.etag = headers.get("ETag", "").removeprefix("W/")
        self.modified = headers.get("Last-Modified", "")
        try:
            self.size = self._response.content_length if self._response.status == 200 else self._size_of_part()
        except BaseException:
            self.close()
            raise

    def _size_of_part(self) -> int | None:
        given, length = self._response.headers.get("Content-Range", ""), self._response.content_length
        match = _RANGE.fullmatch(given.strip())
        if not match or int(match[1]) != self._start or length not in (None, int(match[2]) + 1 - self._start):
            came = "an unknown number of bytes" if length is None else f"{length:,} bytes"
            raise WrongAnswer(
                f"the bytes from {self._start} on were asked for, and the server answered with Content-Range '{given}' "
                f"and {came}"
            )
        return None if match[3] == "*" else int(match[3])

    def other_size(self, size: int) -> str:
        """What is said where the file was `size` bytes long when it was indexed."""
        if self._response.status == 206:
            return f"has {self.size:,} bytes, and {size:,} were indexed: {CHANGED_SINCE}"
        return (
            f"the server sends {self.size:,} bytes of type {self._response.content_type}, and {size:,} were indexed: "
            f"another answer than the file, or {CHANGED_SINCE}"
        )

    def skip(self) -> None:
        """Read and forget the bytes before `start`, which a server without ranges sends too."""
        left = self._start if self._response.status == 200 else 0
        while left:
            if not (data := self.read(min(left, READ_BYTES))):
                raise Failed("the answer ended before the byte from which the reading goes on")
            left -= len(data)

    def read(self, size: int, *, within_s: float | None = None) -> bytes:
        """The next `size` bytes of the body; fewer at its end, and before a failure, which the next call raises."""
        if self._failure is not None:
            raise self._failure
        return _sync(self._loop, self._read, size, within_s)

    async def _read(self, size: int, within_s: float | None) -> bytes:
        parts: list[bytes] = []
        until = None if within_s is None else monotonic() + within_s
        while size:
            if until is not None and monotonic() > until:
                raise Failed(f"the answer did not end within {within_s:,.0f} s")
            try:
                part = await self._read_piece(min(size, READ_BYTES))
            except Exception as error:
                if not parts:
                    raise
                self._failure = error
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    async def _read_piece(self, most: int) -> bytes:
        """The bytes of the body that have arrived, at most `most`; none only at the end of the body."""
        started = monotonic()
        try:
            # aiohttp's own timeout begins anew with bytes that are not of the body, as those between its chunks.
            part = await _within(self._response.content.read(most), SILENCE_S, self._stop)
        except asyncio.TimeoutError as error:
            raise Failed(f"no byte came for {SILENCE_S} s") from error
        if part:
            self._rate.add(monotonic() - started, len(part))
        return part

    def close(self) -> None:
        """End the connection; that of an answer which was read to its end is used again."""
        self._loop.call_soon_threadsafe(self._response.close)


class _Rate:
    """Measures bytes per second of waiting; time that the caller spends between reads does not count."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waited_s, self._bytes = 0.0, 0
        self._warned = False

    def add(self, waited_s: float, count: int) -> None:
        """Count bytes that arrived after `waited_s` seconds.

        Raises:
            Failed: the rate was too low for too long.
        """
        self._waited_s += waited_s
        self._bytes += count
        if self._waited_s < SLOW_S:
            return
        rate = self._bytes / self._waited_s
        self._waited_s, self._bytes = 0.0, 0
        if rate >= LEAST_BYTES_PER_S:
            self._warned = False
            return
        words = f"{rate:,.0f} bytes a second came for {SLOW_S:g} s, fewer than {LEAST_BYTES_PER_S:,}"
        if self._warned:
            raise Failed(f"{words}, and for {SLOW_S:g} s before")
        self._warned = True
        logger.warning(
            "'%s': %s; after another %g s like that the request is given up. Is the network or the server overloaded?",
            self._name,
            words,
            SLOW_S,
        )


async def _within(waiting: Coroutine[Any, Any, T], seconds: float, stop: Event) -> T:
    """The result of a coroutine; asyncio.TimeoutError after so many seconds, Interrupted when `stop` is set."""
    task, until = asyncio.ensure_future(waiting), monotonic() + seconds
    try:
        while not task.done():
            if stop.is_set():
                raise Interrupted
            if (left := until - monotonic()) <= 0:
                raise asyncio.TimeoutError
            await asyncio.wait({task}, timeout=min(left, STOP_S))
        return task.result()
    finally:
        task.cancel()


async def _respond(file_system: Any, url: str, span: tuple[int, int | None], stop: Event) -> ClientResponse:
    """The response to a request for the bytes of a span, or from its start on: headers checked, body not read yet."""
    from aiohttp import InvalidURL, NonHttpUrlClientError, TooManyRedirects

    start, end = span
    headers = {"Accept-Encoding": "identity"}
    if is_part := bool(start) or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    session = await file_system.set_session()
    request = session.get(file_system.encode_url(url), headers=headers, max_redirects=MAX_REDIRECTS)
    try:
        response: ClientResponse = await _within(request, ANSWER_S, stop)
    except TooManyRedirects as error:
        raise WrongAnswer(f"the server redirects in a circle, or more than {MAX_REDIRECTS} times") from error
    except (InvalidURL, NonHttpUrlClientError) as error:
        raise WrongAnswer(f"{type(error).__name__}: the URL, or what it is redirected to, is not HTTP") from error
    except asyncio.TimeoutError as error:
        raise Failed(str(error) or f"no answer for {ANSWER_S} s") from error
    try:
        _check_is_file(response, (200, 206) if is_part else (200,))
    except BaseException:
        response.close()
        raise
    return response


def _check_is_file(response: ClientResponse, statuses: tuple[int, ...]) -> None:
    """Raise if status or headers say that the body is not the file."""
    status, headers = response.status, response.headers
    if status == 404:
        raise FileNotFoundError("no such file")
    if status >= 400:
        raise Failed(f"status {status} {response.reason or ''}".rstrip(), status)
    if status not in statuses:
        raise WrongAnswer(f"the server answered with status {status}")
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise WrongAnswer(
            f"the server sends it with Content-Encoding '{encoding}', though identity was asked for; have the server "
            "send the file as it lies there"
        )
    if response.content_type in _HTML:
        raise WrongAnswer(
            f"the server answered with a page of HTML (status {status}), as for a login or an error; open the URL in a "
            "browser, and see whether it needs credentials"
        )
