"""Chooses what makes a loader's batches: threads of its process, or worker processes. The batches are the same."""

from __future__ import annotations

import logging

import torch

from mmdata.config import DataConfig
from mmdata.cores import most_workers
from mmdata.launcher import Ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.state import identity_of
from mmdata.loader.work import BatchSource
from mmdata.loader.workers.parent import WorkerProcesses, not_importable
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Plan

logger = logging.getLogger("mmdata")


def make_source(data: DataConfig, plan: Plan, maker: BatchMaker, ranks: Ranks) -> BatchSource:
    """The workers that a section `data` asks for; see `resolve_workers` for `worker_type: auto`.

    Raises:
        ConfigError: `worker_type: process` with a transform that another process cannot import.
    """
    chosen = resolve_workers(data)
    num_threads, prefetch = most_workers(data.loading.num_workers), data.loading.prefetch_batches
    if chosen.loading.worker_type == "thread" or num_threads == 0:
        return ThreadedBatches(RankSteps(plan, maker, ranks), maker, num_threads=num_threads, prefetch=prefetch)
    return WorkerProcesses(chosen, identity_of(plan, maker), ranks)


def resolve_workers(data: DataConfig) -> DataConfig:
    """Resolve `worker_type: auto`; log the choice if it is a process.

    With a GPU it is a process: a loop that launches kernels is many small operations, and threads of its process would
    keep it waiting for the interpreter's lock (the GIL). Without a GPU it is threads: a training step on a CPU is a few
    large operations, which release the lock.
    """
    if data.loading.worker_type != "auto":
        return data
    if not has_gpu() or data.loading.num_workers == 0:
        return data.with_loading(worker_type="thread")
    why = "there is a GPU, and threads would keep the loop that feeds it waiting for Python's lock (the GIL)"
    if cannot := not_importable(data):
        logger.warning(
            "%s; another process cannot import %s, so threads make the batches: define it at the top of a file of its "
            "own",
            why,
            cannot,
        )
        return data.with_loading(worker_type="thread")
    logger.info(
        "%s: batches are made in 1 worker process. Set data.loading.worker_type to thread for no worker process, or to "
        "process to silence this message",
        why,
    )
    return data.with_loading(worker_type="process")


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device. Does not initialise CUDA, after which this process could not fork."""
    return torch.cuda.device_count() > 0
