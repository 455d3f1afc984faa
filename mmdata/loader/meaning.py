"""Rows that mean the same, by a column of the corpus's own truth: their captions count as equal (`data.meaning`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import EMPTY_HASH, fast_hash, hash64
from mmdata.join.joined import Joined
from mmdata.nearest import meant
from mmdata.plan import CaptionSources, IndexRows
from mmdata.plan.select.index_columns import column_of, kinds_of
from mmdata.plan.selection import row_chunks
from mmdata.shards import Index

OF = "data.meaning"
NONE = 0
"""Hash of a row that has no value: its caption is equal to those of the same text."""

Ints = NDArray[np.int64]


class Meaning:
    """A hash of each row's meaning, 8 bytes a row.

    Args:
        column: of the index or of a joined table.
        index: of the rows.
        joined: the tables.

    Attributes:
        hashes: int64 (len(index),), equal for equal values; `NONE` where a row has none.
        name: for states and messages, with a digest of the hashes.

    Raises:
        ConfigError: no such column, or one whose values cannot be compared; the nearest one is named.
    """

    def __init__(self, column: str, index: Index, joined: Joined) -> None:
        kinds = {name: kind for name, kind in kinds_of(index, joined).items() if kind != "other"}
        if column not in kinds:
            raise ConfigError(
                f"{OF}: no column '{column}' of numbers, texts or dates{meant(column, kinds)}; there are "
                f"{', '.join(sorted(kinds))}"
            )
        index.fetch_columns(np.arange(index.num_shards))
        of_shards = (_hashes(column_of(index, joined, shard, column)) for shard in range(index.num_shards))
        self.hashes = np.concatenate([np.empty(0, np.int64), *of_shards])
        self.name = f"{OF} {column} ({fast_hash(self.hashes.tobytes()) % 2**64:016x})"

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, joined: Joined) -> Meaning | None:
        """That of a section `data`; None if it names none."""
        return None if data.meaning is None else cls(data.meaning, index, joined)

    def of(self, rows: Ints, caption_hashes: Ints) -> Ints:
        """Hashes by which the captions of n rows are equal, int64 (n,); rows are -1 where there is none.

        A caption that was dropped is equal to others that were, whatever the row means.
        """
        found = np.where(rows < 0, NONE, self.hashes[rows])
        return np.where((found == NONE) | (caption_hashes == EMPTY_HASH), caption_hashes, found)

    def added(self, batch: Batch) -> Batch:
        """The batch with these hashes as caption_hash; as it is if it has no hashes of captions."""
        if "caption_hash" not in batch:
            return batch
        hashes = self.of(batch["rows"].numpy(), batch["caption_hash"].numpy())
        return cast(Batch, {**batch, "caption_hash": torch.from_numpy(hashes)})


def _hashes(values: NDArray[np.generic]) -> Ints:
    known: dict[object, int] = {}
    found = np.empty(len(values), np.int64)
    listed: list[Any] = values.tolist()
    if values.dtype.kind == "M":  # as texts: nanoseconds would be listed as numbers
        listed = [None if text == "NaT" else text for text in values.astype(str).tolist()]
    for row, value in enumerate(listed):
        if value is None or value != value:  # NaN
            found[row] = NONE
            continue
        if value not in known:
            # Whole numbers come as floats from a shard in which a row has none.
            plain = int(value) if isinstance(value, float) and value.is_integer() else value
            known[value] = hash64(repr(plain).encode())
        found[row] = known[value]
    return found


def rows_alike(index: Index, captions: CaptionSources | None, meaning: Meaning | None) -> Ints:
    """What makes rows equal, int64 (len(index), 2): hashes of image and of caption, or of what the caption means.

    Rows that are equal in one of the two are no negatives of each other. The captions are those of the first pass.

    Args:
        index: of the rows.
        captions: sources from which the rows draw their captions; None: those of the shards in turn.
        meaning: by which captions are equal; None: by their texts.
    """
    rows = IndexRows(index, lengths=captions or ("index" if index.has_captions else "no_texts"))

    def parts() -> Iterator[Ints]:
        for numbers in row_chunks(None, len(index)):
            image, caption = rows.hashes(numbers, np.zeros(len(numbers), np.int64))
            yield np.stack([image, caption if meaning is None else meaning.of(numbers, caption)], axis=1)

    return np.concatenate([np.empty((0, 2), np.int64), *parts()])
