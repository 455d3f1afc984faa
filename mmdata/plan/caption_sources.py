"""From settings to the sources of captions (`data.captions`), and to what counts as an equal caption."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import hash64
from mmdata.index import Index
from mmdata.nearest import meant
from mmdata.plan.captions import CaptionSource, CaptionSources, ShardCaptions
from mmdata.tables.arrow_values import DATES
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.row_columns import RowColumns
from mmdata.tables.selection import Selection, row_chunks

logger = logging.getLogger("mmdata")

OF = "data.captions"
SHARDS = "shards"
"""Name of the source that is the captions in the shards."""


def caption_sources(data: DataConfig, index: Index, joined: Joined | None = None) -> CaptionSources | None:
    """The sources that a section `data` names; None: the captions of the shards in turn.

    Args:
        data: settings.
        index: of the shards.
        joined: what `data.join` names; None: it is opened here.

    Raises:
        ConfigError: no such source (the nearest one is named), a column without texts, or shards without captions.
        DataError: a table is damaged, or holds a text that is no caption.
    """
    if isinstance(data.captions, str):
        return None
    joined = joined or Joined.from_config(data, index)
    members = {
        f"{JOINED}{name}:{member}": (shards, member)
        for name, shards in joined.shards.items()
        for member in shards.caption_names
    }
    known = [SHARDS, *(JOINED + name for name in joined.types), *members]
    for name in data.captions:
        if name not in known:
            raise ConfigError(
                f"{OF}: no source '{name}'{meant(name, known)}; there are {', '.join(known)}"
                f"{_how_to_index(name, joined)}"
            )
    sources: dict[str, CaptionSource] = {}
    for name in data.captions:
        if name == SHARDS:
            _check_captions(index)
            sources[name] = ShardCaptions(index)
        elif name in members:
            shards, member = members[name]
            sources[name] = shards.captions(member, of=f"{OF} {name}")
        else:
            column = name.removeprefix(JOINED)
            sources[name] = joined.table_of(column).captions(column, of=f"{OF} {name}")
    return CaptionSources(sources, data.captions, seed=data.seed)


def equal_rows(data: DataConfig, index: Index, joined: Joined | None = None) -> NDArray[np.int64] | None:
    """What stands for the hashes of captions, by the column that `data.caption_hash` names; None: nothing does.

    Returns:
        int64 (len(index),), equal for equal values; 0 where a row has none.

    Raises:
        ConfigError: no such column; the nearest one is named.
    """
    if (column := data.caption_hash) is None:
        return None
    joined = joined or Joined.from_config(data, index)
    columns = RowColumns(index, joined)
    known = columns.names("number", "bool", "text", *DATES)
    if column not in known:
        raise ConfigError(
            f"data.caption_hash: no column '{column}' of numbers, texts or dates{meant(column, known)}; there are "
            f"{', '.join(known)}"
        )
    columns.warn_of_hidden([column], of="data.caption_hash")
    index.fetch_columns(np.arange(index.num_shards))
    found = (_hashes_of_values(columns.of_shard(shard, column)) for shard in range(index.num_shards))
    return np.concatenate([np.empty(0, np.int64), *found])


def _hashes_of_values(values: Any) -> NDArray[np.int64]:
    """A hash of each value of an Arrow array (n,), int64 (n,); 0 where there is none."""
    encoded = values.dictionary_encode()
    texts = encoded.dictionary.cast(pa.string()).to_pylist()
    hashes = np.array([*(hash64(text.encode()) for text in texts), 0], np.int64)  # -1 is the last: no value
    return hashes[encoded.indices.fill_null(-1).to_numpy()]


def check_rows(sources: CaptionSources, index: Index, starts: NDArray[np.int64], selection: Selection | None) -> None:
    """Warn of rows that a source has no caption for.

    Raises:
        ConfigError: a row has no caption in any source; names the first.
    """
    num_rows = int(starts[-1]) if selection is None else len(selection)
    lacking = np.zeros(len(sources.names), np.int64)
    without, first = 0, -1
    for rows in row_chunks(selection, num_rows):
        lacks = sources.num_captions(rows) == 0  # (S, n)
        lacking += lacks.sum(axis=1)
        none = lacks.all(axis=0)
        if not without and none.any():
            first = int(rows[none.argmax()])
        without += int(none.sum())
    if without:
        key = index.keys(np.array([first]))[0]
        raise ConfigError(
            f"{OF}: {without:,} of {num_rows:,} rows have no caption in {', '.join(sources.names)}, such as row "
            f"{first:,} (key '{key}'): leave them out (data.select='COLUMN is not None', or, where a table does not "
            "have them, missing: mask), or name a source that has them; one of probability 0 is used where the others "
            "have nothing"
        )
    for name, count in zip(sources.names, lacking.tolist(), strict=True):
        if count:
            logger.warning(
                "%s: %s of %s rows have no caption in %s, and draw from the other sources",
                OF,
                f"{count:,}",
                f"{num_rows:,}",
                name,
            )


def _how_to_index(name: str, joined: Joined) -> str:
    """For messages: how the captions of a member of joined tars become known; "" for another source."""
    shards, _, member = name.removeprefix(JOINED).partition(":")
    if shards not in joined.shards or not member:
        return ""
    return f"; `{joined.shards[shards].command(member)}` reads those of the member"


def _check_captions(index: Index) -> None:
    for part in index.manifests:
        if not part.has_captions:
            raise ConfigError(
                f"{OF}: shards '{part.folder}' hold labels and no captions: leave '{SHARDS}' out of {OF}, and name "
                f"columns of joined tables ({JOINED}COLUMN)"
            )
