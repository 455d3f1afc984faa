"""Matches the rows of an index with keys in any order, as all that is joined is matched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError
from mmdata.index.index import Index
from mmdata.tables.arrow_values import compute

logger = logging.getLogger("mmdata")

MATCH_ROWS = 2**24
"""Rows of the index that are matched at a time: for each time, Arrow hashes all keys."""

LOOKED_ROWS = 1024
"""Rows among which a key is looked for that messages name: others may have none."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def first_twice(keys: Any) -> tuple[int, int] | None:
    """The first two rows that have the same key; None if no key comes twice."""
    known = keys.drop_null()
    if compute.count_distinct(known).as_py() == len(known):
        return None
    counts = compute.value_counts(known)
    several = counts.filter(compute.greater(counts.field("counts"), 1)).field("values")[0]
    rows = [row for row, same in enumerate(compute.equal(keys, several).to_pylist()) if same]
    return rows[0], rows[1]


@dataclass(frozen=True)
class OtherKeys:
    """The keys of what is joined with an index.

    Attributes:
        texts: Arrow texts (n,), no two equal.
        of: name of the setting, for messages.
        where: the files that hold them, likewise.
        what: "the table", or another word for the files.
        hint: what may be wrong with them.
    """

    texts: Any
    of: str
    where: str
    what: str
    hint: str = ""


def match(keys: OtherKeys, index: Index, keys_of: Callable[[int], Any], *, shards: tuple[int, int]) -> Ints:
    """The place of the key of each row of some shards among the others, -1 where it is not there: int64 (rows,).

    Args:
        keys: of what is joined.
        index: of the rows.
        keys_of: gives the keys of a shard's rows, Arrow texts, null where a row has none.
        shards: first shard, and the shard after the last.

    Raises:
        ConfigError: no row has one of the keys.
    """
    starts, (begin, last) = index.starts, shards
    first_row, first_key = starts[begin], None
    found = np.full(int(starts[last] - first_row), -1, np.int64)
    known = keys.texts.combine_chunks()
    index.fetch_columns(np.arange(begin, last))
    while begin < last:
        end = int(np.searchsorted(starts, starts[begin] + MATCH_ROWS, side="right")) - 1
        end = min(max(end, begin + 1), last)
        texts = pa.chunked_array([keys_of(shard).cast(pa.large_string()) for shard in range(begin, end)])
        rows = compute.index_in(texts, value_set=known, skip_nulls=True)
        found[starts[begin] - first_row : starts[end] - first_row] = rows.fill_null(-1).to_numpy()
        first_key = first_key or _first(texts)
        begin = end
    if len(found) and not (found >= 0).any():
        raise ConfigError(
            f"{_said(keys.of, keys.where, len(found), len(found))}: keys are like '{first_key}', and those of "
            f"{keys.what} like '{_first(known)}'{keys.hint}"
        )
    return found


def check_missing(is_missing: Bools, num_rows: int, policy: str, index: Index, *, of: str, where: str) -> None:
    """Warn of rows that what is joined does not have.

    Args:
        is_missing: bool (len(index),).
        num_rows: how many rows it is for.
        policy: "error" refuses such rows.
        index: of the rows.
        of: name of the setting, for messages.
        where: the joined files, likewise.

    Raises:
        ConfigError: rows are missing, and that is an error.
    """
    if not (missing := int(np.count_nonzero(is_missing))):
        return
    said = _said(of, where, missing, num_rows)
    if policy == "error":
        first = index.keys(np.flatnonzero(is_missing)[:1])[0]
        raise ConfigError(f"{said}, such as '{first}'; leave them out (missing: mask) or keep them (missing: keep)")
    logger.warning("%s", said)


def warn_of_shared_keys(found: Ints, index: Index, *, of: str, what: str) -> None:
    """Warn where rows of several datasets get the same row of what is joined: `mmdata convert` numbers keys from 0.

    Args:
        found: of `match`, for all rows.
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


def _said(of: str, where: str, missing: int, num_rows: int) -> str:
    return f"{of}: {missing:,} of {num_rows:,} rows have no row in {where}"


def _first(keys: Any) -> str | None:
    """The first key that is not null."""
    return next((key for key in keys.slice(0, LOOKED_ROWS).to_pylist() if key is not None), None)
