"""Forked children read the pass anew, without the threads of their parent; a program may end in mid-pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import mmdata
from tests.programs import PATIENCE_S


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first window has 8 rows or more, instead of 1,024."""
    monkeypatch.setattr("mmdata.loader.growing.tars.FIRST_ROWS", 8)


def passes_in_child(check: Callable[[], bool]) -> bool:
    """Whether a check holds in a forked child, which is ended if it waits for ever."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("begun", [0, 3])
@pytest.mark.sweep(keep=2)
def test_a_forked_child_reads_the_pass_anew(
    uneven: Any, config: Any, serve: Any, num_workers: int, over_http: bool, begun: int
):
    folder: Path = uneven(*[5] * 8)
    shards = [f"{serve(folder)}/{i}.tar" for i in range(8)] if over_http else folder
    settings = config(global_batch_size=2, shuffle_window_rows=8, loading={"num_workers": num_workers})
    expected = [batch["keys"] for batch in mmdata.stream(shards, settings)]
    stream = mmdata.stream(shards, settings)
    batches = iter(stream)
    got = [batch["keys"] for batch in islice(batches, begun)]

    def anew() -> bool:
        stream.set_epoch(0)
        found = [batch["keys"] for batch in stream]
        stream.close()
        return found == expected

    assert passes_in_child(anew)
    assert got + [batch["keys"] for batch in batches] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.sweep(keep=1)
def test_a_program_that_ends_in_mid_pass_prints_nothing(uneven: Any, config: Any, num_workers: int):
    settings = config(global_batch_size=2, shuffle_window_rows=8, loading={"num_workers": num_workers})
    program = f"""
import mmdata, mmdata.loader.growing.tars
mmdata.loader.growing.tars.FIRST_ROWS = 8
stream = mmdata.stream({str(uneven(*[5] * 40))!r}, {settings!r})
batches = iter(stream)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
