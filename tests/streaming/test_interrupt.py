"""Ctrl-C in a stream, or in a loader, is a KeyboardInterrupt, whatever it interrupts."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mmdata

MOMENTS = 12
"""Threads that are started between two batches or less, one after the other."""


def interrupt_at_thread(number: int) -> Any:
    """A trace function: a KeyboardInterrupt while this thread waits for the `number`-th thread that it starts, which
    runs by then."""
    starts = [0]

    def trace(frame: FrameType, event: str, arg: object) -> None:
        back = frame.f_back
        if frame.f_code is threading.Event.wait.__code__ and back and back.f_code is threading.Thread.start.__code__:
            thread = back.f_locals["self"]
            if not thread.name.startswith("mmdata-"):
                return
            starts[0] += 1
            if starts[0] == number:
                until = time.monotonic() + 60
                while not thread._started.is_set() and time.monotonic() < until:
                    time.sleep(0.001)
                time.sleep(0.02)  # it takes a task now
                raise KeyboardInterrupt

    return trace


def source(kind: str, shards: Path, config: Any) -> mmdata.Loader | Any:
    settings = config(num_workers=3, prefetch=3)
    if kind == "stream":
        return mmdata.stream(shards, settings)
    return mmdata.Loader.from_config({**settings, "shards": str(shards)})


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 60
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("mmdata-")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_an_interrupt_while_a_thread_starts_is_a_keyboard_interrupt(
    shards: Path, config: Any, no_threads_left: None, kind: str
):
    batches = source(kind, shards, config)
    expected = [batch["keys"] for batch in batches]
    interrupted = 0
    for number in range(1, MOMENTS):
        batches.set_epoch(0)
        before = sys.gettrace()
        sys.settrace(interrupt_at_thread(number))
        try:
            for _ in batches:
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
    assert interrupted >= 3
    batches.set_epoch(0)
    assert [batch["keys"] for batch in batches] == expected


# Python itself drops an interrupt that comes while it runs a finalizer, such as that of a batch's memory.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_interrupts_at_any_moment_are_keyboard_interrupts(shards: Path, config: Any, no_threads_left: None, kind: str):
    batches = source(kind, shards, config)
    expected = [batch["keys"] for batch in batches]
    begun = time.monotonic()
    batches.set_epoch(0)
    assert [batch["keys"] for batch in batches] == expected
    epoch_s = time.monotonic() - begun

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for i in range(60):
            try:
                batches.set_epoch(0)
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, epoch_s * i / 60))
                for _ in batches:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    batches.set_epoch(0)
    assert [batch["keys"] for batch in batches] == expected
