"""Files over HTTP. A response is checked before its body is read, and no more is read than was asked for.

Servers send login pages, compress a file that was requested as it is, redirect in circles, send without end, or slow to
a crawl. Each of these raises an error that names it; none fills memory, and none makes the caller wait in silence.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec.asyn

from mmdata.errors import Interrupted

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
"""Timeout of a body of unknown size, which may take one second more for each MB that it may have."""
LEAST_BYTES_PER_S = 1000
SLOW_S = 30.0
"""Waiting this long at less than LEAST_BYTES_PER_S gives a warning; as long again, and the request has failed."""
MAX_REDIRECTS = 10
_PIECE = 2**20  # bytes

_sync: Any = fsspec.asyn.sync  # it is annotated as if it returned nothing
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_HTML = ("text/html", "application/xhtml+xml")
_CHANGED = "the file changed since it was indexed; index it anew, or put back the file that was indexed"


class WrongAnswer(Exception):
    """The server sent something else than the file; asking again would not change that."""


class Failed(Exception):
    """A request that may succeed when it is repeated.

    Attributes:
        status: HTTP status; None without a response.
    """

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.status = status


class Span(NamedTuple):
    """Bytes [start, end) of a file of `size` bytes."""

    start: int
    end: int
    size: int


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


def read_http(file_system: Any, url: str, name: str, *, span: Span | None, most: int, stop: Event) -> bytes:
    """Read a file, or a part of it, with one request.

    Args:
        file_system: fsspec's for HTTP, with `request_options`.
        url: of the file.
        name: for messages.
        span: the part; None: the whole file.
        most: upper bound of the size of a whole file, in bytes.
        stop: ends the reading.

    Returns:
        The bytes asked for. If the server does not support ranges, all bytes from `span.start` on.

    Raises:
        FileNotFoundError: status 404.
        WrongAnswer: the response is not the file.
        Failed: the request may be repeated.
        Interrupted: `stop` was set.
    """
    return _sync(file_system.loop, _read_once, file_system, url, name, span, most, stop)


def version_of(file_system: Any, url: str, name: str) -> tuple[int, str]:
    """Size in bytes of a file, and what tells it from its next version; "" if the server does not say.

    Raises:
        FileNotFoundError, WrongAnswer, Failed: see `read_http`; WrongAnswer also if the server says no size.
    """
    with HttpFile(file_system, url, name) as file:
        if file.size is None:
            raise WrongAnswer("the server does not say how many bytes it has (Content-Length); fetch it yourself")
        return file.size, file.etag or file.modified


class HttpFile(io.RawIOBase):
    """A file of unknown size, read from front to back with one request.

    Args:
        file_system: fsspec's for HTTP, with `request_options`.
        url: of the file.
        name: for messages.
        start: offset of the first byte to read. A server without ranges sends the bytes before it too, which are read
            and dropped.
        of: the file that was read up to `start`; a file of another size or version is refused.

    Attributes:
        size: bytes of the whole file; None if the server does not say.
        etag, modified: what the server says of the file's version (ETag, Last-Modified); "" without it.

    Raises:
        FileNotFoundError, WrongAnswer, Failed: see `read_http`; reading raises them too. Failed also if the body ends
            before the file does: some servers send at most so many bytes for a request.
    """

    def __init__(self, file_system: Any, url: str, name: str, *, start: int = 0, of: HttpFile | None = None) -> None:
        super().__init__()
        self._loop = file_system.loop
        self._rate = _Rate(name)
        self._response: ClientResponse = _sync(self._loop, _ask, file_system, url, None, start)
        headers = self._response.headers
        self.etag = headers.get("ETag", "").removeprefix("W/")
        self.modified = headers.get("Last-Modified", "")
        self._at = start
        try:
            if self._response.status == 206:
                self._end, self.size = self._part(start)
            else:
                self._end = self.size = self._response.content_length
            if of is not None:
                self._check_same(of)
            if self._response.status == 200:
                _sync(self._loop, _skip, self._response, start, self._rate)
        except BaseException:
            self.close()
            raise

    def _part(self, start: int) -> tuple[int, int | None]:
        """The offset at which a part of the file ends, and the size of the whole file.

        Raises:
            WrongAnswer: the headers say that the part is another one than that from `start` on.
        """
        given, length = self._response.headers.get("Content-Range", ""), self._response.content_length
        match = _RANGE.fullmatch(given.strip())
        if not match or int(match[1]) != start or length not in (None, int(match[2]) + 1 - start):
            raise WrongAnswer(
                f"the bytes from {start} on were asked for, and the server answered with Content-Range '{given}' and "
                f"{_of_bytes(length)}"
            )
        return int(match[2]) + 1, None if match[3] == "*" else int(match[3])

    def _check_same(self, of: HttpFile) -> None:
        """Raise WrongAnswer if this is another file, or another version of it, than the one that was read before."""
        version = (of.etag, self.etag) if of.etag and self.etag else (of.modified, self.modified)
        if any(before and now and before != now for before, now in (version, (of.size, self.size))):
            raise WrongAnswer("the file changed on the server while it was read; start again when it is complete")
        self.size = of.size if self.size is None else self.size

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with the bytes that have arrived, one or more; with none only at the end of the file."""
        data = _sync(self._loop, _read_piece, self._response, len(buffer), self._rate)
        self._at += len(data)
        if self._end is not None and self._at > self._end:
            raise WrongAnswer(f"the answer goes on after byte {self._end}, where it said that it ends")
        if not data and self.size is not None and self._at < self.size:
            raise Failed(f"the answer ended at byte {self._at} of {self.size}")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """End the connection."""
        if not self.closed and hasattr(self, "_response"):
            self._loop.call_soon_threadsafe(self._response.close)
        super().close()


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


async def _read_once(file_system: Any, url: str, name: str, span: Span | None, most: int, stop: Event) -> bytes:
    response = await _ask(file_system, url, span)
    try:
        whole = span is None or response.status == 200
        limit = most if span is None else span.size if whole else span.end - span.start
        try:
            body = _read_body(response, limit + 1, _Rate(name), stop)  # one byte more shows a body that is too long
            data = await asyncio.wait_for(body, None if span else WHOLE_S + most / 1e6)
        except asyncio.TimeoutError as error:
            raise Failed(f"the answer did not end within {WHOLE_S + most / 1e6:,.0f} s") from error
        if len(data) > limit:
            why = _CHANGED if span else "is it what mmdata wrote?"
            raise WrongAnswer(f"the answer goes on after the {limit:,} bytes that it may have; {why}")
        if span and len(data) < limit:
            raise Failed(f"the answer ended after {len(data):,} of {limit:,} bytes")
        return data[span.start :] if span and whole else data
    finally:
        response.close()  # a response that was read to its end has returned its connection already


async def _ask(file_system: Any, url: str, span: Span | None, start: int = 0) -> ClientResponse:
    """The response to a request: headers checked, body not read yet. Without a span, all bytes from `start` on."""
    from aiohttp import InvalidURL, NonHttpUrlClientError, TooManyRedirects

    headers = {"Accept-Encoding": "identity"}
    if span:
        headers["Range"] = f"bytes={span.start}-{span.end - 1}"
    elif start:
        headers["Range"] = f"bytes={start}-"
    session = await file_system.set_session()
    request = session.get(file_system.encode_url(url), headers=headers, max_redirects=MAX_REDIRECTS)
    try:
        response = await asyncio.wait_for(request, ANSWER_S)
    except TooManyRedirects as error:
        raise WrongAnswer(f"the server redirects in a circle, or more than {MAX_REDIRECTS} times") from error
    except (InvalidURL, NonHttpUrlClientError) as error:
        raise WrongAnswer(f"{type(error).__name__}: the URL, or what it is redirected to, is not HTTP") from error
    except asyncio.TimeoutError as error:
        raise Failed(str(error) or f"no answer for {ANSWER_S} s") from error
    try:
        _check_answer(response, span, ranges=span is not None or start > 0)
    except BaseException:
        response.close()
        raise
    return response


def _check_answer(response: ClientResponse, span: Span | None, *, ranges: bool) -> None:
    """Raise if status or headers say that the body is not the file."""
    status, headers = response.status, response.headers
    if status == 404:
        raise FileNotFoundError("no such file")
    if status >= 400:
        raise Failed(f"status {status} {response.reason or ''}".rstrip(), status)
    if status not in ((200, 206) if ranges else (200,)):
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
    if span:
        _check_size(response, span)


def _check_size(response: ClientResponse, span: Span) -> None:
    """Raise if the headers say that the file has another size, or that the body is another part of it."""
    length = response.content_length  # None: the server does not say
    if response.status == 200:
        if length not in (None, span.size):
            raise WrongAnswer(
                f"the server sends {length:,} bytes of type {response.content_type}, and {span.size:,} were indexed: "
                f"another answer than the file, or {_CHANGED}"
            )
        return
    given = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(given.strip())
    if match and match[3] != "*" and (size := int(match[3])) != span.size:
        if size < span.size:
            raise WrongAnswer(f"ends before byte {size}: shorter than indexed; upload it again, or index it anew")
        raise WrongAnswer(f"has {size:,} bytes, and {span.size:,} were indexed: {_CHANGED}")
    asked = span.end - span.start
    if not match or (int(match[1]), int(match[2])) != (span.start, span.end - 1) or length not in (None, asked):
        raise WrongAnswer(
            f"bytes {span.start} to {span.end - 1} were asked for, and the server answered with Content-Range "
            f"'{given}' and {_of_bytes(length)}"
        )


def _of_bytes(length: int | None) -> str:
    """A Content-Length for messages."""
    return "an unknown number of bytes" if length is None else f"{length:,} bytes"


async def _skip(response: ClientResponse, size: int, rate: _Rate) -> None:
    """Read and drop bytes of a body."""
    while size:
        data = await _read_body(response, min(size, _PIECE), rate, Event())
        if not data:
            raise Failed("the answer ended before the byte from which the reading goes on")
        size -= len(data)


async def _read_body(response: ClientResponse, size: int, rate: _Rate, stop: Event) -> bytes:
    """The next `size` bytes of a body; fewer only at the end of the body."""
    parts: list[bytes] = []
    left = size
    while left:
        part = await _read_piece(response, left, rate)
        if not part:
            break
        parts.append(part)
        left -= len(part)
        if stop.is_set():
            raise Interrupted
    return b"".join(parts)


async def _read_piece(response: ClientResponse, most: int, rate: _Rate) -> bytes:
    """The bytes of a body that have arrived, at most `most`; none only at the end of the body."""
    started = monotonic()
    try:
        # aiohttp's own timeout begins anew with bytes that are not of the body, as those between its chunks.
        part = await asyncio.wait_for(response.content.read(min(most, _PIECE)), SILENCE_S)
    except asyncio.TimeoutError as error:
        raise Failed(f"no byte came for {SILENCE_S} s") from error
    if part:
        rate.add(monotonic() - started, len(part))
    return part
