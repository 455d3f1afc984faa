"""Groups: rows that stand together in a batch, because they share a label or are neighbours in an embedding space.

What is planned is then not a row but a unit of several; a unit is never cut by a batch, nor by the part of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmdata.plan.buckets import Bucket

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Which rows stand together.

    Attributes:
        of_rows: int64 (rows of the corpus,), the group of each; below 0 for none.
        size: rows of one group that stand together, each row once an epoch; or, with `candidates`, 1.
        candidates: so many other rows of its group follow each row, drawn anew in each epoch: they are read besides.
        source: where `of_rows` comes from, with a hash of what is in it: equal for equal groups.
    """

    of_rows: Ints
    size: int
    candidates: int
    source: str

    @property
    def unit_rows(self) -> int:
        """Rows of a unit."""
        return self.size + self.candidates

    @property
    def fingerprint(self) -> str:
        """Equal for equal groups."""
        return f"{self.source} {self.size}+{self.candidates}"


def form_units(groups: Groups, labels: Ints, bucket_of: NDArray[np.integer], covers: Ints) -> tuple[Ints, Ints]:
    """Units of n rows, which are in a random order.

    Args:
        groups: what is asked for.
        labels: int64 (n,), group of each row; below 0 for none.
        bucket_of: int (n,), position of each row's bucket.
        covers: int64 (K, K), `cover_table` of the buckets.

    Returns:
        units int64 (u, unit_rows), positions among the n rows, -1 where a unit is filled up; and the bucket of each
        unit, int64 (u,), which covers those of its rows.
    """
    draw = _candidates if groups.candidates else _partition
    units = draw(labels, bucket_of, groups.candidates or groups.size)
    bucket = bucket_of[units[:, 0]].astype(np.int64)
    for column in units.T[1:]:
        bucket = np.where(column >= 0, covers[bucket, bucket_of[column]], bucket)
    return units, bucket


def cover_table(buckets: Sequence[Bucket]) -> Ints:
    """For each two buckets one that holds the texts of both, int64 (K, K).

    With the image shape of the first if it can be, and no longer than it must be. Of buckets that keep the images' own
    shape, one with the patches of both.
    """
    table = np.zeros((len(buckets), len(buckets)), np.int64)
    for i, first in enumerate(buckets):
        for j, second in enumerate(buckets):
            length, patches = max(first.length, second.length), max(first.patches, second.patches)

            def unfit(k: int, of: Bucket = first, length: int = length, patches: int = patches) -> tuple[object, ...]:
                bucket = buckets[k]
                small = (bucket.length < length, bucket.patches < patches)
                return (*small, bucket[1:3] != of[1:3], bucket.length, bucket.patches, k)

            table[i, j] = min(range(len(buckets)), key=unfit)
    return table


def _partition(labels: Ints, bucket_of: NDArray[np.integer], size: int) -> Ints:
    """Units of `size` rows of one label, as far as its rows go around; the rows that are left stand in mixed units."""
    order = np.argsort(labels, kind="stable")  # random order within a label
    place, count = _places(labels[order])
    whole = (place < count // size * size) & (labels[order] >= 0)
    inside, left = order[whole], order[~whole]
    # rows of a label whose buckets are equal stand together where they can
    inside = inside[np.lexsort((bucket_of[inside], labels[inside]))]
    left = np.sort(left)  # the random order again, in which labels do not stand together
    left = left[np.argsort(bucket_of[left], kind="stable")]
    filled = np.full(-(-len(left) // size) * size, -1, np.int64)
    filled[: len(left)] = left
    return np.concatenate([inside, filled]).reshape(-1, size)


def _candidates(labels: Ints, bucket_of: NDArray[np.integer], count: int) -> Ints:
    """Each row, followed by the next `count` of its label, which stands in a ring: like buckets together, at random."""
    order = np.lexsort((bucket_of, labels))
    place, members = _places(labels[order])
    begin = np.arange(len(order)) - place
    units = np.full((len(order), 1 + count), -1, np.int64)
    units[:, 0] = order
    for step in range(1, count + 1):
        there = (labels[order] >= 0) & (step < members)
        units[there, step] = order[(begin + (place + step) % members)[there]]
    return units


def _places(ordered: Ints) -> tuple[Ints, Ints]:
    """Of equal labels that stand together: the place of each among its like, and how many there are; int64 (n,)."""
    _, first, counts = np.unique(ordered, return_index=True, return_counts=True)
    return np.arange(len(ordered)) - np.repeat(first, counts), np.repeat(counts, counts)
