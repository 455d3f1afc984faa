"""The supply of an epoch: which rows each feed gets, in which windows. From the sizes of the shards alone.

A feed is a stream in a lane. Feeds are numbered lane by lane: stream s of lane l is feed l · streams + s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.row_ranges import RepeatedShards, Window, assign_to_lanes, cut_windows, interleave
from mmdata.seeding import Purpose, permutation

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class KeyedPermutation:
    """Random orders of things, or their own order where nothing is shuffled."""

    seed: int
    shuffle: bool

    def __call__(self, count: int, epoch: int, purpose: Purpose, position: int) -> Ints:
        """An order of `count` things."""
        if not self.shuffle:
            return np.arange(count)
        return permutation(count, seed=self.seed, epoch=epoch, purpose=purpose, position=position)


class EpochWindows:
    """Rows for the feeds.

    Args:
        starts: first row of each shard, and the number of rows: int64 (num_shards + 1,).
        mixture: of the corpus.
        batch_sizes: of each of the K buckets, in rows.
        num_lanes: C.
        window_rows: rows that are shuffled together, at least, over all feeds.
        order: of the shards.

    Attributes:
        parts: int64 (F, K), units that each feed adds to a batch of each bucket.

    Raises:
        ValueError: these do not fit each other.
    """

    def __init__(
        self,
        starts: Ints,
        mixture: Mixture,
        *,
        batch_sizes: list[int],
        num_lanes: int,
        window_rows: int,
        order: KeyedPermutation,
    ) -> None:
        self._mixture = mixture
        self._num_lanes = num_lanes
        self._window_rows = window_rows
        self._order = order
        self._cycles: list[list[RepeatedShards]] = [[] for _ in range(num_lanes * len(mixture.streams))]  # by feed
        _check(mixture, batch_sizes, num_lanes)
        number = 0  # of the dataset
        for place, stream in enumerate(mixture.streams):
            for source in stream.sources:
                for lane, cycle in enumerate(self._deal(source, number, starts)):
                    if cycle.num_rows == 0 and place > 0:
                        raise ValueError(
                            f"lane {lane} of the dataset of shards {source.first_shard} to {source.last_shard - 1} has "
                            "no rows to cycle; set num_lanes lower"
                        )
                    self._cycles[lane * len(mixture.streams) + place].append(cycle)
                number += 1
        weights = np.array([stream.weight for stream in mixture.streams] * num_lanes)[:, None]
        if all(rate < 1 for feed in self._firsts for rate in self._rates(feed)):
            raise ValueError("repeat: so few rows are taken that an epoch may have none; set repeat higher")
        rows = np.array(batch_sizes)[None, :] * weights // (mixture.total_weight * num_lanes)
        self.parts: Ints = rows // mixture.unit_rows

    def steps(self, epoch: int) -> int:
        """Steps of an epoch, if all batches have one size and no rows stand in groups."""
        return max(
            -(-sum(end - begin for begin, end in self._once(feed, epoch)) // self._part(feed)) for feed in self._firsts
        )

    def windows(self, epoch: int) -> list[list[Window]]:
        """The windows of each feed in an epoch."""
        streams, num_feeds = self._mixture.streams, len(self._cycles)
        # a cycled dataset goes on where the epochs before have left it
        done, steps = (sum(map(self.steps, range(epoch))), self.steps(epoch)) if len(streams) > 1 else (0, 0)
        result: list[list[Window]] = []
        for feed, cycles in enumerate(self._cycles):
            part = self._part(feed)
            spans = self._once(feed, epoch) if feed in self._firsts else [(done * part, (done + steps) * part)]
            pieces = interleave([cycle.pieces(*span) for cycle, span in zip(cycles, spans, strict=True)])
            weight = streams[feed % len(streams)].weight
            least = -(-self._window_rows * weight // (self._mixture.total_weight * self._num_lanes))
            cuts = cut_windows(pieces.ends - pieces.begins, least)
            result.append([Window(pieces.take(cut), i * num_feeds + feed) for i, cut in enumerate(cuts)])
        return result

    def _once(self, feed: int, epoch: int) -> list[tuple[int, int]]:
        """Of each dataset of the first stream, which rows of its endless sequence of passes an epoch takes."""
        return [(math.floor(epoch * rate), math.floor((epoch + 1) * rate)) for rate in self._rates(feed)]

    def _rates(self, feed: int) -> list[Fraction]:
        """Rows that each dataset of the first stream gives an epoch; 0.29 of 100 rows are 29, and no float is."""
        cycles = zip(self._mixture.streams[0].sources, self._cycles[feed], strict=True)
        return [Fraction(str(source.repeat)) * cycle.num_rows for source, cycle in cycles]

    @property
    def _firsts(self) -> range:
        """The first stream's feed of each lane."""
        return range(0, len(self._cycles), len(self._mixture.streams))

    def _part(self, feed: int) -> int:
        """Units that a feed adds to a batch, where all batches have one size."""
        return int(self.parts[feed, 0])

    def _deal(self, source: ShardSpan, number: int, starts: Ints) -> list[RepeatedShards]:
        """The lanes' shares of a dataset."""
        num_shards = source.last_shard - source.first_shard
        if self._num_lanes > num_shards:
            raise ValueError(f"{self._num_lanes} lanes need as many shards: got {num_shards}; set num_lanes lower")
        sizes = np.diff(starts[source.first_shard : source.last_shard + 1])
        if not sizes.any():
            raise ValueError(
                f"the dataset of shards {source.first_shard} to {source.last_shard - 1} has no rows; leave it out"
            )
        lanes = assign_to_lanes(sizes, self._num_lanes, seed=self._order.seed, position=number)
        cycles: list[RepeatedShards] = []
        for lane, shards in enumerate(lanes):
            order = partial(self._shard_order, position=number * self._num_lanes + lane)
            cycles.append(RepeatedShards(source.first_shard + shards, starts, order))
        return cycles

    def _shard_order(self, count: int, number: int, *, position: int) -> Ints:
        return self._order(count, number, Purpose.SHARD_ORDER, position)


def _check(mixture: Mixture, batch_sizes: list[int], num_lanes: int) -> None:
    """Raise ValueError where batches cannot be shared out to lanes, streams and units as they are asked for."""
    if mixture.groups and mixture.unique:
        raise ValueError("unique: rows of a group must stay together and cannot be kept apart; set unique or groups")
    if mixture.unique and num_lanes > 1:
        raise ValueError(f"unique: a rank sees only the rows of its own of the {num_lanes} lanes; set num_lanes to 1")
    if len(mixture.streams) > 1 and (mixture.groups or len(set(batch_sizes)) > 1):
        raise ValueError(
            "weights: a fixed share of every batch needs batches of one size without groups; mix by repeat instead"
        )
    for size in sorted(set(batch_sizes)):
        if num_lanes < 1 or size % num_lanes:
            raise ValueError(f"num_lanes must divide every batch size: got {num_lanes}, and batches of {size} rows")
        if size // num_lanes % mixture.unit_rows:
            raise ValueError(
                f"groups of {mixture.unit_rows} rows do not fill a batch of {size} rows with num_lanes {num_lanes}: "
                "set global_batch_size (batch_multiple, with token_budget) to a multiple of "
                f"{mixture.unit_rows * num_lanes}"
            )
        weights = [stream.weight for stream in mixture.streams]
        if any(size * weight % (mixture.total_weight * num_lanes) for weight in weights):
            multiple = mixture.total_weight // math.gcd(*weights) * num_lanes
            raise ValueError(
                f"weights {' : '.join(map(str, weights))} do not share a batch of {size} rows with num_lanes "
                f"{num_lanes} exactly: set global_batch_size to a multiple of {multiple}"
            )
