"""Matches the rows of an index with keys in any order, as all that is joined is matched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.index.index import Index
from mmdata.tables.table import compute

logger = logging.getLogger("mmdata")

MATCH_ROWS = 2**24
"""Rows of the index that are matched at a time: for each time, Arrow hashes all keys."""

LOOKED_ROWS = 1024
"""Rows among which a key is looked for that messages name: others may have none."""

Ints = NDArray[np.int64]


def first_twice(keys: Any) -> tuple[int, int] | None:
    """The first two rows that have the same key; None if no key comes twice."""
    known = keys.drop_null()
    if compute.count_distinct(known).as_py() == len(known):
        return None
    counts = compute.value_counts(known)
    several = counts.filter(compute.greater(counts.field("counts"), 1)).field("values")[0]
    rows = [row for row, same in enumerate(compute.equal(keys, several).to_pylist()) if same]
    return rows[0], rows[1]


def match(
    keys: Any, index: Index, keys_of: Callable[[int], Any] | None = None, *, shards: tuple[int, int] | None = None
) -> Ints:
    """The place of each row's key among `keys`, -1 where it is not there: int64 (len(index),).

    Args:
        keys: Arrow texts (n,), no two equal.
        index: of the rows.
        keys_of: gives the keys of a shard's rows, Arrow texts, null where a row has none; None: those of the index.
        shards: first shard, and the shard after the last; rows of others are not matched. None: all shards.
    """
    found = np.full(len(index), -1, np.int64)
    known = keys.combine_chunks()
    begin, last = shards or (0, index.num_shards)
    index.fetch_columns(np.arange(begin, last))
    while begin < last:
        end = int(np.searchsorted(index.starts, index.starts[begin] + MATCH_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), last)
        own = [(keys_of or _keys_of(index))(shard) for shard in range(begin, end)]
        texts = pa.chunked_array([one.cast(pa.large_string()) for one in own])
        rows = compute.index_in(texts, value_set=known, skip_nulls=True)
        found[index.starts[begin] : index.starts[end]] = rows.fill_null(-1).to_numpy()
        begin = end
    return found


def check_missing(
    found: Ints,
    policy: str,
    keys: Any,
    index: Index,
    *,
    of: str,
    where: str,
    what: str,
    keys_of: Callable[[int], Any] | None = None,
) -> None:
    """Warn of rows whose key is not there.

    Args:
        found: of `match`.
        policy: "error" refuses such rows.
        keys, index, keys_of: as for `match`.
        of: name of the setting, for messages.
        where: the files that hold the keys, for messages.
        what: "the table", or another word for them.

    Raises:
        ConfigError: no row is there, or rows are missing and that is an error.
    """
    missing = int((found < 0).sum())
    if not missing:
        return
    shards, local = index.locate(np.flatnonzero(found < 0)[:LOOKED_ROWS])
    of_rows = (
        (keys_of or _keys_of(index))(shard)[place].as_py()
        for shard, place in zip(shards.tolist(), local.tolist(), strict=True)
    )
    known = next((key for key in of_rows if key is not None), None)
    first = "rows without a key (null)" if known is None else f"'{known}'"
    words = f"{of}: {missing:,} of {len(index):,} rows have no row in {where}"
    if missing == len(index):
        like = next((key for key in keys.to_pylist() if key is not None), "none")
        raise ConfigError(f"{words}: keys are like {first}, and those of {what} like '{like}'")
    if policy == "error":
        raise ConfigError(f"{words}, such as {first}; leave them out (missing: mask) or keep them (missing: keep)")
    logger.warning("%s", words)


def _keys_of(index: Index) -> Callable[[int], Any]:
    return lambda shard: index.shard(shard).keys


def warn_of_shared_keys(found: Ints, index: Index, *, of: str, what: str) -> None:
    """Warn where rows of several datasets get the same row of what is joined: `mmdata convert` numbers keys from 0.

    Args:
        found: of `match`.
        index: of one dataset or more.
        of: name of the setting, for the message.
        what: the table, or another word for it.
    """
    taken = np.zeros(int(found.max(initial=-1)) + 1, np.bool_)
    for source in index.sources:
        places = found[index.starts[source.first_shard] : index.starts[source.last_shard]]
        places = places[places >= 0]
        if twice := int(taken[places].sum()):
            logger.warning(
                "%s: %s rows of '%s' have keys that rows of another dataset have too, and get the same rows of %s: "
                "that is right only if they are the same samples (`mmdata convert` numbers each dataset from 0); a "
                "table for each dataset is data.join: [{table: {FOLDER: FILE}}]",
                of,
                f"{twice:,}",
                source.folder,
                what,
            )
        taken[places] = True
