"""Rows that stand together in a batch, because they share a label or are neighbours in an embedding space.

A plan then moves units of several rows in place of single rows. A unit is never divided between batches or ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmdata.config.batches import GroupsConfig
from mmdata.errors import ConfigError, counted
from mmdata.files import write_whole
from mmdata.index import Index
from mmdata.plan.buckets import Bucket
from mmdata.plan.rows import npy_of_rows

Ints = NDArray[np.int64]

OF = "data.groups.source"


@dataclass(frozen=True)
class Groups:
    """Which rows stand together.

    Attributes:
        of_rows: int64 (rows of the corpus,), the group of each row; below 0 for none.
        size: rows of one group that stand together, each row once an epoch; 1 with `candidates`.
        candidates: number of other rows of its group that follow each row, drawn anew in each epoch; they occur in
            addition to the epoch's own rows.
        source: names where `of_rows` comes from, with a hash of its content; equal for equal groups.
        share: of the rows of a batch that stand in groups, about; the others stand alone. Which groups stand together
            is drawn anew in each epoch. Only with `size`.
    """

    of_rows: Ints
    size: int
    candidates: int
    source: str
    share: float = 1.0

    @property
    def unit_rows(self) -> int:
        """Rows of a unit."""
        return self.size + self.candidates

    @property
    def fingerprint(self) -> str:
        """Equal for equal groups."""
        share = "" if self.share == 1 else f" share {self.share!r}"
        return f"{self.source} {self.size}+{self.candidates}{share}"


def form_units(groups: Groups, labels: Ints, bucket_of: NDArray[np.integer], covers: Ints) -> tuple[Ints, Ints]:
    """Form units of n rows, which are in a random order.

    Args:
        groups: size and candidates.
        labels: int64 (n,), group of each row; below 0 for none.
        bucket_of: int (n,), position of each row's bucket.
        covers: int64 (K, K), `cover_table` of the buckets.

    Returns:
        units int64 (u, unit_rows), positions among the n rows, -1 for padding; and the bucket of each unit, int64 (u,),
        which holds all its rows.
    """
    draw = _candidates if groups.candidates else _partition
    units = draw(labels, bucket_of, groups.candidates or groups.size)
    bucket = bucket_of[units[:, 0]].astype(np.int64)
    for column in units.T[1:]:
        bucket = np.where(column >= 0, covers[bucket, bucket_of[column]], bucket)
    return units, bucket


def draw_groups(labels: Ints, size: int, share: float, order: Callable[[int], Ints]) -> Ints:
    """Choose the groups of a window that stand together; the rows of all others stand alone.

    Args:
        labels: int64 (n,), group of each row; below 0 for none.
        size: rows of one group that stand together.
        share: of the n rows that stand in groups, as far as the groups suffice.
        order: gives a random order of so many things.

    Returns:
        int64 (n,), -1 for rows that stand alone.
    """
    names, counts = np.unique(labels, return_counts=True)
    together = np.where(names < 0, 0, counts // size * size)
    drawn = order(len(names))
    before = np.cumsum(together[drawn]) - together[drawn]
    is_chosen = np.zeros(len(names), np.bool_)
    is_chosen[drawn[before < share * len(labels)]] = True
    return np.where(is_chosen[np.searchsorted(names, labels)], labels, -1)


def spread_groups(units: Ints, labels: Ints, bucket: Ints) -> Ints:
    """An order of u units in which those of one group and all others alternate evenly, bucket by bucket.

    Args:
        units: int64 (u, size), positions among n rows, -1 for padding; in a random order, which each kind keeps.
        labels: int64 (n,), group of each row; below 0 for none.
        bucket: int64 (u,), of each unit.

    Returns:
        int64 (u,), positions of the units.
    """
    of_rows = np.where(units < 0, -1, labels[units])
    is_group = (of_rows[:, 0] >= 0) & (of_rows == of_rows[:, :1]).all(axis=1)
    kinds = 2 * bucket + is_group
    runs = [np.ones(count) for count in np.unique(kinds, return_counts=True)[1].tolist()]
    return np.argsort(kinds, kind="stable")[mix_evenly(runs)]


def mix_evenly(runs: Sequence[NDArray[np.number]]) -> Ints:
    """An order in which several runs of things, one after the other, are mixed evenly; each run keeps its order.

    Args:
        runs: the size of each thing of each run.

    Returns:
        int64 (things of all runs,), positions in the runs as they lie one after the other.

    Example:
        Runs of two and of four equal things, mix_evenly([np.ones(2), np.ones(4)]): [2, 0, 3, 4, 1, 5].
    """
    # A thing goes where its middle lies in its own run, as a share of the run's size: 0 begin, 1 end.
    middles = [(np.cumsum(sizes) - sizes / 2) / max(sizes.sum(), 1) for sizes in runs]
    return np.argsort(np.concatenate([np.empty(0), *middles]), kind="stable")


def cover_table(buckets: Sequence[Bucket]) -> Ints:
    """For each pair of buckets a bucket that holds the texts, the boxes (and the patches) of both, int64 (K, K).

    It has the image shape of the first bucket where there is one, and the shortest text.
    """
    table = np.zeros((len(buckets), len(buckets)), np.int64)
    for i, first in enumerate(buckets):
        for j, second in enumerate(buckets):
            # In order of importance: texts, patches and boxes fit, the first bucket's image shape, least padding.
            def unfit(k: int, of: Bucket = first, other: Bucket = second) -> tuple[object, ...]:
                bucket = buckets[k]
                fits = [
                    bucket.length >= max(of.length, other.length),
                    bucket.patches >= max(of.patches, other.patches),
                    bucket.boxes >= max(of.boxes, other.boxes),
                ]
                least = (bucket.length, bucket.patches, bucket.boxes, k)
                return (*(not one for one in fits), bucket[1:3] != of[1:3], *least)

            table[i, j] = min(range(len(buckets)), key=unfit)
    return table


def _partition(labels: Ints, bucket_of: NDArray[np.integer], size: int) -> Ints:
    """Units of `size` rows of one label, as far as its rows suffice; the other rows form mixed units."""
    order = np.argsort(labels, kind="stable")  # by label, in the random order within each
    position, count = _positions(labels[order])
    in_full_unit = (position < count // size * size) & (labels[order] >= 0)
    full, rest = order[in_full_unit], order[~in_full_unit]
    # A unit takes the bucket that holds all its rows, so rows of one bucket stand together: by label, then by bucket.
    full = full[np.lexsort((bucket_of[full], labels[full]))]
    rest = np.sort(rest)  # back to the random order, which mixes labels
    rest = rest[np.argsort(bucket_of[rest], kind="stable")]
    padded = np.full(-(-len(rest) // size) * size, -1, np.int64)
    padded[: len(rest)] = rest
    return np.concatenate([full, padded]).reshape(-1, size)


def _candidates(labels: Ints, bucket_of: NDArray[np.integer], count: int) -> Ints:
    """Each row, followed by the next `count` rows of its label; the rows of a label form a ring, sorted by bucket."""
    order = np.lexsort((bucket_of, labels))  # by label, then by bucket, in the random order within both
    position, members = _positions(labels[order])
    begin = np.arange(len(order)) - position
    units = np.full((len(order), 1 + count), -1, np.int64)
    units[:, 0] = order
    for step in range(1, count + 1):
        has_next = (labels[order] >= 0) & (step < members)  # a small label has no more than its other rows
        units[has_next, step] = order[(begin + (position + step) % members)[has_next]]
    return units


def _positions(ordered: Ints) -> tuple[Ints, Ints]:
    """For n sorted labels: the position of each among the equal ones, and how many equal ones there are; int64 (n,)."""
    _, first, counts = np.unique(ordered, return_index=True, return_counts=True)
    return np.arange(len(ordered)) - np.repeat(first, counts), np.repeat(counts, counts)


def groups_of(settings: GroupsConfig, index: Index) -> Groups:
    """The group of each row of an index: its label, or that of a file.

    Raises:
        ConfigError: no row has a label; or the file does not exist, has other content, or was made for another corpus,
            or no rows of it would stand together.
        DataError: the file is damaged.
    """
    size, candidates = settings.size or 1, settings.candidates or 0
    if settings.source == "run":  # which makes groups between its epochs
        return Groups(np.full(len(index), -1), size, candidates, "run", settings.share)
    if settings.source != "label":
        of_rows = _of_file(settings.source, index, settings)
        digest = hashlib.sha256(of_rows.tobytes()).hexdigest()[:16]
        return Groups(of_rows, size, candidates, f"file {digest}", settings.share)
    if not index.has_labels:
        raise ConfigError(
            "data.groups by label: no row of the corpus has a label; convert it with --label-column, or set source to "
            "a file of groups, which `mmdata neighbours` makes"
        )
    return Groups(index.column("label"), size, candidates, "label", settings.share)


def save_groups(path: Path, of_rows: Ints, index: Index) -> None:
    """Save the groups of the rows of an index, for this index alone.

    Args:
        path: of a .npy file.
        of_rows: int64 (len(index),), -1 for a row without a group.
        index: of the rows.
    """
    write_whole(path, lambda file: np.save(file, of_rows.astype(np.int64).view(_type_for(index))))


def _type_for(index: Index) -> np.dtype[np.void]:
    """The type of groups that were made for an index: the title of its field is the fingerprint."""
    return np.dtype([((index.fingerprint, "group"), np.int64)])


def _of_file(name: str, index: Index, settings: GroupsConfig) -> Ints:
    """The groups in a .npy file: plain numbers, or what `save_groups` has saved for this index."""
    file = npy_of_rows(name, index, of=OF, kinds="iuV", what="save the group of each row as int64, -1 for none")
    values = file.read(0, len(file))
    if file.dtype.kind == "V" and file.dtype != _type_for(index):
        raise ConfigError(f"{OF}: '{name}' was made for another corpus; make it anew with `mmdata neighbours`")
    of_rows = values["group"] if file.dtype.kind == "V" else values.astype(np.int64)
    largest = int(np.unique(of_rows[of_rows >= 0], return_counts=True)[1].max(initial=0))
    together = settings.size or 1 + (settings.candidates or 0)
    if together > largest:
        setting = f"size is {settings.size}" if settings.size else f"candidates is {settings.candidates}"
        raise ConfigError(
            f"{OF}: '{name}': its largest group has {counted(largest, 'row')}, and data.groups.{setting}: no "
            f"{together} rows would stand together; set a lower one"
        )
    return of_rows
