"""From settings to the sources of captions: `data.captions` as a mapping of sources to probabilities."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.index import Index
from mmdata.nearest import meant
from mmdata.plan.captions import CaptionSources, ShardCaptions
from mmdata.tables.captions import TableCaptions
from mmdata.tables.joined import JOINED, Joined
from mmdata.tables.selection import Selection, row_chunks
from mmdata.tars.members import Selector

logger = logging.getLogger("mmdata")

OF = "data.captions"
SHARDS = "shards"
"""Name of the source that is the captions in the shards."""


def caption_sources(data: DataConfig, index: Index, joined: Joined | None = None) -> CaptionSources | None:
    """The sources that a section `data` names; None: the captions of the shards in turn.

    Args:
        data: settings.
        index: of the shards.
        joined: what `data.join` names; None: it is read here.

    Raises:
        ConfigError: no such source (the nearest one is named), a column without texts, or shards without captions.
        DataError: a table is damaged, or holds a text that is no caption.
    """
    if isinstance(data.captions, str):
        return None
    joined = joined or Joined.from_config(data, index)
    known = [SHARDS, *(JOINED + name for name in joined.names()), *(f"{JOINED}{name}:MEMBER" for name in joined.shards)]
    sources: dict[str, ShardCaptions | TableCaptions] = {}
    for name in data.captions:
        if name == SHARDS:
            _check_captions(index)
            sources[name] = ShardCaptions(index)
            continue
        column = name.removeprefix(JOINED)
        tars, _, member = column.partition(":")
        if name.startswith(JOINED) and member and tars in joined.shards:
            sources[name] = joined.shards[tars].captions(Selector.parse(member), of=f"{OF} {name}")
        elif name in known:
            sources[name] = joined.table_of(column).captions(column, of=f"{OF} {name}")
        else:
            raise ConfigError(f"{OF}: no source '{name}'{meant(name, known)}; there are {', '.join(known)}")
    return CaptionSources(sources, data.captions, seed=data.seed, epochs=_epochs(data))


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


def _epochs(data: DataConfig) -> int | None:
    """The epochs over which probabilities change; None if they do not."""
    if not data.captions_change:
        return None
    if data.caption_epochs is None:
        raise ConfigError(
            f"{OF}: probabilities change over the run, and nothing says over how many epochs: give data.caption_epochs "
            "(or train.epochs, of a run that is counted in epochs)"
        )
    if data.caption_epochs < 2:  # of train.epochs
        raise ConfigError(
            f"{OF}: probabilities change from epoch to epoch, and train.epochs is {data.caption_epochs}: give each "
            "source one probability, or say of how many epochs this is the first by data.caption_epochs"
        )
    return data.caption_epochs


def _check_captions(index: Index) -> None:
    for part in index.manifests:
        if not part.has_captions:
            raise ConfigError(
                f"{OF}: shards '{part.folder}' hold labels and no captions: leave '{SHARDS}' out of {OF}, and name "
                f"columns of joined tables ({JOINED}COLUMN)"
            )
