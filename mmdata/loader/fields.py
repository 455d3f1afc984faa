"""Entries of batches beside images and captions: values of joined tables, looked up by the rows of a batch.

The workers have no part in it: a batch says its rows, and the values of a table are in this process's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import ConfigError
from mmdata.join.joined import JOINED, Joined
from mmdata.join.values import Values
from mmdata.nearest import did_you_mean


class Fields:
    """What `data.fields` adds to each batch.

    Args:
        settings: name in the batch -> "join:COLUMN".
        joined: the tables.

    Raises:
        ConfigError: a name that batches have already, an unknown column (the nearest one is named), values that make no
            tensor, or rows without a value where numbers have no word for that.
        DataError: a table is damaged.
    """

    def __init__(self, settings: Mapping[str, str], joined: Joined) -> None:
        self._values: dict[str, Values] = {}
        for name, source in settings.items():
            of = f"data.fields.{name}"
            if name in Batch.__annotations__:
                raise ConfigError(f"{of}: batches have an entry of this name already; choose another one")
            column = source.removeprefix(JOINED)
            if column == source or column not in joined.names():
                known = [JOINED + one for one in joined.names()]
                listed = ", ".join(known) or "none: give data.join"
                raise ConfigError(f"{of}: no source '{source}'{did_you_mean(source, known)}; there are {listed}")
            self._values[name] = joined.table_of(column).values(column, of=of)

    def added(self, batch: Batch) -> Batch:
        """The batch with these entries."""
        rows = batch["rows"].numpy()
        entries: Any = {name: _tensor(values.take(rows)) for name, values in self._values.items()}
        return cast(Batch, {**batch, **entries})


def _tensor(values: np.ndarray[Any, Any] | list[str]) -> Tensor | list[str]:
    return values if isinstance(values, list) else torch.from_numpy(values)
