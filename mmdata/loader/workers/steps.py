"""The steps of one rank, from a position on and into the epochs that follow. They depend on the plan alone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from mmdata.launcher import Ranks
from mmdata.loader.batch_maker import BatchMaker
from mmdata.loader.shard_prefetch import ShardPrefetcher
from mmdata.plan import Plan, Step
from mmdata.plan.rows import selection_of


class RankSteps:
    """Gives the steps of one rank, and prefetches their remote shards.

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
        if maker.index.caches and (selection := selection_of(plan.rows)) is not None:
            own_fields = maker.fields is not None and maker.fields.are_own
            maker.store.keep_to(selection.of_shard, whole_samples=own_fields)
        self.current_epoch = 0

    def begin(self, epoch: int, start: int) -> Generator[Step, None, None]:
        """The steps from step `start` of an epoch on, and those of the next epochs, until an epoch has no steps."""
        # Set by the caller's thread: the generator below first runs in a worker thread, perhaps after `take`.
        self.current_epoch = epoch
        return self._from(epoch, start)

    def _from(self, epoch: int, start: int) -> Generator[Step, None, None]:
        index, store = self._maker.index, self._maker.store
        while True:
            steps = self._plan.steps(epoch, start=start, rank=self._ranks.rank, world_size=self._ranks.world_size)
            if not index.caches:  # all shards are on a local disk
                yield from steps
            else:
                # While the caller is still in the epoch before, the steps of this one come without prefetching.
                while self.current_epoch < epoch and (step := next(steps, None)):
                    yield step
                with closing(ShardPrefetcher(steps, index, store)) as prefetched:
                    yield from prefetched
            epoch, start = epoch + 1, 0
            if not self._plan.has_steps(epoch):
                return
