"""The passes of one rank over the shards, one after the other.

A pass is a pure function of its number, the rank and the settings: to come back to a position in a pass, read the pass
again from its start.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import count, islice

from mmdata.errors import BadSample, DamagedShard, DataError, Reason
from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.workers.interrupt_safe import SharedGenerator
from mmdata.seeding import Purpose, permutation
from mmdata.storage.fetch import display_name
from mmdata.streaming.composer import Composer, Pass, StreamStep
from mmdata.streaming.position import PassPosition
from mmdata.streaming.samples import Dropped, StreamSample, read_shard
from mmdata.streaming.shard_names import assign_shards

logger = logging.getLogger("mmdata")


class Passes:
    """The steps of a rank from a position on.

    Args:
        shards: the shards of all ranks.
        composer: settings, rank and buckets.
        start: position before the first step. The pass is read from its start, and steps before `start` are skipped
            without decoding.
        endless: go on with pass after pass; else `steps` ends after one pass.

    Attributes:
        steps: an iterator, which threads may share. It also ends when all shards were read without a usable sample.
        ended: whether `steps` has ended.
        dropped: after `steps` has ended: the samples since the last step that could not be used.
        seen: number of samples read in the passes that are over.
    """

    def __init__(self, shards: list[str], composer: Composer, *, start: PassPosition, endless: bool) -> None:
        self.ended = False
        self.dropped: list[LedgerEntry] = []
        self.seen = 0
        self._shards = shards
        self._composer = composer
        self._start = start
        self._endless = endless
        self._stopped = False
        self.steps = SharedGenerator(self._make())

    def stop(self) -> None:
        """End `steps` at the next sample. Another thread may be waiting for a step."""
        self._stopped = True

    def close(self) -> None:
        """Close the open shard; if a thread is waiting for a step, that thread closes it."""
        self.steps.close()

    def _make(self) -> Generator[StreamStep]:
        barren = 0  # consecutive passes without a step
        for number in count(self._start.number):
            passing = Pass(self._composer, number, dropped=self.dropped)
            left_out = self._start.batches if number == self._start.number else 0
            barren += 1
            with closing(self._samples(number)) as samples:
                for step in passing.steps(samples):
                    barren = 0
                    if step.in_passes.batches > left_out:
                        yield step
            self.seen += passing.seen
            self.dropped = passing.dropped
            # A rank reads all shards in world_size passes, so without a step in all of them it never gets one.
            if not self._endless or barren == self._composer.world_size or self._stopped:
                break
        self.ended = True

    def _samples(self, number: int) -> Generator[StreamSample | Dropped]:
        """The samples of a pass, shard after shard."""
        data, rank, world_size = self._composer.data, self._composer.rank, self._composer.world_size
        # max_rows means the first rows, as with an index, so each pass then reads the same shards in the same order.
        # Else the ranks exchange shards after each pass, so that samples of small shards are not used more often.
        turn = number if data.max_rows is None else 0
        shards = assign_shards(self._shards, (rank + turn) % world_size, world_size)
        order = range(len(shards))
        if data.shuffle and data.max_rows is None:
            order = permutation(
                len(shards), seed=data.seed, epoch=number, purpose=Purpose.SHARD_ORDER, position=rank
            ).tolist()
        samples = (sample for i in order for sample in self._read(shards[i]))
        # The limits of all ranks add up to max_rows.
        limit = None if data.max_rows is None else (data.max_rows + world_size - 1 - rank) // world_size
        for sample in islice(samples, limit):
            if self._stopped:
                return
            yield sample

    def _read(self, shard: str) -> Iterator[StreamSample | Dropped]:
        """The samples of a shard; with `data.skip_damaged` a damaged shard ends with a loss, not with an error."""
        composer = self._composer
        needs_caption = composer.reads_captions
        try:
            yield from read_shard(shard, needs_caption=needs_caption, members=composer.members)
        except DataError as error:
            if not composer.data.skip_damaged:
                raise
            what = error.what if isinstance(error, DamagedShard) else str(error)
            logger.warning("%s; the stream goes on with the next shard", what)
            yield Dropped(display_name(shard), "", BadSample(Reason.DAMAGED_SHARD, what))
