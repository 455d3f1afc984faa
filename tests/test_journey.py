"""A system or an installation that lacks what is not needed gives the same batches, and the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import PATIENCE_S
from tests.test_dependencies import blocked

PROGRAM = Path(__file__).with_name("journey.py")

LACKED_BY_WINDOWS = [
    *("resource", "pwd", "grp", "termios", "os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.memfd_create"),
    *("os.sched_getaffinity", "os.register_at_fork", "os.fork", "os.killpg", "os.getuid", "os.getloadavg"),
    *("os.posix_fadvise", "os.posix_fallocate", "os.O_NONBLOCK", "os.O_CLOEXEC", "os.O_NOFOLLOW", "os.O_DIRECTORY"),
    *("select.poll", "select.epoll", "signal.SIGHUP", "signal.SIGUSR1", "signal.SIGUSR2", "signal.SIGALRM"),
    *("signal.setitimer", "signal.pthread_kill", "signal.pthread_sigmask", "os.set_blocking"),
    *("mmap.MAP_SHARED", "mmap.PROT_READ"),
]
"""Modules and functions of Python. fcntl goes last: the program needs it to be Windows."""


def journey(folder: Path, hidden: list[str], *system: str) -> dict[str, Any]:
    """What the program prints."""
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(hidden), *system]
    # Not `run_program`, whose processes have imported mmdata before anything is hidden.
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=quiet)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes where nothing is hidden."""
    found = journey(tmp_path_factory.mktemp("everything"), [])
    assert (len(found["batches"]), len(found["losses"])) == (4, 10)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="locks of Linux stand for those of Windows")
@pytest.mark.parametrize(
    ("hidden", "system"),
    [
        pytest.param(LACKED_BY_WINDOWS, ["windows"], id="windows"),
        pytest.param(None, [], id="without-extras"),
    ],
)
def test_journey_gives_the_same_without_what_is_not_everywhere(
    hidden: list[str] | None, system: list[str], everything: dict[str, Any], tmp_path: Path
):
    assert journey(tmp_path, blocked() if hidden is None else hidden, *system) == everything
