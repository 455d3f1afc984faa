"""Batches made ahead by worker threads, in the order of their steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from mmdata.loader.stats import Stats
from mmdata.loader.work import Work
from mmdata.loader.workers.interrupt_safe import Promise
from mmdata.loader.workers.threads import END_S, WorkerThreads

Step = TypeVar("Step")
Made = TypeVar("Made")
Result = TypeVar("Result")


def make_ahead(
    steps: Iterator[Step],
    begin: Callable[[Step], Work[Made]],
    *,
    num_workers: int,
    prefetch: int,
    stats: Stats,
) -> Generator[Made]:
    """What comes of the steps; at most `prefetch` are ready or being made while the caller works on another.

    One thread takes the steps, so that they come one after the other; the workers wait for them in turn. When this
    generator is closed, what was taken and not handed on is lost, and no thread is left but one that a server or a disk
    holds.

    Args:
        steps: taken in the reader's thread; with 0 workers in the caller's.
        begin: called in the workers' threads.
        num_workers: threads.
        prefetch: steps, for all of them together.
        stats: counts the seconds for which the caller waited, and those for which workers waited for steps as reading.
    """
    waits = _Waits(stats)
    if num_workers == 0:
        here = (begin(step).run() for step in waits.each(lambda: next(steps, None)))
        while (made := waits.timed(lambda: next(here, None))) is not None:
            yield made
        return
    reader = _Reader(steps)
    threads: WorkerThreads[Step, Made] | None = None

    def ask(threads: WorkerThreads[Step, Made]) -> None:
        while len(threads) < prefetch:
            reader.ask()
            threads.ask()

    try:
        reader.start()
        threads = WorkerThreads(waits.each(reader.take), lambda step, _: begin(step), num_workers)
        while True:
            ask(threads)
            try:
                made = waits.timed(threads.take)
            except StopIteration:
                return
            ask(threads)
            yield made
            del made
    finally:
        try:
            reader.end()
            if threads is not None:
                threads.close()
        finally:  # an interrupt may come at any line
            reader.end()
            reader.join()


class _Reader(Generic[Step]):
    """A thread that takes steps when it is asked to, one after the other.

    Not a pool: one that is interrupted while it starts a thread does not know that it has it, and does not end it.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._asked: SimpleQueue[Promise[Step | None] | None] = SimpleQueue()
        self._read: deque[Promise[Step | None]] = deque()
        self._ended = False
        # A daemon: no program waits for a server that does not answer.
        self._thread = threading.Thread(target=self._take_tasks, name="mmdata-reader", daemon=True)

    def start(self) -> None:
        """Begin to take steps."""
        self._thread.start()

    def ask(self) -> None:
        """Have the next step taken."""
        promise: Promise[Step | None] = Promise()
        self._read.append(promise)
        self._asked.put(promise)

    def take(self) -> Step | None:
        """The next step that was asked for, as soon as it is there; None: there are no more. Raises what they raise."""
        return self._read.popleft().take()

    def end(self) -> None:
        """Take no more, and tell whoever waits for one; waits for nothing."""
        self._ended = True
        self._asked.put(None)

    def join(self) -> None:
        """Wait a while for the thread to end."""
        with suppress(RuntimeError):  # interrupted while it was started: it finds nothing to do
            self._thread.join(END_S)

    def _take_tasks(self) -> None:
        while (promise := self._asked.get()) is not None:
            if self._ended:
                promise.cancel()  # a worker may be waiting for it
                continue
            try:
                promise.keep(next(self._steps, None))
            except BaseException as error:
                promise.fail(error)
                del promise  # or it, the error and its traceback, which has this frame, would keep each other


class _Waits:
    """Puts down who waited for what: the caller for batches, and the workers for steps, which is reading."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._for_tasks_s: deque[float] = deque()  # not yet in `stats`, which is the caller's

    def timed(self, wait: Callable[[], Result]) -> Result:
        """The caller waits for a batch."""
        started = perf_counter()
        try:
            return wait()
        finally:
            self._stats.wait_s += perf_counter() - started
            while self._for_tasks_s:
                self._stats.wall_s["read"] += self._for_tasks_s.popleft()

    def each(self, next_task: Callable[[], Step | None]) -> Generator[Step]:
        """The steps up to the first None, waited for by a worker."""
        while True:
            started = perf_counter()
            step = next_task()
            self._for_tasks_s.append(perf_counter() - started)
            if step is None:
                return
            yield step
