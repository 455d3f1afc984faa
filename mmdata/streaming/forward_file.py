"""Opens a shard (a file, an HTTP URL, or any URL of fsspec), decompresses it, and reads it once from front to back.

Seeking is limited to what the tar reader does: forward, and back by two blocks. So pipes, HTTP bodies and decompressors
can be read as files, and nothing is stored on disk.
"""

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
from mmdata.shards.remote.fetch import GIVE_CREDENTIALS, cause_of, display_name, is_denied, is_http, is_missing
from mmdata.shards.remote.http import WrongAnswer
from mmdata.streaming.resumed_http import ResumedHttpFile

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK = 2**20  # bytes
_LOOK_BEHIND = 1024  # bytes; `read_members` reads the two blocks that end a tar a second time
_NO_END = 2**63 - 1
_GO_ON = "data.skip_damaged goes on with the next shard, and counts the loss"


class ForwardFile:
    """A file for `read_members` over a stream of bytes that cannot seek: it goes forward, and back by 1,024 bytes.

    Its size is unknown until it is read: `seek(0, SEEK_END)` returns a number larger than any file.

    Args:
        file: a blocking stream of bytes; the caller closes it.
        name: of the shard, for messages.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._at = 0  # offset of the next read
        self._end = 0  # bytes read from `file`
        self._behind = b""  # the last bytes before `_end`

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the offset of the next read. SEEK_END moves nothing; see above for its result."""
        if whence == os.SEEK_END:
            return _NO_END
        assert whence == os.SEEK_SET
        assert offset >= self._end - len(self._behind)
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end of the stream.

        Raises:
            DataError: a read failed, because of a lost connection or damaged compression.
        """
        while self._at > self._end:  # read and forget the bytes up to the offset
            if not self._pull(min(_CHUNK, self._at - self._end)):
                return b""
        # Bytes before `_end` come from `_behind`: the stream itself cannot go back.
        again = self._behind[len(self._behind) - (self._end - self._at) :][:size]
        data = again + self._pull(size - len(again)) if len(again) < size else again
        self._at += len(data)
        return data

    def _pull(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except Exception as error:  # fsspec's protocols and codecs share no base class of errors
            raise _unreadable(self._name, self._end, error) from error
        self._end += len(data)
        self._behind = data[-_LOOK_BEHIND:] if len(data) >= _LOOK_BEHIND else (self._behind + data)[-_LOOK_BEHIND:]
        return data


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
        yield ForwardFile(cast(BinaryIO, file), name)


def _codec(kind: str, name: str) -> Callable[..., Any]:
    codecs = cast("dict[str, Callable[..., Any]]", compr)
    if kind not in codecs:
        raise DataError(f"shard '{name}': {kind}-compressed, and fsspec has no codec for it: `pip install zstandard`")
    return codecs[kind]


def _open(shard: str, name: str) -> Any:
    """The bytes of a shard, not decompressed. HTTP goes on after a failed request; fsspec opens other URLs."""
    if is_http(shard):
        return ResumedHttpFile(shard, name)
    if "://" in shard:
        return fsspec.open(shard, "rb")
    return open(open_regular(shard, "shard"), "rb", buffering=0)


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
