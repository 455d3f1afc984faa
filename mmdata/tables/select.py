"""From settings to a selection: the filters of `data.select` and of `data.val.share`, and what passes all of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.config.corpus import FILES, CorpusConfig, sources
from mmdata.errors import ConfigError, excerpt
from mmdata.hashing import share_bound
from mmdata.index import Index
from mmdata.tables.condition import Condition
from mmdata.tables.joined import Joined
from mmdata.tables.selection import Selection
from mmdata.tables.table import NpyFile, read_lines
from mmdata.tables.values import compute

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UID = "uid"
"""Column of a joined table that DataComp's uids are compared with, in place of the keys."""


@dataclass(frozen=True)
class Filter:
    """Lets some rows of some shards pass.

    Attributes:
        name: of the rule, for messages and states.
        shards: first shard, and the shard after the last; rows of others are not asked for, and pass.
        mask: gives the rows of a shard that pass, bool (rows of the shard,), by the columns of the rows.
        reads_index: whether it reads the shard's index file.
        keys: distinct, Arrow texts that it looks for in `column`; None: it looks for none.
    """

    name: str
    shards: tuple[int, int]
    mask: Callable[[Joined, int], Bools]
    reads_index: bool = True
    keys: Any = None
    column: str = "key"


def select_rows(
    data: DataConfig, index: Index, joined: Joined | None = None, *, of: str = "data.select"
) -> Selection | None:
    """The rows that a section `data` plans; None: all of them.

    Args:
        data: settings.
        index: of the shards.
        joined: what `data.join` names; None: it is opened here.
        of: opens messages about `data.select`: where it was given.

    Raises:
        ConfigError: a file or a condition is wrong; or they leave no row, or none to evaluate on.
        DataError: a file is damaged.
    """
    joined, share = joined or Joined.from_config(data, index), data.val.share
    filters = list(filters_of(data, joined, of=of))
    if not filters and share is None:
        return None
    found = [0] * len(filters)  # rows that each lets pass
    selected = 0  # rows that all of them let pass, before the share is taken

    def masks() -> Iterator[Bools]:
        nonlocal selected
        for shard, count in enumerate(np.diff(index.starts).tolist()):
            mask = np.ones(count, np.bool_)
            for number, rule in enumerate(filters):
                if count and rule.shards[0] <= shard < rule.shards[1]:
                    own = rule.mask(joined, shard)[:count]
                    found[number] += int(np.count_nonzero(own))
                    mask &= own
            selected += int(np.count_nonzero(mask))
            if share is not None and mask.any():
                mask &= below_share(index, shard, share)[:count] == (data.split == "val")
            yield mask

    of_all = [(0, index.num_shards)] if share is not None else []
    read = [np.arange(*span) for span in of_all + [rule.shards for rule in filters if rule.reads_index]]
    index.fetch_columns(
        np.intersect1d(np.flatnonzero(np.diff(index.starts)), np.concatenate([np.empty(0, np.int64), *read]))
    )
    names = [rule.name for rule in filters]
    if share is not None:
        names.append(f"data.split {data.split} of data.val.share {share:g}")
    selection = Selection(index.starts, masks(), name=" and ".join(names))
    for rule, count in zip(filters, found, strict=True):
        _check_found(rule, count, joined)
    if filters:
        _check_selected(index, selection, filters)
        # A condition may read a file, and a file may change: a state knows the rows themselves.
        selection.name += f" ({selection.digest})"
    if share is not None:
        _check_share(data, share, selected, len(selection))
    return selection


def filters_of(data: CorpusConfig, joined: Joined, *, of: str = "data.select") -> Iterator[Filter]:
    """The filters of `data.select`, of the datasets of a mixture, and of tables that leave rows out.

    Raises:
        ConfigError, DataError: as `select_rows`.
    """
    every = (0, joined.index.num_shards)
    for part in (one for one in joined.parts if one.missing == "mask"):
        yield Filter(f"{part.of} missing: mask", every, lambda _, shard, part=part: part.has_rows(shard), False)
    if data.select is not None:
        yield _filter(data.select, joined, every, of=of)
    for number, (source, indexed) in enumerate(zip(sources(data), joined.index.sources, strict=True)):
        if source.select is not None:
            span = (indexed.first_shard, indexed.last_shard)
            yield _filter(source.select, joined, span, of=f"data.shards.{number}.select")


def _filter(select: str, joined: Joined, shards: tuple[int, int], *, of: str) -> Filter:
    if not select.lower().endswith(FILES):
        return _of_condition(select, joined, shards, of=of)
    name = f"{of} {Path(select).name}"
    if not select.lower().endswith(".npy"):
        return _of_keys(read_lines(select, None, of=of), "key", shards, name)
    array = NpyFile(select, of=of)
    if (uids := _uids(array)) is not None:
        return _of_keys(uids, UID if UID in joined.types else "key", shards, name)
    if array.dtype != np.bool_:
        raise ConfigError(
            f"{of}: '{select}' is an array of {array.dtype}; known are bool (a mask) and two u8 (DataComp's uids); "
            "save a mask as bool (mask.astype(bool)); of row numbers: mask = np.zeros(len(index), bool), mask[rows] = "
            "True"
        )
    starts = joined.index.starts
    first_row, num_rows = int(starts[shards[0]]), int(starts[shards[1]] - starts[shards[0]])
    if len(array) != num_rows:
        raise ConfigError(
            f"{of}: '{select}' is a mask of {len(array):,} rows, and the index has {num_rows:,}: it was made for other "
            "shards"
        )
    return Filter(name, shards, lambda _, shard: array.read(*(starts[shard : shard + 2] - first_row).tolist()), False)


def _of_condition(select: str, joined: Joined, shards: tuple[int, int], *, of: str) -> Filter:
    if os.path.isfile(select):
        raise ConfigError(f"{of}: '{select}': files of keys and masks end in {', '.join(FILES)}")
    condition = Condition(select, joined.types_of_rows, of=of)
    joined.warn_of_hidden(condition.names, of=of)

    def mask(columns: Joined, shard: int) -> Bools:
        values = {name: columns.of_shard(shard, name) for name in condition.names}
        return condition(values, int(columns.index.starts[shard + 1] - columns.index.starts[shard]))

    return Filter(f"{of} {select}", shards, mask)


def _of_keys(keys: Sequence[str], column: str, shards: tuple[int, int], name: str) -> Filter:
    """Looks for keys in a column."""
    if not keys:
        raise ConfigError(f"{name}: the file has no keys")
    known = pa.array(keys, pa.large_string()).unique()

    def mask(columns: Joined, shard: int) -> Bools:
        texts = columns.of_shard(shard, column).cast(pa.large_string())
        return compute.is_in(texts, value_set=known, skip_nulls=True).to_numpy(zero_copy_only=False)

    return Filter(name, shards, mask, keys=known, column=column)


def _uids(array: NpyFile) -> list[str] | None:
    """DataComp's uids as texts of 32 hexadecimal digits: its tools write each as two numbers; None for other arrays."""
    dtype: Any = array.dtype
    if dtype.names is None or [dtype[name].str[1:] for name in dtype.names] != ["u8", "u8"]:
        return None
    values = array.read(0, len(array))
    pairs = zip(*(values[name].tolist() for name in dtype.names), strict=True)
    return [f"{first:016x}{last:016x}" for first, last in pairs]


def below_share(index: Index, shard: int, share: float) -> Bools:
    """The rows of a shard whose image hash lies below a share of all hashes.

    Rows with equal images are on one side, in whichever shards they lie, and the rows below a share are below every
    larger share too. `mmdata convert --val-share` draws the same line.
    """
    return index.shard(shard).fixed("image_hash") < share_bound(share)


def _check_found(rule: Filter, found: int, joined: Joined) -> None:
    """Raise ConfigError if a filter lets no row pass; log how many keys were not found."""
    num_keys = 0 if rule.keys is None else len(rule.keys)
    if not found and num_keys:
        texts = joined.of_shard(rule.shards[0], rule.column).drop_null()
        among = "keys of the index" if rule.column == "key" else f"uids of {joined.table_of(rule.column)}"
        known = f", and {among} are like {excerpt(texts[0].as_py())}" if len(texts) else ""
        like = excerpt(compute.min(rule.keys).as_py())
        raise ConfigError(f"{rule.name}: no row has one of its {num_keys:,} keys: they are like {like}{known}")
    if not found:
        is_one_of_several = rule.name.startswith("data.shards.") and len(joined.index.sources) > 1
        remedy = "; leave that dataset out, or select more" if is_one_of_several else ""
        raise ConfigError(f"{rule.name}: selects no row{remedy}")
    if num_keys and found == int(np.diff(joined.index.starts[list(rule.shards)])[0]):
        logger.warning("%s: every row has one of its %s keys, so all are selected", rule.name, f"{num_keys:,}")
    if found < num_keys:
        logger.warning("%s: %d keys, and %d rows have one of them", rule.name, num_keys, found)


def _check_selected(index: Index, selection: Selection, filters: Sequence[Filter]) -> None:
    """Raise ConfigError if what is selected leaves a dataset without rows."""
    for number, indexed in enumerate(index.sources):
        if not np.diff(selection.starts[[indexed.first_shard, indexed.last_shard]]).any():
            if len(index.sources) == 1:
                raise ConfigError(f"{selection.name}: selects no row of '{indexed.folder}'")
            span = indexed.first_shard, indexed.last_shard
            names = [one.name for one in filters if one.shards[0] < span[1] and span[0] < one.shards[1]]
            raise ConfigError(
                f"{' and '.join(names) or selection.name}: selects no row of data.shards.{number} ('{indexed.folder}')"
                "; leave that dataset out, or select more"
            )


def _check_share(data: CorpusConfig, share: float, rows: int, chosen: int) -> None:
    """Raise ConfigError if a share of some rows leaves none to train on or to evaluate on."""
    train, val = (rows - chosen, chosen) if data.split == "val" else (chosen, rows - chosen)
    if not (train and val):
        raise ConfigError(
            f"data.val.share {share:g} of {rows:,} rows leaves {train:,} to train on and {val:,} to evaluate on; equal "
            f"images stay together, so set it to about {min(0.5, max(0.01, 8 / rows)):.2g}, or name other shards "
            "(data.val.shards)"
        )
