"""One request over HTTP: headers are checked before the body is read, and no more is read than may come.

aiohttp does the asking; this file decides how long, how much, and what each failure is called.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
from yarl import URL

from mmdata.convert.fetch.addresses import RefusedAddress, is_passing
from mmdata.convert.fetch.faults import UrlFault, short
from mmdata.convert.fetch.opt_outs import MAX_RULES_BYTES, opted_out_by_headers
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import Reason, excerpt

Need = Callable[[int, "int | None"], None]
"""Finds room for the bytes of a body so far, and in all if that is known; it may raise NoRoom."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 429})
"""Statuses below 500 that may be another one later."""
_CLOSE = {"Connection": "close"}
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors of this machine, for which no URL is to blame."""


class _NoAddress(ClientError):
    """Its cause says why no address of a host is known."""


class Answer(NamedTuple):
    """The body of an answer of status 200, or where another one redirects to, as the server gives it ("": nowhere)."""

    status: int
    body: bytes = b""
    location: str = ""


async def look_up(names: AbstractResolver, url: URL) -> None:
    """Look up the host of a URL, so that `names` knows it when it is asked for; its time is none of `answer_s`.

    It ends when the system's resolver gives up. A limit here would free the slot of a thread that is at work.

    Raises:
        UrlFault, OSError: as `ask`.
    """
    with _naming(url):
        try:
            if not is_ip_address(url.raw_host):
                await names.resolve(url.raw_host or "")
        except OSError as error:
            raise _NoAddress from error


async def ask(
    session: ClientSession,
    url: URL,
    settings: FetchSettings,
    *,
    need: Need | None,
    is_last: bool = False,
    honours: bool = False,
) -> Answer:
    """Ask for a URL once; redirects are not followed.

    Args:
        session: sends no cookies, and decompresses nothing.
        url: of http or https.
        settings: of the fetching.
        need: finds room for an image; None asks for the rules of a site, and cuts them at MAX_RULES_BYTES.
        is_last: whether the connection is closed after the answer.
        honours: whether an answer that opts out is a fault.

    Raises:
        UrlFault: there is no such answer.
        NoRoom: the body has no room now.
        OSError: this machine cannot open connections.
    """
    with _naming(url):
        request = session.get(url, allow_redirects=False, headers=_CLOSE if is_last else None)
        response = await asyncio.wait_for(request, settings.answer_s)
    try:
        headers, status = response.headers, response.status
        location = headers.get("Location", "") if status in REDIRECTS else ""
        if status != 200 and not location:
            detail = short(f"status {status} {response.reason or ''}".rstrip())
            may_pass = status in PASSING or status >= 500
            after_s = retry_after(headers.get("Retry-After", "")) if may_pass else 0.0
            raise UrlFault(Reason.HTTP_STATUS, detail, status=status, may_pass=may_pass, after_s=after_s)
        opt_outs = headers.getall("X-Robots-Tag", ()), headers.getall("tdm-reservation", ())
        if honours and (header := opted_out_by_headers(*opt_outs)):
            raise UrlFault(Reason.OPTED_OUT, f"the answer says {header}")
        if location:
            return Answer(status, location=location)
        encoding = headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            detail = f"the server sends it with Content-Encoding {excerpt(encoding)}, though identity was asked for"
            raise UrlFault(Reason.BAD_ANSWER, detail)
        with _naming(url):
            return Answer(status, await _read(response, settings, need))
    finally:
        response.close()  # a body that was read to its end has returned its connection already


def retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without one."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


async def _read(response: ClientResponse, settings: FetchSettings, need: Need | None) -> bytes:
    """The body of an answer.

    Raises:
        UrlFault: too large, too slow, or silent for too long.
        NoRoom: see `Room.need`.
    """
    most = settings.max_bytes if need else MAX_RULES_BYTES
    declared = response.content_length
    if need and declared is not None:
        if declared > most:
            raise UrlFault(Reason.IMAGE_TOO_LARGE, f"the server declares {declared} bytes; the limit is {most}")
        need(declared, declared)
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
            raise UrlFault(Reason.TIMED_OUT, silent, may_pass=True) from error
        if not part:
            break
        waited_s += monotonic() - started
        size += len(part)
        if size > most:
            if need is None:
                return b"".join([*parts, part])[:most]
            raise UrlFault(Reason.IMAGE_TOO_LARGE, f"the answer goes on after {most} bytes, the limit")
        if need:
            need(size, None)
        parts.append(part)
        if waited_s > settings.body_s:
            raise UrlFault(Reason.TIMED_OUT, f"not complete after {settings.body_s:g} s")
        if waited_s - marked_s >= settings.slow_s:
            rate = (size - marked) / (waited_s - marked_s)
            if rate < settings.least_bytes_per_s:
                least = f"fewer than {settings.least_bytes_per_s:,}"
                detail = f"{rate:,.0f} bytes a second came for {waited_s - marked_s:.3g} s, {least}"
                raise UrlFault(Reason.TIMED_OUT, detail)
            marked_s, marked = waited_s, size
    return b"".join(parts)


@contextmanager
def _naming(url: URL) -> Generator[None, None, None]:
    """Turn the errors of aiohttp into ours."""
    try:
        yield
    except asyncio.TimeoutError as error:
        words = str(error).partition(" to host ")[0] or "no answer"
        raise UrlFault(Reason.TIMED_OUT, f"{words[0].lower()}{words[1:]}", may_pass=True) from error
    except (InvalidURL, UnicodeError) as error:
        raise UrlFault(Reason.REFUSED_ADDRESS, f"not a URL that can be asked for: {short(str(error))}") from error
    except ClientError as error:
        raise _named(url, error) from error


def _named(url: URL, error: ClientError) -> Exception:
    cause = _cause(error)
    if isinstance(cause, RefusedAddress):
        return UrlFault(Reason.REFUSED_ADDRESS, f"{cause}; --allow-private-addresses allows it")
    if isinstance(cause, OSError) and cause.errno in _OURS and not isinstance(cause, socket.gaierror):
        return cause
    if isinstance(error, (ClientConnectorDNSError, _NoAddress)):
        detail = f"no address of '{url.host}' is known: {_words(cause)}"
        return UrlFault(Reason.UNREACHABLE, detail, may_pass=is_passing(error))
    if isinstance(error, (ClientConnectorCertificateError, ClientSSLError)):
        return UrlFault(Reason.UNREACHABLE, f"no safe connection: {_words(cause)}")
    if isinstance(error, ClientResponseError):
        return UrlFault(Reason.BAD_ANSWER, f"the answer is not HTTP: {short(error.message)}")
    return UrlFault(Reason.UNREACHABLE, f"the connection failed: {_words(cause)}", may_pass=True)


def _cause(error: BaseException) -> BaseException:
    """The first cause of an error."""
    inner: Any = getattr(error, "os_error", None) or error.__cause__ or error.__context__
    return _cause(inner) if isinstance(inner, BaseException) and inner is not error else error


def _words(error: BaseException) -> str:
    words = str(error)
    if isinstance(error, OSError) and error.errno:  # asyncio puts the address in place of the words
        words = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return short(words) if words else type(error).__name__
