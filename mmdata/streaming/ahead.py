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
    waited_s: deque[float] = deque()  # for tasks, not yet in `stats`, which is the caller's

    def timed(wait: Callable[[], Result]) -> Result:
        started = perf_counter()
        try:
            return wait()
        finally:
            stats.wait_s += perf_counter() - started
            while waited_s:
                stats.wall_s["read"] += waited_s.popleft()

    def each(next_task: Callable[[], Task | None]) -> Generator[Task]:
        while True:
            started = perf_counter()
            task = next_task()
            waited_s.append(perf_counter() - started)
            if task is None:
                return
            yield task

    if num_workers == 0:
        here = (begin(task).run() for task in each(lambda: next(tasks, None)))
        while (made := timed(lambda: next(here, None))) is not None:
            yield made
        return
    reader = ThreadPoolExecutor(1, thread_name_prefix="mmdata-reader")
    read: deque[Future[Task | None]] = deque()
    threads = WorkerThreads(each(lambda: read.popleft().result()), lambda task, _: begin(task), num_workers)

    def ask() -> None:
        while len(threads) < prefetch:
            read.append(reader.submit(next, tasks, None))
            threads.ask()

    try:
        while True:
            ask()
            try:
                made = timed(threads.take)
            except StopIteration:
                return
            ask()
            yield made
            del made
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
        threads.close()
        reader.shutdown(wait=True)
