"""The passes of one rank over the shards, one after the other. A pass is a pure function of its number, the rank and
the settings, so any place in it is found again by reading it from its start."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import count, islice

from mmdata.loader.ledger import LedgerEntry
from mmdata.loader.workers.interrupt_safe import SharedGenerator
from mmdata.seeding import Purpose, permutation
from mmdata.streaming.composer import Composer, Pass, StreamStep
from mmdata.streaming.position import Place
from mmdata.streaming.samples import Dropped, StreamSample, read_shard
from mmdata.streaming.shard_names import deal


class Passes:
    """The steps of a rank from a place on.

    Args:
        shards: of all ranks.
        composer: makes steps; knows the settings and the rank.
        start: the first step comes after this place. The pass is read from its start, and what came before is left
            out without being decoded.
        endless: after a pass comes the next; else there is one.

    Attributes:
        steps: an iterator; it ends after the one pass, or where no pass has a sample that can be used.
        ended: it has ended.
        dropped: samples that could not be used and came after the last step, once it has ended.
        seen: samples that came.
    """

    def __init__(self, shards: list[str], composer: Composer, *, start: Place, endless: bool) -> None:
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
        """Read no further; also while another thread waits for a step."""
        self._stopped = True

    def close(self) -> None:
        """Close the shard that is open; where a thread waits for a step, it does so itself."""
        self.steps.close()

    def _make(self) -> Generator[StreamStep]:
        barren = 0  # passes in a row that had no step
        for number in count(self._start.number):
            passing = Pass(self._composer, number, dropped=self.dropped)
            left_out = self._start.batches if number == self._start.number else 0
            barren += 1
            with closing(self._samples(number)) as samples:
                for step in passing.steps(samples):
                    barren = 0
                    if step.place.batches > left_out:
                        yield step
            self.seen += passing.seen
            self.dropped = passing.dropped
            # So many passes of a rank read all shards.
            if not self._endless or barren == self._composer.world_size or self._stopped:
                break
        self.ended = True

    def _samples(self, number: int) -> Generator[StreamSample | Dropped]:
        """The samples of a pass: shard after shard, in an order of its own."""
        data, rank, world_size = self._composer.data, self._composer.rank, self._composer.world_size
        # With a limit it is always the first shards that count, as it is with an index.
        turn = number if data.max_rows is None else 0
        shards = deal(self._shards, (rank + turn) % world_size, world_size)
        order = range(len(shards))
        if data.shuffle and data.max_rows is None:
            order = permutation(
                len(shards), seed=data.seed, epoch=number, purpose=Purpose.SHARD_ORDER, position=rank
            ).tolist()
        samples = (sample for i in order for sample in read_shard(shards[i]))
        # The ranks' parts of a limit sum up to it.
        limit = None if data.max_rows is None else (data.max_rows + world_size - 1 - rank) // world_size
        for sample in islice(samples, limit):
            if self._stopped:  # nobody waits for the rest
                return
            yield sample
