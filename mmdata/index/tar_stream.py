"""Reads a tar behind a URL once, from front to back. Samples are looked at while they come; no byte is kept."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from itertools import chain
from threading import Event
from typing import Any, BinaryIO, cast

from mmdata.errors import ConfigError, DamagedShard, DataError, Interrupted
from mmdata.hashing import fast_hash_of
from mmdata.images.probe import sniff
from mmdata.images.unread import unread_format
from mmdata.storage.fetch import GIVE_CREDENTIALS, RemoteFolder, cause_of, display_name, is_denied, is_http, is_missing
from mmdata.storage.http import WrongAnswer
from mmdata.storage.incoming import Incoming
from mmdata.storage.resumed_http import ResumedHttpFile
from mmdata.tars.captions import MAX_CAPTION_BYTES
from mmdata.tars.forward_file import ForwardFile
from mmdata.tars.samples import IMAGE_EXTENSIONS, MAX_IMAGE_BYTES, SampleReader
from mmdata.tars.tar import Member, read_members, split_name

HEAD_BYTES = MAX_CAPTION_BYTES
"""What is kept of a member that is no image: all of a caption, and enough of any other to tell that it is no image."""
MAX_KEPT_BYTES = 2**30
"""Most bytes of images that are kept: of two samples, or of the first ones while the members are guessed."""
_BUFFER = 2**20  # bytes


class TarStream:
    """A tar that is being read.

    Args:
        folder: of the tar.
        name: of the tar.
        stop: ends the reading, also that of another thread.
        may_keep: asked, with the tar's size, whether the tar may be kept in the folder's cache.

    Attributes:
        samples: reads the samples of the tar.
        size: of the tar in bytes; None if the server does not say before the end.

    Raises:
        DataError, ConfigError: the tar cannot be read; so do all methods, and `samples`.
        Interrupted: `stop` was set.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        name: str,
        *,
        stop: Event,
        may_keep: Callable[[int], bool] = lambda size: False,
    ) -> None:
        self._name, self._stop = name, stop
        url = folder.url_of(".", name)
        self._place = display_name(url)
        self._tap: _Tap | None = None
        try:
            source, self.size = _open(folder, url, stop)
        except Exception as error:
            raise self._explained(0, error) from error
        self._tap = _Tap(source, stop)
        if self.size is not None and may_keep(self.size):
            self._tap.copy = Incoming.begin(folder.cache, self._place, self.size)
        self._file = ForwardFile(cast(BinaryIO, io.BufferedReader(self._tap, _BUFFER)), self._explained, self.size)
        self._payloads: dict[str, dict[int, bytes]] = {}  # by key of the sample, and offset
        self._hashes: dict[int, int] = {}  # by offset
        self.keeps_all = False
        self.samples = SampleReader(self._members(), name=name)

    def payload(self, member: Member) -> bytes:
        """The bytes of a member of the sample that came last, or of the one that is coming."""
        for payloads in self._payloads.values():
            if (data := payloads.get(member.offset)) is not None:
                return data
        raise AssertionError(f"{member} of {self._place} was forgotten")

    def hash_of(self, member: Member) -> int:
        """The `fast_hash` of such a member."""
        return self._hashes[member.offset]

    def finish(self) -> tuple[str, int]:
        """Read what is left of the tar, and give the SHA-256 and the size of the whole."""
        assert self._tap is not None
        self._file.drain()
        sha256 = self._tap.digest.hexdigest()
        if self._tap.copy is not None and self._tap.size == self.size:
            self._tap.copy.keep(sha256)
        return sha256, self._tap.size

    def interrupt(self) -> None:
        """End the connection, so that the thread that reads it gets an error; `stop` must be set."""
        if self._tap is not None:
            self._tap.source.close()

    def close(self) -> None:
        """End the connection, and drop what has come of a tar that was to be kept."""
        if self._tap is not None:
            self._tap.close()

    def _members(self) -> Iterator[Member]:
        """The members, each after its payload was read: the stream cannot go back to it."""
        last = ""  # key of the sample before
        for member in read_members(cast(BinaryIO, self._file), name=self._name):
            if (split := split_name(member.name)) is not None:
                key, extension = split
                # The sample before this one may not have been looked at yet.
                if not self.keeps_all:
                    self._payloads = {kept: self._payloads[kept] for kept in (last, key) if kept in self._payloads}
                self._payloads.setdefault(key, {})[member.offset] = self._read(member, key, extension)
                last = key
            yield member

    def _read(self, member: Member, key: str, extension: str) -> bytes:
        """What is needed of a member: of those that are neither captions nor images only the beginning."""
        self._file.seek(member.offset)
        if member.size > MAX_IMAGE_BYTES:
            self._hash(member, b"")
            return b""  # it is refused by its size
        data = self._file.read(min(member.size, HEAD_BYTES))
        is_image = extension in IMAGE_EXTENSIONS or bool(sniff(data) or unread_format(data))
        if is_image and member.size > len(data) == HEAD_BYTES:
            kept = sum(len(one) for payloads in self._payloads.values() for one in payloads.values())
            if kept + member.size > MAX_KEPT_BYTES:
                raise DataError(
                    f"'{self._place}', byte {member.start}: samples with more than {MAX_KEPT_BYTES:,} bytes of "
                    "images; fetch this tar, and index it from a disk"
                )
            data += self._file.read(member.size - len(data))
        if len(data) < (member.size if is_image else min(member.size, HEAD_BYTES)):
            raise DamagedShard(
                f"shard '{self._name}', byte {member.start}: a member of {member.size} bytes, and the file ends after "
                f"{len(data)}: cut",
                "fetch or convert the shard again",
                (key, member.start),
            )
        self._hash(member, data)
        return data

    def _hash(self, member: Member, data: bytes) -> None:
        """Hash a member of which `data` was read; the rest of it is read in pieces."""
        sizes = (min(_BUFFER, member.size - at) for at in range(len(data), member.size, _BUFFER))
        self._hashes[member.offset] = fast_hash_of(chain([data], map(self._file.read, sizes)))

    def _explained(self, offset: int, error: Exception) -> Exception:
        if isinstance(error, (DataError, ConfigError, Interrupted)):
            return error
        if self._stop.is_set():
            return Interrupted(self._place)
        if isinstance(error, WrongAnswer):
            return DataError(f"'{self._place}': {error}")
        if is_denied(error):
            return ConfigError(f"'{self._place}': access denied ({cause_of(error)}); {GIVE_CREDENTIALS}")
        if is_missing(error):
            return DataError(f"'{self._place}': no such file; correct the URL, or the numbers in its braces")
        return DataError(
            f"'{self._place}', byte {offset}: cannot be read ({cause_of(error)}); is its server up, and the network? "
            "Run this again when it is: it goes on with this tar"
        )


def _open(folder: RemoteFolder, url: str, stop: Event) -> tuple[io.RawIOBase, int | None]:
    """The bytes of a tar, and their number if the server says it: one request over HTTP, else one for each chunk."""
    if is_http(url):
        file = ResumedHttpFile(url, display_name(url), stop)
        return file, file.size
    version = folder.version_of(url, stop)
    return _Chunks(_one_version(folder, url, version, stop)), version[0]


def _one_version(folder: RemoteFolder, url: str, version: tuple[int, str], stop: Event) -> Iterator[bytes]:
    """The bytes of a file, in chunks, all of the same version."""
    yield from folder.chunks(url, version[0], stop, 0)
    if folder.version_of(url, stop) != version:
        raise WrongAnswer("the file changed on the server while it was read; start again when it is complete")


class _Chunks(io.RawIOBase):
    """A file of the bytes that an iterator gives."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; with nothing only at the end."""
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


class _Tap(io.RawIOBase):
    """Passes a stream through; counts and hashes its bytes, and writes them into the cache if `copy` is set."""

    def __init__(self, source: io.RawIOBase, stop: Event) -> None:
        super().__init__()
        self.source, self._stop = source, stop
        self.digest = hashlib.sha256()
        self.size = 0
        self.copy: Incoming | None = None

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; with nothing only at the end."""
        if self._stop.is_set():
            raise Interrupted
        count = cast(int, self.source.readinto(buffer))
        self.digest.update(memoryview(buffer)[:count])
        if self.copy is not None:
            self.copy.write(memoryview(buffer)[:count])
        self.size += count
        return count

    def close(self) -> None:
        """Close the stream."""
        if not self.closed:
            self.source.close()
            if self.copy is not None:
                self.copy.drop()
        super().close()
