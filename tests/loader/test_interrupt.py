"""Ctrl-C in a program that iterates over a loader: it ends as Python programs do, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.flat_settings import grouped
from tests.programs import PATIENCE_S
from tests.waiting import wait_until_no_new_shared_files

from .conftest import Corpus
from .worker_processes import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")

PROGRAM = """
import json, sys
from mmdata import Loader
print("begins", flush=True)  # what an interrupt does to the import of torch is torch's affair
loader = Loader.from_config(json.loads(sys.argv[1]))
while True:
    for batch in loader:
        print("batch", flush=True)
"""


@contextmanager
def started(corpus: Corpus, folder: Path, workers: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a process group of its own, as a shell starts it; it has said that it begins."""
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    settings = grouped(**corpus.settings, num_processes=2 if workers == "process" else 0, num_workers=2)
    with subprocess.Popen(
        [sys.executable, str(folder / "program.py"), json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            assert str(process.pid) in left_of(folder, within_s=0.0)  # it may have started others by now
            yield process
        finally:
            process.kill()


def left_of(folder: Path, within_s: float = PATIENCE_S) -> list[str]:
    """Processes that the program started, or itself: they inherit its TMPDIR. Waits a while for them to end."""
    until = time.monotonic() + within_s
    while found := [file.parent.name for file in Path("/proc").glob("[0-9]*/environ") if names(file, folder)]:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return found


def names(environ: Path, folder: Path) -> bool:
    try:
        return f"TMPDIR={folder}\0".encode() in environ.read_bytes()
    except OSError:  # another user's, or it has ended meanwhile
        return False


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.parametrize("after_s", [0.0, 0.5, None], ids=lambda s: "at a batch" if s is None else f"{s} s")
@pytest.mark.sweep(keep=1)
def test_interrupt_leaves_no_process_memory_or_file(
    corpus: Corpus, tmp_path: Path, workers: str, after_s: float | None
):
    shared, files = os.listdir("/dev/shm"), sorted(os.listdir(corpus.folder / "shards"))
    with started(corpus, tmp_path, workers) as process:
        if after_s is None:
            assert process.stdout is not None
            assert process.stdout.readline() == "batch\n"
        else:
            time.sleep(after_s)  # while it opens the index, starts its worker processes, waits for them, or iterates
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT, error
    assert error.count("Traceback (most recent call last)") == 1, error
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert left_of(tmp_path) == [], "memory without a name goes with the last process that maps it"
    wait_until_no_new_shared_files(shared)
    assert sorted(os.listdir(corpus.folder / "shards")) == files
    assert os.listdir(tmp_path) == ["program.py"]


@pytest.mark.parametrize("workers", ["thread", "process"])
@pytest.mark.sweep(keep=1)
def test_second_interrupt_while_the_first_is_dealt_with_leaves_nothing_either(
    corpus: Corpus, tmp_path: Path, workers: str
):
    with started(corpus, tmp_path, workers) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "batch\n"
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.005)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert left_of(tmp_path) == []
