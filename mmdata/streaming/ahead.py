"""Batches made ahead by worker threads, in the order of their tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

from mmdata.loader.job import Job
from mmdata.loader.stats import Stats
from mmdata.loader.threads import WorkerThreads

Task = TypeVar("Task")
Made = TypeVar("Made")
Result = TypeVar("Result")


def make_ahead(
    tasks: Iterator[Task],
    begin: Callable[[Task], Job[Made]],
    *,
    num_workers: int,
    prefetch: int,
    stats: Stats,
) -> Generator[Made]:
    """What comes of the tasks; at most `prefetch` are ready or being made while the caller works on another.

    One thread takes the tasks, so that they come one after the other; the workers wait for them in turn. When this
    generator is closed, no thread is left, and what was taken and not handed on is lost.

    Args:
        tasks: taken in the reader's thread; with 0 workers in the caller's.
        begin: called in the workers' threads.
        num_workers: threads.
        prefetch: tasks, for all of them together.
        stats: counts the seconds for which the caller waited, and those for which workers waited for tasks as reading.
    """
    waits = _Waits(stats)
    if num_workers == 0:
        here = (begin(task).run() for task in waits.each(lambda: next(tasks, None)))
        while (made := waits.timed(lambda: next(here, None))) is not None:
            yield made
        return
    reader = ThreadPoolExecutor(1, thread_name_prefix="mmdata-reader")
    read: deque[Future[Task | None]] = deque()
    threads = WorkerThreads(waits.each(lambda: read.popleft().result()), lambda task, _: begin(task), num_workers)

    def ask() -> None:
        while len(threads) < prefetch:
            read.append(reader.submit(next, tasks, None))
            threads.ask()

    try:
        while True:
            ask()
            try:
                made = waits.timed(threads.take)
            except StopIteration:
                return
            ask()
            yield made
            del made
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
        threads.close()
        reader.shutdown(wait=True)


class _Waits:
    """Puts down who waited for what: the caller for batches, and the workers for tasks, which is reading."""

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

    def each(self, next_task: Callable[[], Task | None]) -> Generator[Task]:
        """The tasks up to the first None, waited for by a worker."""
        while True:
            started = perf_counter()
            task = next_task()
            self._for_tasks_s.append(perf_counter() - started)
            if task is None:
                return
            yield task
