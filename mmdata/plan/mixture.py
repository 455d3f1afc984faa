"""What a plan mixes: which datasets, in which proportions, and which rows stand together in a batch.

Rows stand together because they share a label or are neighbours in an embedding space. The plan then moves units of
several rows instead of single rows. A unit is never divided between batches or ranks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError, DataError, counted
from mmdata.files import write_whole
from mmdata.index import Index
from mmdata.plan.buckets import Bucket
from mmdata.plan.ranges import mix_evenly
from mmdata.safe_read import check_regular

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]


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
    return np.argsort(kinds, kind="stable")[mix_evenly(np.unique(kinds, return_counts=True)[1])]


def cover_table(buckets: Sequence[Bucket]) -> Ints:
    """For each pair of buckets a bucket that holds the texts (and the patches) of both, int64 (K, K).

    It has the image shape of the first bucket where there is one, and the shortest text.
    """
    table = np.zeros((len(buckets), len(buckets)), np.int64)
    for i, first in enumerate(buckets):
        for j, second in enumerate(buckets):
            length, patches = max(first.length, second.length), max(first.patches, second.patches)

            # In order of importance: the texts fit, the patches fit, the first bucket's image shape, least padding.
            def unfit(k: int, of: Bucket = first, length: int = length, patches: int = patches) -> tuple[object, ...]:
                bucket = buckets[k]
                too_small = (bucket.length < length, bucket.patches < patches)
                return (*too_small, bucket[1:3] != of[1:3], bucket.length, bucket.patches, k)

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


def read_groups(
    path: Path, index: Index, *, size: int | None = None, candidates: int | None = None
) -> NDArray[np.int64]:
    """The group of each row, int64 (len(index),), from a .npy file or an Arrow IPC file.

    The Arrow file has a column `group`, and the fingerprint of the index it was made for in its metadata.

    Args:
        path: the file.
        index: of the rows.
        size: rows of a group that are to stand together: as many as the file says that its groups have, if it does.
        candidates: rows that are to follow each row of their group.

    Raises:
        ConfigError: the file does not exist, or was made for another corpus, or in groups of another size.
        DataError: the file has other content.
    """
    # Both kinds are read whole: if a mapped file is cut while it is in use, the kernel ends the process (SIGBUS).
    is_arrow = path.suffix != ".npy"
    remade = "make it anew with `mmdata neighbours`" if is_arrow else "save the group of each row as int64, -1 for none"
    try:
        check_regular(path, "file of groups")
        if not is_arrow:  # np.load would accept zip archives too, and suggest unpickling any other file
            with path.open("rb") as file:
                of_rows, made_for = np.lib.format.read_array(file, allow_pickle=False), index.fingerprint
                made_in = None
        else:
            table = pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()
            of_rows = table.column("group").combine_chunks().to_numpy(zero_copy_only=False)
            said = table.schema.metadata or {}
            made_for, made_in = said.get(b"index", b"").decode(), int(said[b"size"]) if b"size" in said else None
    except FileNotFoundError:
        raise ConfigError(f"data.groups.source '{path}': no such file; {remade}, or set source to label") from None
    except (ValueError, KeyError, EOFError, pa.ArrowException) as error:
        raise DataError(f"file of groups '{path}': cannot be read: {error}; {remade}") from error
    if of_rows.dtype != np.int64 or of_rows.ndim != 1:
        raise DataError(
            f"file of groups '{path}': expected int64 (rows,), got {of_rows.dtype} {of_rows.shape}; {remade}"
        )
    if len(of_rows) != len(index) or made_for != index.fingerprint:
        other = " of other content" if is_arrow else ""
        raise ConfigError(
            f"data.groups.source '{path}': made for another corpus: {len(of_rows)} rows, and data.shards has "
            f"{len(index)}{other}; {remade}"
        )
    if size is not None and made_in is not None and made_in != size:
        what = (
            f"data.groups.source '{path}': its groups have {made_in} rows, and data.groups.size is {size}: set it to "
            f"{made_in}, or make groups with `mmdata neighbours --size {size}`"
        )
        if size > made_in:
            raise ConfigError(what)
        logger.warning("%s; until then groups are cut into parts of %d", what, size)
    if (together := size or (candidates and 1 + candidates)) is None:
        return of_rows
    largest = int(np.unique(of_rows[of_rows >= 0], return_counts=True)[1].max(initial=0))
    if together > largest:
        setting = f"size is {size}" if size else f"candidates is {candidates}"
        raise ConfigError(
            f"data.groups.source '{path}': its largest group has {counted(largest, 'row')}, and data.groups.{setting}: "
            f"no {together} rows would stand together; set a lower one"
        )
    return of_rows


def write_groups(path: Path, groups: NDArray[np.int64], index: Index, made_of: dict[str, str | int]) -> None:
    """Write what `read_groups` reads: an Arrow file with a column `group`.

    Args:
        path: the file.
        groups: int64 (len(index),), -1 for a row without a group.
        index: whose rows are grouped; its fingerprint goes into the metadata.
        made_of: further metadata.
    """
    schema = pa.schema(
        {"group": pa.int64()},
        metadata={"index": index.fingerprint, **{key: str(value) for key, value in made_of.items()}},
    )
    table = pa.table({"group": groups}, schema=schema)

    def write(file: BinaryIO) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_table(table)

    write_whole(path, write)


class ShardSpan(NamedTuple):
    """A dataset: consecutive shards of the corpus.

    Attributes:
        first_shard: number of its first shard.
        last_shard: number of the shard after its last.
        repeat: passes over its rows in an epoch; 0.5 takes half of the rows, and the other half in the next epoch.
    """

    first_shard: int
    last_shard: int
    repeat: float = 1.0


class BatchShare(NamedTuple):
    """Datasets that fill a fixed share of every batch.

    Attributes:
        spans: mixed with each other in the proportions of their rows times `repeat`, exact over an epoch.
        weight: the share is weight / sum of all weights, exact to the row.
    """

    spans: tuple[ShardSpan, ...]
    weight: int = 1


@dataclass(frozen=True)
class Mixture:
    """What meets in a batch.

    Attributes:
        shares: the first one's rows make the epoch. The others are repeated: each gives as many rows as the steps need,
            and the next epoch goes on where this one ended, so that over time all its rows occur equally often.
        groups: rows that stand together.

    Raises:
        ValueError: a weight or repeat is out of range, datasets overlap, or a repeated share has several datasets.

    Example:
        192 rows of a corpus of 100 shards and 64 of another one of 7 in every batch of 256:
        Mixture((BatchShare((ShardSpan(0, 100),), 192), BatchShare((ShardSpan(100, 107),), 64)))
    """

    shares: tuple[BatchShare, ...]
    groups: Groups | None = None

    def __post_init__(self) -> None:
        for share in self.shares:
            if share.weight < 1 or any(span.repeat <= 0 for span in share.spans):
                raise ValueError(f"a weight must be 1 or more and a repeat above 0: got {share}")
        for share in self.shares[1:]:
            if len(share.spans) != 1 or share.spans[0].repeat != 1:
                raise ValueError(
                    f"a share after the first is repeated as needed, so it must be one dataset with repeat 1: got "
                    f"{share}; give each dataset a share of its own"
                )
        for before, span in pairwise(sorted(self.spans)):
            if span.first_shard < before.last_shard:
                raise ValueError(f"datasets overlap: {before} and {span}; no shard may be in two of them")

    @property
    def spans(self) -> list[ShardSpan]:
        """The datasets of all shares."""
        return [span for share in self.shares for span in share.spans]

    @property
    def total_weight(self) -> int:
        """Sum of the weights of all shares."""
        return sum(share.weight for share in self.shares)

    @property
    def unit_rows(self) -> int:
        """Rows that stand together; 1 without groups."""
        return self.groups.unit_rows if self.groups else 1

    @property
    def fingerprint(self) -> str:
        """Equal for equal mixtures; short."""
        groups = self.groups.fingerprint if self.groups else None
        shares = [(tuple(map(tuple, share.spans)), share.weight) for share in self.shares]
        return hashlib.sha256(repr((shares, groups)).encode()).hexdigest()[:16]
