"""Waiting for what comes by itself: not for a fixed time, which is too short on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from tests.programs import PATIENCE_S


def wait_until(is_so: Callable[[], object]) -> bool:
    """Whether it comes to be so within PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while not (found := is_so()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(found)


def no_new_shared_files(before: list[str]) -> bool:
    """Whether all that /dev/shm has now, and had not before, goes; other programs have files there for a while."""
    new = set(os.listdir("/dev/shm")) - set(before)
    return wait_until(lambda: not new & set(os.listdir("/dev/shm")))
