"""Converts on a Ray cluster: `mmdata convert … --engine ray`. Rows, order and bytes are those of the thread engine.

Every node must see the corpus under the same path and have mmdata installed.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from mmdata.convert.engines import CHUNK, Engine, chunks, examine_all
from mmdata.convert.examine import Examine, Examined
from mmdata.convert.rows import Row
from mmdata.errors import ConfigError, DataError

RETRIES = 1
"""Times that Ray repeats a task whose worker died; examining is a pure function of the rows."""


def ray_engine(num_workers: int | None = None) -> Engine:
    """An engine of Ray tasks, on the cluster that RAY_ADDRESS names, else on one started for this conversion.

    Args:
        num_workers: concurrent tasks; None takes one for each core of the cluster.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine 'ray': Ray is not installed; `pip install mmdata[ray]`") from error

    def run(examine: Examine, rows: Iterable[Row]) -> Iterator[Examined]:
        started_here = not ray.is_initialized()
        if started_here:
            # An existing cluster has its own number of cores.
            own: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, **own)
        try:
            yield from _in_order(ray, examine, rows, num_workers)
        finally:
            if started_here:
                ray.shutdown()

    return run


def _in_order(ray: Any, examine: Examine, rows: Iterable[Row], num_workers: int | None) -> Iterator[Examined]:
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(examine_all)
    shared = ray.put(examine)
    in_flight = 2 * (num_workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
    pending: deque[tuple[list[Row], Any]] = deque()
    for chunk in chunks(rows, CHUNK):
        pending.append((chunk, task.remote(shared, chunk)))
        if len(pending) > in_flight:
            yield from _result(ray, *pending.popleft())
    while pending:
        yield from _result(ray, *pending.popleft())


def _result(ray: Any, chunk: list[Row], reference: Any) -> list[Examined]:
    try:
        return ray.get(reference)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise DataError(
            f"a Ray worker died {RETRIES + 1} times over rows {chunk[0].number} to {chunk[-1].number} "
            f"({chunk[0].place} to {chunk[-1].place}); has it memory enough?"
        ) from error
