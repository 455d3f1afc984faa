"""The doctor's look at what the system allows."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mmdata.inspect.machine import (
    cache,
    descriptors,
    memory,
    memory_limit,
    threads,
    tokenizer_threads,
)


def test_descriptors_warns_of_a_low_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        check = descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (check.status, check.found) == ("warn", "limit 512")
    assert re.match(r"`ulimit -n \d+` before starting", check.remedy)


def test_descriptors_warns_of_a_low_hard_limit():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from mmdata.inspect.machine import descriptors
print(descriptors())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "status='warn', found='hard limit 256', remedy='as root `ulimit -n 65536`, for a container `--u" in done.stdout
    )


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"])
def test_threads_warns_of_more_than_cores(name: str, monkeypatch: pytest.MonkeyPatch):
    for other in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        monkeypatch.delenv(other, raising=False)
    assert (threads().status, threads().found) == ("ok", "OMP_NUM_THREADS is not set")
    monkeypatch.setenv(name, "4096")
    check = threads()
    assert check.status == "warn"
    assert re.fullmatch(rf"{name}=4096, and there are \d+ cores", check.found)
    assert check.remedy.startswith(f"unset {name}, or set it to the cores divided by the processes of this host")


@pytest.mark.parametrize(
    ("value", "status", "found"),
    [
        (None, "info", "TOKENIZERS_PARALLELISM is not set"),
        ("true", "warn", "TOKENIZERS_PARALLELISM is true"),
        ("false", "ok", "TOKENIZERS_PARALLELISM=false: none"),
    ],
)
def test_tokenizer_threads(value: str | None, status: str, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    check = tokenizer_threads()
    assert (check.status, check.found) == (status, found)
    assert check.remedy.startswith("set it to false before a loop of your own starts" if status != "ok" else "")


def test_memory_limit_reads_both_cgroup_versions(tmp_path: Path):
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    assert memory_limit(tmp_path) == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("2147483648\n")
    assert memory_limit(tmp_path) == 2**31


@pytest.mark.parametrize(
    ("limit", "status", "words"),
    [(None, "ok", r"[\d.,]+ GiB"), (2**30, "warn", r"[\d.,]+ GiB, the container may use 1 GiB")],
)
def test_memory_says_what_a_container_may_use(
    limit: int | None, status: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.inspect.machine.memory_limit", lambda: limit)
    check = memory()
    assert check.status == status
    assert re.fullmatch(words, check.found)
    assert check.remedy.startswith("the kernel's out-of-memory killer ends a process above it" if limit else "")


@pytest.mark.parametrize(("gib", "found"), [(7.514, "7.51 GiB"), (999.4, "999 GiB"), (2015.8, "2,016 GiB")])
def test_memory_of_a_large_host_is_written_whole(gib: float, found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mmdata.inspect.machine.memory_limit", lambda: None)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(gib * 2**18)}.__getitem__)
    assert memory().found == found


def test_cache_says_how_much_room_there_is(tmp_path: Path):
    check = cache(tmp_path / "not" / "yet" / "there")
    assert re.fullmatch(rf"'{tmp_path}/not/yet/there': [\d.,]+ GB free", check.found)
    assert check.status in ("ok", "info")
    assert not (tmp_path / "not").exists()


def test_cache_warns_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    check = cache(tmp_path / "file")
    assert (check.status, check.found) == ("warn", f"'{tmp_path}/file' cannot be written")
    assert check.remedy == "for shards behind URLs set data.loading.cache_dir"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_cache_warns_of_a_read_only_folder(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert cache(tmp_path / "c").found == f"'{tmp_path}' cannot be written"
