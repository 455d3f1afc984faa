"""Files behind URLs, read from front to back. No more is read than a file has, and nothing makes the caller wait long.

Servers send login pages, compress a file that was requested as it is, redirect in circles, send without end, or slow to
a crawl. Each of these raises an error that names it. HTTP is one request, from which bytes are taken as they come; all
other protocols are read by fsspec, in ranges. A failed request goes on at the byte where it ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import fsspec.asyn

from mmdata.files import naming
from mmdata.safe_read import open_regular
from mmdata.storage.attempts import Failed, WrongAnswer, repeated
from mmdata.storage.urls import FileSystem, awaited, display_name, is_http

if TYPE_CHECKING:  # programs that read local shards do without aiohttp
    from aiohttp import ClientResponse

ANSWER_S = 60
"""Timeout from a request to the end of the response's headers, redirects included."""
SILENCE_S = 60
"""Timeout of a read that gets no byte."""
WHOLE_S = 180
"""Timeout of a small file of unknown size, which may take one second more for each MB that it may have."""
LEAST_BYTES_PER_S = 1000
SLOW_S = 60.0
"""A request has failed that was waited for so long at less than LEAST_BYTES_PER_S."""
MAX_REDIRECTS = 10
READ_BYTES = 2**20
"""Most bytes that are read at once of an answer over HTTP."""
RANGE_BYTES = 8 * 2**20
"""Largest range of a request that is not of HTTP."""
PIECE_BYTES = 2**18
"""Bytes that may fail `attempts.ATTEMPTS` times."""

_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_HTML = ("text/html", "application/xhtml+xml")
CHANGED_SINCE = "the file changed since it was indexed; index it anew, or put back the file that was indexed"
CHANGED_MEANWHILE = "the file changed on the server while it was read; start again when it is complete"


class RemoteFile:
    """A file behind a URL, read once from front to back. A failed request goes on at the byte where it ended.

    Each PIECE_BYTES have the attempts and waits of `repeated`: a server that ends each connection after some
    hundred KB is read to the end, and one that ends each after a few bytes is given up.

    Args:
        files: of the URL's protocol.
        url: of the file.
        stop: ends the reading, and the waiting between two requests.
        start: offset of the first byte to read.
        size: bytes that the file must have; None: not known.
        end: offset behind the last byte to read; None: all are read.

    Attributes:
        name: for messages.
        size: bytes of the whole file; None if the server has not said it.
        at: offset of the next byte.

    Raises:
        Absent, ConfigError, DataError, Interrupted: all methods, see `repeated`.
    """

    def __init__(
        self,
        files: FileSystem,
        url: str,
        stop: Event,
        *,
        start: int = 0,
        size: int | None = None,
        end: int | None = None,
    ) -> None:
        self.name, self.size, self.at = display_name(url), size, start
        self._files, self._url, self._stop, self._end = files, url, stop, end
        self._is_indexed = size is not None
        self._piece = start  # offset of the piece that is read
        self._failures = 0  # in this piece
        self._first: _HttpAnswer | _Ranges | None = None
        self._answer: _HttpAnswer | _Ranges | None = None  # None before the first request, and after a failure

    def begin(self) -> None:
        """Ask for the file, which sets `size`; no byte of it is read."""
        repeated(self._ask, self.name, self._stop, start=self.at)

    @property
    def version(self) -> str:
        """What tells the file from its next version; "" before `begin`, or if the server does not say."""
        return "" if self._first is None else next(filter(None, self._first.versions), "")

    def read(self) -> bytes:
        """The next bytes; none only at the end of the file."""
        if self.at - self._piece >= PIECE_BYTES:
            self._piece, self._failures = self.at, 0
        return repeated(self._read_once, self.name, self._stop, start=self.at, failures=self._failures)

    def read_small(self, most: int) -> bytes:
        """The whole file, which has at most `most` bytes, of one request; another one begins anew."""

        def once() -> bytes:
            unknown = None if is_http(self._url) else most + 1  # an object is not asked for its size
            with closing(self._request(unknown)) as answer:
                data = answer.read_whole(most + 1)
            if len(data) > most:
                raise WrongAnswer(
                    f"the answer goes on after the {most:,} bytes that it may have; is it what mmdata wrote?"
                )
            return data

        return repeated(once, self.name, self._stop, start=0)

    def save(self, path: Path) -> str:
        """Write what is left of the file into one on this disk, and close it. Returns the SHA-256 of what was written.

        Raises:
            OSError: the file cannot be written; it is named.
        """
        digest = hashlib.sha256()
        with closing(self), naming(path), path.open("wb") as file:
            for data in iter(self.read, b""):
                file.write(data)
                digest.update(data)
        return digest.hexdigest()

    def close(self) -> None:
        """End the connection."""
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def _read_once(self) -> bytes:
        if self._answer is None and self.at == self._until:
            return b""  # the connection broke behind the last byte, or all had come before
        answer = self._answer or self._ask()
        end = self._until
        with self._counting():
            left = READ_BYTES if end is None else end - self.at
            data = answer.read(left if self._end is not None else left + 1)  # one more shows a body that is too long
            if len(data) > left:
                why = CHANGED_SINCE if self._is_indexed else CHANGED_MEANWHILE
                raise WrongAnswer(f"the answer goes on after the {self.size:,} bytes that it may have; {why}")
            if not data and end is not None and left:
                raise Failed(f"the answer ended at byte {self.at:,} of {end:,}")
        self.at += len(data)
        return data

    @property
    def _until(self) -> int | None:
        return self.size if self._end is None else self._end

    def _ask(self) -> _HttpAnswer | _Ranges:
        with self._counting():
            self._answer = answer = self._request(self.size if self._is_indexed else None)
            # What was indexed is compared with its hash, and mirrors may call one version by several names.
            if not self._is_indexed and self._first is not None and self._differs(answer):
                raise WrongAnswer(CHANGED_MEANWHILE)
            answer.skip()
        self._first = self._first or answer
        self.size = answer.size if self.size is None else self.size
        return answer

    def _differs(self, answer: _HttpAnswer | _Ranges) -> bool:
        """Whether an answer is of another version of the file than the first one."""
        assert self._first is not None
        known = ((one, two) for one, two in zip(self._first.versions, answer.versions, strict=True) if one and two)
        one, two = next(known, ("", ""))
        return one != two or len({self.size, answer.size} - {None}) > 1

    def _request(self, size: int | None) -> _HttpAnswer | _Ranges:
        answer = _HttpAnswer if is_http(self._url) else _Ranges
        return answer(self._files, self._url, self._stop, start=self.at, end=self._end, size=size)

    @contextmanager
    def _counting(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception:
            self._failures += 1
            self.close()
            raise


class _HttpAnswer:
    """The answer to a request over HTTP: checked headers, and the body.

    Attributes:
        size: bytes of the whole file; None if the server does not say.
        versions: what the server says of the file's version: the first that two answers have decides.
    """

    def __init__(
        self, files: FileSystem, url: str, stop: Event, *, start: int, end: int | None, size: int | None
    ) -> None:
        self._stop, self._start = stop, start
        self._waited_s, self._came = 0.0, 0  # since the rate was last looked at
        is_part = bool(start) or end is not None
        headers = {"Accept-Encoding": "identity"}
        if is_part:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        asked = _respond(files.get(), url, headers)
        self._response = awaited(asked, ANSWER_S, f"no answer for {ANSWER_S} s", stop)
        try:
            self._check((200, 206) if is_part else (200,))
            self.size = self._response.content_length if self._response.status == 200 else self._size_of_part()
            self._check_size(size)
        except BaseException:
            self.close()
            raise
        found = self._response.headers
        self.versions = found.get("ETag", "").removeprefix("W/"), found.get("Last-Modified", "")

    def _check(self, statuses: tuple[int, ...]) -> None:
        """Raise if status or headers say that the body is not the file."""
        status, headers = self._response.status, self._response.headers
        if status == 404:
            raise FileNotFoundError("no such file")
        if status >= 400:
            raise Failed(f"status {status} {self._response.reason or ''}".rstrip(), status)
        if status not in statuses:
            raise WrongAnswer(f"the server answered with status {status}")
        encoding = headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise WrongAnswer(
                f"the server sends it with Content-Encoding '{encoding}', though identity was asked for; have the "
                "server send the file as it lies there"
            )
        if self._response.content_type in _HTML:
            raise WrongAnswer(
                f"the server answered with a page of HTML (status {status}), as for a login or an error; open the URL "
                "in a browser, and see whether it needs credentials"
            )

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

    def _check_size(self, size: int | None) -> None:
        """Raise WrongAnswer if the server says that the file has another size than the one that was indexed."""
        if size is None or self.size in (None, size):
            return
        if self._response.status == 206:
            raise WrongAnswer(f"has {self.size:,} bytes, and {size:,} were indexed: {CHANGED_SINCE}")
        raise WrongAnswer(
            f"the server sends {self.size:,} bytes of type {self._response.content_type}, and {size:,} were indexed: "
            f"another answer than the file, or {CHANGED_SINCE}"
        )

    def skip(self) -> None:
        """Read and forget the bytes before `start`, which a server without ranges sends too."""
        left = self._start if self._response.status == 200 else 0
        while left:
            if not (data := self.read(left)):
                raise Failed("the answer ended before the byte from which the reading goes on")
            left -= len(data)

    def read(self, most: int) -> bytes:
        """The next bytes that come, at most `most`; none only at the end."""
        started = monotonic()
        # aiohttp's own timeout begins anew with bytes that are not of the body, as those between its chunks.
        reading = self._response.content.read(min(most, READ_BYTES))
        data = awaited(reading, SILENCE_S, f"no byte came for {SILENCE_S} s", self._stop)
        self._waited_s += monotonic() - started  # the time that the caller spends between reads does not count
        self._came += len(data)
        if self._waited_s >= SLOW_S:
            rate = self._came / self._waited_s
            if rate < LEAST_BYTES_PER_S:
                raise Failed(f"{rate:,.0f} bytes a second came for {SLOW_S:g} s, fewer than {LEAST_BYTES_PER_S:,}")
            self._waited_s, self._came = 0.0, 0
        return data

    def read_whole(self, most: int) -> bytes:
        """All that comes, at most `most` bytes, within a bounded time."""
        whole, within_s, started = bytearray(), WHOLE_S + most / 1e6, monotonic()
        while len(whole) < most and (data := self.read(most - len(whole))):
            whole += data
            if monotonic() - started > within_s:
                raise Failed(f"the answer did not end within {within_s:,.0f} s")
        return bytes(whole)

    def close(self) -> None:
        """End the connection, unless the answer was read to its end: then the next request uses it."""
        fsspec.asyn.get_loop().call_soon_threadsafe(self._response.close)


async def _respond(files: Any, url: str, headers: dict[str, str]) -> ClientResponse:
    from aiohttp import InvalidURL, NonHttpUrlClientError, TooManyRedirects

    session = await files.set_session()
    try:
        return await session.get(files.encode_url(url), headers=headers, max_redirects=MAX_REDIRECTS)
    except TooManyRedirects as error:
        raise WrongAnswer(f"the server redirects in a circle, or more than {MAX_REDIRECTS} times") from error
    except (InvalidURL, NonHttpUrlClientError) as error:
        raise WrongAnswer(f"{type(error).__name__}: the URL, or what it is redirected to, is not HTTP") from error


class _Ranges:
    """A file that fsspec reads, in ranges. Without a `size` its version is asked for before and after it is read.

    Attributes:
        size, versions: see `_HttpAnswer`.
    """

    def __init__(
        self, files: FileSystem, url: str, stop: Event, *, start: int, end: int | None, size: int | None
    ) -> None:
        self._files, self._url, self._stop, self._at = files, url, stop, start
        self._is_checked = size is None
        self.size, *self.versions = self._find() if size is None else (size,)
        self._end = self.size if end is None else end

    def read(self, most: int) -> bytes:
        """The next bytes; none only at the end."""
        end = min(self._at + RANGE_BYTES, self._end)
        if end == self._at:
            return b""
        data = self._range(self._at, end)
        if not 0 < len(data) <= end - self._at:
            raise WrongAnswer(f"{len(data)} bytes came for bytes {self._at} to {end} of {self.size}: {CHANGED_SINCE}")
        if self._is_checked and end == self.size and self._find() != (self.size, *self.versions):
            raise WrongAnswer(CHANGED_MEANWHILE)
        self._at += len(data)
        return data

    def skip(self) -> None:
        """Nothing: a range begins where it was asked for."""

    def read_whole(self, most: int) -> bytes:
        """The first bytes of the file, at most `most`."""
        return self._range(0, most)

    def close(self) -> None:
        """Nothing: each range is a request of its own."""

    def _find(self) -> tuple[int, str]:
        """Size in bytes, and what tells the file from its next version."""
        self._files.get().invalidate_cache()  # a listing of before
        found: dict[str, Any] = self._files.call("info", self._url, stop=self._stop)
        versions = [str(found[name]) for name in ("ETag", "etag", "generation", "blob_id") if found.get(name)]
        return int(found["size"]), " ".join(versions)

    def _range(self, start: int, end: int) -> bytes:
        if self._url.startswith("file://"):
            with open(open_regular(self._url.removeprefix("file://"), "file"), "rb") as file:
                file.seek(start)
                return file.read(end - start)
        return self._files.call("cat_file", self._url, start=start, end=end, stop=self._stop)
