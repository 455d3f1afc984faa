"""Encodes the rows of a shard as its index file. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.hashing import fast_hash, hash64
from mmdata.images.probe import FORMATS
from mmdata.index.columns import FIXED, LISTS, SCHEMA, Columns
from mmdata.index.pages import ShardEntry
from mmdata.tars.captions import NO_CAPTION
from mmdata.tars.row import Row

CountTokens = Callable[[list[str]], list[int]]
"""Lengths of captions in tokens: special tokens included, nothing truncated."""


@dataclass(frozen=True)
class Encoded:
    """A shard's index file, before it is written."""

    data: bytes
    columns: Columns

    def entry(self, tar: str, index: str, *, size: int, sha256: str) -> ShardEntry:
        """The manifest's entry of the shard, for a tar with this name, size in bytes and SHA-256."""
        cells, counts = self.columns.histogram()
        return ShardEntry(
            name=tar,
            bytes=size,
            sha256=sha256,
            rows=len(self.columns.keys),
            index=index,
            index_sha256=hashlib.sha256(self.data).hexdigest(),
            index_xxh3=fast_hash(self.data),
            captions=self.columns.num_captions,
            labels=self.columns.num_labels,
            cells=cells,
            counts=counts,
        )


def encode(rows: Sequence[Row], count_tokens: CountTokens | None = None) -> Encoded:
    """The index file of a shard. All captions are counted in one call."""
    captions = [caption for row in rows for caption in row.captions]
    tokens = list(count_tokens(captions)) if count_tokens and captions else []
    if count_tokens and len(tokens) != len(captions):
        raise ValueError(f"count_tokens returned {len(tokens)} lengths for {len(captions)} captions")
    offsets = np.cumsum([0, *(len(row.captions) for row in rows)], dtype=np.int32)
    values: dict[str, list[int]] = {
        "image_offset": [row.image.offset for row in rows],
        "image_bytes": [row.image.size for row in rows],
        "image_format": [FORMATS.index(row.info.format) for row in rows],
        "caption_offset": [row.caption.offset for row in rows],
        "caption_bytes": [row.caption.size for row in rows],
        "caption_format": [row.caption_format for row in rows],
        "height": [row.info.height for row in rows],
        "width": [row.info.width for row in rows],
        "orientation": [row.info.orientation for row in rows],
        "label": [row.label for row in rows],
        "image_hash": [row.image_hash for row in rows],
        "image_xxh3": [row.image_xxh3 for row in rows],
    }
    arrays: list[Any] = [pa.array([row.key for row in rows], pa.string())]
    arrays += [pa.array(np.asarray(values[name], FIXED[name])) for name in FIXED]
    hashes = np.asarray([hash64(caption.encode()) for caption in captions], np.int64)
    arrays.append(pa.ListArray.from_arrays(offsets, hashes, type=SCHEMA.field("caption_hash").type))
    lengths = np.asarray(tokens, np.int32)
    arrays.append(
        pa.ListArray.from_arrays(
            offsets if count_tokens else offsets * 0, lengths, type=SCHEMA.field("caption_tokens").type
        )
    )
    return _encoded(arrays, len(rows))


def with_tokens(columns: Columns, tokens: Sequence[int]) -> Encoded:
    """The index file of a shard with the lengths of its captions, one for each, in the order of rows and captions."""
    offsets, hashes = columns.lists("caption_hash")
    if len(tokens) != len(hashes):
        raise ValueError(f"{len(tokens)} lengths for {len(hashes)} captions")
    arrays: list[Any] = [columns.keys]
    arrays += [pa.array(columns.fixed(name)) for name in FIXED]
    for name, values in (("caption_hash", hashes), ("caption_tokens", np.asarray(tokens, np.int32))):
        arrays.append(pa.ListArray.from_arrays(pa.array(offsets), values, type=SCHEMA.field(name).type))
    return _encoded(arrays, len(columns))


def rearranged(parts: Sequence[tuple[Columns, NDArray[np.int64], NDArray[np.int64]]]) -> Encoded:
    """The index file of a shard whose samples were copied from other shards.

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
    return _encoded(arrays, sum(len(rows) for _, rows, _ in parts))


def _moved(columns: Columns, name: str, rows: NDArray[np.int64], moved: NDArray[np.int64]) -> NDArray[Any]:
    values = columns.fixed(name)[rows]
    if name == "image_offset":
        return values + moved
    if name == "caption_offset":
        return np.where(columns.fixed("caption_format")[rows] == NO_CAPTION, values, values + moved)
    return values


def _encoded(arrays: list[Any], rows: int) -> Encoded:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
    data = sink.getvalue().to_pybytes()
    return Encoded(data, Columns.parse(data, rows, "this one"))
