from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.errors import ConfigError, DataError, Interrupted
from mmdata.storage.cache import Remote, ShardCache, default_folder
from tests.programs import PATIENCE_S, Program, run_program


class File:
    """A file elsewhere that counts how often it is asked for."""

    def __init__(self, content: bytes, *, sha256: str | None = None) -> None:
        self.content = content
        self.asked = 0
        self.remote = Remote("far/x.tar", sha256 or sha(content), len(content), self.chunks)

    def chunks(self) -> Iterator[bytes]:
        self.asked += 1
        for start in range(0, len(self.content), 10):
            yield self.content[start : start + 10]


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read(cache: ShardCache, file: File) -> bytes:
    descriptor = cache.open(file.remote)
    try:
        return os.pread(descriptor, 10**6, 0)
    finally:
        os.close(descriptor)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_file_is_fetched_once_and_named_by_its_hash(tmp_path):
    cache, file = ShardCache(tmp_path / "c"), File(b"a" * 25)
    assert (read(cache, file), read(cache, file)) == (b"a" * 25, b"a" * 25)
    assert file.asked == 1
    assert names(tmp_path / "c") == {sha(b"a" * 25)}
    assert cache.touch(sha(b"a" * 25))
    assert not cache.touch(sha(b"b"))


def test_an_empty_file_is_a_file(tmp_path):
    assert read(ShardCache(tmp_path), File(b"")) == b""


def test_default_folder_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ShardCache().folder == default_folder() == Path("/somewhere/mmdata/shards")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache/mmdata/shards"


def test_of_many_threads_one_fetches(tmp_path):
    cache, file, gate = ShardCache(tmp_path), File(b"b" * 1000), threading.Barrier(8)

    def ask(_: int) -> bytes:
        gate.wait()
        return read(cache, file)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {b"b" * 1000}
    assert file.asked == 1


def test_what_was_used_least_recently_makes_room(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=300)
    files = [File(letter * 100) for letter in (b"a", b"b", b"c", b"d")]
    for file in files[:3]:
        read(cache, file)
        time.sleep(0.01)  # file systems round times
    read(cache, files[0])
    read(cache, files[3])
    assert names(tmp_path) == {files[i].remote.sha256 for i in (0, 2, 3)}


def test_an_open_file_can_be_read_when_its_room_was_needed(tmp_path):
    cache = ShardCache(tmp_path, max_bytes=100)
    descriptor = cache.open(File(b"a" * 100).remote)
    read(cache, File(b"b" * 100))
    assert names(tmp_path) == {sha(b"b" * 100)}
    assert os.pread(descriptor, 100, 0) == b"a" * 100
    os.close(descriptor)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=30))
def test_it_never_holds_more_than_it_may(asks):
    with tempfile.TemporaryDirectory() as folder:
        cache = ShardCache(folder, max_bytes=100)
        for letter, size in asks:
            file = File(bytes([letter]) * size)
            assert read(cache, file) == file.content
            assert sum(path.stat().st_size for path in Path(folder).iterdir() if path.name != ".lock") <= 100


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"x" * 500)
    cache = ShardCache(tmp_path, max_bytes=100)
    read(cache, File(b"a" * 100))
    read(cache, File(b"b" * 100))
    assert names(tmp_path) == {"notes.txt", sha(b"b" * 100)}


def test_another_file_than_asked_for_is_refused_and_leaves_nothing(tmp_path):
    file = File(b"a" * 30, sha256="0" * 64)
    with pytest.raises(
        DataError, match=rf"'far/x\.tar': its SHA-256 is {sha(b'a' * 30)}, and the manifest says 0{{64}}: the file chan"
    ):
        read(ShardCache(tmp_path), file)
    assert names(tmp_path) == set()


def test_a_hash_that_is_none_never_becomes_a_name(tmp_path):
    with pytest.raises(DataError, match=re.escape("'../../x' is not a SHA-256: the manifest is damaged")):
        read(ShardCache(tmp_path), File(b"a", sha256="../../x"))


def test_a_file_larger_than_the_cache_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'far/x\.tar': 300 bytes, and the cache '.*' holds 299; set data.loading.cache_gb"
    ):
        read(ShardCache(tmp_path, max_bytes=299), File(b"a" * 300))


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cache folder '.*/c': Not a directory, for 'far/x\.tar' \(1 B\); set"):
        read(ShardCache(tmp_path / "c"), File(b"a"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"cache folder '.*': Permission denied"):
        read(ShardCache(tmp_path), File(b"a"))


def test_a_write_that_fails_is_an_error_and_leaves_nothing(tmp_path):
    # A limit on the size of files stands in for a full disk: the system refuses the write.
    code = f"""
    import resource, sys
    sys.path.insert(0, "tests/storage")
    from test_cache import File, ShardCache, read
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    read(ShardCache({str(tmp_path)!r}), File(b"a" * 100))
    """
    done = run_program([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert f"ConfigError: cache folder '{tmp_path}': File too large, for 'far/x.tar' (100 B); set data" in done.stderr
    assert names(tmp_path) == set()


def test_a_cached_file_that_was_cut_is_fetched_again(tmp_path):
    cache, file = ShardCache(tmp_path), File(b"a" * 30)
    read(cache, file)
    os.truncate(cache.path(file.remote.sha256), 10)
    assert read(cache, file) == b"a" * 30


@pytest.mark.parametrize("end", [None, DataError("the server is gone"), KeyboardInterrupt()])
def test_a_fetch_that_ended_early_leaves_nothing(tmp_path, end):
    stop, file = threading.Event(), File(b"a" * 60)

    def chunks() -> Iterator[bytes]:
        yield b"a" * 20
        if end is not None:
            raise end
        stop.set()
        yield b"a" * 10

    with pytest.raises(Interrupted if end is None else type(end)):
        ShardCache(tmp_path).open(file.remote._replace(chunks=chunks), stop)
    assert names(tmp_path) == set()
    assert read(ShardCache(tmp_path, max_bytes=100), file) == b"a" * 60


@pytest.mark.parametrize("when", ["stat", "unlink", "open"])
def test_room_is_made_although_a_cleaner_removes_the_files_meanwhile(tmp_path, monkeypatch, when):
    """The cleaner is there just before a file is looked at, and before it or a part of it is removed."""
    cache = ShardCache(tmp_path, max_bytes=100)
    for letter in (b"a", b"b"):
        read(cache, File(letter * 40))
    if when == "open":
        for path in cache.folder.glob("*[0-9a-f]"):
            path.rename(f"{path}.40.part")
    remove, begin, look = os.unlink, os.open, os.scandir

    def gone(path, *rest):
        if when != "open" or str(path).endswith(".40.part"):
            remove(path)
        return remove(path) if when == "unlink" else begin(path, *rest)

    def looked(folder):
        for entry in list(look(folder)):
            if when == "stat" and len(entry.name) == 64:
                remove(entry.path)
            yield entry

    monkeypatch.setattr(os, "scandir", looked)
    if when != "stat":
        monkeypatch.setattr(os, when, gone)
    descriptor = cache.open(File(b"c" * 80).remote)
    monkeypatch.undo()
    assert os.pread(descriptor, 100, 0) == b"c" * 80
    os.close(descriptor)
    assert names(tmp_path) == {sha(b"c" * 80)}


def test_a_file_is_read_although_a_cleaner_removes_it_while_it_comes(tmp_path):
    def chunks() -> Iterator[bytes]:
        yield b"a" * 10
        (tmp_path / f"{sha(b'a' * 20)}.20.part").unlink()
        yield b"a" * 10

    descriptor = ShardCache(tmp_path).open(File(b"a" * 20).remote._replace(chunks=chunks))
    assert os.pread(descriptor, 100, 0) == b"a" * 20
    os.close(descriptor)
    assert names(tmp_path) == set()


KILLED = """
import sys, time
sys.path.insert(0, "tests/storage")
from test_cache import Remote, ShardCache, sha

def chunks():
    yield b"abcdefghij" * 3
    print("half", flush=True)
    time.sleep(60)

ShardCache(sys.argv[1], max_bytes=200).open(Remote("x", sha(b"abcdefghij" * 6), 60, chunks))
"""


@pytest.fixture
def killed(tmp_path) -> Path:
    """A cache of 200 bytes whose process was killed with half of a file of 60 bytes."""
    with Program([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {f"{sha(b'abcdefghij' * 6)}.60.part"}
    return tmp_path


def test_what_a_killed_process_left_is_fetched_anew(killed):
    file = File(b"abcdefghij" * 6)
    assert read(ShardCache(killed, max_bytes=200), file) == b"abcdefghij" * 6
    assert names(killed) == {file.remote.sha256}


def test_what_a_killed_process_left_makes_room(killed):
    cache = ShardCache(killed, max_bytes=200)
    for letter in (b"a", b"b", b"c"):
        read(cache, File(letter * 60))
    assert names(killed) == {sha(letter * 60) for letter in (b"a", b"b", b"c")}


def test_what_is_being_fetched_keeps_its_room(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        yield b"a" * 60

    cache = ShardCache(tmp_path, max_bytes=100)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.open, Remote("a", sha(b"a" * 60), 60, chunks))
        assert begun.wait(PATIENCE_S)
        second = pool.submit(read, cache, File(b"b" * 60))
        time.sleep(0.2)
        assert names(tmp_path) == {f"{sha(b'a' * 60)}.60.part"}
        go_on.set()
        os.close(first.result())
        assert second.result() == b"b" * 60
    assert names(tmp_path) == {sha(b"b" * 60)}


def in_a_mount(options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Fetch 100,000 bytes into a cache in a file system of its own, mounted over `folder` for that process alone."""
    mount = f"mount -t tmpfs -o {options} tmpfs {folder}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    code = f"""
    import os, sys
    sys.path.insert(0, "tests/storage")
    from test_cache import ConfigError, File, ShardCache, read
    try:
        read(ShardCache({str(folder)!r}), File(b"a" * 100_000))
    except ConfigError as error:
        print(error)
    print(sorted(os.listdir({str(folder)!r})))
    """
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("options", "cause", "left"),
    [("size=64k", "No space left on device", [".lock"]), ("ro", "Read-only file system", [])],
)
def test_a_file_system_that_is_full_or_read_only_is_named(tmp_path, options, cause, left):
    done = in_a_mount(options, tmp_path)
    said, files = done.stdout.splitlines()
    assert said == (
        f"cache folder '{tmp_path}': {cause}, for 'far/x.tar' (100,000 B); set data.loading.cache_dir to a folder "
        "that can be written, on a local disk with 100 GB free, or data.loading.cache_gb to less"
    ), done.stderr
    assert files == str(left)
