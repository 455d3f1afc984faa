"""Deterministic batch plans.

A step depends only on the rows, the policy, the global batch size, the mixture, the lanes, the seed and the epoch;
nothing here reads an image. Every row is in an epoch once, or as often as the mixture says.

From rows to batches: `EpochWindows` assigns shards to lanes and cuts their rows into windows, `WindowRows` reads a
window, `LaneQueues` hold its rows by bucket, and the `Schedule`, made from counts alone, says which batches come next.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, BucketPolicy
from mmdata.plan.groups import mix_evenly
from mmdata.plan.mixture import Mixture, ShardSpan
from mmdata.plan.queues import LaneQueues, WindowRows
from mmdata.plan.rows import Rows, fingerprint_policy, passes_of, rows_of
from mmdata.plan.schedule import Leftover, Schedule, check_leftover
from mmdata.plan.windows import EpochWindows, KeyedPermutation, Window
from mmdata.seeding import Purpose

WINDOW_ROWS = 2**20
"""Rows that are shuffled together by default; as many occurrences take 8 MB."""

Ints = NDArray[np.int64]


class Step(NamedTuple):
    """One global batch, or a rank's part of it.

    Attributes:
        epoch: from 0.
        number: of the step in the epoch, from 0.
        bucket: the shape of the batch, on every rank.
        rows: int64 (n,); -1 for padding.
        passes: int64 (n,), how many passes over the row's dataset came before; decides the row's caption and crop. The
            epoch without a mixture; -1 for padding.
        mark: what the plan of a stream says of its position after the step, as JSON; None of other plans.
    """

    epoch: int
    number: int
    bucket: Bucket
    rows: Ints
    passes: Ints
    mark: dict[str, Any] | None = None


class Plan:
    """The epochs of a corpus as sequences of global batches of one bucket each.

    The shards are assigned to lanes. In each epoch a lane's shards, in a random order, are cut into windows; a window's
    rows are put in a random order and into the queues of their buckets; rows that do not fill a batch wait for the next
    window. A batch has the same number of rows from every lane. At the end of the epoch the rows that wait are merged
    into buckets of longer text, and the last batches are padded with masked rows.

    Args:
        rows: of the corpus. Rows that have a `selection` are planned as if the corpus had no others.
        policy: gives each row its bucket.
        global_batch_size: rows of a step, over all ranks, unless its bucket says otherwise.
        seed: of the order.
        shuffle: False keeps the order of the index within each bucket of a lane.
        window_rows: rows that are shuffled together, at least, over all lanes; whole shards. The last may have fewer.
        num_lanes: C; must divide the global batch size. 1 mixes all shards; at many nodes, as many as nodes keeps each
            node to its own shards.
        mixture: of several datasets, of groups, without duplicates; default: every row once.
        leftover: what becomes of the rows that fill no batch of their bucket: "merge", "pad" or "drop".

    Raises:
        ValueError: the corpus is empty, or lanes, mixture, groups and batch sizes do not fit each other.

    Method: the schedule of buckets comes from counts, so a rank reads only the lanes in which its slice of the batch
    lies, and a step in mid-epoch needs only the windows whose rows still wait.
    """

    def __init__(
        self,
        rows: Rows,
        policy: BucketPolicy,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        window_rows: int = WINDOW_ROWS,
        num_lanes: int = 1,
        mixture: Mixture | None = None,
        leftover: Leftover = "merge",
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.window_rows = window_rows
        self.num_lanes = num_lanes
        self.leftover: Leftover = check_leftover(leftover)
        self.mixture = mixture or Mixture((ShardSpan(0, len(rows.starts) - 1),))
        self.num_rows = int(rows.places[-1])
        if self.num_rows == 0:
            of = "the corpus" if rows.selection is None else f"the selection ({rows.selection.name})"
            raise ValueError(f"{of} has no rows: nothing to plan")
        if window_rows < 1:
            raise ValueError(f"window_rows must be 1 or more: got {window_rows}")
        if leftover != "merge" and len(self.mixture.shares) > 1:
            raise ValueError(
                f"leftover {leftover}: with weights the datasets share every batch, and rows are merged; give each "
                "dataset a repeat"
            )
        groups = self.mixture.groups
        if groups and len(groups.of_rows) < rows.starts[-1]:
            raise ValueError(
                f"groups: of_rows has {len(groups.of_rows)} entries for {rows.starts[-1]} rows; give one a row"
            )
        self.batch_sizes = [bucket.rows or global_batch_size for bucket in policy.buckets]
        if min(self.batch_sizes) < 1:
            raise ValueError(f"a batch has 1 row or more: got batch sizes {self.batch_sizes}")
        self._permutation = KeyedPermutation(seed, shuffle)
        self._window_reader = WindowRows(rows, policy, self.mixture, self._permutation)
        self._epoch_windows = EpochWindows(
            rows.places,
            self.mixture,
            batch_sizes=self.batch_sizes,
            num_lanes=num_lanes,
            window_rows=window_rows,
            permutation=self._permutation,
        )
        self._schedules: dict[int, tuple[list[list[Window]], Schedule]] = {}

    def __len__(self) -> int:
        """Steps of the first epoch. Others may have more or fewer only if `epochs_differ`."""
        return self.num_steps(0)

    @property
    def most_rows(self) -> int:
        """Rows that a batch can have, none of them masked or twice."""
        # With weights an epoch is one pass over the first dataset, which fills its part of each batch.
        spans, weights = self.mixture.shares[0], self.mixture.weights
        counts = [int(self.rows.places[one.last_shard] - self.rows.places[one.first_shard]) for one in spans]
        epoch = sum(count * one.repeat for count, one in zip(counts, spans, strict=True))
        return int(min(epoch * sum(weights) / weights[0], self.num_rows))

    @property
    def epochs_differ(self) -> bool:
        """Whether epochs may have different numbers of steps: batch sizes differ, rows stand in groups or in buckets
        that are not merged, or a repeat is no whole number."""
        return not self._steps_follow_from_shards or any(span.repeat % 1 for span in self.mixture.spans)

    def __repr__(self) -> str:
        return f"Plan({self.in_words(0)}, {len(self.policy.buckets)} batch shapes, seed {self.seed})"

    def in_words(self, epoch: int, world_size: int = 1) -> str:
        """Rows, steps and batch size of an epoch, for a repr: reads nothing, so it may not know the steps."""
        most = "up to " if self.leftover == "drop" else ""
        rows, batch_rows = f"{most}{self.num_rows:,} rows", self._batch_in_words(world_size)
        if not self._steps_follow_from_shards:
            return f"{rows} in batches of up to {batch_rows}"
        return f"{rows}, {self.num_steps(epoch):,} batches of {batch_rows}"

    def _batch_in_words(self, world_size: int) -> str:
        """Rows of a rank's batch, and the most boxes of a row."""
        boxes = max(bucket.boxes for bucket in self.policy.buckets)
        return f"{self.global_batch_size // world_size:,} rows" + (f" with up to {boxes} boxes" if boxes else "")

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        if not self._steps_follow_from_shards:
            return self._schedule(epoch)[1].num_steps
        return self._epoch_windows.num_steps(epoch)

    def has_steps(self, epoch: int) -> bool:
        """Whether an epoch has any step."""
        return self.num_steps(epoch) > 0

    def steps_of_buckets(self, epoch: int) -> list[int] | None:
        """How many steps of an epoch have each bucket, in the policy's order, from counts alone; None: not known."""
        return self._schedule(epoch)[1].steps_of_buckets()

    @property
    def _steps_follow_from_shards(self) -> bool:
        """Of one batch size, without groups and with merging; else it takes the bucket of every row."""
        return len(set(self.batch_sizes)) == 1 and not self.mixture.groups and self.leftover == "merge"

    def identity(self) -> dict[str, str | int | bool | None]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        selection = self.rows.selection
        return {
            "rows": self.rows.fingerprint,
            "selection": None if selection is None else selection.name,
            "policy": fingerprint_policy(self.policy, self.rows),
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window_rows": self.window_rows,
            "num_lanes": self.num_lanes,
            "mixture": self.mixture.fingerprint,
            **({} if self.leftover == "merge" else {"leftover": self.leftover}),
            **({} if self.rows.boxes_fingerprint is None else {"boxes": self.rows.boxes_fingerprint}),
        }

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """The steps of an epoch, from step `start` on: a rank's slice of each, all of it by default.

        Raises:
            ValueError: world_size does not divide a batch size, or there is no such rank or epoch.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more: got {epoch}")
        self.check_ranks(rank, world_size)
        windows, schedule = self._schedule(epoch)
        begin = schedule.round_of(start)
        # A global batch is laid out lane after lane, so this rank's slice of it lies in lanes first … last-1.
        first, last = rank * self.num_lanes // world_size, -(-(rank + 1) * self.num_lanes // world_size)
        lane_shares = range(first * len(self.mixture.shares), last * len(self.mixture.shares))
        queues = [LaneQueues(self._window_reader, epoch, windows[i], schedule, i) for i in lane_shares]
        for queue in queues:
            queue.seek(begin)
        round_ = begin - 1
        while (round_ := round_ + 1) < schedule.num_rounds:  # a stream learns on the way which round is the last
            schedule.reach(round_)
            buckets = schedule.buckets_of(round_)
            parts = [queue.next_round(round_) for queue in queues]  # [lane share][batch]
            order = self._batch_order(len(buckets), schedule.num_padded(round_), epoch, round_)
            number = max(start, int(schedule.first_step[round_]))
            for position in order[number - int(schedule.first_step[round_]) :].tolist():
                bucket = int(buckets[position])
                mine = rank_slice(self.batch_sizes[bucket], rank, world_size)
                skipped = first * self.batch_sizes[bucket] // self.num_lanes  # rows of the lanes before `first`
                batch = self._join_lanes([part[position] for part in parts])
                occurrences = batch[mine.start - skipped : mine.stop - skipped]
                yield Step(epoch, number, self.policy.buckets[bucket], rows_of(occurrences), passes_of(occurrences))
                number += 1

    def stop(self) -> None:
        """End what the steps wait for: nothing, where all is known beforehand."""

    def check_ranks(self, rank: int, world_size: int) -> None:
        """Raise ValueError where the ranks cannot share every batch equally, with whole groups."""
        rank_slice(world_size, rank, world_size)
        unit_rows, own_sizes = self.mixture.unit_rows, any(bucket.rows for bucket in self.policy.buckets)
        for size in sorted(set(self.batch_sizes)):
            if size % (unit_rows * world_size) and (own_sizes or unit_rows > 1):
                in_groups = f" in groups of {unit_rows}" if unit_rows > 1 else ""
                # With a token budget the batches are multiples of about a 32nd of the largest one.
                least = unit_rows * world_size
                wanted = f"{32 * least}, or that times a power of two" if own_sizes else f"a multiple of {least}"
                raise ValueError(
                    f"a batch of {size} rows{in_groups} cannot be shared by world_size {world_size}; set "
                    f"global_batch_size to {wanted}"
                )
            rank_slice(size, rank, world_size)

    def _batch_order(self, count: int, num_padded: int, epoch: int, round_: int) -> Ints:
        """The order of the batches of a round; the padded ones stay the last."""
        order = self._permutation(count - num_padded, epoch, Purpose.BATCH_ORDER, round_)
        return np.concatenate([order, np.arange(len(order), count)])

    def _join_lanes(self, parts: list[Ints]) -> Ints:
        """A global batch, lane after lane; in a lane the shares are mixed evenly, so that ranks get equal shares."""
        num_shares = len(self.mixture.shares)
        if num_shares == 1:
            return np.concatenate(parts)
        lanes: list[Ints] = []
        for lane in range(0, len(parts), num_shares):
            own = parts[lane : lane + num_shares]
            lanes.append(np.concatenate(own)[mix_evenly([np.ones(len(part)) for part in own])])
        return np.concatenate(lanes)

    def _schedule(self, epoch: int) -> tuple[list[list[Window]], Schedule]:
        """The windows of each lane share, and the schedule; the epoch asked for last is kept."""
        if epoch not in self._schedules:
            windows = self._epoch_windows.windows(epoch)
            schedule = Schedule(
                partial(self._window_reader.arrivals, windows, epoch),
                max(map(len, windows)),
                self.policy.buckets,
                self._epoch_windows.rows_per_batch,
                self.leftover,
            )
            self._schedules = {epoch: (windows, schedule)}
        return self._schedules[epoch]


def rank_slice(global_batch_size: int, rank: int, world_size: int) -> slice:
    """The part of a global batch that a rank loads: contiguous, the same size on every rank.

    Raises:
        ValueError: world_size does not divide the global batch, or there is no such rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more: got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0 … {world_size - 1} (world_size {world_size}): got {rank}")
    if global_batch_size % world_size:
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of world_size {world_size}; "
            f"{global_batch_size // world_size * world_size or world_size} is"
        )
    size = global_batch_size // world_size
    return slice(rank * size, (rank + 1) * size)
