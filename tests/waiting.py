"""Waiting for what comes by itself: not for a fixed time, which is too short on a busy machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

from tests.programs import PATIENCE_S


def wait_until(is_so: Callable[[], object], *, program: subprocess.Popen[str] | None = None) -> None:
    """Return once it is so; it must be within PATIENCE_S, and before `program` ends."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert program is None or program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_no_new_shared_files(before: list[str]) -> None:
    """Return once all that /dev/shm has now, and had not before, is gone; other programs have files there a while."""
    new = set(os.listdir("/dev/shm")) - set(before)
    wait_until(lambda: not new & set(os.listdir("/dev/shm")))
