"""`mmdata convert --select`: the rows of indexed shards that meet a condition, as `data.select` has it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mmdata.config import Config
from mmdata.config.data import DataConfig
from mmdata.config.strict_yaml import parse
from mmdata.convert.sources.chosen import SelectedRows
from mmdata.loader.corpus import open_index
from mmdata.tables.select import select_rows


def chosen_rows(shards: str, select: str) -> SelectedRows:
    """The rows of a folder that a condition, or a file of keys or a mask, selects.

    Args:
        shards: a folder with an index.
        select: as `data.select`.

    Raises:
        ConfigError: a wrong condition or file, or one that leaves no row.
        DataError: the folder has no index.
    """
    content = {"data": {"shards": shards, "select": select, "global_batch_size": 1}}
    data: DataConfig = parse(Config, content, origin="--select").data
    index = open_index(data)
    selection = select_rows(data, index, of="--select")
    assert selection is not None, "there is a condition"
    offsets: dict[str, NDArray[np.int64]] = {}
    for shard in range(index.num_shards):
        places = selection.of_shard(shard) - int(index.starts[shard])
        found = index.shard(shard).fixed("image_offset")[places]
        offsets[index.listed(shard).name] = np.sort(found.astype(np.int64))
    return SelectedRows(select, offsets)
