"""Batches made ahead by worker threads, in the order of their tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

from mmdata.loader.assemble import worker_threads
from mmdata.loader.stats import Stats

Task = TypeVar("Task")
Made = TypeVar("Made")


def make_ahead(
    tasks: Iterator[Task],
    make: Callable[[Task], Made],
    *,
    num_workers: int,
    prefetch: int,
    stats: Stats,
) -> Generator[Made]:
    """What `make` makes of the tasks; at most num_workers × prefetch are ready or being made.

    One thread takes the tasks, so that they come one after the other; the workers wait for them in turn. When this
    generator is closed, no thread is left, and what was taken and not handed on is lost.

    Args:
        tasks: taken in the reader's thread; with 0 workers in the caller's.
        make: called in the workers' threads.
        num_workers: threads.
        prefetch: tasks for each of them.
        stats: counts the seconds for which the caller waited.
    """

    def make_next(next_task: Callable[[], Task | None]) -> Made | None:
        task = next_task()
        return None if task is None else make(task)

    def timed(wait: Callable[[], Made | None]) -> Made | None:
        started = perf_counter()
        made = wait()
        stats.wait_s += perf_counter() - started
        return made

    if num_workers == 0:
        while (made := timed(lambda: make_next(lambda: next(tasks, None)))) is not None:
            yield made
        return
    reader = ThreadPoolExecutor(1, thread_name_prefix="mmdata-reader")
    pool = worker_threads(num_workers)
    ahead: deque[Future[Made | None]] = deque()
    try:
        while True:
            while len(ahead) < num_workers * prefetch:
                ahead.append(pool.submit(make_next, reader.submit(next, tasks, None).result))
            if (made := timed(ahead.popleft().result)) is None:
                return
            yield made
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
        pool.shutdown(wait=True, cancel_futures=True)
