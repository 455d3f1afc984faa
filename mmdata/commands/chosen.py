"""`mmdata convert --select`: the rows of indexed shards that meet a condition, as `data.select` has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mmdata.config import Config
from mmdata.config.data import DataConfig
from mmdata.config.strict_yaml import parse
from mmdata.convert.sources.chosen import ChosenRows
from mmdata.loader.corpus import open_index
from mmdata.tables.joined import Joined
from mmdata.tables.select import select_rows


def chosen_rows(shards: str, select: str, tables: Sequence[str] = ()) -> ChosenRows:
    """The rows of a folder that a condition, or a file of keys or a mask, selects.

    Args:
        shards: a folder with an index.
        select: as `data.select`.
        tables: joined by their column "key", for the condition; as `data.join`.

    Raises:
        ConfigError: a wrong condition or file, or one that leaves no row.
        DataError: the folder has no index.
    """
    content = {"shards": shards, "select": select, "join": [{"table": table} for table in tables]}
    data: DataConfig = parse(Config, {"data": {**content, "global_batch_size": 1}}, origin="--select").data
    index = open_index(data)
    selection = select_rows(data, index, Joined.from_config(data, index, writes=True))
    assert selection is not None, "there is a condition"
    offsets: dict[str, NDArray[np.int64]] = {}
    for shard in range(index.num_shards):
        places = selection.of_shard(shard) - int(index.starts[shard])
        found = index.shard(shard).fixed("image_offset")[places]
        offsets[index.listed(shard).name] = np.sort(found.astype(np.int64))
    return ChosenRows(select, selection.digest, offsets)
