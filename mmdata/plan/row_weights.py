"""From settings to the weights of rows: those of `data.row_weights`, or the numbers of their captions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.index import Index
from mmdata.plan.weights import RowWeights
from mmdata.tables.joined import Joined
from mmdata.tables.selection import Selection
from mmdata.tables.table import NpyFile
from mmdata.tables.values import in_condition

logger = logging.getLogger("mmdata")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

OF = "data.row_weights"
LABEL_BALANCED = "label_balanced"


def row_weights(
    data: DataConfig, index: Index, starts: Ints, selection: Selection | None, joined: Joined | None = None
) -> RowWeights | None:
    """The weights that a section `data` gives its rows; None: every row comes once an epoch.

    Args:
        data: settings.
        index: of the shards.
        starts: first row of each shard, then the number of rows.
        selection: rows outside it have the weight 0; None: all rows are used.
        joined: what `data.join` names; None: it is opened here.

    Raises:
        ConfigError: no such column or file, a weight that is negative or no number, or no weight above 0.
        DataError: the file is damaged.
    """
    if data.captions == "every":
        if not index.captions:
            raise ConfigError("data.captions every: the shards hold labels and no captions; leave it out")
        values = _of_rows(index, starts, selection, lambda shard: np.diff(index.shard(shard).lists("caption_hash")[0]))
        return RowWeights(values, name="data.captions every", seed=data.seed)
    given = data.row_weights
    if given is None:
        return None
    if given == LABEL_BALANCED:
        return RowWeights(_cut(_balanced(index, starts, selection), data), name=f"{OF} {given}", seed=data.seed)
    if given.lower().endswith(".npy"):
        values = _of_file(given, index, starts, selection)
        return RowWeights(_cut(_checked(values, index, given), data), name=f"{OF} {Path(given).name}", seed=data.seed)
    joined = joined or Joined.from_config(data, index)
    joined.check(given, ("number", "bool"), of=OF, others=[LABEL_BALANCED, "files (.npy) of a number a row"])
    values = _of_rows(index, starts, selection, lambda shard: _as_floats(joined.of_shard(shard, given)))
    return RowWeights(_cut(_checked(values, index, given, is_column=True), data), name=f"{OF} {given}", seed=data.seed)


def _of_rows(
    index: Index, starts: Ints, selection: Selection | None, of_shard: Callable[[int], NDArray[np.generic]]
) -> Floats:
    """A number for each row, 0 for those that are not selected."""
    values = np.zeros(int(starts[-1]))
    places = starts if selection is None else selection.starts
    used = np.flatnonzero(np.diff(places))
    index.fetch_columns(used)
    for shard in used.tolist():
        own = of_shard(shard)[: starts[shard + 1] - starts[shard]]
        rows = np.arange(*starts[shard : shard + 2].tolist()) if selection is None else selection.of_shard(shard)
        values[rows] = own[rows - starts[shard]]
    return values


def _as_floats(values: Any) -> Floats:
    return values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()


def _of_file(file: str, index: Index, starts: Ints, selection: Selection | None) -> Floats:
    array = NpyFile(file, of=OF)
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{OF}: '{file}' is an array of {array.dtype}; a weight is a number")
    if len(array) != len(index):
        raise ConfigError(
            f"{OF}: '{file}' has {len(array):,} weights, and the index has {len(index):,} rows: it was made for other "
            "shards"
        )
    return _of_rows(index, starts, selection, lambda shard: array.read(*index.starts[shard : shard + 2].tolist()))


def _balanced(index: Index, starts: Ints, selection: Selection | None) -> Floats:
    """Weights that give each class as many passes as another, and the rows one on average."""
    if not index.has_labels:
        raise ConfigError(f"{OF} {LABEL_BALANCED}: no row of the corpus has a label")
    labels = _of_rows(index, starts, selection, lambda shard: index.shard(shard).fixed("label")).astype(np.int64)
    used = np.ones(len(labels), np.bool_)
    if selection is not None:
        used[:] = False
        for rows in selection.chunks(2**20):
            used[rows] = True
    if (without := int((labels[used] < 0).sum())) > 0:
        raise ConfigError(
            f"{OF} {LABEL_BALANCED}: {without:,} rows have no label; leave them out: data.select='label is not None'"
        )
    counts = np.bincount(labels[used])
    weights = np.zeros(len(labels))
    weights[used] = used.sum() / (np.count_nonzero(counts) * counts[labels[used]])
    return weights


def _checked(values: Floats, index: Index, what: str, *, is_column: bool = False) -> Floats:
    """The weights, if each is one."""
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        key = index.keys(np.array([row]))[0]
        missing = ""
        if np.isnan(values[row]) and is_column:
            missing = f": leave out the rows without one (data.select='{in_condition(what)} is not None')"
        raise ConfigError(
            f"{OF} {what}: row {row:,} (key '{key}') has the weight {values[row]:g}; a weight is a number from 0 on"
            f"{missing}"
        )
    if not values.any():
        raise ConfigError(f"{OF} {what}: every row has the weight 0")
    return values


def _cut(values: Floats, data: DataConfig) -> Floats:
    """The weights, at most `data.max_repeats`."""
    above = int((values > data.max_repeats).sum())
    if above:
        logger.warning(
            "%s: %s of %s rows have a weight above data.max_repeats (%d), up to %.4g: they come %d times an epoch",
            OF,
            f"{above:,}",
            f"{np.count_nonzero(values):,}",
            data.max_repeats,
            values.max(),
            data.max_repeats,
        )
    return np.minimum(values, data.max_repeats)
