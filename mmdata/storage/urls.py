"""What a URL is: its name in messages, whether it is followed, and fsspec's file system for it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine
from concurrent.futures import wait
from math import inf
from threading import Event
from time import monotonic
from typing import Any, TypeVar

import fsspec
import fsspec.asyn

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.processes import new_lock
from mmdata.safe_read import path_of_url
from mmdata.storage.attempts import Failed

PROTOCOLS = ("http", "https", "s3", "gs", "hf")
"""What the manifest of a folder on this machine may name as the place of its tars."""
ATTEMPT_S = 300
"""Timeout of a request that is not of HTTP: the timeouts of fsspec's packages begin anew with each byte of a header."""
STOP_S = 0.1
"""Time after which a request that is to be stopped notices it."""
S3_CONNECTIONS = 32
"""Requests to S3 of one process at once."""

_LOGIN = re.compile(r"://[^/#]+@")
_PLAIN_NAME = re.compile(r"[^/\\\0:]+")

T = TypeVar("T")


def is_url(name: str | os.PathLike[str]) -> bool:
    """Whether a source is a URL; a `file:` URL is a path."""
    return "://" in os.fspath(name) and path_of_url(os.fspath(name)) is None


def is_http(url: str) -> bool:
    """Whether a URL is of HTTP, which is read as one answer; files of other protocols are read in ranges."""
    return url.startswith(("http://", "https://"))


def display_name(url: str) -> str:
    """A file's name for messages and ledgers, without the password or signature that a URL may carry, or one in it."""
    if "://" not in url:
        return url
    head, _, _ = url.partition("?")
    return _LOGIN.sub("://", head)


def is_followed(url: str) -> bool:
    """Whether a URL is of one of PROTOCOLS, and not a chain of them."""
    return url.partition("://")[0] in PROTOCOLS and "://" in url and "::" not in url


def check_plain_name(name: str, where: str) -> None:
    """Raise DataError if a shard's name is no file name, or could lead out of its folder."""
    if not _PLAIN_NAME.fullmatch(name) or name.startswith("."):
        raise DataError(f"{where}: '{name}' is not a plain file name; commands and paths are never followed")


class FileSystem:
    """fsspec's file system for a URL. Safe to share between threads; a forked or other process opens its own.

    Args:
        url: http(s), s3, gs, hf, file, or another protocol of fsspec.

    Raises:
        ConfigError: a chain of protocols, or one whose package is not installed or that fsspec does not know.
    """

    def __init__(self, url: str) -> None:
        if "::" in url:
            raise ConfigError(f"'{display_name(url)}': a chain of protocols is not followed; give one URL")
        self._url = url
        self._lock = new_lock()
        self._opened: tuple[int, Any] | None = None
        self.get()

    def __reduce__(self) -> tuple[type[FileSystem], tuple[str]]:
        return FileSystem, (self._url,)

    def get(self) -> Any:
        """The file system; fsspec's threads do not survive a fork."""
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                protocol = self._url.partition("://")[0]
                try:
                    self._opened = (os.getpid(), fsspec.filesystem(protocol, **_options(self._url)))
                except (ImportError, ValueError) as error:
                    raise ConfigError(
                        f"'{display_name(self._url)}': {error}; `pip install 'mmdata[remote]'` brings http, s3 and "
                        "gs, and other protocols need their package of fsspec"
                    ) from error
            return self._opened[1]

    def call(self, method: str, *given: Any, stop: Event | None = None, **named: Any) -> Any:
        """The result of a method, which fails after ATTEMPT_S where fsspec can keep a bound."""
        files = self.get()
        if not files.async_impl:
            return getattr(files, method)(*given, **named)
        late = f"no whole answer for {ATTEMPT_S} s"
        return awaited(getattr(files, f"_{method}")(*given, **named), ATTEMPT_S, late, stop)


def _options(url: str) -> dict[str, Any]:
    """Options of fsspec for a protocol. Bounds and attempts are ours, so that no others are below them."""
    if is_http(url):
        from aiohttp import ClientTimeout

        # The body is not decompressed, so that a range of it is a range of the file.
        return {"client_kwargs": {"timeout": ClientTimeout(total=None), "auto_decompress": False}}
    if url.startswith("s3://"):
        config = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": S3_CONNECTIONS,
            "request_checksum_calculation": "when_required",  # ours is given; stores of others know no trailing ones
            "response_checksum_validation": "when_required",
        }
        return {"config_kwargs": config}
    return {}


def awaited(waiting: Coroutine[Any, Any, T], seconds: float = inf, late: str = "", stop: Event | None = None) -> T:
    """The result of a coroutine, which runs in fsspec's thread.

    Raises:
        Failed: it has none after so many seconds; says `late`.
        Interrupted: `stop` was set.
    """
    future = asyncio.run_coroutine_threadsafe(waiting, fsspec.asyn.get_loop())
    until = monotonic() + seconds
    try:
        while not future.done():
            if stop is not None and stop.is_set():
                raise Interrupted
            if (left := until - monotonic()) <= 0:
                raise Failed(late)
            wait([future], min(left, STOP_S))
        return future.result()
    finally:
        future.cancel()
