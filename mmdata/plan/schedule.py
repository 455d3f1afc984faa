"""The schedule of an epoch: which bucket each step has. From counts alone, so every rank knows it, whatever it reads.

A batch of a bucket is due as soon as every lane has its part of it. What is left at the end is merged into buckets of
longer text, and the last batches are filled up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket, merge_groups

Ints = NDArray[np.int64]


class Merge(NamedTuple):
    """What is done at the end of an epoch with the rows that are left of a group of buckets (`merge_groups`).

    They stand in line, those with the longest text first, and are cut into batches from that end: few long batches, and
    the part that fills none has the shortest text.

    Attributes:
        group: positions in the policy's buckets, the longest text first.
        batches: bucket of each batch.
        targets: where the rest of each bucket goes; empty in the last group.
        filled: batches, the last ones, that some lane must fill up with masked rows; 0 but in the last group.
    """

    group: list[int]
    batches: list[int]
    targets: list[int]
    filled: int


class Schedule:
    """How many batches of each bucket each round of windows brings.

    Args:
        arrived: int64 (C, R, K), rows that have reached each bucket of each lane by the end of each round.
        buckets: the K buckets.
        part: rows that a lane adds to a batch, global batch size / C.

    Attributes:
        emitted: int64 (R, K), batches of each bucket that are full by the end of each round.
        merges: what follows the last round.
        first_step: int64 (R + 1,), number of the first step of each round, and of the first merged one.
        num_steps: of the epoch.
    """

    def __init__(self, arrived: Ints, buckets: Sequence[Bucket], part: int) -> None:
        self.arrived = arrived
        self.part = part
        self.emitted: Ints = (arrived // part).min(axis=0)
        left = arrived[:, -1] - self.emitted[-1] * part  # (C, K)
        self.merges = _merges(left, buckets, part)
        self.first_step: Ints = np.concatenate([np.zeros(1, np.int64), self.emitted.sum(axis=1)])
        self.num_steps = int(self.first_step[-1]) + sum(len(merge.batches) for merge in self.merges)

    def due(self, round_: int) -> Ints:
        """Batches of each bucket that a round brings, int64 (K,), merged ones not counted."""
        return self.emitted[round_] - (self.emitted[round_ - 1] if round_ else 0)

    def round_of(self, step: int) -> int:
        """The round that brings a step; merged steps belong to the last."""
        return min(int(np.searchsorted(self.first_step[1:], step, side="right")), len(self.emitted) - 1)

    def carried_from(self, lane: int, round_: int) -> int:
        """The earliest round that has rows waiting in a lane when `round_` begins; `round_` itself if none has."""
        if round_ == 0:
            return 0
        taken = self.emitted[round_ - 1] * self.part  # (K,) rows that have left each bucket's queue
        waiting = self.arrived[lane, round_ - 1] > taken
        # the first round at whose end more rows had arrived than have left
        first = (self.arrived[lane, :round_] > taken).argmax(axis=0)  # (K,)
        return int(first[waiting].min()) if waiting.any() else round_


def _merges(left: Ints, buckets: Sequence[Bucket], part: int) -> list[Merge]:
    """The merges of what is `left` (C, K) of each lane and bucket."""
    left = left.copy()
    merges: list[Merge] = []
    for group, targets in merge_groups(buckets):
        standing = left[:, group]  # (C, k)
        reached = np.cumsum(standing, axis=1)  # rows in line up to each bucket, and with it
        full = int((reached[:, -1] // part).min())
        count = full if targets else int((-(-reached[:, -1] // part)).max())
        # A batch takes rows p … p + part - 1 of each line; the row p of some lane has the longest text.
        begins = np.arange(count) * part
        place = (reached[:, None, :] <= begins[None, :, None]).sum(axis=2)  # (C, count), k where a line is too short
        merges.append(Merge(group, [group[i] for i in place.min(axis=0)], targets, count - full))
        # Of each bucket, the rows behind the last batch.
        rest = np.clip(reached - count * part, 0, standing)
        left[:, group] = 0
        for target, rows in zip(targets, rest.T, strict=False):
            left[:, target] += rows
    return merges
