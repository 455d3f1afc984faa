"""The columns that say which rows are copies: for `data.join` of the shards, a row for each of theirs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from mmdata.atomic import write_whole
from mmdata.duplicates.groups import NearPairs, components, leaders, near_others, near_pairs
from mmdata.duplicates.signature import Signed, sign
from mmdata.errors import ConfigError
from mmdata.hashing import share_bound
from mmdata.index import Index
from mmdata.storage import ShardCache

Ints = NDArray[np.int64]
Advance = Callable[[int], object]
Location = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """How many rows of the shards are copies of what.

    Attributes:
        rows: of the shards.
        exact: rows whose image has the bytes of an earlier row's.
        near: other rows that are near copies of the first row of their group.
        groups: that have more than one row.
        largest_group: its rows.
        largest_component: most rows that chains of near copies connect, and that `split` keeps together.
        problems: rows that have no hash, by reason.
        leaks: rows that the other shards have, by "exact" and "near"; empty without other shards.
        val: rows that `split` gives to val; None without a share.
        bounded: images that were compared with only the closest of their candidates.
    """

    rows: int
    exact: int
    near: int
    groups: int
    largest_group: int
    largest_component: int
    problems: Counter[str]
    leaks: Counter[str]
    val: int | None
    bounded: int


COLUMNS = {"key", "phash", "group", "first", "problem"}
"""Columns that each table has."""


def is_table(path: Path) -> bool:
    """Whether a file is a table as `find_duplicates` writes it."""
    try:
        return set(pyarrow.parquet.read_schema(path).names) >= COLUMNS
    except pa.ArrowInvalid:
        return False


def find_duplicates(
    shards: Location,
    out: Path,
    *,
    against: Sequence[Location] = (),
    val_share: float | None = None,
    flipped: bool = False,
    num_workers: int = 1,
    cache: ShardCache | None = None,
    progress: Callable[[str, int], Advance] = lambda what, total: lambda count: None,
) -> Duplicates:
    """Write a Parquet table with a row for each row of some shards: which are copies. No shard is changed.

    Its columns are `key`; `phash` (int64, the bits of the perceptual hash; null where the image does not decode);
    `group` (number of the first row of the row's group); `first` (bool, whether it is that row); `problem` (why there
    is no hash; null where there is one); with `against` `leak` ("exact", "near" or null), `leak_shards` and `leak_key`
    (of the row that is copied); with `val_share` `split` ("train" or "val").

    Args:
        shards: an indexed folder or URL.
        out: the table.
        against: other indexed folders, such as a benchmark's shards.
        val_share: share of the rows that `split` gives to val (0 to 1); near copies are on one side. As in
            `data.val.share` the hash of an image decides, here that of the first row.
        flipped: whether a mirrored copy is a near copy.
        num_workers: threads that read and decode.
        cache: of shards behind URLs.
        progress: makes a function to be called with the images that were done, of a title and their number.

    Raises:
        ConfigError: a key that two rows of the shards have: no table could be joined; or a folder without images.
        DataError: a folder has no index, or a shard is not the one that was indexed.
        OSError: the disk is full.
    """
    own = len(Index.open(shards, cache=cache))
    index = Index.open([shards, *against] if against else shards, cache=cache)
    index.check_images()
    keys = index.keys(np.arange(own))
    _check_distinct(keys, shards)
    count = len(np.unique(index.column("image_hash")))
    signed = sign(index, folder=out.parent, num_workers=num_workers, on_rows=progress("hashing", count))
    images = int(np.searchsorted(signed.first_rows, own))
    near = near_pairs(
        signed, flipped=flipped, limit=images, on_rows=progress("comparing", int(np.count_nonzero(signed.known)))
    )
    rows = np.arange(own)
    image_of = signed.image_of[:own]
    near_own = near.below(images)
    groups = signed.first_rows[leaders(near_own)[image_of]]
    chained = components(near_own)[image_of]
    hashes: Ints = signed.hashes.view(np.int64)[image_of]
    problems = [str(signed.problems[row].reason) if row in signed.problems else None for row in range(own)]
    columns: dict[str, object] = {
        "key": keys,
        "phash": pa.array(hashes, mask=~signed.known[image_of]),
        "group": groups,
        "first": groups == rows,
        "problem": pa.array(problems, pa.string()),
    }
    leaks = _leak_columns(index, own, signed, near) if against else {}
    columns |= {name: pa.array(values, pa.string()) for name, values in leaks.items()}
    in_val = np.zeros(own, np.bool_)
    if val_share is not None:
        in_val = index.column("image_hash")[signed.first_rows[chained]] < share_bound(val_share)
        columns["split"] = np.where(in_val, "val", "train").astype(object)
    table = pa.table(columns)
    write_whole(out, lambda file: pyarrow.parquet.write_table(table, file))
    sizes = np.unique(groups, return_counts=True)[1]
    return Duplicates(
        rows=own,
        exact=own - images,
        near=images - len(np.unique(groups)),
        groups=int(np.count_nonzero(sizes > 1)),
        largest_group=int(sizes.max(initial=0)),
        largest_component=int(np.bincount(chained, minlength=1).max()),
        problems=Counter(problem for problem in problems if problem is not None),
        leaks=Counter(kind for kind in leaks.get("leak", []) if kind),
        val=None if val_share is None else int(np.count_nonzero(in_val)),
        bounded=near.bounded,
    )


def _leak_columns(index: Index, own: int, signed: Signed, near: NearPairs) -> dict[str, list[str | None]]:
    """Which rows below `own` the rows from `own` on have, too."""
    copied = np.full(len(signed.first_rows), len(index))  # the first other row of each image
    np.minimum.at(copied, signed.image_of[own:], np.arange(own, len(index)))
    is_other = copied < len(index)
    image_of = signed.image_of[:own]
    exact = is_other[image_of]
    nearest = np.where(exact, image_of, near_others(near, is_other)[image_of])
    leaks = np.flatnonzero(nearest >= 0)
    rows = copied[nearest[leaks]]
    shards, _ = index.locate(rows)
    kinds, folders, keys = (np.full(own, None, object) for _ in range(3))
    kinds[leaks] = np.where(exact[leaks], "exact", "near")
    folders[leaks] = [str(index.part(shard)[0].folder) for shard in shards.tolist()]
    keys[leaks] = index.keys(rows)
    return {"leak": kinds.tolist(), "leak_shards": folders.tolist(), "leak_key": keys.tolist()}


def _check_distinct(keys: Sequence[str], shards: Location) -> None:
    """Raise ConfigError if a key comes twice, before hours of decoding."""
    if len(set(keys)) < len(keys):
        key, times = Counter(keys).most_common(1)[0]
        raise ConfigError(
            f"shards '{shards}': {times} rows have the key '{key}', and a table is joined by key; `mmdata convert` "
            "writes shards whose rows are numbered"
        )
