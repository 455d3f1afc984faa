"""Deterministic batch plans.

A step depends only on the rows, the policy, the global batch size, the lanes, the seed and the epoch; nothing here
reads an image. Every row is in an epoch once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, BucketPolicy
from mmdata.plan.lanes import Window, cut_windows, deal
from mmdata.plan.rows import Rows, assign_buckets
from mmdata.plan.schedule import Schedule
from mmdata.seeding import Purpose, permutation

WINDOW_ROWS = 2**20

Ints = NDArray[np.int64]


class Step(NamedTuple):
    """One global batch, or a part of it.

    Attributes:
        number: from 0, within the epoch.
        bucket: the shape of the batch, on every rank.
        rows: int64 (n,); -1 where the batch is filled up, in the epoch's last batches only.
    """

    number: int
    bucket: Bucket
    rows: Ints


class Plan:
    """The epochs of a corpus as sequences of global batches of one bucket each.

    The shards are dealt to lanes. In each epoch a lane's shards, in a random order, are cut into windows; a window's
    rows are put in a random order and into buckets; what does not fill a batch is carried to the next window. A batch
    has the same number of rows from every lane. At the end of the epoch the carries are merged into buckets of
    longer text, and what does not fill a batch then is filled up with masked rows.

    Args:
        rows: of the corpus.
        policy: gives each row its bucket.
        global_batch_size: rows of a step, over all ranks.
        seed: of the order.
        shuffle: False keeps the order of the index within each bucket of a lane.
        window_rows: rows that are shuffled together, at least, over all lanes; whole shards. The last may have fewer.
        num_lanes: C; must divide the global batch size. 1 mixes all shards; at many nodes, as many as nodes keeps each
            node to its own shards.

    Raises:
        ValueError: the corpus is empty, or the lanes do not fit.

    Method: the schedule of buckets comes from counts, so a rank expands only the lanes that its slice of the batch lies
    in, and a step in mid-epoch needs only the windows whose rows still wait.
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
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.window_rows = window_rows
        self.num_lanes = num_lanes
        self._sizes: Ints = np.diff(rows.starts)
        self.num_rows = int(self._sizes.sum())
        if self.num_rows == 0:
            raise ValueError("the corpus has no rows: nothing to plan")
        if num_lanes < 1 or global_batch_size % num_lanes:
            raise ValueError(f"num_lanes must divide global_batch_size {global_batch_size}: got {num_lanes}")
        if num_lanes > len(self._sizes):
            raise ValueError(f"{num_lanes} lanes need as many shards: got {len(self._sizes)}; set num_lanes lower")
        self._part = global_batch_size // num_lanes
        self._lanes = deal(self._sizes, num_lanes, seed=seed)
        self._schedules: dict[int, tuple[list[list[Window]], Schedule]] = {}

    def __len__(self) -> int:
        """Steps of an epoch, the same for every epoch; from the rows of the shards alone."""
        longest = max(int(self._sizes[lane].sum()) for lane in self._lanes)
        return -(-longest // self._part)

    def identity(self) -> dict[str, str | int | bool]:
        """What the plan depends on, as JSON; two plans with the same identity have the same steps."""
        policy = f"{type(self.policy).__qualname__} {[tuple(bucket) for bucket in self.policy.buckets]}"
        return {
            "rows": self.rows.fingerprint,
            "policy": hashlib.sha256(policy.encode()).hexdigest()[:16],
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window_rows": self.window_rows,
            "num_lanes": self.num_lanes,
        }

    def steps(self, epoch: int, *, start: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        """The steps of an epoch, from step `start` on: a rank's slice of each, all of it by default.

        Raises:
            ValueError: world_size does not divide the global batch size, or there is no such rank.
        """
        mine = rank_slice(self.global_batch_size, rank, world_size)
        first, last = mine.start // self._part, -(-mine.stop // self._part)
        inside = slice(mine.start - first * self._part, mine.stop - first * self._part)
        windows, schedule = self._schedule(epoch)
        begin = schedule.round_of(start)
        lanes = [_Lane(self, epoch, windows[lane], schedule, lane).at(begin) for lane in range(first, last)]
        for round_ in range(begin, len(schedule.emitted)):
            number = int(schedule.first_step[round_])
            parts = [lane.round(round_) for lane in lanes]
            buckets = np.repeat(np.arange(len(self.policy.buckets)), schedule.due(round_))
            filled = 0
            if round_ == len(schedule.emitted) - 1:
                parts = [part + lane.merged() for part, lane in zip(parts, lanes, strict=True)]
                merged = [bucket for merge in schedule.merges for bucket in merge.batches]
                buckets = np.concatenate([buckets, np.asarray(merged, np.int64)])
                filled = schedule.merges[-1].filled
            shuffled = len(buckets) - filled  # batches that were filled up stay the last
            order = np.concatenate(
                [self.order(shuffled, epoch, Purpose.BATCH_ORDER, round_), np.arange(shuffled, len(buckets))]
            )
            for position in order[max(0, start - number) :].tolist():
                rows = np.concatenate([part[position] for part in parts])[inside]
                yield Step(max(start, number), self.policy.buckets[int(buckets[position])], rows)
                number = max(start, number) + 1

    def order(self, count: int, epoch: int, purpose: Purpose, position: int) -> Ints:
        """A random order of `count` things, or their own where the plan does not shuffle."""
        if not self.shuffle:
            return np.arange(count)
        return permutation(count, seed=self.seed, epoch=epoch, purpose=purpose, position=position)

    def _schedule(self, epoch: int) -> tuple[list[list[Window]], Schedule]:
        """The windows of each lane, and the schedule; kept for the epoch asked last."""
        if epoch not in self._schedules:
            windows = [self._windows(epoch, lane) for lane in range(self.num_lanes)]
            counts = self.rows.bucket_counts(self.policy, epoch)  # (num_shards, K)
            rounds = max(map(len, windows))
            arrivals = np.zeros((self.num_lanes, rounds, len(self.policy.buckets)), np.int64)
            for lane, row in zip(windows, arrivals, strict=True):
                for round_, window in enumerate(lane):
                    row[round_] = counts[window.shards].sum(axis=0)
            schedule = Schedule(np.cumsum(arrivals, axis=1), self.policy.buckets, self._part)
            self._schedules = {epoch: (windows, schedule)}
        return self._schedules[epoch]

    def _windows(self, epoch: int, lane: int) -> list[Window]:
        shards = self._lanes[lane]
        shards = shards[self.order(len(shards), epoch, Purpose.SHARD_ORDER, lane)]
        cuts = cut_windows(self._sizes[shards], -(-self.window_rows // self.num_lanes))
        return [Window(shards[cut], round_ * self.num_lanes + lane) for round_, cut in enumerate(cuts)]


class _Lane:
    """One lane's rows on their way through the buckets of an epoch."""

    def __init__(self, plan: Plan, epoch: int, windows: list[Window], schedule: Schedule, lane: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._windows = windows
        self._schedule = schedule
        self._lane = lane
        self._waiting = [np.empty(0, np.int64) for _ in plan.policy.buckets]

    def at(self, round_: int) -> _Lane:
        """The lane as it is when a round begins: rows that wait are found again in the windows that brought them."""
        schedule = self._schedule
        first = schedule.carried_from(self._lane, round_)
        for earlier in range(first, round_):
            self._arrive(earlier)
        if first < round_:
            arrived = schedule.arrived[self._lane, round_ - 1]
            left = arrived - schedule.emitted[round_ - 1] * schedule.part  # (K,) rows that wait: the newest
            self._waiting = [
                rows[len(rows) - count :] for rows, count in zip(self._waiting, left.tolist(), strict=True)
            ]
        return self

    def round(self, round_: int) -> list[Ints]:
        """This lane's part of the batches of a round, bucket by bucket: int64 (part,) each."""
        self._arrive(round_)
        batches: list[Ints] = []
        for bucket, count in enumerate(self._schedule.due(round_).tolist()):
            batches += self._take(bucket, count)
        return batches

    def merged(self) -> list[Ints]:
        """This lane's part of the batches that follow the last round; -1 where a batch is filled up."""
        part = self._schedule.part
        batches: list[Ints] = []
        for merge in self._schedule.merges:
            waiting = [self._waiting[bucket] for bucket in merge.group]
            line, taken = np.concatenate(waiting), len(merge.batches) * part
            full = min(len(line), taken) // part
            batches += list(line[: full * part].reshape(full, part))
            batches += [fill_up(line[begin : begin + part], part) for begin in range(full * part, taken, part)]
            begin = 0  # where a bucket's rows begin in the line
            rests: list[Ints] = []
            for bucket, rows in zip(merge.group, waiting, strict=True):
                rests.append(rows[max(0, taken - begin) :])
                begin += len(rows)
                self._waiting[bucket] = rows[:0]
            for target, rest in zip(merge.targets, rests, strict=False):  # the last group has no targets
                self._waiting[target] = np.concatenate([self._waiting[target], rest])
        return batches

    def _take(self, bucket: int, count: int) -> list[Ints]:
        rows = self._waiting[bucket]
        taken = count * self._schedule.part
        self._waiting[bucket] = rows[taken:]
        return list(rows[:taken].reshape(count, self._schedule.part))

    def _arrive(self, round_: int) -> None:
        """Put a window's rows, in a random order, into the buckets."""
        if round_ >= len(self._windows):
            return
        plan, window = self._plan, self._windows[round_]
        rows = rows_of(plan.rows.starts, window.shards)
        bucket_of = assign_buckets(plan.policy, plan.rows.shapes(rows, self._epoch), rows)
        order = plan.order(len(rows), self._epoch, Purpose.ROW_ORDER, window.position)
        bucket_of, rows = bucket_of[order], rows[order]
        order = np.argsort(bucket_of, kind="stable")
        ends = np.cumsum(np.bincount(bucket_of, minlength=len(self._waiting)))
        arrived = np.split(rows[order], ends[:-1])
        self._waiting = [np.concatenate(pair) for pair in zip(self._waiting, arrived, strict=True)]


def rows_of(starts: Ints, shards: Ints) -> Ints:
    """The rows of some shards, shard by shard."""
    pairs: Sequence[tuple[int, int]] = list(zip(starts[shards].tolist(), starts[shards + 1].tolist(), strict=True))
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*pair) for pair in pairs)])


def fill_up(rows: Ints, size: int) -> Ints:
    """`rows` with -1 strewn evenly among them, so that the slices of any number of ranks are about equally full.

    Example:
        fill_up([7, 8], 4) == [-1, 7, -1, 8]
    """
    filled = np.full(size, -1, np.int64)
    if len(rows):
        filled[(np.arange(1, len(rows) + 1) * size) // len(rows) - 1] = rows
    return filled


def rank_slice(global_batch_size: int, rank: int, world_size: int) -> slice:
    """The part of a global batch that a rank loads: contiguous, the same size on every rank.

    Raises:
        ValueError: world_size does not divide the global batch, or there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0 … {world_size - 1} (world_size {world_size}): got {rank}")
    if global_batch_size % world_size:
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of world_size {world_size}; "
            f"{global_batch_size // world_size * world_size or world_size} is"
        )
    size = global_batch_size // world_size
    return slice(rank * size, (rank + 1) * size)
