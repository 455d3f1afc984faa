"""Where a loader's batches are made: in threads of its process or in side processes. What is in them is the same."""

from __future__ import annotations

import logging
from math import ceil

import numpy as np
import torch

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.corpus import needs_hashes
from mmdata.loader.state import identity_of
from mmdata.loader.work import Task
from mmdata.loader.workers.gil_share import time_with_gil
from mmdata.loader.workers.handover import StartupHandover, StoppableSteps
from mmdata.loader.workers.parent import WorkerProcesses
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Plan

logger = logging.getLogger("mmdata")

BUSY = 0.7
"""Share of the time for which workers may hold an interpreter's lock; above it they wait for each other."""
MEASURED_ROWS, MEASURED_S = 8, 0.5
"""Rows that the share of the lock is measured on, and seconds it takes."""


def make_source(
    data: DataConfig, plan: Plan, worker: BatchMaker, *, rank: int, world_size: int
) -> WorkerProcesses | StartupHandover | None:
    """Side processes, with threads to bridge their start, where the settings ask for them or `auto` finds them better.

    A user's transform under `worker_type: process` never runs in this process, so that it cannot take the loop along
    when it crashes: nothing bridges the start then.

    Args:
        data: settings.
        plan: of the global batches.
        worker: of the loader, to measure with.
        rank: 0 … world_size-1.
        world_size: processes that share each global batch.

    Returns:
        None: threads.

    Raises:
        ConfigError: `worker_type: process`, and the transform is one that another process cannot import.
    """
    chosen = resolve_workers(data, plan, worker, rank=rank, world_size=world_size)
    if chosen.loading.worker_type == "thread" or chosen.loading.num_workers == 0:
        return None
    beside = WorkerProcesses(chosen, identity_of(plan, worker), rank=rank, world_size=world_size)
    if not threads_may_start(data):
        return beside

    def new_threads() -> tuple[StoppableSteps, ThreadedBatches]:
        # A worker of its own: the memory of its batches goes with it.
        mine = BatchMaker(
            worker.index, worker.tokenizer, worker.transform, hashes=needs_hashes(data), negatives=worker.negatives
        )
        tasks = StoppableSteps(plan, mine, rank=rank, world_size=world_size)
        return tasks, ThreadedBatches(tasks, mine, count=data.loading.num_workers, room=data.loading.prefetch_batches)

    return StartupHandover(beside, new_threads, optional=data.loading.worker_type == "auto")


def threads_may_start(data: DataConfig) -> bool:
    """Whether threads of this process may make batches until the side processes are ready."""
    return data.loading.worker_type == "auto" or not is_users(data)


def resolve_workers(data: DataConfig, plan: Plan, worker: BatchMaker, *, rank: int, world_size: int) -> DataConfig:
    """Resolve `worker_type: auto`; log the choice if it is a process.

    A loop that launches kernels on a GPU is one of many small operations, which threads beside it keep waiting for the
    interpreter's lock: side processes where there is a GPU. A transform of the user's that holds the lock keeps the
    other workers waiting: as many side processes as their threads need locks. Otherwise threads.

    Args:
        data, plan, worker, rank, world_size: see `make_source`.

    Example:
        A row's time holds the lock for 0.9 of it, and there are 4 workers: they would need 3.6 locks, each of which is
        held for at most 0.7 of the time: 6 processes, and no more than there are workers: 4. At 0.1: threads.
    """
    if data.loading.worker_type != "auto":
        return data
    gpu = has_gpu()
    held, workers = 0.0, most_workers(data.loading.num_workers)
    if is_users(data) and workers > 1:
        held = held_share(plan, worker, rank=rank, world_size=world_size)
    locks = held * workers
    processes = min(workers, max(int(gpu), ceil(locks / BUSY) if locks > BUSY else 0))
    if processes == 0:
        return data.with_loading(worker_type="thread")
    why = "there is a GPU, and threads would keep the loop that feeds it waiting for Python's lock (the GIL)"
    if locks > BUSY:
        why = (
            f"transform '{data.transform}' holds Python's lock (the GIL) for {held:.0%} of a row's time, and "
            f"{workers} threads would wait for each other"
        )
    if data.transform.startswith("__main__:"):
        logger.warning(
            "%s; another process cannot import what is defined in the program itself, so threads make the batches: put "
            "the transform into a file of its own",
            why,
        )
        return data.with_loading(worker_type="thread")
    logger.log(
        logging.WARNING if locks > BUSY else logging.INFO,
        "%s: batches are made in %s. Set data.loading.worker_type to thread to have none, or to process "
        "(data.loading.num_processes=%d) "
        "not to see this again%s",
        why,
        "1 side process" if processes == 1 else f"{processes} side processes",
        processes,
        "; calls into torch or torchvision that take long let go of the lock" if locks > BUSY else "",
    )
    return data.with_loading(worker_type="process", num_processes=processes)


def is_users(data: DataConfig) -> bool:
    """Whether the transform is a user's, "module:callable"."""
    return ":" in data.transform


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device. Asks the driver's monitor, so that this process may still fork."""
    return torch.cuda.device_count() > 0


def held_share(plan: Plan, worker: BatchMaker, *, rank: int, world_size: int) -> float:
    """Share of a row's processor time that holds the GIL, 0 to 1, measured on some rows of the first step.

    What fails here is left to the loop, which meets it again: 0.
    """
    step = next(iter(plan.steps(0, start=0, rank=rank, world_size=world_size)), None)
    some = np.flatnonzero(step.rows >= 0) if step else np.empty(0, np.int64)
    if step is None or not len(some):
        return 0.0
    if worker.index.caches:  # of one shard, since each has to be fetched
        shards, _ = worker.index.locate(step.rows[some])
        some = some[shards == shards[0]]
    some = some[:MEASURED_ROWS]
    task = Task(0, step.number, step.bucket, step.rows[some], step.passes[some])

    def make(task: Task) -> None:
        torch.set_num_threads(1)  # of the thread that measures
        worker.make(task)

    callers = torch.get_num_threads()
    try:
        worker.make(task)  # what comes but once does not count
        return time_with_gil(make, [task], seconds=MEASURED_S).share
    except Exception as error:
        logger.debug("how long transforms hold the GIL was not measured: %s", error)
        return 0.0
    finally:
        torch.set_num_threads(callers)  # or all threads that are started later would begin with one
