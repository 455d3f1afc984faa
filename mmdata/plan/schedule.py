"""The schedule of an epoch: which bucket each step has. From counts alone, so every rank knows all of it.

Each lane share has a queue for each bucket. A round reads one window of each lane share, and then makes a batch of a
bucket as long as every lane share has its rows of it. Where the lane shares do not agree on a bucket, and at the end of
the epoch, batches are merged from the queues of several buckets, longest text first. Rows leave a queue in the order of
their arrival, so the rows that wait are always the last that arrived. `queues` holds the rows themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, merge_groups

Ints = NDArray[np.int64]

Leftover = Literal["merge", "pad", "drop"]
"""What becomes of rows that fill no batch of their own bucket at the end of an epoch. merge: they are merged into
buckets that hold them, and the last batches are padded. pad: the last batch of each bucket is padded. drop: they are
left out of the epoch. Only `merge` puts rows of several buckets into a batch."""

MERGE_AT_BATCHES = 8
"""Batches that wait in every lane share, on average over the buckets, before they are merged in mid-epoch."""


def check_leftover(leftover: Leftover) -> Leftover:
    """What becomes of rows that fill no batch; raises a ValueError if it is another word."""
    if leftover not in (known := get_args(Leftover)):
        raise ValueError(f"leftover must be one of {', '.join(known)}: got '{leftover}'")
    return leftover


class MergedBatch(NamedTuple):
    """A batch of rows from the queues of several buckets.

    Attributes:
        bucket: position of the batch's bucket.
        taken: int64 (L, K), what each lane share takes from each of its queues.
        is_padded: some lane share has too few rows, so the batch has padding; only the last batches of an epoch.
    """

    bucket: int
    taken: Ints
    is_padded: bool


class Schedule:
    """How many batches of each bucket each round of windows brings. Rounds are counted when they are first asked for.

    Args:
        arrivals: counts what some rounds bring to each bucket of each lane share: int64 (L, len(rounds), K).
        num_rounds: R, or more: whoever gives the arrivals may lower the attribute when the last round is reached.
        buckets: the K buckets.
        rows_per_batch: int64 (L, K), what each lane share adds to a batch of each bucket.
        leftover: what becomes of rows that fill no batch.

    Attributes (of the rounds that `reach` has reached):
        arrived: int64 (L, R, K), what has reached each bucket of each lane share by the end of each round.
        taken: int64 (L, R, K), what has left each queue by the end of each round.
        num_batches: int64 (R, K), batches of each bucket that each round brings, without the merged ones.
        merged: the merged batches of each round, by its number; they follow the others.
        first_step: int64 (R + 1,), number of the first step of each round, and of the epoch after.
    """

    def __init__(
        self,
        arrivals: Callable[[range], Ints],
        num_rounds: int,
        buckets: Sequence[Bucket],
        rows_per_batch: Ints,
        leftover: Leftover,
    ) -> None:
        self.num_rounds = num_rounds
        self.rows_per_batch = rows_per_batch
        num_lane_shares, num_buckets = rows_per_batch.shape
        self.arrived: Ints = np.zeros((num_lane_shares, num_rounds, num_buckets), np.int64)
        self.taken: Ints = np.zeros_like(self.arrived)
        self.num_batches: Ints = np.zeros((num_rounds, num_buckets), np.int64)
        self.merged: dict[int, list[MergedBatch]] = {}
        self.first_step: Ints = np.zeros(num_rounds + 1, np.int64)
        self._arrivals = arrivals
        # Threads may reach the same round at once, and a process may be forked meanwhile: both write the same numbers,
        # and a round counts as reached after all of its own are written.
        self._counted = 0  # rounds whose arrivals are counted
        self._reached = 0
        self._leftover = leftover
        # Without merging, each bucket is a group that hands nothing on.
        self._groups = merge_groups(buckets) if leftover == "merge" else [([k], []) for k in range(num_buckets)]

    def reach(self, round_: int) -> None:
        """Know all rounds up to this one."""
        while (following := self._reached) <= round_:
            if following >= self._counted:
                rounds = range(following, round_ + 1)
                arrived = np.cumsum(self._arrivals(rounds), axis=1)
                before = self.arrived[:, following - 1 : following] if following else 0
                self.arrived[:, rounds.start : rounds.stop] = arrived + before
                self._counted = rounds.stop
            self._schedule(following)

    def _schedule(self, round_: int) -> None:
        """Make batches of what waits in one round."""
        taken = self.taken[:, round_ - 1] if round_ else np.zeros_like(self.rows_per_batch)  # (L, K) before the round
        waiting = self.arrived[:, round_] - taken
        num_batches = (waiting // self.rows_per_batch).min(axis=0)  # the lane share with the fewest decides
        waiting -= num_batches * self.rows_per_batch
        # Shares with texts of other lengths may never agree on a bucket. Merging what waits keeps the queues, and
        # with them the cost of a resume, bounded.
        crowded = (waiting / self.rows_per_batch).sum(axis=1).min() >= MERGE_AT_BATCHES * len(num_batches)
        is_last = round_ == self.num_rounds - 1
        merges = (is_last and self._leftover != "drop") or (crowded and self._leftover == "merge")
        merged = _merge(waiting, self._groups, self.rows_per_batch, pad=is_last) if merges else []
        for batch in merged:
            waiting -= batch.taken
        self.num_batches[round_] = num_batches
        self.merged[round_] = merged
        self.taken[:, round_] = self.arrived[:, round_] - waiting
        self.first_step[round_ + 1] = self.first_step[round_] + int(num_batches.sum()) + len(merged)
        self._reached = round_ + 1

    @property
    def num_steps(self) -> int:
        """Of the epoch."""
        self.reach(self.num_rounds - 1)
        return int(self.first_step[-1])

    def round_of(self, step: int) -> int:
        """The round that brings a step; the last one for a step after the epoch."""
        round_ = int(np.searchsorted(self.first_step[1 : self._reached + 1], step, side="right"))
        while round_ < self.num_rounds:
            self.reach(round_)
            if self.first_step[round_ + 1] > step:
                return round_
            round_ += 1
        return self.num_rounds - 1

    def buckets_of(self, round_: int) -> Ints:
        """The bucket of each batch of a round: those of one bucket, then the merged ones."""
        plain = np.repeat(np.arange(self.num_batches.shape[1]), self.num_batches[round_])
        return np.concatenate([plain, np.array([batch.bucket for batch in self.merged[round_]], np.int64)])

    def steps_of_buckets(self) -> list[int]:
        """How many steps of the epoch each bucket has."""
        self.reach(self.num_rounds - 1)
        counts = self.num_batches.sum(axis=0)
        for batch in itertools.chain.from_iterable(self.merged.values()):
            counts[batch.bucket] += 1
        return counts.tolist()

    def num_padded(self, round_: int) -> int:
        """How many batches of a round have padding: its last ones."""
        return sum(batch.is_padded for batch in self.merged[round_])

    def carried_from(self, lane_share: int, round_: int) -> int:
        """The earliest round whose rows still wait in a lane share when `round_` begins; `round_` itself if none do."""
        if round_ == 0:
            return 0
        taken = self.taken[lane_share, round_ - 1]  # (K,)
        waiting = self.arrived[lane_share, round_ - 1] > taken
        # The queues are first in, first out: the oldest row that waits came in the first round at whose end more rows
        # had arrived than have left by now.
        first = (self.arrived[lane_share, :round_] > taken).argmax(axis=0)  # (K,)
        return int(first[waiting].min()) if waiting.any() else round_


def _merge(
    waiting: Ints, groups: list[tuple[list[int], list[int]]], rows_per_batch: Ints, *, pad: bool
) -> list[MergedBatch]:
    """Make batches of what is `waiting` (L, K), group by group (`merge_groups`).

    The rows that a group leaves over line up behind those of its target buckets in a later group. Without `pad`, rows
    that make no full batch of every lane share in the last group go on waiting.
    """
    queues = {bucket: [bucket] for bucket in range(waiting.shape[1])}  # the queues that line up at each bucket
    waiting = waiting.copy()
    batches: list[MergedBatch] = []
    for group, targets in groups:
        line = [(bucket, queue) for bucket in group for queue in queues[bucket]]
        batches += _cut(line, waiting, rows_per_batch, pad=False)
        if not targets and pad:
            batches += _cut(line, waiting, rows_per_batch, pad=True)
        if targets != group:
            for bucket, target in zip(group, targets, strict=False):  # the last group has no targets
                queues[target] += queues.pop(bucket)
    return batches


def _cut(line: list[tuple[int, int]], waiting: Ints, rows_per_batch: Ints, *, pad: bool) -> list[MergedBatch]:
    """Cut batches from the front of a line; what they take is subtracted from `waiting`.

    Args:
        line: (bucket, queue) pairs, longest text first. A batch whose first row is in `queue` has the pair's bucket,
            which holds all rows behind it too.
        waiting: int64 (L, K), changed.
        rows_per_batch: int64 (L, K).
        pad: also make batches that some lane share cannot fill.
    """
    queues = [queue for _, queue in line]
    reached = np.cumsum(waiting[:, queues], axis=1)  # (L, Q) rows in line up to and with each queue
    total = reached[:, -1]
    begin = np.zeros(len(waiting), np.int64)  # (L,) rows in line that are in batches
    batches: list[MergedBatch] = []
    while (begin < total).any():
        # the lane share that has got least far down the line has the longest text
        bucket = line[int((reached <= begin[:, None]).sum(axis=1).min())][0]
        end = begin + rows_per_batch[:, bucket]
        is_padded = bool((end > total).any())
        if is_padded and not pad:
            break
        taken = np.zeros_like(waiting)
        # how much of begin … end lies in each queue, from where each queue ends, clipped to that stretch
        up_to = np.clip(reached, begin[:, None], np.minimum(end, total)[:, None])
        taken[:, queues] = np.diff(up_to, axis=1, prepend=begin[:, None])
        batches.append(MergedBatch(bucket, taken, is_padded))
        waiting -= taken
        begin = np.minimum(end, total)
    return batches
