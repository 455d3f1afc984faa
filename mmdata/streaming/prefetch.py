"""Makes batches ahead with worker threads, and gives them in the order of their steps.

One thread, the reader, takes the steps, because a pass is read from front to back. The workers share the decoding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from mmdata.loader.stats import Stats
from mmdata.loader.workers.interrupt_safe import Promise
from mmdata.loader.workers.threads import END_S, WorkerThreads
from mmdata.loader.workers.work import Work

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
    """The results of the steps. While the caller uses one, at most `prefetch` others are ready or in work.

    When this generator is closed, the steps in work are lost and the threads end. If a server or a disk blocks one,
    `close` waits END_S seconds for it and leaves it behind, as a daemon.

    Args:
        steps: iterated in the reader's thread; with 0 workers in the caller's thread.
        begin: called in the workers' threads.
        num_workers: worker threads; 0: the caller's thread does all work.
        prefetch: largest number of steps ahead, over all workers.
        stats: `wait_s` counts the seconds that the caller waits, `wall_s["read"]` those that workers wait for steps.
    """
    waits = _Waits(stats)
    if num_workers == 0:
        results = (begin(step).run() for step in waits.each(lambda: next(steps, None)))
        while (made := waits.timed(lambda: next(results, None))) is not None:
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
            del made  # or this frame would keep the batch's memory while it waits for the next one
    finally:
        try:
            reader.end()
            if threads is not None:
                threads.close()
        finally:  # again, because a KeyboardInterrupt may have cut off the lines above
            reader.end()
            reader.join()


class _Reader(Generic[Step]):
    """A thread that takes steps one after the other, each when it is asked for.

    No ThreadPoolExecutor: if an interrupt comes while an executor starts a thread, it loses track of that thread and
    never ends it.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._asked: SimpleQueue[Promise[Step | None] | None] = SimpleQueue()
        self._read: deque[Promise[Step | None]] = deque()
        self._ended = False
        # A daemon, so that the program can exit while a server does not answer.
        self._thread = threading.Thread(target=self._take_steps, name="mmdata-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self) -> None:
        """Queue the next step."""
        promise: Promise[Step | None] = Promise()
        self._read.append(promise)
        self._asked.put(promise)

    def take(self) -> Step | None:
        """Wait for the next step that was asked for; None at the end. Raises what `steps` raises."""
        return self._read.popleft().take()

    def end(self) -> None:
        """Take no more steps, and cancel those that were asked for; does not block."""
        self._ended = True
        self._asked.put(None)

    def join(self) -> None:
        """Wait at most END_S seconds for the thread to end."""
        with suppress(RuntimeError):  # an interrupt came before the thread was started
            self._thread.join(END_S)

    def _take_steps(self) -> None:
        while (promise := self._asked.get()) is not None:
            if self._ended:
                promise.cancel()  # a worker may be waiting for this step
                continue
            try:
                promise.keep(next(self._steps, None))
            except BaseException as error:
                promise.fail(error)
                del promise  # breaks the cycle promise → error → traceback → this frame → promise


class _Waits:
    """Measures how long the caller waits for batches, and how long workers wait for steps, which is reading."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._for_steps_s: deque[float] = deque()  # not yet in `stats`, which only the caller's thread changes

    def timed(self, wait: Callable[[], Result]) -> Result:
        """Call `wait`, and count its time as the caller's waiting."""
        started = perf_counter()
        try:
            return wait()
        finally:
            self._stats.wait_s += perf_counter() - started
            while self._for_steps_s:
                self._stats.wall_s["read"] += self._for_steps_s.popleft()

    def each(self, next_step: Callable[[], Step | None]) -> Generator[Step]:
        """The steps up to the first None; counts the time of each as reading."""
        while True:
            started = perf_counter()
            step = next_step()
            self._for_steps_s.append(perf_counter() - started)
            if step is None:
                return
            yield step
