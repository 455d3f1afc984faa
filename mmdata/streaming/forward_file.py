"""Opens a shard (a file, an HTTP URL, or any URL of fsspec), decompresses it, and reads it once from front to back.

Pipes, HTTP bodies and decompressors are read alike, as a `ForwardFile`, and nothing is stored on disk.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.compression import compr

from mmdata.errors import DataError
from mmdata.safe_read import open_regular
from mmdata.storage.attempts import GIVE_CREDENTIALS, WrongAnswer, cause_of, is_denied, is_missing
from mmdata.storage.fetch import display_name, is_http
from mmdata.storage.http import HttpFile, request_options
from mmdata.tars.forward_file import ForwardFile

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK = 2**20  # bytes
_GO_ON = "data.skip_damaged goes on with the next shard, and counts the loss"


@contextmanager
def open_shard(shard: str) -> Generator[ForwardFile, None, None]:
    """Open a shard. Magic bytes decide the compression, because names and HTTP headers are often wrong.

    Raises:
        DataError: the shard cannot be opened, or fsspec has no codec for its compression.
    """
    name = display_name(shard)
    with ExitStack() as opened:
        try:
            source = opened.enter_context(_open(shard, name))
            file = io.BufferedReader(source, _CHUNK)
            if kind := next((kind for magic, kind in _MAGIC.items() if file.peek(8).startswith(magic)), None):
                file = opened.enter_context(_codec(kind, name)(file, mode="rb"))
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(name, 0, error) from error
        yield ForwardFile(cast(BinaryIO, file), partial(_unreadable, name))


def _codec(kind: str, name: str) -> Callable[..., Any]:
    codecs = cast("dict[str, Callable[..., Any]]", compr)
    if kind not in codecs:
        raise DataError(f"shard '{name}': {kind}-compressed, and fsspec has no codec for it: `pip install zstandard`")
    return codecs[kind]


def _open(shard: str, name: str) -> Any:
    """The bytes of a shard, not decompressed. HTTP goes on after a failed request; fsspec opens other URLs."""
    if is_http(shard):
        return _HttpBody(shard, name)
    if "://" in shard:
        return fsspec.open(shard, "rb")
    return open(open_regular(shard, "shard"), "rb", buffering=0)


class _HttpBody(io.RawIOBase):
    """An HTTP file as a stream."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__()
        self._file = HttpFile(fsspec.filesystem("http", **request_options()), url, name, Event())
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; with nothing only at the end."""
        if not self._left:
            self._left = memoryview(self._file.read())
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _unreadable(name: str, offset: int, error: Exception) -> DataError:
    if isinstance(error, WrongAnswer):
        return DataError(f"shard '{name}': {error}")
    if "://" in name and is_denied(error):
        remedy = GIVE_CREDENTIALS
    elif "://" in name and is_missing(error):
        remedy = f"upload it, or correct the URL; {_GO_ON}"
    else:
        remedy = f"is it whole, and its server up? {_GO_ON}"
    return DataError(f"shard '{name}', byte {offset}: cannot be read ({cause_of(error)}); {remedy}")
