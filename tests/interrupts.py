"""Interrupts at moments that a signal would rarely hit."""

from __future__ import annotations

import linecache
import threading
import time
from types import FrameType
from typing import Any


def interrupt_at_thread(name: str, *, is_begun: bool = True) -> Any:
    """A trace function: a KeyboardInterrupt while a thread of this name starts.

    Args:
        name: the beginning of it.
        is_begun: whether the new thread runs already; if not, the system has not begun it, and never will.
    """

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        back = frame.f_back
        if frame.f_code is threading.Thread.start.__code__ and not is_begun:
            return trace_start if frame.f_locals["self"].name.startswith(name) else None
        if frame.f_code is not threading.Event.wait.__code__ or not back or not is_begun:
            return None
        if back.f_code is threading.Thread.start.__code__ and back.f_locals["self"].name.startswith(name):
            time.sleep(0.1)
            raise KeyboardInterrupt
        return None

    def trace_start(frame: FrameType, event: str, arg: object) -> Any:
        line = linecache.getline(threading.__file__, frame.f_lineno)
        if event == "line" and ("_start_new_thread(" in line or "_start_joinable_thread(" in line):
            raise KeyboardInterrupt
        return trace_start

    return trace


def forget_threads_that_never_began() -> None:
    """Python lists a thread forever whose start was interrupted before the system began it, and tests count threads."""
    limbo = vars(threading)["_limbo"]
    for thread in list(limbo):
        if not thread.is_alive():
            del limbo[thread]
