"""A child that is forked while a thread of its parent holds a lock does what it is asked, and hangs nowhere."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mmdata.errors import DataError
from mmdata.index import Index, ShardStore
from mmdata.loader.workers.buffers import BufferPool
from mmdata.storage import ShardCache
from mmdata.storage.cache import LOCK_NAME, Remote
from mmdata.storage.folder import RemoteFolder
from mmdata.storage.urls import FileSystem
from tests.storage.servers import serve

HANGS_S = 120
"""Seconds after which a child is taken to hang."""


def forked(use: Callable[[], object]) -> int:
    """The exit status of a forked child that calls a function: 0; 1 after an error; -SIGALRM if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S)
        try:
            use()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def held_by_a_thread(lock: Any) -> Generator[None, None, None]:
    """Another thread is within `with lock`."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            leave.wait(2 * HANGS_S)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert entered.wait(HANGS_S)
    try:
        yield
    finally:
        leave.set()
        thread.join()


USES: dict[str, Callable[[Index], tuple[Any, Callable[[], object]]]] = {
    "file system": lambda index: ((files := FileSystem("file:///"))._lock, files.get),
    "index": lambda index: (index._lock, lambda: index.shard(0)),
    "manifest": lambda index: (index.manifests[0]._locks[0], lambda: index.manifests[0].listed(0)),
    "store": lambda index: ((store := ShardStore(index)).open_shards._lock, lambda: store.read(0, 0, 512)),
    "buffers": lambda index: ((pool := BufferPool())._lock, lambda: pool.lend((4,))),
}


@pytest.mark.parametrize("name", USES)
def test_a_forked_child_finds_locks_free_that_a_thread_of_its_parent_holds(name: str, shards: Path, tmp_path: Path):
    index = Index.open(f"file://{shards}", cache=ShardCache(tmp_path / "cache"))
    lock, use = USES[name](index)
    with held_by_a_thread(lock):
        assert forked(use) == 0


def test_a_child_forked_while_a_thread_begins_to_fetch_fetches_itself(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on, of_fsspec = threading.Event(), threading.Event(), fsspec.filesystem

    def slow(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait(2 * HANGS_S)
        return of_fsspec(*arguments, **options)

    with serve(shards) as server:
        folder = RemoteFolder(server.url, ShardCache(tmp_path / "cache"))
        folder._files._opened = None
        monkeypatch.setattr(fsspec, "filesystem", slow)
        thread = threading.Thread(target=folder._files.get)
        thread.start()
        assert begun.wait(HANGS_S)
        try:
            assert forked(lambda: folder.read_manifest()) == 0
        finally:
            go_on.set()
            thread.join()


def test_a_sample_is_read_while_another_one_waits_for_its_server(shards: Path, tmp_path: Path):
    here = Index.open(shards)
    with serve(shards) as server:
        far = Index.open(server.url, cache=ShardCache(tmp_path / "cache"))
        waiting = far[0]
        server.held = ".tar"
        thread = threading.Thread(target=lambda: waiting.image_bytes)
        thread.start()
        assert server.holding.wait(HANGS_S)
        try:
            assert forked(lambda: here[0].image_bytes) == 0
        finally:
            server.release.set()
            thread.join()
    assert waiting.image_bytes == here[0].image_bytes


@contextmanager
def child_that_waits() -> Generator[None, None, None]:
    """A forked child that does nothing until the end of the context."""
    child = os.fork()
    if child == 0:
        signal.alarm(2 * HANGS_S)
        signal.pause()
        os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def is_free(path: Path) -> bool:
    """Whether a file can be locked."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_forked_child_does_not_keep_the_lock_of_the_cache(tmp_path: Path):
    cache = ShardCache(tmp_path)
    with held_by_a_thread(cache.locked()):
        assert not is_free(tmp_path / LOCK_NAME)
        child = child_that_waits()
        child.__enter__()
    try:
        assert is_free(tmp_path / LOCK_NAME)
    finally:
        child.__exit__(None, None, None)


def test_a_forked_child_closes_what_its_parent_has_locked(tmp_path: Path):
    """Else it would keep the lock after the death of its parent."""
    cache = ShardCache(tmp_path)

    def check() -> None:
        opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        assert str(tmp_path / LOCK_NAME) not in opened

    with held_by_a_thread(cache.locked()):
        assert forked(check) == 0


def test_a_forked_child_does_not_keep_a_part_that_its_parent_gave_up(tmp_path: Path):
    begun, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def chunks() -> Iterator[bytes]:
        yield b"a" * 10
        begun.set()
        assert go_on.wait(HANGS_S)
        raise DataError("the server is gone")

    def fetch() -> None:
        try:
            cache.open(Remote("a", "0" * 64, 30, chunks))
        except DataError as error:
            errors.append(error)

    cache = ShardCache(tmp_path)
    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(HANGS_S)
    part = tmp_path / f"{'0' * 64}.30.part"
    other_name = tmp_path / "part"
    other_name.hardlink_to(part)
    with child_that_waits():
        assert not is_free(other_name)
        go_on.set()
        thread.join()
        assert [str(error) for error in errors] == ["the server is gone"]
        assert not part.exists()
        assert is_free(other_name)
