"""Worker processes of a program, and programs that have some."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmdata.loader.workers import process
from tests.flat_settings import grouped
from tests.programs import PATIENCE_S, Program

from .conftest import Corpus

PROCESS: dict[str, Any] = {"num_processes": 1}
ROOT = Path(__file__).parents[2]


def worker_processes(of: int | None = None) -> list[int]:
    """Process ids of a process's worker processes."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            ppid = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(ppid) == (of or os.getpid())
                and b"mmdata.loader.workers.process" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found


def gone(pid: int, *, within_s: float = PATIENCE_S) -> bool:
    """Whether a process ends; one that nobody has waited for yet has."""
    until = time.monotonic() + within_s
    while True:
        try:
            # While other threads of it live, its files are open.
            threads = len(os.listdir(f"/proc/{pid}/task"))
            if threads == 1 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Worker processes end with their loaders. They are forked from a template."""
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=Program, DEVNULL=subprocess.DEVNULL))
    yield
    gc.collect()
    assert worker_processes() == []


PROGRAM = """
    import json, os, sys, time
    import mmdata
    loader = mmdata.Loader.from_config(json.loads(sys.argv[1]))
    batches = iter(loader)
    next(batches)
    print("ready", flush=True)
"""


def program(corpus: Corpus, folder: Path, more: str, **changes: Any) -> subprocess.Popen[str]:
    """A program of its own without a `__main__` guard, in another folder; it has printed a line."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(more))
    (folder / "random.py").write_text("raise SystemExit('the current folder is not on the path of a program')")
    (folder / "elsewhere").mkdir()
    path = path.rename(folder / "elsewhere" / "program.py")
    settings = json.dumps(grouped(**{**corpus.settings, **PROCESS, **changes}))
    started = Program(
        [sys.executable, str(path), settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    # By the byte: `readline` may take the lines behind it into its own buffer, which `communicate` does not look into.
    said = b""
    while (byte := os.read(started.stdout.fileno(), 1)) not in (b"\n", b""):
        said += byte
    assert said == b"ready", started.communicate()
    return started


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def transforms(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "my_transforms.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("my_transforms", None)
