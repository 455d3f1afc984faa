"""How much of a function's time holds the interpreter's lock (the GIL): what threads cannot share among cores.

The measure is taken in processor time, so that other programs on the machine change it little.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

SWITCH_S = 1e-4
"""How long either thread lets the other wait for the lock."""

LATE_S = 5e-5
"""A turn of the lock does not count where the watching thread had to wait so long for a core to notice its end."""

ENOUGH_TURNS, LONGEST = 20, 4
"""So many turns must count, on a busy machine for up to so many times as long as asked."""


class Held(NamedTuple):
    """Processor time of a function, in seconds.

    Attributes:
        held_s: with the lock.
        free_s: without it.
    """

    held_s: float
    free_s: float

    @property
    def share(self) -> float:
        """Part of the time with the lock, 0 to 1."""
        return self.held_s / max(self.held_s + self.free_s, 1e-9)


def time_with_gil(function: Callable[[T], object], items: Sequence[T], *, seconds: float = 0.5) -> Held:
    """Measure how much of a function's processor time holds the GIL.

    One thread calls the function, and the caller's thread spins beside it. What the first computes while the second has
    the lock, it computes without the lock; what it computes while the second is kept waiting, with it. Parts without
    the lock that are shorter than a thread needs to wake up, some 10 to 50 µs, count as held, so a function of many
    small operations has a share that is too large. Other threads of the process should be idle.

    Args:
        function: called with each item in turn, and again from the first, until `seconds` are over, at least once each.
        items: what to call it with, one or more.
        seconds: to measure for; on a busy machine up to four times as long.

    Returns:
        Times per call.

    Raises:
        Exception: what the function raised.

    Example:
        Resizing a photo takes 1 ms in one call into C++, nearly all of it without the lock: a share below 0.1. The same
        as a loop in Python: above 0.9.
    """
    caller = _Caller(function, items)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        caller.start()
        held_s, free_s = _watch(caller, seconds)
    finally:
        sys.setswitchinterval(interval)
        caller.end()
    if caller.error is not None:
        raise caller.error
    return Held(held_s / caller.calls, free_s / caller.calls)


class _Caller(threading.Thread):
    """Calls the function; its processor clock can be read until `watched` is set."""

    def __init__(self, function: Callable[[Any], object], items: Sequence[Any]) -> None:
        super().__init__(daemon=True, name="mmdata-gil")
        self._function, self._items = function, items
        self.begin, self.watched = threading.Event(), threading.Event()
        self.enough = self.done = False
        self.calls = 0
        self.error: Exception | None = None

    def end(self) -> None:
        """Wait for its end: that of the call it is at, also where watching was interrupted."""
        self.enough = True
        self.begin.set()
        self.watched.set()
        self.join()

    def run(self) -> None:
        self.begin.wait()
        try:
            while self.calls < len(self._items) or not self.enough:
                self._function(self._items[self.calls % len(self._items)])
                self.calls += 1
        except Exception as error:
            self.error = error
        self.done = True
        self.watched.wait()


def _watch(caller: _Caller, seconds: float) -> tuple[float, float]:
    """Seconds of the caller's processor time with and without the lock, until it is done."""
    assert caller.ident is not None
    clock = time.pthread_getcpuclockid(caller.ident)
    delays = _Delays()
    held_s = 0.0
    turns = counted = 0
    caller.begin.set()
    started = time.monotonic()
    last, waits, delay = time.clock_gettime(clock), _waits(), delays.seconds()
    before = last
    while not caller.done:
        now, waits_now = time.clock_gettime(clock), _waits()
        delay_now = delays.seconds()  # lets go of the lock: the caller never waits long for it
        if waits_now != waits:  # this thread slept: the caller had the lock
            turns += 1
            if delay_now - delay < LATE_S:
                counted += 1
                held_s += now - last
        last, waits, delay = now, waits_now, delay_now
        elapsed = time.monotonic() - started
        caller.enough = elapsed > seconds and (counted >= ENOUGH_TURNS or elapsed > LONGEST * seconds)
    delays.close()
    held_s *= turns / max(counted, 1)
    return held_s, max(0.0, last - before - held_s)


def _waits() -> int:
    """How often this thread has gone to sleep of itself: for the lock, since it does nothing else to sleep for."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class _Delays:
    """How long this thread has waited for a core, where Linux tells it; 0 elsewhere."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def seconds(self) -> float:
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
