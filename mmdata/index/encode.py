"""Encodes the rows of a shard as its columns in the index. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.hashing import fast_hash, hash64
from mmdata.index.columns import FIXED, LISTS, MEMBERS, SCHEMA, ShardColumns
from mmdata.index.pages import ShardEntry
from mmdata.tars.captions import NO_CAPTION
from mmdata.tars.scan import IndexRow

_PLACES = ("offset", "size", "xxh3")

CountTokens = Callable[[list[str]], Sequence[int]]
"""Lengths of captions in tokens: special tokens included, nothing truncated."""


@dataclass(frozen=True)
class Encoded:
    """The columns of a shard, as the bytes of a record batch."""

    data: bytes
    columns: ShardColumns

    def entry(self, tar: str, *, size: int, sha256: str) -> ShardEntry:
        """The manifest's entry of the shard, for a tar with this name, size in bytes and SHA-256.

        `ManifestWriter` knows the place in an index file, which is 0 here.
        """
        cells, counts = self.columns.histogram()
        return ShardEntry(
            name=tar,
            bytes=size,
            sha256=sha256,
            rows=len(self.columns.keys),
            index_offset=0,
            index_bytes=len(self.data),
            index_sha256=hashlib.sha256(self.data).hexdigest(),
            index_xxh3=fast_hash(self.data),
            images=self.columns.num_images,
            captions=self.columns.num_captions,
            labels=self.columns.num_labels,
            cells=cells,
            counts=counts,
        )


def encode(rows: Sequence[IndexRow], count_tokens: CountTokens | None = None) -> Encoded:
    """The columns of a shard. All captions are counted in one call."""
    captions = [caption for row in rows for caption in row.captions]
    tokens = list(count_tokens(captions)) if count_tokens and captions else []
    if count_tokens and len(tokens) != len(captions):
        raise ValueError(f"count_tokens returned {len(tokens)} lengths for {len(captions)} captions")
    offsets = np.cumsum([0, *(len(row.captions) for row in rows)], dtype=np.int32)
    columns: dict[str, Any] = dict(zip(IndexRow._fields, zip(*rows, strict=True), strict=True)) if rows else {}
    arrays: list[Any] = [pa.array(columns.get("key", ()), pa.string())]
    arrays += [pa.array(np.array(columns.get(name, ()), dtype)) for name, dtype in FIXED.items()]
    hashes = np.asarray([hash64(caption.encode()) for caption in captions], np.int64)
    arrays.append(pa.ListArray.from_arrays(offsets, hashes, type=SCHEMA.field("caption_hash").type))
    lengths = np.asarray(tokens, np.int32)
    arrays.append(
        pa.ListArray.from_arrays(
            offsets if count_tokens else offsets * 0, lengths, type=SCHEMA.field("caption_tokens").type
        )
    )
    members = [member for row in rows for member in row.members]
    extensions, *places = zip(*members, strict=True) if members else [()] * 4
    parts = [pa.array(extensions, pa.string()), *(pa.array(values, pa.int64()) for values in places)]
    starts = np.cumsum([0, *(len(row.members) for row in rows)], dtype=np.int32)
    arrays.append(_member_lists(starts, parts))
    return _encoded(arrays, len(rows))


def with_tokens(columns: ShardColumns, tokens: Sequence[int]) -> Encoded:
    """The columns of a shard with the lengths of its captions, one for each, in the order of rows and captions."""
    offsets, hashes = columns.lists("caption_hash")
    if len(tokens) != len(hashes):
        raise ValueError(f"{len(tokens)} lengths for {len(hashes)} captions")
    arrays: list[Any] = [columns.keys]
    arrays += [pa.array(columns.fixed(name)) for name in FIXED]
    for name, values in (("caption_hash", hashes), ("caption_tokens", np.asarray(tokens, np.int32))):
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets), values, type=SCHEMA.field(name).type))
    arrays.append(columns.members_of(np.arange(len(columns))))
    return _encoded(arrays, len(columns))


def rearranged(parts: Sequence[tuple[ShardColumns, NDArray[np.int64], NDArray[np.int64]]]) -> Encoded:
    """The columns of a shard whose samples were copied from other shards.

    Args:
        parts: in the order of the new shard: columns of an old one, int64 (n,) rows of it, and int64 (n,), by how many
            bytes each of them was moved.
    """
    arrays: list[Any] = [pa.concat_arrays([columns.keys.take(pa.array(rows)) for columns, rows, _ in parts])]
    for name in FIXED:
        taken = [_moved(columns, name, rows, moved) for columns, rows, moved in parts]
        arrays.append(pa.array(np.concatenate(taken)))
    for name in LISTS:
        kind = SCHEMA.field(name).type
        lists = [pa.ListArray.from_arrays(*map(pa.array, columns.lists(name)), type=kind) for columns, _, _ in parts]
        taken = [old.take(pa.array(rows)) for old, (_, rows, _) in zip(lists, parts, strict=True)]
        arrays.append(pa.concat_arrays(taken))
    arrays.append(pa.concat_arrays([_moved_members(*part) for part in parts]))
    return _encoded(arrays, sum(len(rows) for _, rows, _ in parts))


def _moved(columns: ShardColumns, name: str, rows: NDArray[np.int64], moved: NDArray[np.int64]) -> NDArray[Any]:
    values = columns.fixed(name)[rows]
    if name == "image_offset":
        return values + moved
    if name == "caption_offset":
        return np.where(columns.fixed("caption_format")[rows] == NO_CAPTION, values, values + moved)
    return values


def _moved_members(columns: ShardColumns, rows: NDArray[np.int64], moved: NDArray[np.int64]) -> Any:
    """The members of some rows that were moved by so many bytes each."""
    taken = columns.members_of(rows)
    starts, values = taken.offsets.to_numpy(), taken.values
    places = {name: values.field(name).to_numpy() for name in _PLACES}
    places["offset"] = places["offset"] + np.repeat(moved, np.diff(starts))
    return _member_lists(starts, [values.field("extension"), *(pa.array(places[name]) for name in _PLACES)])


def _member_lists(starts: NDArray[np.int32], parts: list[Any]) -> Any:
    struct = pa.StructArray.from_arrays(parts, fields=[*MEMBERS.value_type])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), struct, type=MEMBERS)


def _encoded(arrays: list[Any], rows: int) -> Encoded:
    data = pa.record_batch(arrays, schema=SCHEMA).serialize().to_pybytes()
    return Encoded(data, ShardColumns.parse(data, rows, "this one"))
