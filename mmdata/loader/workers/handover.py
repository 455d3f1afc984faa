"""Threads make a loader's first batches while its worker processes start, and hand over to them between two batches.

A batch depends on its position in the plan alone, so threads and processes make the same batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing

from mmdata.errors import ConfigError, LoadError
from mmdata.forked import new_lock
from mmdata.launcher import Ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.work import LoadedBatch
from mmdata.loader.workers.parent import WorkerProcesses
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Plan, Step

logger = logging.getLogger("mmdata")


class StartupHandover:
    """Makes batches in threads of this process at first, and in worker processes as soon as all of them are ready.

    Each `take` asks the processes whether they are ready. When they are, the threads begin no new step: the processes
    immediately begin with the first step that no thread has begun, while the caller takes the batches that the threads
    have begun. After the last of these the threads end, and their memory is freed. Nothing waits, and no batch is made
    twice.

    A worker process that is killed later is replaced by another process, not by threads: a batch that kills the
    process it is made in would end the training loop as well.

    Args:
        processes: the worker processes.
        new_threads: makes the threads, and the steps they take.
        optional: if worker processes cannot be started the threads stay, with a warning; otherwise it is an error.

    Example:
        Two threads; the processes are ready when the caller takes batch 7. Batches 7 and 8 are made, 9 and 10 are in
        progress. The processes begin with 11; the threads give 7 to 10, and end.
    """

    def __init__(
        self,
        processes: WorkerProcesses,
        new_threads: Callable[[], tuple[StoppableSteps, ThreadedBatches]],
        *,
        optional: bool,
    ) -> None:
        self._processes: WorkerProcesses | None = processes
        self._new_threads = new_threads
        self._optional = optional
        self._threads: tuple[StoppableSteps, ThreadedBatches] | None = None
        self._handover_at: tuple[int, int] | None = None  # epoch and step of the first batch of the processes

    def begin(self, epoch: int, start: int) -> None:
        """Make the batches from step `start` of an epoch on.

        Raises:
            ConfigError, DataError, LoadError: a worker process cannot be started.
        """
        self.stop()
        if ready := self._ready(epoch, start):
            ready.begin(epoch, start)
        else:
            self._threads = self._new_threads()
            self._threads[1].begin(epoch, start)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """Wait for the next batch, which is that of the given step.

        Raises:
            ConfigError, DataError, LoadError: see `BatchMaker.make` and `WorkerProcesses.take`.
        """
        if self._threads:
            steps, threads = self._threads
            if not self._handover_at and (ready := self._ready(epoch, step)):
                # None while a thread is taking a step: then the next `take` tries again.
                self._handover_at = steps.end()
                if self._handover_at:
                    ready.begin(*self._handover_at)
            if self._handover_at != (epoch, step):
                return threads.take(epoch, step)
            threads.stop()
            self._threads = self._handover_at = None
        assert self._processes
        return self._processes.take(epoch, step)

    def stop(self) -> None:
        """Make no more batches. Processes that are starting continue to start, for the next `begin`."""
        if self._threads:
            self._threads[1].stop()
        self._threads = self._handover_at = None
        if self._processes:
            self._processes.stop()

    def close(self) -> None:
        """End threads and processes; `begin` starts others."""
        self.stop()
        if self._processes:
            self._processes.close()

    def _ready(self, epoch: int, step: int) -> WorkerProcesses | None:
        """The worker processes if all are ready, else None."""
        if not self._processes:
            return None
        try:
            return self._processes if self._processes.are_ready(epoch, step) else None
        except (ConfigError, LoadError) as error:
            if not self._optional:
                raise
            logger.warning("%s. Threads of this process make all batches", str(error))
            self._processes = None
            return None


class StoppableSteps(RankSteps):
    """The steps of one rank, which can be ended between two steps so that another source continues.

    Args:
        plan, maker, ranks: see `RankSteps`.
    """

    def __init__(self, plan: Plan, maker: BatchMaker, ranks: Ranks) -> None:
        super().__init__(plan, maker, ranks)
        self._taking = new_lock()  # held while a thread takes a step
        self._ended = False
        self._next: tuple[int, int] | None = None  # epoch and step of the next step; None: there is none

    def begin(self, epoch: int, start: int) -> Generator[Step, None, None]:
        """See `RankSteps.begin`."""
        self._ended, self._next = False, (epoch, start)
        return self._until_ended(super().begin(epoch, start))

    def end(self) -> tuple[int, int] | None:
        """Give no more steps.

        Returns:
            Epoch and step of the first step that was not given. None: the plan has no more steps, or a thread is
            taking one at this moment, and the steps have not been ended.
        """
        # Not `acquire(blocking=False)`: an interrupt may come between its success and the line that records it, and the
        # lock would stay held. A thread that takes a step after this line holds the lock for a moment only.
        if self._taking.locked():
            return None
        with self._taking:
            self._ended = self._next is not None
            return self._next

    def _until_ended(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        with closing(steps):
            while True:
                with self._taking:
                    step = None if self._ended else next(steps, None)
                    if step is None:
                        if not self._ended:  # the plan has no more steps
                            self._next = None
                        return
                    self._next = (step.epoch, step.number + 1)
                    if step.number + 1 == self._plan.num_steps(step.epoch):
                        self._next = (step.epoch + 1, 0)
                yield step
