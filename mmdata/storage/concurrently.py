"""Calls a function in several threads, whose results come in order. A program that ends does not wait for a server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar

AHEAD = 64
"""Calls for each thread that may be made before the result of the first is taken, if nothing else is said."""
JOIN_S = 5.0
"""Longest wait for the threads at the end: one may wait for a server that does not answer."""

T = TypeVar("T")
R = TypeVar("R")


def map_concurrently(
    function: Callable[[T], R], items: Iterable[T], *, threads: int, end: Callable[[], object], ahead: int = AHEAD
) -> Iterator[R]:
    """The results of `function` for each item, in order; the first error in this order is raised.

    Unlike those of a ThreadPoolExecutor, the threads are daemons, which the interpreter does not wait for.

    Args:
        function: called in one of the threads.
        items: given to it.
        threads: how many.
        end: called when the iteration ends, also early: ends the calls that are under way. No other begins then.
        ahead: calls for each thread that may be made before the result of the first is taken.
    """
    tasks: SimpleQueue[tuple[Future[R], T] | None] = SimpleQueue()
    workers = [threading.Thread(target=_work, args=(function, tasks), name="mmdata-tars") for _ in range(threads)]
    waiting: deque[Future[R]] = deque()
    try:
        for worker in workers:
            worker.daemon = True
            worker.start()
        for item in items:
            future: Future[R] = Future()
            waiting.append(future)
            tasks.put((future, item))
            if len(waiting) >= ahead * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in workers:
            tasks.put(None)
        end()
        until = monotonic() + JOIN_S
        for worker in workers:
            worker.join(max(0.0, until - monotonic()))


def _work(function: Callable[[T], R], tasks: SimpleQueue[tuple[Future[R], T] | None]) -> None:
    while (task := tasks.get()) is not None:
        future, item = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(item))
        except BaseException as error:
            future.set_exception(error)
