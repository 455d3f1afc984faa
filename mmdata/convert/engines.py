"""Engines examine rows. Results come in the order of the rows, so the output does not depend on the engine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from mmdata.convert.examine import Examine, Examined
from mmdata.convert.rows import Row

Engine = Callable[[Examine, Iterable[Row]], Iterator[Examined]]
"""Examines rows: yields one result for each row, in order, with a bounded number of rows in flight."""

CHUNK = 16
"""Rows in a worker's task."""


def chunks(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Lists of `size` consecutive rows; the last may be shorter."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def threads(num_workers: int | None = None) -> Engine:
    """An engine of threads in this process: reading, hashing and decoding release the GIL.

    Args:
        num_workers: threads; None takes one for each core.
    """
    workers = num_workers or os.cpu_count() or 1

    def run(examine: Examine, rows: Iterable[Row]) -> Iterator[Examined]:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="convert")
        pending: deque[Future[list[Examined]]] = deque()
        try:
            for chunk in chunks(rows, CHUNK):
                pending.append(pool.submit(examine_all, examine, chunk))
                if len(pending) > 2 * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return run


def examine_all(examine: Examine, rows: list[Row]) -> list[Examined]:
    """The task of a worker."""
    return [examine(row) for row in rows]
