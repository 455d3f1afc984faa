"""What threads share where an interrupt may come: a result, and a stop signal."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from mmdata.loader.workers.threads import Promise, Stop
from tests.programs import PATIENCE_S


def test_promise_goes_with_the_error_that_was_taken_from_it():
    promise: Promise[int] = Promise()
    gone = weakref.ref(promise)
    gc.disable()
    try:
        promise.fail(ValueError())
        with suppress(ValueError):
            promise.take()
        del promise
        assert gone() is None
    finally:
        gc.enable()


def test_stop_wakes_all_who_wait_and_stays():
    stop = Stop()
    assert not stop.is_set()
    assert not stop.wait(0.01)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(stop.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    stop.set()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == [True] * 5
    assert stop.is_set()
    assert stop.wait()


@pytest.mark.parametrize("which", range(1, 40))
def test_interrupt_at_any_line_of_set_and_keep_leaves_no_lock_held(which: int):
    """The line is the n-th that runs in them, and in what they call."""
    stop, promise, lines = Stop(), Promise[int](), 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines == which:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    with suppress(KeyboardInterrupt):
        sys.settrace(trace)
        try:
            stop.set()
            promise.keep(1)
        finally:
            sys.settrace(None)
    stop.set()
    promise.keep(1)
    done = threading.Thread(target=lambda: (stop.wait(), stop.set(), promise.take(), promise.keep(1)), daemon=True)
    done.start()
    done.join(PATIENCE_S)
    assert not done.is_alive()
