"""A file that comes into the cache while something else reads it, such as a tar that is being indexed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from mmdata.storage.cache import Remote, ShardCache, unlock, write_total


def _nothing(offset: int) -> Iterator[bytes]:
    return iter(())


class Incoming:
    """A part in the cache whose hash is not known before it is whole.

    Until then it has the hash of its URL for a name. Like any other part it is removed when a killed process has left
    it and room is needed.

    Args:
        cache: that it comes into.
        remote: with the hash of the URL in place of its own.
        descriptor: of the part, locked.
    """

    def __init__(self, cache: ShardCache, remote: Remote, descriptor: int) -> None:
        self._cache, self._remote, self._descriptor = cache, remote, descriptor

    @classmethod
    def begin(cls, cache: ShardCache, url: str, size: int) -> Incoming | None:
        """Make room for a file of `size` bytes.

        Returns:
            None if it is larger than the cache, parts in progress leave no room, or another process receives the file.

        Raises:
            ConfigError: the folder cannot be written; so do all methods.
        """
        if size > cache.max_bytes:
            return None
        remote = Remote(url, hashlib.sha256(url.encode()).hexdigest(), size, _nothing)
        with cache.explaining(remote):
            if (descriptor := cache.claim(remote)) is None:
                return None
            os.ftruncate(descriptor, 0)  # what a killed process has left
            return cls(cache, remote, descriptor)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        with self._cache.explaining(self._remote):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def keep(self, sha256: str) -> None:
        """Publish the whole file under its hash."""
        part = self._cache.part(self._remote)
        with self._cache.explaining(self._remote):
            os.fsync(self._descriptor)
            with self._cache.locked() as lock:
                if self._cache.touch(sha256):
                    part.unlink()
                    write_total(lock, None)
                else:
                    os.rename(part, self._cache.path(sha256))
            self._close()

    def drop(self) -> None:
        """Remove what has come; does nothing after `keep`."""
        if self._descriptor < 0:
            return
        with self._cache.explaining(self._remote):
            with self._cache.locked() as lock:
                self._cache.part(self._remote).unlink(missing_ok=True)
                write_total(lock, None)
            self._close()

    def _close(self) -> None:
        unlock(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
