"""What one rank has to make, step after step and epoch after epoch. It follows from the plan alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.shard_prefetch import fetch_ahead
from mmdata.loader.work import Task
from mmdata.plan import Plan


class RankSteps:
    """The tasks of one rank.

    Args:
        plan: of the global batches.
        worker: makes them; its store fetches shards that lie elsewhere.
        rank: 0 … world_size-1.
        world_size: processes that share each global batch.

    Attributes:
        asked: the epoch that the caller is in. Of later ones no shard is fetched before a worker needs it: nobody
            may ever ask for them.
    """

    def __init__(self, plan: Plan, worker: BatchMaker, *, rank: int, world_size: int) -> None:
        self._plan, self._worker = plan, worker
        self._rank, self._world_size = rank, world_size
        self.asked = 0

    def begin(self, epoch: int, start: int, *, onward: bool) -> Generator[Task, None, None]:
        """The tasks from step `start` of an epoch on, to its end; `onward`: also those of the epochs after it."""
        self.asked = epoch
        return self._from(epoch, start, onward)

    def _from(self, epoch: int, start: int, onward: bool) -> Generator[Task, None, None]:
        while True:
            tasks = self._of_epoch(epoch, start)
            while self.asked < epoch and (task := next(tasks, None)):
                yield task
            yield from fetch_ahead(tasks, self._worker.index, self._worker.store)
            epoch, start = epoch + 1, 0
            if not onward or self._plan.num_steps(epoch) == 0:
                return

    def _of_epoch(self, epoch: int, start: int) -> Iterator[Task]:
        for step in self._plan.steps(epoch, start=start, rank=self._rank, world_size=self._world_size):
            yield Task(epoch, step.number, step.bucket, step.rows, step.passes)
