"""Converts on a Ray cluster: `mmdata convert … --engine ray`. A task makes a unit; the bytes are those of one process.

Every node must see the corpus and the output folder under the same paths (or the output is on S3), and have mmdata
installed. Tasks write there, and give back receipts: a task that is repeated, or that goes on after its node was given
up, changes nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from mmdata.convert.fetch import FetchStage
from mmdata.convert.units.engines import Engine, Progress, make_units
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit
from mmdata.errors import ConfigError, DataError

RETRIES = 3
"""Times that Ray repeats a task whose worker or node died."""


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

    def run(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        started_here = not ray.is_initialized()
        if started_here:
            # An existing cluster has its own number of cores. "local" is not one that others have started here.
            own: dict[str, Any] = {"address": "local", "num_cpus": num_workers}
            own = {} if os.environ.get("RAY_ADDRESS") else own
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, **own)
        try:
            yield from _make_all(ray, job, units, num_workers)
        finally:
            if started_here:
                ray.shutdown()

    return run


def _make_all(ray: Any, job: Job, units: Iterable[Unit], num_workers: int | None) -> Iterator[Receipt | Progress]:
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(_make)
    shared = ray.put(job)
    at_once = 2 * (num_workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
    pending: dict[Any, Unit] = {}
    waiting = iter(units)
    try:
        while True:
            for unit in islice(waiting, at_once - len(pending)):
                pending[task.remote(shared, unit)] = unit
            if not pending:
                return
            (reference,), _ = ray.wait(list(pending), num_returns=1)
            receipt = _receipt(ray, reference, pending.pop(reference))
            yield Progress(receipt.rows)
            yield receipt
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)


def _make(job: Job, unit: Unit) -> Receipt:
    """Make a unit; the task of a worker."""
    with FetchStage.from_config(job.config) as fetch:
        (receipt,) = (event for event in make_units(job, [unit], fetch, 1) if isinstance(event, Receipt))
    return receipt


def _receipt(ray: Any, reference: Any, unit: Unit) -> Receipt:
    try:
        return ray.get(reference)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError) as error:
        raise DataError(
            f"a Ray worker died {RETRIES + 1} times over rows {unit.start} to {unit.stop - 1}; has it memory enough?"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
