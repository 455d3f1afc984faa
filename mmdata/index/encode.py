"""Makes the columns of a shard. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.hashing import hash64
from mmdata.index.columns import FIXED, MEMBERS, SCHEMA, ShardColumns
from mmdata.tars.captions import NO_CAPTION
from mmdata.tars.scan import IndexRow
from mmdata.tars.texts import Loss

CountTokens = Callable[[list[str]], Sequence[int]]
"""Lengths of captions in tokens: special tokens included, nothing truncated."""


def encode(rows: Sequence[IndexRow], count_tokens: CountTokens | None = None) -> ShardColumns:
    """The columns of a shard. All captions are counted in one call."""
    captions = [caption for row in rows for caption in row.captions]
    columns: dict[str, Any] = dict(zip(IndexRow._fields, zip(*rows, strict=True), strict=True)) if rows else {}
    arrays: list[Any] = [pa.array(columns.get("key", ()), pa.string())]
    arrays += [pa.array(np.array(columns.get(name, ()), dtype)) for name, dtype in FIXED.items()]
    offsets = np.cumsum([0, *(len(row.captions) for row in rows)], dtype=np.int32)
    hashes = np.asarray([hash64(caption.encode()) for caption in captions], np.int64)
    arrays.append(pa.ListArray.from_arrays(offsets, hashes, type=SCHEMA.field("caption_hash").type))
    arrays.append(_tokens(offsets if count_tokens else offsets * 0, _counted(captions, count_tokens)))
    members = [member for row in rows for member in row.members]
    extensions, *places = zip(*members, strict=True) if members else [()] * 4
    parts = [pa.array(extensions, pa.string()), *(pa.array(values, pa.int64()) for values in places)]
    starts = np.cumsum([0, *(len(row.members) for row in rows)], dtype=np.int32)
    arrays.append(_members(starts, parts))
    return columns_of(pa.record_batch(arrays, schema=SCHEMA))


def columns_of(batch: Any) -> ShardColumns:
    """The columns in a record batch of Arrow."""
    return ShardColumns.parse(batch.serialize().to_pybytes(), batch.num_rows, "this one")


def with_tokens(columns: ShardColumns, captions: list[str], count_tokens: CountTokens) -> ShardColumns:
    """The columns of a shard with the lengths of its captions, which are given in the order of the rows."""
    assert len(captions) == columns.num_captions
    offsets = columns.arrow.column("caption_hash").offsets
    return columns_of(_replaced(columns.arrow, "caption_tokens", _tokens(offsets, _counted(captions, count_tokens))))


def rearranged(parts: Sequence[tuple[ShardColumns, NDArray[np.int64], NDArray[np.int64]]]) -> ShardColumns:
    """The columns of a shard whose samples were copied from other shards.

    Args:
        parts: in the order of the new shard: columns of an old one, int64 (n,) rows of it, and int64 (n,), by how many
            bytes each of them was moved.
    """
    batches = [_moved(columns.arrow.take(pa.array(rows)), moved) for columns, rows, moved in parts]
    arrays = [pa.concat_arrays([batch.column(name) for batch in batches]) for name in SCHEMA.names]
    return columns_of(pa.record_batch(arrays, schema=SCHEMA))


def _moved(batch: Any, moved: NDArray[np.int64]) -> Any:
    """Rows of a tar in which each of them was moved by so many bytes."""
    has_caption = batch.column("caption_format").to_numpy() != NO_CAPTION
    for name, by in (("image_offset", moved), ("caption_offset", np.where(has_caption, moved, 0))):
        batch = _replaced(batch, name, pa.array(batch.column(name).to_numpy() + by))
    lists = batch.column("members")
    starts, members = lists.offsets.to_numpy(), lists.values
    offsets = members.field("offset").to_numpy() + np.repeat(moved, np.diff(starts))
    parts = [pa.array(offsets) if name == "offset" else members.field(name) for name in MEMBERS.value_type.names]
    return _replaced(batch, "members", _members(starts, parts))


def _replaced(batch: Any, name: str, column: Any) -> Any:
    return batch.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), column)


def _tokens(offsets: Any, tokens: Sequence[int]) -> Any:
    return pa.ListArray.from_arrays(offsets, np.asarray(tokens, np.int32), type=SCHEMA.field("caption_tokens").type)


def _counted(captions: list[str], count_tokens: CountTokens | None) -> Sequence[int]:
    tokens = list(count_tokens(captions)) if count_tokens and captions else []
    if count_tokens and len(tokens) != len(captions):
        raise ValueError(f"count_tokens returned {len(tokens)} lengths for {len(captions)} captions")
    return tokens


def _members(starts: NDArray[np.int32], parts: list[Any]) -> Any:
    struct = pa.StructArray.from_arrays(parts, fields=[*MEMBERS.value_type])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), struct, type=MEMBERS)


class Labels:
    """Numbers class names in order of first appearance; labels that are numbers stay as they are.

    `decide`, or else the first label, says whether the labels of a corpus are names or numbers. Equal labels in equal
    order get equal numbers, in `mmdata index` and, if all are names or all are numbers, in `mmdata convert`.

    Args:
        names: names that the corpus declares, by class number.

    Attributes:
        names: by class number; empty if labels are numbers without names.
        are_names: whether labels are names; None before the first one.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.are_names: bool | None = None
        self._is_closed = False

    def decide(self, first: Sequence[int | str]) -> None:
        """Take labels for names or numbers as most of the first ones of the corpus are; of a tie, as the first is."""
        names = sum(isinstance(label, str) for label in first)
        if 2 * names != len(first):
            self.are_names = 2 * names > len(first)

    def close(self) -> None:
        """Take no further names: all labels were seen."""
        self.are_names = self.are_names is not False
        self._is_closed = True

    def number(self, label: int | str | None) -> int | None:
        """The class number of a label, or None.

        Raises:
            BadSample: labels are numbers, and this one is a name; or it is new after `close`.
        """
        if label is None:
            return None
        if self.are_names is None:
            self.are_names = isinstance(label, str)
        if not self.are_names:
            if isinstance(label, str):
                detail = f"label {excerpt(label)} is not a number, as other labels are"
                raise BadSample(Reason.BROKEN_ROW, detail)
            return label
        name = str(label)
        if name not in self._numbers:
            if self._is_closed:
                raise BadSample(Reason.FILE_CHANGED, f"label {excerpt(label)} was not there when classes were numbered")
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


def number_labels(
    columns: ShardColumns, labels: Sequence[int | str | None], numbers: Labels
) -> tuple[ShardColumns, list[tuple[str, dict[Loss, str]]]]:
    """Columns with the labels of their rows as class numbers, and the labels lost: (key, names among numbers)."""
    numbered: list[int] = []
    losses: list[tuple[str, dict[Loss, str]]] = []
    for row, label in enumerate(labels):
        try:
            number = numbers.number(label)
        except BadSample as bad:
            number = None
            losses.append((columns.keys[row].as_py(), {Loss.LABEL_NAME: bad.detail}))
        numbered.append(-1 if number is None else number)
    if numbered != columns.fixed("label").tolist():
        columns = columns_of(_replaced(columns.arrow, "label", pa.array(numbered, pa.int64())))
    return columns, losses
