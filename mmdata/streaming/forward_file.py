"""A shard as a stream of bytes: opened here or with fsspec, decompressed, read once from front to back."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.compression import compr

from mmdata.errors import DataError
from mmdata.safe_read import open_regular
from mmdata.shards.http import HttpFile, WrongAnswer, request_options
from mmdata.shards.remote import display_name, is_http

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK = 2**20  # bytes
_LOOK_BEHIND = 1024  # bytes: the two blocks that end a tar, which are looked at twice
_NO_END = 2**63 - 1


class ForwardFile:
    """A stream that `read_members` can walk: it moves forward, and back by a block or two.

    Where it ends is unknown until the end comes: seeking there answers a number larger than any file.

    Args:
        file: blocking; read to its end or closed by the caller.
        name: the shard, for messages.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._at = 0  # where the next read starts
        self._end = 0  # where `file` stands
        self._behind = b""  # the last bytes before `_end`

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset, or ask for the end."""
        if whence == os.SEEK_END:
            return _NO_END
        assert whence == os.SEEK_SET
        assert offset >= self._end - len(self._behind)
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end of the stream.

        Raises:
            DataError: a read failed: a cut connection, damaged compression.
        """
        while self._at > self._end:
            if not self._pull(min(_CHUNK, self._at - self._end)):
                return b""
        again = self._behind[len(self._behind) - (self._end - self._at) :][:size]
        data = again + self._pull(size - len(again)) if len(again) < size else again
        self._at += len(data)
        return data

    def _pull(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except Exception as error:  # each protocol has exceptions of its own
            raise _unreadable(self._name, self._end, error) from error
        self._end += len(data)
        self._behind = data[-_LOOK_BEHIND:] if len(data) >= _LOOK_BEHIND else (self._behind + data)[-_LOOK_BEHIND:]
        return data


@contextmanager
def open_shard(shard: str) -> Generator[ForwardFile, None, None]:
    """Open a shard; compression is told by magic bytes, as names and servers' headers often lie.

    Raises:
        DataError: it cannot be opened.
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
        yield ForwardFile(cast(BinaryIO, file), name)


def _codec(kind: str, name: str) -> Callable[..., Any]:
    codecs = cast("dict[str, Callable[..., Any]]", compr)
    if kind not in codecs:
        raise DataError(f"shard '{name}': {kind}-compressed, and fsspec has no codec for it: `pip install zstandard`")
    return codecs[kind]


def _open(shard: str, name: str) -> Any:
    """The bytes of a shard as they lie there: a path, an HTTP URL (one request), or what else fsspec opens."""
    if is_http(shard):
        return HttpFile(fsspec.filesystem("http", **request_options()), shard, name)
    if "://" in shard:
        return fsspec.open(shard, "rb")
    return open(open_regular(shard, "shard"), "rb", buffering=0)


def _unreadable(name: str, offset: int, error: Exception) -> DataError:
    if isinstance(error, WrongAnswer):
        return DataError(f"shard '{name}': {error}")
    return DataError(
        f"shard '{name}', byte {offset}: cannot be read ({type(error).__name__}: {error}); "
        "is it whole, and its server up? A stream does not resume within a shard"
    )
