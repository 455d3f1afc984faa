"""A bounded folder of downloaded files, shared by any number of processes. A file under its final name is whole.

A file is named by its SHA-256, so equal files are held once. The process that holds the lock of a file writes it as
NAME.BYTES.part, checks it while it arrives, syncs and renames it. The part of a file whose hash is not known yet is
named by its URL. The kernel releases the lock when the process ends: a process that is stopped, killed, or fails leaves
a part for each download under way. The next request for that file continues its part; like any other file, a part is
removed when room is needed. The size in a part's name is reserved from the beginning. Others may remove any file at any
time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.processes import held

GB = 10**9
LOCK_NAME = ".lock"
POLL_S = 0.05
"""Wait before asking again for a file that another process is fetching."""
_READ = 2**20  # bytes
GROWTH_BYTES = 2**26
"""Room that is made for the next bytes of a file whose size is not known; in a small cache an eighth of it."""
_SPARE = 0.02  # share of the cache that is freed together, so that the folder is not listed for each small file

_HASH = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(r"[0-9a-f]{64}(?:\.(\d+)\.part)?")


class Remote(NamedTuple):
    """A file to be fetched.

    Attributes:
        name: for messages.
        sha256, bytes: hash and size that the file must have.
        chunks: iterates over the content from an offset on; raises DataError and ConfigError.
        is_hash: False if `sha256` is a name only. The file is then not compared with it, and what an interrupted
            download leaves is not continued: no hash would tell that its halves are of two versions.
    """

    name: str
    sha256: str
    bytes: int
    chunks: Callable[[int], Iterator[bytes]]
    is_hash: bool = True


class ShardCache:
    """Files of a bounded total size; the least recently used make room. Safe to share between threads.

    Args:
        folder: created when first needed; default: mmdata/shards in the user's folder of caches (XDG_CACHE_HOME).
        max_bytes: total size of all files, parts included.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, max_bytes: int = 100 * GB) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.max_bytes = max_bytes

    def path(self, sha256: str) -> Path:
        """Path of a file, whether or not it is cached. Another process may remove the file at any moment: use `open`.

        Raises:
            DataError: not a SHA-256.
        """
        if not _HASH.fullmatch(sha256):
            raise DataError(f"'{sha256}' is not a SHA-256: the manifest is damaged, or not made by mmdata")
        return self.folder / sha256

    def touch(self, sha256: str) -> bool:
        """Whether a file is cached; it counts as used now."""
        try:
            os.utime(self.path(sha256))
        except OSError:
            return False
        return True

    def remove(self, sha256: str) -> None:
        """Remove a file, so that it is fetched again."""
        self.path(sha256).unlink(missing_ok=True)

    def open(self, remote: Remote, stop: Event | None = None) -> int:
        """A descriptor of a whole file, which the caller closes; the file is fetched if it is not cached.

        Of several processes and threads that ask for the same file, one fetches it and the others wait.

        Raises:
            DataError: the fetched file has another hash.
            ConfigError: the file is larger than the cache, or the folder cannot be written or is full.
            Interrupted: `stop` was set.
        """
        self._check_fits(remote)
        stop = stop or Event()
        with self.explaining(remote):
            while not stop.is_set():
                if (whole := self._open_whole(remote)) is not None:
                    return whole
                if (incoming := self._claim(remote)) is not None:
                    return _fetch(remote, incoming, stop)
                stop.wait(POLL_S)
            raise Interrupted(remote.name)

    def begin(self, name: str, key: str, size: int | None, stop: Event) -> Incoming:
        """Make room for a file whose hash is not known yet, and hold it until it is ended.

        Args:
            name: for messages.
            key: that the file has for a hash until it is ended, 64 hexadecimal digits.
            size: of the file in bytes; None: not known.
            stop: ends the waiting for room that other files take which are coming, and for the same file.

        Raises:
            ConfigError: the file is larger than the cache, or the folder cannot be written.
            Interrupted: `stop` was set.
        """
        remote = Remote(name, key, self._growth if size is None else size, _nothing)
        self._check_fits(remote)
        with self.explaining(remote):
            while not stop.is_set():
                if (incoming := self._claim(remote)) is not None:
                    incoming.restart()  # without what a killed process has left
                    return incoming
                stop.wait(POLL_S)
        raise Interrupted(name)

    @property
    def _growth(self) -> int:
        return min(GROWTH_BYTES, max(1, self.max_bytes // 8))

    def grow(self, remote: Remote, needed: int) -> Remote:
        """Make more room for a part that will have `needed` bytes or more.

        Raises:
            ConfigError: there is none.
        """
        more = max(self._growth, needed - remote.bytes)
        with self.locked() as lock:
            if not self._make_room(lock, more):
                raise ConfigError(
                    f"'{remote.name}': its server does not say its size, and the cache '{self.folder}' has no room for "
                    f"more than {remote.bytes:,} bytes of it; set data.loading.cache_gb to more"
                )
            grown = remote._replace(bytes=remote.bytes + more)
            os.rename(self.part(remote), self.part(grown))
        return grown

    @contextmanager
    def explaining(self, remote: Remote) -> Generator[None, None, None]:
        """Turn an error of the system into a ConfigError that names the folder and the remedy."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cache folder '{self.folder}': {error.strerror or error}, for '{remote.name}' ({remote.bytes:,} B); "
                "set data.loading.cache_dir to a folder that can be written, on a local disk with "
                f"{self.max_bytes / GB:g} GB "
                "free, or data.loading.cache_gb to less"
            ) from error

    def _check_fits(self, remote: Remote) -> None:
        if remote.bytes > self.max_bytes:
            raise ConfigError(
                f"'{remote.name}': {remote.bytes:,} bytes, and the cache '{self.folder}' holds {self.max_bytes:,}; "
                f"set data.loading.cache_gb to {remote.bytes / GB * 4:.2g} or more: several shards are in use at once"
            )

    def _open_whole(self, remote: Remote) -> int | None:
        path = self.path(remote.sha256)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        if os.fstat(descriptor).st_size != remote.bytes:  # another program cut it
            os.close(descriptor)
            self.remove(remote.sha256)
            return None
        with suppress(PermissionError):  # another user's
            os.utime(descriptor)
        return descriptor

    def part(self, remote: Remote) -> Path:
        """Path of a file that is not whole yet."""
        return self.folder / f"{remote.sha256}.{remote.bytes}.part"

    def _claim(self, remote: Remote) -> Incoming | None:
        """The part of a file, locked, with room for the whole; None if another process has it or there is no room."""
        part = self.part(remote)
        with self.locked() as lock:
            if self.path(remote.sha256).exists():
                return None
            if not part.exists() and not self._make_room(lock, remote.bytes):
                return None
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
            if _try_lock(descriptor):
                return Incoming(self, remote, descriptor)
            os.close(descriptor)
            return None

    @contextmanager
    def locked(self) -> Generator[int, None, None]:
        """Hold the folder's lock, which guards making and renaming parts. Its file says how many bytes are taken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        held.add(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            unlock(lock)
            os.close(lock)

    def _make_room(self, lock: int, needed: int) -> bool:
        """Reserve `needed` bytes, removing the least recently used files; False if parts in progress leave no room."""
        total = _read_total(lock)
        if total is None or total + needed > self.max_bytes:
            total = self._evict(self.max_bytes - needed)
        fits = total + needed <= self.max_bytes
        write_total(lock, total + needed if fits else total)
        return fits

    def _evict(self, room: int) -> int:
        """Remove files until `room` bytes or fewer are left. Returns the bytes left."""
        found: list[tuple[int, int, str]] = []
        for entry in os.scandir(self.folder):
            if match := _ENTRY.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, int(match[1] or status.st_size), entry.path))
        total = sum(size for _, size, _ in found)
        if total <= room:
            return total
        for _, size, path in sorted(found):
            if total <= min(room, self.max_bytes * (1 - _SPARE)):
                break
            if _remove_unless_alive(path):
                total -= size
        return total


class Incoming:
    """A file that comes into the cache: a part, which nothing removes before `publish`, `discard` or `leave` ends it.

    Args:
        cache: that it comes into.
        remote: the file; of one whose hash is not known, another name in place of the hash.
        descriptor: of the part, locked.

    Attributes:
        bytes: that have come.
    """

    def __init__(self, cache: ShardCache, remote: Remote, descriptor: int) -> None:
        self._cache, self._remote, self._descriptor = cache, remote, descriptor
        self._digest = hashlib.sha256()
        self._is_kept = remote.is_hash  # False also when the disk has failed
        self.bytes = 0

    def take_over(self) -> None:
        """Go on behind what an earlier process has left."""
        if os.fstat(self._descriptor).st_size > self._remote.bytes:
            self.restart()
        while written := os.read(self._descriptor, _READ):
            self._digest.update(written)
            self.bytes += len(written)

    def restart(self) -> None:
        """Forget what has come."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._digest, self.bytes = hashlib.sha256(), 0

    @property
    def path(self) -> Path:
        """Where the file lies until it is ended."""
        return self._cache.part(self._remote)

    @property
    def sha256(self) -> str:
        """Hash of the bytes that have come."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            ConfigError: there is no room for them, or the folder cannot be written.
        """
        with self._on_disk():
            self.bytes += len(data)
            if self.bytes > self._remote.bytes:
                self._remote = self._cache.grow(self._remote, self.bytes)
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]
            self._digest.update(data)

    def publish(self, name: str | None = None) -> int:
        """Give the file its final name, by default its hash; a descriptor of it, which the caller closes."""
        name = name or self.sha256
        with self._on_disk():
            os.fsync(self._descriptor)
            with self._cache.locked() as lock:
                with suppress(FileNotFoundError):  # a cleaner removed it; what is open can be read all the same
                    os.rename(self.path, self._cache.path(name))
                if name != self._remote.sha256:  # less room may have been taken than was made
                    write_total(lock, None)
        unlock(self._descriptor)
        return self._descriptor

    def discard(self) -> None:
        """Remove the file."""
        try:
            with self._cache.explaining(self._remote), self._cache.locked() as lock:
                self.path.unlink(missing_ok=True)
                write_total(lock, None)
        finally:
            self._close()

    def leave(self) -> None:
        """Leave what has come to the next request for the file, if it may be continued."""
        if self.bytes and self._is_kept:
            self._close()
        else:
            self.discard()

    @contextmanager
    def _on_disk(self) -> Generator[None, None, None]:
        try:
            with self._cache.explaining(self._remote):
                yield
        except ConfigError:
            self._is_kept = False
            raise

    def _close(self) -> None:
        unlock(self._descriptor)
        os.close(self._descriptor)


def _fetch(remote: Remote, incoming: Incoming, stop: Event) -> int:
    """Fetch a file, check it, and give it its final name; a descriptor of it."""
    try:
        incoming.take_over()
        if not remote.is_hash:
            incoming.restart()
        resumed = incoming.bytes > 0
        _fill(remote, incoming, stop)
        if not remote.is_hash:
            return incoming.publish(remote.sha256)
        if incoming.sha256 != remote.sha256 and resumed:  # a power cut may have damaged the old part: start over, once
            incoming.restart()
            _fill(remote, incoming, stop)
        if (found := incoming.sha256) != remote.sha256:
            incoming.restart()
            raise DataError(
                f"'{remote.name}': its SHA-256 is {found}, and the manifest says {remote.sha256}: the file changed "
                "since it was indexed; index it anew, or put back the file that was indexed"
            )
        return incoming.publish()
    except BaseException:
        incoming.leave()
        raise


def _fill(remote: Remote, incoming: Incoming, stop: Event) -> None:
    for chunk in remote.chunks(incoming.bytes):
        incoming.write(chunk)
        if stop.is_set():
            raise Interrupted(remote.name)


def _nothing(offset: int) -> Iterator[bytes]:
    return iter(())


def default_folder() -> Path:
    """mmdata/shards in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmdata" / "shards"


def _remove_unless_alive(path: str) -> bool:
    """Remove a file, or a part that no process is filling; whether it is gone."""
    with suppress(FileNotFoundError):
        if not path.endswith(".part"):
            os.unlink(path)
            return True
        descriptor = os.open(path, os.O_RDWR)
        try:
            if not _try_lock(descriptor):
                return False
            os.unlink(path)
        finally:
            unlock(descriptor)
            os.close(descriptor)
    return True


def _try_lock(descriptor: int) -> bool:
    held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.discard(descriptor)
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock. To close the file would not do, as a forked child may have it open too."""
    held.discard(descriptor)
    with suppress(OSError):  # the file system has no locks, which was raised before
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _read_total(lock: int) -> int | None:
    text = os.pread(lock, 32, 0)
    return int(text) if text.isdigit() else None


def write_total(lock: int, total: int | None) -> None:
    """Write down the bytes taken; None: the next reader counts them.

    The number rises before a file is made and falls after one is removed: a kill leaves it too high, never too low.
    """
    os.ftruncate(lock, 0)
    if total is not None:
        os.pwrite(lock, b"%d" % total, 0)
