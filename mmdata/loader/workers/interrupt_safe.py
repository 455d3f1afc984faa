"""What threads share where Ctrl-C may come at any line: a result, a stop signal, a generator.

`concurrent.futures.Future`, `threading.Event` and `threading.Condition` enter and leave their locks in lines of Python.
An interrupt between two of these lines, in the main thread, leaves a lock held, so that other threads wait for ever, or
releases it twice, which is a RuntimeError. `Promise` and `Stop` wait and wake in a single call into C instead.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

EXECUTING = "generator already executing"
"""Python's message where another thread is executing, or closing, a generator."""


class Promise(Generic[T]):
    """One result, which one thread makes and another takes once."""

    def __init__(self) -> None:
        # A SimpleQueue puts and gets in C: no interrupt can leave its lock held.
        self._box: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def keep(self, result: T) -> None:
        """Give the result."""
        self._box.put((result, None))

    def fail(self, error: BaseException) -> None:
        """Give an error, which `take` raises. After an earlier result or error it has no effect."""
        self._box.put((None, error))

    def cancel(self) -> None:
        """Give a CancelledError: no thread makes the result."""
        self.fail(CancelledError())

    def take(self) -> T:
        """Wait for the result; raises the error that was given instead."""
        result, error = self._box.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            # The error's traceback refers to this frame: without `del` they would keep each other, and the batch's
            # memory, until the garbage collector runs.
            del self, error


class Stop(threading.Event):
    """An event that is set once, for good: what is being made is not wanted any more."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False
        # Held until the event is set. To wait is to acquire it, which is one call into C; `Event.wait` is many lines.
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._stopped

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        # The flag first: if an interrupt comes before the gate opens, workers still see that they are to end.
        self._stopped = True
        with suppress(RuntimeError):  # the gate was open already
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most `timeout` seconds; returns whether it is set."""
        if self._gate.acquire(timeout=-1 if timeout is None else timeout):
            # Each thread that passes opens the gate for the next. A second `set` may have opened it meanwhile.
            with suppress(RuntimeError):
                self._gate.release()
        return self._stopped

    def clear(self) -> None:
        """Raises TypeError."""
        raise TypeError("a Stop is set for good")


class SharedGenerator(Generic[T], Iterator[T]):
    """Gives the items of a generator to one thread at a time; may be closed at any moment, by any thread.

    To close a generator that another thread executes raises "ValueError: generator already executing". The caller of
    `close` cannot find out in advance, because an interrupt may come between the start of a thread and the line that
    records the start. Here `close` sets a flag instead, and the executing thread closes the generator when it leaves.

    Args:
        source: used through this object only.
    """

    def __init__(self, source: Generator[T, None, None]) -> None:
        self._source = source
        self._executing = threading.Lock()
        self._closed = False

    def __next__(self) -> T:
        """The next item; waits while another thread executes the generator. A closed one raises StopIteration."""
        try:
            with self._executing:
                if self._closed:
                    raise StopIteration
                return next(self._source)
        except ValueError as error:
            # `close` takes no lock, so it may have begun to close the generator after `_closed` was read.
            if str(error) != EXECUTING:
                raise
            raise StopIteration from None
        finally:
            # `close` was called while this thread executed the generator, and left the closing to this thread.
            if self._closed:
                self.close()

    def close(self) -> None:
        """Give no more items, and close the generator; waits for nothing."""
        self._closed = True
        try:
            self._source.close()
        except ValueError as error:
            # Python itself tells whether the generator is executing. To try the lock would not do: an interrupt may
            # come between a successful `acquire` and the line that records it, and the lock would stay held.
            if str(error) != EXECUTING:
                raise
