"""Who makes the batches of a rank: threads of its process, or worker processes. The batches are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from threading import Event
from typing import Any

import torch

from mmdata.config import DataConfig
from mmdata.config.settings import is_importable, name_of
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import Ranks
from mmdata.loader.builder import BatchBuilder
from mmdata.loader.corpus import open_corpus
from mmdata.loader.identity import Identity, identity_of
from mmdata.loader.prefetch import ShardPrefetcher
from mmdata.loader.unfinished import LoadedBatch
from mmdata.loader.workers.process import WorkerProcesses
from mmdata.loader.workers.threads import ThreadedBatches, Work
from mmdata.plan import BucketPolicy, Plan, Step
from mmdata.plan.from_config import build_plan
from mmdata.processes import most_workers, worker_processes
from mmdata.system import IS_POSIX

logger = logging.getLogger("mmdata")


BatchSource = ThreadedBatches[LoadedBatch] | WorkerProcesses[LoadedBatch]
"""Makes a loader's batches ahead, in the order of the plan, from one epoch into the next."""


Given = dict[str, Any]
"""`order` and `policy` of `build_plan`, which no settings hold."""


class RankPipeline:
    """The steps of one rank, and the work on each. Shards behind URLs are prefetched in the order of the steps.

    Args:
        plan: of the global batches.
        builder: makes the batches; its store fetches shards behind URLs.
        ranks: which share of each global batch.

    Attributes:
        plan, builder: as given.
        current_epoch: the epoch of the batches that the caller takes. No shard of a later epoch is fetched before a
            worker needs it, because the caller may never ask for that epoch.
    """

    def __init__(self, plan: Plan, builder: BatchBuilder, ranks: Ranks) -> None:
        self.plan, self.builder, self._ranks = plan, builder, ranks
        self.current_epoch = 0

    @classmethod
    def from_config(cls, data: DataConfig, ranks: Ranks, given: Given) -> RankPipeline:
        """The pipeline of a section `data`, whose corpus is opened; see `open_corpus` and `build_plan`."""
        corpus = open_corpus(data)
        plan = build_plan(data, corpus.index, corpus.tokenizer, joined=corpus.joined, captions=corpus.captions, **given)
        return cls(plan, BatchBuilder.from_config(data, corpus, plan), ranks)

    def steps(self, epoch: int, start: int) -> Generator[Step, None, None]:
        """The steps from step `start` of an epoch on, and those of the next epochs, until an epoch has no steps."""
        # Set by the caller's thread: the generator below first runs in a worker thread, perhaps after `take`.
        self.current_epoch = epoch
        return self._from(epoch, start)

    def begin(self, step: Step, stop: Event | None = None) -> Work:
        """The work on a step."""
        return self.builder.begin(step, stop)

    def stop(self) -> None:
        """End what the steps wait for."""
        self.plan.stop()

    def identity(self) -> Identity:
        """What the batches depend on."""
        return identity_of(self.plan, self.builder.spec)

    def _from(self, epoch: int, start: int) -> Generator[Step, None, None]:
        index, store = self.builder.index, self.builder.store
        while True:
            steps = self.plan.steps(epoch, start=start, rank=self._ranks.rank, world_size=self._ranks.world_size)
            if not index.caches:  # all shards are on a local disk
                yield from steps
            else:
                # While the caller is still in the epoch before, the steps of this one come without prefetching.
                while self.current_epoch < epoch and (step := next(steps, None)):
                    yield step
                with closing(ShardPrefetcher(steps, index, store)) as prefetched:
                    yield from prefetched
            epoch, start = epoch + 1, 0
            if not self.plan.has_steps(epoch):
                return


def make_source(data: DataConfig, pipeline: RankPipeline, opened: Callable[[], RankPipeline] | None) -> BatchSource:
    """The workers that a section `data` asks for; see `num_processes_of` for `num_processes: auto`.

    Args:
        data: settings.
        pipeline: that they are to follow.
        opened: opens the same pipeline in another process; None: no other process can.

    Raises:
        ConfigError: worker processes, with a transform or policy that another process cannot import.
    """
    loading, num_threads = data.loading, most_workers(data.loading.num_workers)
    policy = pipeline.plan.policy
    num_processes = 0 if opened is None else num_processes_of(data, policy)
    if opened is None or num_processes == 0 or num_threads == 0:
        return ThreadedBatches(pipeline, num_threads=num_threads, prefetch=loading.prefetch_batches)
    if cannot := not_importable(data, policy):
        raise ConfigError(
            f"{cannot}: data.loading.num_processes is {num_processes}, and another process "
            "cannot import it by its name: it is defined in the program itself, inside a function, or made when "
            "the program runs. Define it at the top of a file of its own, or set data.loading.num_processes to 0"
        )
    checked = partial(_checked, opened, pipeline.identity())
    return WorkerProcesses(
        checked, num_processes=num_processes, num_threads=num_threads, prefetch=loading.prefetch_batches
    )


def open_pipeline(settings: dict[str, Any], ranks: Ranks, given: Given) -> RankPipeline:
    """Open the pipeline of a section `data`, as JSON, in a worker process."""
    return RankPipeline.from_config(DataConfig.model_validate(settings), ranks, given)


def _checked(opened: Callable[[], RankPipeline], expected: Identity) -> RankPipeline:
    """Open a pipeline in a worker process, whose batches must be those of the training process."""
    pipeline = opened()
    if (found := pipeline.identity()) != expected:
        raise DataError(
            f"the loader's worker process made another plan, {found}, than this process, {expected}: the shards or the "
            "tokenizer have changed since the loader was built; build it anew"
        )
    return pipeline


def num_processes_of(data: DataConfig, policy: BucketPolicy) -> int:
    """The number of worker processes that make the batches; logs it if `num_processes: auto` chooses one.

    With a GPU it does: a loop that launches kernels is many small operations, and threads of its process would keep it
    waiting for the interpreter's lock (the GIL). Without a GPU it does not: a training step on a CPU is a few large
    operations, which release the lock.
    """
    if data.loading.num_processes not in ("auto", 0) and not IS_POSIX:
        raise ConfigError(
            f"data.loading.num_processes is {data.loading.num_processes}, and worker processes need Linux or macOS; "
            "set it to 0: threads make the same batches"
        )
    if data.loading.num_processes != "auto":
        return data.loading.num_processes
    if not IS_POSIX or not has_gpu() or data.loading.num_workers == 0:
        return 0
    why = "there is a GPU, and threads would keep the loop that feeds it waiting for Python's lock (the GIL)"
    if cannot := not_importable(data, policy):
        logger.warning(
            "%s; another process cannot import %s, so threads make the batches: define it at the top of a file of its "
            "own",
            why,
            cannot,
        )
        return 0
    number = worker_processes(data.loading.num_workers)
    logger.info(
        "%s: batches are made in %s. Set data.loading.num_processes to 0 for no worker process, or to %s to silence "
        "this message",
        why,
        "1 worker process" if number == 1 else f"{number} worker processes",
        number,
    )
    return number


def not_importable(data: DataConfig, policy: BucketPolicy) -> str:
    """The user's transform or policy that another process cannot import by its name, in words; "" if there is none."""
    named = {"transform": data.transform, "text_transform": data.text_transform, "policy": type(policy)}
    for name, own in named.items():
        if own is not None and not is_importable(own):
            return f"{name} '{name_of(own)}'"
    return ""


def has_gpu() -> bool:
    """Whether torch sees a CUDA or ROCm device. Does not initialise CUDA, after which this process could not fork."""
    return torch.cuda.device_count() > 0
