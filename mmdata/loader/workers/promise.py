"""What threads wait for where Ctrl-C may come at any line.

`concurrent.futures.Future`, `threading.Event` and `threading.Condition` enter and leave their locks in lines of Python.
An interrupt between two of them, in the main thread, leaves a lock held, so that other threads wait for ever, or gives
it back twice, which is a RuntimeError. Here each wait, and each sign that ends one, is a single call into C.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """One result, which a thread makes and another takes once."""

    def __init__(self) -> None:
        self._box: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def keep(self, result: T) -> None:
        """Here it is."""
        self._box.put((result, None))

    def fail(self, error: BaseException) -> None:
        """There is none; whoever takes it gets this error. What was said first holds."""
        self._box.put((None, error))

    def cancel(self) -> None:
        """There is none, since nobody makes it: a CancelledError."""
        self.fail(CancelledError())

    def take(self) -> T:
        """The result, as soon as it is there; raises the error that came instead."""
        result, error = self._box.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del self, error  # or the error and its traceback, which has this frame, would keep each other


class Stop(threading.Event):
    """An event that is set once, for good: nobody wants what is being made."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it is."""
        return self._stopped

    def set(self) -> None:
        """Set it, and wake whoever waits."""
        self._stopped = True
        with suppress(RuntimeError):  # it was open
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so many seconds; returns whether it is."""
        if self._gate.acquire(timeout=-1 if timeout is None else timeout):
            with suppress(RuntimeError):  # for the next one who waits; `set` may have opened it a second time
                self._gate.release()
        return self._stopped

    def clear(self) -> None:
        """Raises TypeError: what was given up is not made again."""
        raise TypeError("a Stop is set for good")
