"""The columns of an index that a condition may name, shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmdata.index.index import Index
from mmdata.tables.condition import Kind
from mmdata.tables.joined import Joined

logger = logging.getLogger("mmdata")

Array = NDArray[Any]

KINDS: dict[str, Kind] = {
    "key": "text",
    "shard": "text",
    "height": "number",
    "width": "number",
    "image_bytes": "number",
    "captions": "number",
    "caption_tokens": "number",
    "label": "number",
    "class_name": "text",
}
"""key: of the sample. shard: file name of the tar. height, width: of the image as displayed, in pixels. image_bytes:
of the encoded image. captions: how many the row has. caption_tokens: of the longest caption, special tokens included.
label: number of the class, missing where a row has none. class_name: its name.
"""


def kinds_of(index: Index, joined: Joined) -> dict[str, Kind]:
    """The columns that a condition may name: those of an index and of the tables joined with it."""
    absent = set[str]()
    if index.tokenizer is None:
        absent.add("caption_tokens")
    if index.class_names is None:
        absent.add("class_name")
    known: dict[str, Kind] = {name: kind for name, kind in KINDS.items() if name not in absent}
    for name in joined.names():
        known.setdefault(name, joined.table_of(name).kind(name))
    return known


def warn_of_hidden(names: Iterable[str], joined: Joined, *, of: str) -> None:
    """Warn of columns that the index and a table have: that of the index is meant."""
    for hidden in sorted(set(names) & KINDS.keys() & set(joined.names())):
        logger.warning(
            "%s: '%s' is the index's; the column of this name in %s is not used here: rename it",
            of,
            hidden,
            joined.table_of(hidden),
        )


def types_of(joined: Joined) -> dict[str, str]:
    """Arrow's types of the joined columns, by name."""
    return {name: joined.table_of(name).type_of(name) for name in joined.names()}


def column_of(index: Index, joined: Joined, shard: int, name: str) -> Array:
    """A column for all rows of a shard: numbers (n,), or texts as an object array; see `JoinedTable.of_shard`."""
    if name not in KINDS:
        return joined.table_of(name).of_shard(shard, name)
    columns = index.shard(shard)
    if name == "key":
        return np.array(columns.keys.to_pylist(), object)
    if name == "shard":
        return np.full(len(columns), index.listed(shard).name, object)
    if name in ("height", "width"):
        turned = columns.fixed("orientation") >= 5
        return np.where(turned, columns.fixed("width" if name == "height" else "height"), columns.fixed(name))
    if name == "captions":
        return np.diff(columns.lists("caption_hash")[0])
    if name == "caption_tokens":
        return _longest(*columns.lists("caption_tokens"))
    labels = columns.fixed("label")
    if name == "label":
        return np.ma.masked_less(labels, 0) if (labels < 0).any() else labels
    if name == "class_name":
        names = np.array([*(index.class_names or []), None], object)  # -1 is the last: no class
        return names[np.where(labels < len(names) - 1, labels, -1)]
    return columns.fixed(name)


def _longest(offsets: NDArray[np.int32], counts: NDArray[np.int32]) -> Array:
    """The largest of each row's counts; 0 where it has none."""
    result = np.zeros(len(offsets) - 1, np.int64)
    np.maximum.at(result, np.repeat(np.arange(len(result)), np.diff(offsets)), counts)
    return result
