"""The steps of one rank, from a position on and into the epochs that follow. They depend on the plan alone."""

from __future__ import annotations

from collections.abc import Generator

from mmdata.launcher import Ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.shard_prefetch import fetch_ahead
from mmdata.plan import Plan, Step


class RankSteps:
    """Gives the steps of one rank, and has their remote shards fetched ahead.

    Args:
        plan: of the global batches.
        maker: makes the batches; its store fetches shards behind URLs.
        ranks: which share of each global batch.

    Attributes:
        current_epoch: the epoch of the batches that the caller takes. No shard of a later epoch is fetched before a
            worker needs it, because the caller may never ask for that epoch.
    """

    def __init__(self, plan: Plan, maker: BatchMaker, ranks: Ranks) -> None:
        self._plan, self._maker, self._ranks = plan, maker, ranks
        self.current_epoch = 0

    def begin(self, epoch: int, start: int) -> Generator[Step, None, None]:
        """The steps from step `start` of an epoch on; they go on with the next epoch, until one has no steps."""
        self.current_epoch = epoch
        return self._from(epoch, start)

    def _from(self, epoch: int, start: int) -> Generator[Step, None, None]:
        while True:
            steps = self._plan.steps(epoch, start=start, rank=self._ranks.rank, world_size=self._ranks.world_size)
            while self.current_epoch < epoch and (step := next(steps, None)):
                yield step
            yield from fetch_ahead(steps, self._maker.index, self._maker.store)
            epoch, start = epoch + 1, 0
            if self._plan.num_steps(epoch) == 0:
                return
