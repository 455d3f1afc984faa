"""Threads that make a loader's first batches while its side processes start, and hand over to them between two batches.

A batch follows from its position in the plan alone, so nobody can tell from the batches who made which.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import closing

from mmdata.errors import ConfigError, LoadError
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.work import LoadedBatch, Task
from mmdata.loader.workers.parent import WorkerProcesses
from mmdata.loader.workers.steps import RankSteps
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.plan import Plan

logger = logging.getLogger("mmdata")


class StartupHandover:
    """A source of batches: threads of this process at first, side processes as soon as all of them are ready.

    Whenever a batch is taken, it is looked whether they are. Then the threads take no new task: the side processes
    begin with the first that is not taken, at once, while the batches that the threads are at are taken one by one.
    After the last of them the threads and their memory go. Nothing waits, and no batch is made twice.

    A side process that is killed later is replaced by another, not by threads: a batch that kills the process it is
    made in would end the training loop as well.

    Args:
        beside: the side processes.
        new_threads: makes the threads, and the tasks they take.
        optional: where side processes cannot be started the threads stay, with a warning; otherwise it is an error.

    Example:
        Two threads, the processes are ready when batch 7 is asked for; batches 7 and 8 are made, 9 and 10 are being
        made. The processes begin with 11, the threads give 7 to 10, and end.
    """

    def __init__(
        self,
        beside: WorkerProcesses,
        new_threads: Callable[[], tuple[StoppableSteps, ThreadedBatches]],
        *,
        optional: bool,
    ) -> None:
        self._beside: WorkerProcesses | None = beside
        self._new_threads = new_threads
        self._optional = optional
        self._here: tuple[StoppableSteps, ThreadedBatches] | None = None
        self._until: tuple[int, int] | None = None  # epoch and step from which the side processes make the batches
        self._onward = False

    def begin(self, epoch: int, start: int, *, onward: bool) -> None:
        """Make the batches from step `start` of an epoch on; `onward`: also those of the epochs after it.

        Raises:
            ConfigError, DataError, LoadError: a side process cannot be started.
        """
        self.stop()
        self._onward = onward
        ready = self._look(epoch, start)
        if ready:
            ready.begin(epoch, start, onward=onward)
        else:
            self._here = self._new_threads()
            self._here[1].begin(epoch, start, onward=onward)

    def take(self, epoch: int, step: int) -> LoadedBatch:
        """The next batch, which is that of the given step.

        Raises:
            ConfigError, DataError, LoadError: see `BatchMaker.make` and `WorkerProcesses.take`.
        """
        if self._here:
            tasks, threads = self._here
            if not self._until and (ready := self._look(epoch, step)):
                self._until = tasks.end()
                if self._until:
                    ready.begin(*self._until, onward=self._onward)
            if self._until != (epoch, step):
                return threads.take(epoch, step)
            threads.stop()
            self._here = self._until = None
        assert self._beside
        return self._beside.take(epoch, step)

    def stop(self) -> None:
        """Make no more. A side process that is starting goes on with that, for whoever begins next."""
        if self._here:
            self._here[1].stop()
        self._here = self._until = None
        if self._beside:
            self._beside.stop()

    def _look(self, epoch: int, step: int) -> WorkerProcesses | None:
        """The side processes, if all are ready."""
        if not self._beside:
            return None
        try:
            return self._beside if self._beside.look(epoch, step) else None
        except (ConfigError, LoadError) as error:
            if not self._optional:
                raise
            logger.warning("%s. Threads of this process make all batches", str(error))
            self._beside = None
            return None


class StoppableSteps(RankSteps):
    """The tasks of one rank, until somebody else is to go on with them.

    Args:
        plan, worker, rank, world_size: see `RankSteps`.
    """

    def __init__(self, plan: Plan, worker: BatchMaker, *, rank: int, world_size: int) -> None:
        super().__init__(plan, worker, rank=rank, world_size=world_size)
        self._turn = threading.Lock()
        self._ended = False
        self._next: tuple[int, int] | None = None  # position of the next task

    def begin(self, epoch: int, start: int, *, onward: bool) -> Generator[Task, None, None]:
        """The tasks from step `start` of an epoch on, to its end; `onward`: also those of the epochs after it."""
        self._ended, self._next = False, (epoch, start)
        return self._until_ended(super().begin(epoch, start, onward=onward), onward)

    def end(self) -> tuple[int, int] | None:
        """Hand out no more tasks.

        Returns:
            Epoch and step of the first that was not handed out; None: there is none, or one is just being taken from
            the plan, and the tasks have not been ended.
        """
        if self._turn.locked():
            return None
        with self._turn:  # not tried: an interrupt may come between its success and the line that notes it
            self._ended = self._next is not None
            return self._next

    def _until_ended(self, tasks: Generator[Task, None, None], onward: bool) -> Generator[Task, None, None]:
        with closing(tasks):
            while True:
                with self._turn:
                    task = None if self._ended else next(tasks, None)
                    if task is None:
                        if not self._ended:
                            self._next = None
                        return
                    self._next = (task.epoch, task.step + 1)
                    if task.step + 1 == self._plan.num_steps(task.epoch):
                        self._next = (task.epoch + 1, 0) if onward else None
                yield task
