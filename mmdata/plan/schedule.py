"""The schedule of an epoch: which bucket each step has. From counts alone, so every rank knows it, whatever it reads.

Each feed keeps a queue for each bucket. A batch of a bucket is due as soon as every feed has its part of it. Where the
feeds do not agree on a bucket, and at the end of the epoch, batches are made of the queues of several buckets, longest
text first. Rows leave a queue in the order in which they came, so what waits is always what came last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, merge_groups

Ints = NDArray[np.int64]

CROWDED = 8
"""Batches for each bucket, on average, that every feed has waiting before they are made of several buckets."""


class Merged(NamedTuple):
    """A batch of rows from the queues of several buckets.

    Attributes:
        bucket: position of its bucket.
        taken: int64 (F, K), how many each feed takes from each of its queues.
        filled: whether some feed has too few, so that the batch is filled up; only the last batches of an epoch are.
    """

    bucket: int
    taken: Ints
    filled: bool


class Schedule:
    """How many batches of each bucket each round of windows brings.

    Args:
        arrived: int64 (F, R, K), what has reached each bucket of each feed by the end of each round.
        buckets: the K buckets.
        parts: int64 (F, K), what each feed adds to a batch of each bucket.

    Attributes:
        arrived, parts: as given.
        taken: int64 (F, R, K), what has left each queue by the end of each round.
        due: int64 (R, K), batches of each bucket that each round brings, merged ones not counted.
        merged: of each round, which follow.
        first_step: int64 (R + 1,), number of the first step of each round, and of the epoch after.
        num_steps: of the epoch.
    """

    def __init__(self, arrived: Ints, buckets: Sequence[Bucket], parts: Ints) -> None:
        self.arrived = arrived
        self.parts = parts
        self.taken: Ints = np.zeros_like(arrived)
        self.due: Ints = np.zeros(arrived.shape[1:], np.int64)
        self.merged: list[list[Merged]] = []
        groups = merge_groups(buckets)
        taken = np.zeros_like(parts)
        last = arrived.shape[1] - 1
        for round_ in range(last + 1):
            waiting = arrived[:, round_] - taken
            self.due[round_] = (waiting // parts).min(axis=0)
            waiting -= self.due[round_] * parts
            crowded = (waiting / parts).sum(axis=1).min() >= CROWDED * len(buckets)
            self.merged.append(_merge(waiting, groups, parts, fill=round_ == last) if crowded or round_ == last else [])
            for batch in self.merged[-1]:
                waiting -= batch.taken
            taken = arrived[:, round_] - waiting
            self.taken[:, round_] = taken
        steps = self.due.sum(axis=1) + [len(batches) for batches in self.merged]
        self.first_step: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
        self.num_steps = int(self.first_step[-1])

    def round_of(self, step: int) -> int:
        """The round that brings a step."""
        return min(int(np.searchsorted(self.first_step[1:], step, side="right")), len(self.merged) - 1)

    def buckets_of(self, round_: int) -> Ints:
        """The bucket of each batch of a round: those that were due, then the merged ones."""
        due = np.repeat(np.arange(self.due.shape[1]), self.due[round_])
        return np.concatenate([due, np.array([batch.bucket for batch in self.merged[round_]], np.int64)])

    def filled(self, round_: int) -> int:
        """How many of its batches, the last ones, are filled up."""
        return sum(batch.filled for batch in self.merged[round_])

    def carried_from(self, feed: int, round_: int) -> int:
        """The earliest round that has rows waiting in a feed when `round_` begins; `round_` itself if none has."""
        if round_ == 0:
            return 0
        taken = self.taken[feed, round_ - 1]  # (K,)
        waiting = self.arrived[feed, round_ - 1] > taken
        # the first round at whose end more rows had arrived than have left
        first = (self.arrived[feed, :round_] > taken).argmax(axis=0)  # (K,)
        return int(first[waiting].min()) if waiting.any() else round_


def _merge(waiting: Ints, groups: list[tuple[list[int], list[int]]], parts: Ints, *, fill: bool) -> list[Merged]:
    """Batches of what is `waiting` (F, K), group by group (`merge_groups`).

    What a group leaves over stands behind the rows of its targets in a later group. Without `fill` what makes no full
    batch of every feed at last goes on waiting.
    """
    queues = {bucket: [bucket] for bucket in range(waiting.shape[1])}  # whose rows stand at each bucket
    waiting = waiting.copy()
    batches: list[Merged] = []
    for group, targets in groups:
        batches += _cut([(bucket, queue) for bucket in group for queue in queues[bucket]], waiting, parts, fill=False)
        if not targets and fill:
            rest = [(bucket, queue) for bucket in group for queue in queues[bucket]]
            batches += _cut(rest, waiting, parts, fill=True)
        if targets != group:
            for bucket, target in zip(group, targets, strict=False):  # the last group has no targets
                queues[target] += queues.pop(bucket)
    return batches


def _cut(line: list[tuple[int, int]], waiting: Ints, parts: Ints, *, fill: bool) -> list[Merged]:
    """Cut batches from the front of a line; what they take is taken off `waiting`.

    Args:
        line: (bucket, queue) pairs, longest text first: the batch whose first row stands in `queue` has that bucket.
        waiting: int64 (F, K), changed.
        parts: int64 (F, K).
        fill: also make batches that some feed cannot fill.
    """
    queues = [queue for _, queue in line]
    reached = np.cumsum(waiting[:, queues], axis=1)  # (F, Q) rows in line up to each queue, and with it
    total = reached[:, -1]
    begin = np.zeros(len(waiting), np.int64)
    batches: list[Merged] = []
    while (begin < total).any():
        bucket = line[int((reached <= begin[:, None]).sum(axis=1).min())][0]
        end = begin + parts[:, bucket]
        short = bool((end > total).any())
        if short and not fill:
            break
        taken = np.zeros_like(waiting)
        up_to = np.clip(reached, begin[:, None], np.minimum(end, total)[:, None])
        taken[:, queues] = np.diff(up_to, axis=1, prepend=begin[:, None])
        batches.append(Merged(bucket, taken, short))
        waiting -= taken
        begin = np.minimum(end, total)
    return batches
