"""Rows that mean the same, by a column of the corpus's own truth: their captions count as equal (`data.meaning`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import EMPTY_HASH, fast_hash, hash64
from mmdata.index import Index
from mmdata.nearest import meant
from mmdata.plan import CaptionSources, Groups, IndexRows
from mmdata.plan.rows import Hashes, HashesOf
from mmdata.tables.arrow_values import DATES, date_kind, iso_texts
from mmdata.tables.joined import Joined
from mmdata.tables.row_columns import RowColumns
from mmdata.tables.selection import row_chunks

logger = logging.getLogger("mmdata")

OF = "data.meaning"
NONE = 0
"""Hash of a row that has no value: its caption is equal to those of the same text."""
FEW = 0.1
"""Share of rows with a value below which the table is probably of other keys."""

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
        ConfigError: no such column, the nearest one is named; or one of floats, which are seldom equal.
    """

    def __init__(self, column: str, index: Index, joined: Joined) -> None:
        columns = RowColumns(index, joined)
        known = columns.names("number", "text", "bool", *DATES)
        if column not in known:
            raise ConfigError(
                f"{OF}: no column '{column}' of numbers, texts or dates{meant(column, known)}; there are "
                f"{', '.join(known)}"
            )
        columns.warn_of_hidden([column], of=OF)
        index.fetch_columns(np.arange(index.num_shards))
        found = [columns.of_shard(shard, column) for shard in range(index.num_shards)]
        kind = columns.types[column]
        if pa.types.is_floating(kind) and not all(map(_are_whole, found)):
            raise ConfigError(
                f"{OF} '{column}': its values are floats ({kind}), which are seldom equal; give texts or whole "
                'numbers. pandas makes floats of whole numbers where some are missing: table.astype({"'
                f'{column}": "Int64"}})'
            )
        self.hashes = np.concatenate([np.empty(0, np.int64), *map(_hashes, found)])
        self.column = column
        self.name = f"{OF} {column} ({fast_hash(self.hashes.tobytes()) % 2**64:016x})"

    @classmethod
    def from_config(cls, data: DataConfig, index: Index, joined: Joined) -> Meaning | None:
        """That of a section `data`; None if it names none. Logs that few rows have a value."""
        if data.meaning is None:
            return None
        meaning = cls(data.meaning, index, joined)
        if (known := int((meaning.hashes != NONE).sum())) < FEW * len(index):
            logger.warning(
                "%s: %s of %s rows have a value of '%s'; captions of all others are equal by their texts alone. Are "
                "the table's keys those of data.shards?",
                OF,
                f"{known:,}",
                f"{len(index):,}",
                data.meaning,
            )
        return meaning

    def of(self, rows: Ints, caption_hashes: Ints) -> Ints:
        """Hashes by which the captions of n rows are equal, int64 (n,); rows are -1 where there is none.

        A caption that was dropped is equal to others that were, whatever the row means.
        """
        found = np.where(rows < 0, NONE, self.hashes[rows])
        return np.where((found == NONE) | (caption_hashes == EMPTY_HASH), caption_hashes, found)

    def warn_of_groups(self, groups: Groups | None, data: DataConfig) -> None:
        """Log that groups of a file hold rows that mean the same, which were found without knowing it."""
        if groups is None or data.groups is None or data.groups.source in ("label", "run"):
            return
        if alike := self.count_groups_alike(groups.of_rows):
            logger.warning(
                "data.groups.source '%s': %s of %s groups hold rows that mean the same (%s %s), which are no negatives "
                "of each other: make the groups anew with `mmdata neighbours` and %s",
                data.groups.source,
                f"{alike:,}",
                f"{len(np.unique(groups.of_rows[groups.of_rows >= 0])):,}",
                OF,
                self.column,
                OF,
            )

    def count_groups_alike(self, of_rows: Ints) -> int:
        """How many groups hold two rows of one meaning.

        Args:
            of_rows: int64 (rows of the index,), the group of each row; below 0 for none.
        """
        known = (of_rows >= 0) & (self.hashes != NONE)
        pairs = np.stack([self.hashes[known], of_rows[known]])
        pairs = pairs[:, np.lexsort(pairs)]
        again = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
        return len(np.unique(pairs[1, 1:][again]))

    def added(self, batch: Batch) -> Batch:
        """The batch with these hashes as caption_hash; as it is if it has no hashes of captions."""
        if "caption_hash" not in batch:
            return batch
        hashes = self.of(batch["rows"].numpy(), batch["caption_hash"].numpy())
        return cast(Batch, {**batch, "caption_hash": torch.from_numpy(hashes)})


def _are_whole(values: Any) -> bool:
    """Whether all values that there are, are whole numbers."""
    known = values.to_numpy(zero_copy_only=False)
    known = known[~np.isnan(known)]
    return bool((known == np.floor(known)).all())


def _hashes(values: Any) -> Ints:
    """The hash of each value of an Arrow array, int64 (n,)."""
    found = (iso_texts(values) if date_kind(values.type) else values).dictionary_encode()
    hashes = [NONE if value is None or value != value else _hash(value) for value in found.dictionary.to_pylist()]
    return np.array([*hashes, NONE], np.int64)[found.indices.fill_null(-1).to_numpy()]


def _hash(value: object) -> int:
    plain = int(value) if isinstance(value, float) and value.is_integer() else value  # floats, where some are missing
    return hash64(repr(plain).encode())


def hashes_by(rows: IndexRows, meaning: Meaning | None) -> HashesOf:
    """The hashes by which rows are duplicates: of image, and of caption or what it means."""
    if meaning is None:
        return rows.hashes

    def of(numbers: Ints, passes: Ints) -> Hashes:
        image, caption = rows.hashes(numbers, passes)
        return Hashes(image, meaning.of(numbers, caption))

    return of


def rows_alike(index: Index, captions: CaptionSources | None, meaning: Meaning | None) -> Ints:
    """What makes rows equal, int64 (len(index), 2): hashes of image and of caption, or of what the caption means.

    Rows that are equal in one of the two are no negatives of each other. The captions are those of the first pass.

    Args:
        index: of the rows.
        captions: sources from which the rows draw their captions; None: those of the shards in turn.
        meaning: by which captions are equal; None: by their texts.
    """
    rows = IndexRows(index, lengths=captions or ("index" if index.has_captions else "no_texts"))
    hashes = hashes_by(rows, meaning)

    def parts() -> Iterator[Ints]:
        for numbers in row_chunks(None, len(index)):
            yield np.stack(hashes(numbers, np.zeros(len(numbers), np.int64)), axis=1)

    return np.concatenate([np.empty((0, 2), np.int64), *parts()])
