"""One request over HTTP: headers are checked before the body is read, and no more is read than may come.

aiohttp does the asking; this file decides how long, how much, and what each failure is called.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any, NamedTuple

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorDNSError,
    ClientError,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientSSLError,
    InvalidURL,
)
from aiohttp.abc import AbstractResolver
from aiohttp.helpers import is_ip_address
from multidict import CIMultiDictProxy
from yarl import URL

from mmdata.convert.fetch.addresses import RefusedAddress, is_passing
from mmdata.convert.fetch.faults import BadStatus, TryAgain, short
from mmdata.convert.fetch.room import Space
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import BadSample, Reason, excerpt

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CLOSE = {"Connection": "close"}
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors of this machine, for which no URL is to blame."""


@dataclass(frozen=True)
class Asked:
    """What a request is for.

    Attributes:
        most: bytes that the body may have.
        cut: whether a longer body is cut at `most`, and no error.
        space: of the row, for the body; None for small files.
        is_last: whether the connection is closed after the answer.
        refuse: looks at the headers of an answer before its body is read; it may raise BadSample.
    """

    most: int
    cut: bool = False
    space: Space | None = None
    is_last: bool = False
    refuse: Callable[[CIMultiDictProxy[str]], None] | None = None


class _NoAddress(ClientError):
    """Its cause says why no address of a host is known."""


class Answer(NamedTuple):
    """The body of an answer of status 200, or where another one redirects to, as the server gives it ("": nowhere)."""

    body: bytes
    location: str = ""


async def look_up(names: AbstractResolver, url: URL) -> None:
    """Look up the host of a URL, so that `names` knows it when it is asked for; its time is none of `answer_s`.

    It ends when the system's resolver gives up. A limit here would free the slot of a thread that is at work.

    Raises:
        BadSample, TryAgain, OSError: as `ask`.
    """
    with _naming(url):
        try:
            if not is_ip_address(url.raw_host):
                await names.resolve(url.raw_host or "")
        except OSError as error:
            raise _NoAddress from error


async def ask(session: ClientSession, url: URL, settings: FetchSettings, asked: Asked) -> Answer:
    """Ask for a URL once; redirects are not followed.

    Args:
        session: sends no cookies, and decompresses nothing.
        url: of http or https.
        settings: of the fetching.
        asked: what the request is for.

    Raises:
        BadSample: the answer is not what was asked for.
        TryAgain: the failure may pass.
        NoRoom: the body has no room now.
        OSError: this machine cannot open connections.
    """
    with _naming(url):
        request = session.get(url, allow_redirects=False, headers=_CLOSE if asked.is_last else None)
        response = await asyncio.wait_for(request, settings.answer_s)
    try:
        location = response.headers.get("Location", "") if response.status in REDIRECTS else ""
        if not location:
            _check_status(response)
        if asked.refuse:
            asked.refuse(response.headers)
        if location:
            return Answer(b"", location)
        _check_encoding(response)
        with _naming(url):
            return Answer(await _read(response, settings, asked))
    finally:
        response.close()  # a body that was read to its end has returned its connection already


def _check_status(response: ClientResponse) -> None:
    status = response.status
    if status == 200:
        return
    bad = BadStatus(status, short(f"status {status} {response.reason or ''}".rstrip()))
    if bad.may_pass:
        raise TryAgain(bad, retry_after(response.headers.get("Retry-After", "")))
    raise bad


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without one."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _check_encoding(response: ClientResponse) -> None:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        detail = f"the server sends it with Content-Encoding {excerpt(encoding)}, though identity was asked for"
        raise BadSample(Reason.BAD_ANSWER, detail)


async def _read(response: ClientResponse, settings: FetchSettings, asked: Asked) -> bytes:
    """The body of an answer.

    Raises:
        BadSample: too large or too slow.
        NoRoom: see `Space.need`.
        TryAgain: it is silent for too long.
    """
    most, space, declared = asked.most, asked.space, response.content_length
    if declared is not None and declared > most and not asked.cut:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"the server declares {declared} bytes; the limit is {most}")
    if declared is not None and space is not None:
        space.need(declared, whole=declared)
    parts: list[bytes] = []
    size, waited_s = 0, 0.0
    marked_s, marked = 0.0, 0
    while True:
        started = monotonic()
        try:
            # aiohttp's own timeout begins anew with bytes that are not of the body, as those between its chunks.
            part = await asyncio.wait_for(response.content.readany(), settings.silence_s)
        except asyncio.TimeoutError as error:
            silent = f"no byte of the body came for {settings.silence_s:g} s"
            raise TryAgain(BadSample(Reason.TIMED_OUT, silent)) from error
        if not part:
            break
        waited_s += monotonic() - started
        size += len(part)
        if size > most:
            if asked.cut:
                return b"".join([*parts, part])[:most]
            raise BadSample(Reason.IMAGE_TOO_LARGE, f"the answer goes on after {most} bytes, the limit")
        if space is not None:
            space.need(size)
        parts.append(part)
        if waited_s > settings.body_s:
            raise BadSample(Reason.TIMED_OUT, f"not complete after {settings.body_s:g} s")
        if waited_s - marked_s >= settings.slow_s:
            rate = (size - marked) / (waited_s - marked_s)
            if rate < settings.least_bytes_per_s:
                least = f"fewer than {settings.least_bytes_per_s:,}"
                detail = f"{rate:,.0f} bytes a second came for {waited_s - marked_s:.3g} s, {least}"
                raise BadSample(Reason.TIMED_OUT, detail)
            marked_s, marked = waited_s, size
    return b"".join(parts)


@contextmanager
def _naming(url: URL) -> Generator[None, None, None]:
    """Turn the errors of aiohttp into ours."""
    try:
        yield
    except asyncio.TimeoutError as error:
        words = str(error).partition(" to host ")[0] or "no answer"
        raise TryAgain(BadSample(Reason.TIMED_OUT, f"{words[0].lower()}{words[1:]}")) from error
    except (InvalidURL, UnicodeError) as error:
        raise BadSample(Reason.REFUSED_ADDRESS, f"not a URL that can be asked for: {short(str(error))}") from error
    except ClientError as error:
        raise _named(url, error) from error


def _named(url: URL, error: ClientError) -> Exception:
    cause = _cause(error)
    if isinstance(cause, RefusedAddress):
        return BadSample(Reason.REFUSED_ADDRESS, f"{cause}; --allow-private-addresses allows it")
    if isinstance(cause, OSError) and cause.errno in _OURS and not isinstance(cause, socket.gaierror):
        return cause
    if isinstance(error, (ClientConnectorDNSError, _NoAddress)):
        bad = BadSample(Reason.UNREACHABLE, f"no address of '{url.host}' is known: {_words(cause)}")
        return TryAgain(bad) if is_passing(error) else bad
    if isinstance(error, (ClientConnectorCertificateError, ClientSSLError)):
        return BadSample(Reason.UNREACHABLE, f"no safe connection: {_words(cause)}")
    if isinstance(error, ClientResponseError):
        return BadSample(Reason.BAD_ANSWER, f"the answer is not HTTP: {short(error.message)}")
    return TryAgain(BadSample(Reason.UNREACHABLE, f"the connection failed: {_words(cause)}"))


def _cause(error: BaseException) -> BaseException:
    """The first cause of an error."""
    inner: Any = getattr(error, "os_error", None) or error.__cause__ or error.__context__
    return _cause(inner) if isinstance(inner, BaseException) and inner is not error else error


def _words(error: BaseException) -> str:
    words = str(error)
    if isinstance(error, OSError) and error.errno:  # asyncio puts the address in place of the words
        words = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return short(words) if words else type(error).__name__


def jitter(at_least_s: float) -> float:
    """A pause of at least so long, and up to a tenth longer, so that those who wait do not come together."""
    return at_least_s * random.uniform(1.0, 1.1)
