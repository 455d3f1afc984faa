"""What a system lacks has a stand-in, or an error that says what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.files import HeldElsewhere, lock
from mmdata.loader.source import num_processes_of
from mmdata.processes import WORTH_BYTES, workers_for
from mmdata.storage.cache import Remote, ShardCache
from mmdata.system import lock_file, reserve, write_at
from tests.journey import locks_of_bytes

NO_POLICY: Any = None


@pytest.mark.skipif(sys.platform != "linux", reason="locks of Linux stand for those of Windows")
def test_lock_of_a_byte_has_one_holder_until_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "msvcrt", locks_of_bytes())
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with open(tmp_path / "file", "w+b") as one, open(tmp_path / "file", "r+b") as other:
        lock_file(one.fileno(), wait=True)
        with pytest.raises(BlockingIOError, match=r"^another process holds the lock$"):
            lock_file(other.fileno(), shared=True)
        assert [os.lseek(file.fileno(), 0, os.SEEK_CUR) for file in (one, other)] == [0, 0]
        one.close()
        lock_file(other.fileno())
    with lock(tmp_path, signed=True), pytest.raises(HeldElsewhere, match=rf"process {os.getpid()} on host"):
        lock(tmp_path).__enter__()


@pytest.mark.parametrize("is_linux", [True, False])
def test_reserve_grows_a_file_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_linux: bool):
    if not is_linux:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    (tmp_path / "file").write_bytes(b"head")
    with open(tmp_path / "file", "r+b") as file:
        reserve(file.fileno(), 9)
    assert (tmp_path / "file").read_bytes() == b"head" + bytes(5)


@pytest.mark.parametrize("is_posix", [True, False])
def test_write_at_writes_all_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_posix: bool):
    if not is_posix:
        monkeypatch.delattr(os, "pwrite")
    with open(tmp_path / "file", "w+b") as file:
        write_at(file.fileno(), memoryview(b"tail"), 3)
        write_at(file.fileno(), b"he", 0)
        write_at(file.fileno(), b"", 90)
    assert (tmp_path / "file").read_bytes() == b"he\0tail"


def test_processes_need_linux_or_macos(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.loader.source.IS_POSIX", False)
    monkeypatch.setattr("mmdata.processes.IS_POSIX", False)
    assert workers_for(2 * WORTH_BYTES, 4) == 1
    data = {"shards": "s", "global_batch_size": 8, "image_size": 32}
    asked = DataConfig(**data, loading={"num_workers": 4, "num_processes": 2})
    with pytest.raises(ConfigError, match=r"^data\.loading\.num_processes is 2, and worker .*; set it to 0: threads"):
        num_processes_of(asked, NO_POLICY)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert num_processes_of(DataConfig(**data), NO_POLICY) == 0


def test_cache_needs_a_system_that_renames_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.storage.cache.IS_POSIX", False)
    remote = Remote("https://a/0.tar", "0" * 64, 10, lambda: iter([b""]))
    with pytest.raises(ConfigError, match=r"^'https://a/0\.tar': files behind URLs are cached on .*; fetch the folder"):
        ShardCache(tmp_path).open(remote, Event())
