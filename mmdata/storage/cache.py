"""A bounded folder of downloaded files, shared by any number of processes. A file under its final name is whole.

A file is named by its SHA-256, so equal files are held once. The process that holds the lock of a file writes it as
NAME.BYTES.part, checks it while it arrives, syncs and renames it. The size in a part's name is reserved from the
beginning. The kernel releases the lock when the process ends: a process that is killed leaves a part for each download
under way. The next request for that file begins it anew; like any other file, a part is removed when room is needed.
Others may remove any file at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.processes import held
from mmdata.system import IS_POSIX, lock_file

if TYPE_CHECKING:
    from mmdata.config import LoadingConfig

GB = 10**9
LOCK_NAME = ".lock"
PIXELS = ".pixels"
"""Ending of a file of decoded images, which is not removed while a process has it locked."""
POLL_S = 0.05
"""Wait before asking again for a file that another process is fetching."""
_SPARE = 0.02  # share of the cache that is freed together, so that the folder is not listed for each small file

_HASH = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(rf"[0-9a-f]{{64}}(?:\.(\d+)\.part|\{PIXELS})?")


class Remote(NamedTuple):
    """A file to be fetched.

    Attributes:
        name: for messages.
        sha256, bytes: hash and size that the file must have.
        chunks: gives the content; iterating raises DataError and ConfigError.
        is_hash: False if `sha256` is a name only, with which the file is not compared.
    """

    name: str
    sha256: str
    bytes: int
    chunks: Callable[[], Iterable[bytes]]
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

    @classmethod
    def from_config(cls, loading: LoadingConfig) -> Self:
        """The cache that `data.loading` names."""
        return cls(loading.cache_dir, max_bytes=int(loading.cache_gb * GB))

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
        stop = stop or Event()
        with self.explaining(remote):
            while (whole := self._open_whole(remote)) is None:
                if (incoming := self._claim(remote, stop)) is not None:
                    incoming.fill(stop)
                    return incoming.publish(remote.sha256)
            return whole

    def fetch(self, remote: Remote, stop: Event, step: Callable[[int], object] = lambda done: None) -> Incoming:
        """A file that is fetched even if it is cached, and stays a part, which nothing removes, until it is ended.

        Args:
            remote: the file.
            stop: ends the fetching, and the waiting for room that other files take which are coming.
            step: called with the bytes that have come.

        Raises:
            ConfigError, DataError, Interrupted: see `open`.
        """
        with self.explaining(remote):
            while (incoming := self._claim(remote, stop)) is None:
                self.remove(remote.sha256)
            incoming.fill(stop, step)
            return incoming

    @contextmanager
    def explaining(self, remote: Remote) -> Generator[None, None, None]:
        """Turn an error of the system into a ConfigError that names the folder and the remedy."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cache folder '{self.folder}': {error.strerror or error}, for '{remote.name}' ({remote.bytes:,} B); "
                "set data.loading.cache_dir to a folder that can be written, on a local disk with "
                f"{self.max_bytes / GB:g} GB free, or data.loading.cache_gb to less"
            ) from error

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

    def _claim(self, remote: Remote, stop: Event) -> Incoming | None:
        """The part of a file, locked, with room for the whole; None if another process has it or there is no room."""
        if remote.bytes > self.max_bytes:
            raise ConfigError(
                f"'{remote.name}': {remote.bytes:,} bytes, and the cache '{self.folder}' holds {self.max_bytes:,}; "
                f"set data.loading.cache_gb to {remote.bytes / GB * 4:.2g} or more: several shards are in use at once"
            )
        if not IS_POSIX:
            raise ConfigError(
                f"'{remote.name}': files behind URLs are cached on Linux and macOS, where an open file can be renamed; "
                "fetch the folder, and give its path"
            )
        if stop.is_set():
            raise Interrupted(remote.name)
        part = self.part(remote)
        with self.locked() as lock:
            if self.path(remote.sha256).exists():
                return None
            if part.exists() or self._make_room(lock, remote.bytes):
                descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
                if _try_lock(descriptor):
                    return Incoming(self, remote, descriptor)
                os.close(descriptor)
        stop.wait(POLL_S)
        return None

    @contextmanager
    def locked(self) -> Generator[int, None, None]:
        """Hold the folder's lock, which guards making and renaming parts. Its file says how many bytes are taken."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        held.add(lock)
        try:
            lock_file(lock, wait=True)
            yield lock
        finally:
            _unlock(lock)
            os.close(lock)

    def make_room(self, needed: int) -> int:
        """The bytes, up to `needed`, that the caller may add, who holds the folder's lock."""
        return min(needed, self.max_bytes - self._evict(self.max_bytes - needed))

    def _make_room(self, lock: int, needed: int) -> bool:
        """Reserve `needed` bytes, removing the least recently used files; False if parts in progress leave no room."""
        total = _read_total(lock)
        if total is None or total + needed > self.max_bytes:
            total = self._evict(self.max_bytes - needed)
        fits = total + needed <= self.max_bytes
        _write_total(lock, total + needed if fits else total)
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
    """A file that comes into the cache: a part, which nothing removes before `publish` or `discard` ends it.

    Args:
        cache: that it comes into.
        remote: the file; of one whose hash is not known, another name in place of the hash.
        descriptor: of the part, locked; what a killed process has left in it is dropped.

    Attributes:
        path: where the file lies until it is ended.
        bytes: that have come.
    """

    def __init__(self, cache: ShardCache, remote: Remote, descriptor: int) -> None:
        self._cache, self._remote, self._descriptor = cache, remote, descriptor
        self._digest = hashlib.sha256()
        self.path, self.bytes = cache.part(remote), 0
        os.ftruncate(descriptor, 0)

    @property
    def sha256(self) -> str:
        """Hash of the bytes that have come."""
        return self._digest.hexdigest()

    def fill(self, stop: Event, step: Callable[[int], object] = lambda done: None) -> None:
        """Fetch the file, and compare its hash; see `ShardCache.fetch`. After an error nothing of it is left."""
        try:
            for data in self._remote.chunks():
                left = memoryview(data)
                while left:
                    left = left[os.write(self._descriptor, left) :]
                self._digest.update(data)
                self.bytes += len(data)
                step(self.bytes)
                if stop.is_set():
                    raise Interrupted(self._remote.name)
            if self._remote.is_hash and self.sha256 != self._remote.sha256:
                raise DataError(
                    f"'{self._remote.name}': its SHA-256 is {self.sha256}, and the manifest says "
                    f"{self._remote.sha256}: the file changed since it was indexed; index it anew, or put back the "
                    "file that was indexed"
                )
        except BaseException:
            self.discard()
            raise

    def publish(self, name: str | None = None) -> int:
        """Give the file its final name, by default its hash; a descriptor of it, which the caller closes."""
        try:
            with self._cache.explaining(self._remote):
                os.fsync(self._descriptor)
                # A cleaner may have removed it; what is open can be read all the same.
                with self._cache.locked(), suppress(FileNotFoundError):
                    os.rename(self.path, self._cache.path(name or self.sha256))
        except BaseException:
            self.discard()
            raise
        _unlock(self._descriptor)
        return self._descriptor

    def discard(self) -> None:
        """Remove the file."""
        try:
            with self._cache.explaining(self._remote), self._cache.locked() as lock:
                self.path.unlink(missing_ok=True)
                _write_total(lock, None)
        finally:
            _unlock(self._descriptor)
            os.close(self._descriptor)


def default_folder() -> Path:
    """mmdata/shards in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmdata" / "shards"


def _remove_unless_alive(path: str) -> bool:
    """Remove a file, unless a process has locked it; whether it is gone."""
    with suppress(FileNotFoundError):
        if not path.endswith((".part", PIXELS)):
            os.unlink(path)
            return True
        if not IS_POSIX:  # no open file can be removed
            with suppress(PermissionError):
                os.unlink(path)
            return not os.path.exists(path)
        descriptor = os.open(path, os.O_RDWR)
        try:
            if not _try_lock(descriptor):
                return False
            os.unlink(path)
        finally:
            _unlock(descriptor)
            os.close(descriptor)
    return True


def _try_lock(descriptor: int) -> bool:
    held.add(descriptor)
    try:
        lock_file(descriptor)
    except BlockingIOError:
        held.discard(descriptor)
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Release a lock. To close the file would not do, as a forked child may have it open too."""
    held.discard(descriptor)
    with suppress(ImportError, OSError):  # the file system has no locks, which was raised before
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _read_total(lock: int) -> int | None:
    text = os.pread(lock, 32, 0)
    return int(text) if text.isdigit() else None


def _write_total(lock: int, total: int | None) -> None:
    """Write down the bytes taken; None: the next reader counts them.

    The number rises before a file is made and falls after one is removed: a kill leaves it too high, never too low.
    """
    os.ftruncate(lock, 0)
    if total is not None:
        os.pwrite(lock, b"%d" % total, 0)
