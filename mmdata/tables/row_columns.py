"""The columns that a condition, a weight or a caption hash may name: those of an index and of its joined tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError, meant
from mmdata.index.index import Index
from mmdata.tables.arrow_values import kind_of
from mmdata.tables.joined import Joined

logger = logging.getLogger("mmdata")

OF_INDEX: dict[str, Any] = {
    "key": pa.large_string(),
    "shard": pa.large_string(),
    "height": pa.int64(),
    "width": pa.int64(),
    "image_bytes": pa.int64(),
    "captions": pa.int64(),
    "caption_tokens": pa.int64(),
    "label": pa.int64(),
    "class_name": pa.large_string(),
}
"""key: of the sample. shard: file name of the tar. height, width: of the image as displayed, in pixels. image_bytes:
of the encoded image. captions: how many the row has. caption_tokens: of the longest caption, special tokens included.
label: number of the class, missing where a row has none. class_name: its name.
"""


class RowColumns:
    """Columns of the rows of an index, shard by shard.

    Attributes:
        types: Arrow's, by name; a column that index and table have is the index's.
    """

    def __init__(self, index: Index, joined: Joined) -> None:
        absent = {"caption_tokens"} if index.tokenizer is None else set[str]()
        absent |= {"class_name"} if index.class_names is None else set()
        self._index, self._joined = index, joined
        self._class_names = pa.array(index.class_names or [], pa.large_string())
        of_index = {name: kind for name, kind in OF_INDEX.items() if name not in absent}
        self.types: dict[str, Any] = {**joined.types, **of_index}

    def pick(self, name: str, *kinds: str, of: str, what: str, also: str | None = None) -> Callable[[int], Any]:
        """What gives the values of a column for all rows of a shard: an Arrow array (n,).

        Args:
            name: of the column.
            kinds: that it may have, see `kind_of`.
            of: name of the setting, for messages.
            what: the kinds in words, likewise.
            also: another word that the setting takes.

        Raises:
            ConfigError: no such column; the nearest one is named.
        """
        known = sorted(column for column, kind in self.types.items() if kind_of(kind) in kinds)
        if name not in known:
            words = [*known, also] if also else known
            raise ConfigError(f"{of}: no column '{name}' of {what}{meant(name, words)}; there are {', '.join(words)}")
        self.warn_of_hidden([name], of=of)
        return partial(self.of_shard, name=name)

    def warn_of_hidden(self, names: Iterable[str], *, of: str) -> None:
        """Warn of columns that the index and a table have: that of the index is meant."""
        for hidden in sorted(set(names) & OF_INDEX.keys() & self._joined.types.keys()):
            logger.warning(
                "%s: '%s' is the index's; the column of this name in %s is not used here: rename it",
                of,
                hidden,
                self._joined.table_of(hidden),
            )

    def of_shard(self, shard: int, name: str) -> Any:
        """A column for all rows of a shard: an Arrow array (n,)."""
        if name not in OF_INDEX:
            return self._joined.table_of(name).of_shard(shard, name)
        columns = self._index.shard(shard)
        if name == "key":
            return columns.keys
        if name == "shard":
            return pa.repeat(pa.scalar(self._index.listed(shard).name, pa.large_string()), len(columns))
        if name in ("label", "class_name"):
            labels = columns.fixed("label")
            is_missing = (labels < 0) | (labels >= len(self._class_names)) if name == "class_name" else labels < 0
            known: Any = pa.array(labels, mask=is_missing)
            return known if name == "label" else self._class_names.take(known)
        return pa.array(self._numbers(columns, name))

    def _numbers(self, columns: Any, name: str) -> NDArray[Any]:
        if name in ("height", "width"):
            turned = columns.fixed("orientation") >= 5
            return np.where(turned, columns.fixed("width" if name == "height" else "height"), columns.fixed(name))
        if name == "captions":
            return np.diff(columns.lists("caption_hash")[0])
        return _longest(*columns.lists("caption_tokens")) if name == "caption_tokens" else columns.fixed(name)


def _longest(offsets: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[Any]:
    """The largest of each row's counts; 0 where it has none."""
    result = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(result, np.repeat(np.arange(len(result)), np.diff(offsets)), counts)
    return result
