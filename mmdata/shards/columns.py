"""A shard's columns: one Arrow IPC file, uncompressed, mapped into memory. The same rows give the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmdata.errors import DataError
from mmdata.shards.histogram import aspect_bin, count_cells, pack_cells
from mmdata.shards.pages import ShardEntry
from mmdata.shards.probe import FORMATS, ImageInfo

CountTokens = Callable[[list[str]], list[int]]
"""Captions to their lengths in tokens, specials included, untruncated."""

FIXED: dict[str, np.dtype[Any]] = {
    "image_offset": np.dtype(np.int64),
    "image_bytes": np.dtype(np.int64),
    "image_format": np.dtype(np.uint8),
    "caption_offset": np.dtype(np.int64),
    "caption_bytes": np.dtype(np.int64),
    "caption_format": np.dtype(np.uint8),
    "height": np.dtype(np.int32),
    "width": np.dtype(np.int32),
    "orientation": np.dtype(np.uint8),
    "label": np.dtype(np.int64),
    "image_hash": np.dtype(np.int64),
}
"""Columns with one number a row; the units are bytes, and pixels as stored."""

LISTS: dict[str, np.dtype[Any]] = {"caption_hash": np.dtype(np.int64), "caption_tokens": np.dtype(np.int32)}
"""Columns with one number a caption; caption_tokens is empty for all rows when no tokenizer counted them."""

_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        *(pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in FIXED.items()),
        *(
            pa.field(name, pa.list_(pa.field("item", pa.from_numpy_dtype(dtype), nullable=False)), nullable=False)
            for name, dtype in LISTS.items()
        ),
    ]
)


@dataclass(frozen=True)
class Place:
    """A member's payload in its shard: offset and size in bytes."""

    offset: int
    size: int


@dataclass(frozen=True)
class Row:
    """What the index keeps of one sample; captions are kept as hashes and lengths only."""

    key: str
    image: Place
    caption: Place
    caption_format: int
    info: ImageInfo
    label: int
    image_hash: int
    captions: list[str]


def hash64(data: bytes | memoryview) -> int:
    """First 8 bytes of the SHA-256 as a signed little-endian integer."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


@dataclass(frozen=True)
class Encoded:
    """A shard's index file, before it is written."""

    data: bytes
    columns: Columns

    def entry(self, tar: str, index: str, *, size: int, sha256: str) -> ShardEntry:
        """What the manifest says of the shard, whose tar has this name, size in bytes and hash."""
        cells, counts = self.columns.histogram()
        return ShardEntry(
            name=tar,
            bytes=size,
            sha256=sha256,
            rows=len(self.columns.keys),
            index=index,
            index_sha256=hashlib.sha256(self.data).hexdigest(),
            captions=self.columns.num_captions,
            labels=self.columns.num_labels,
            cells=cells,
            counts=counts,
        )


def encode(rows: Sequence[Row], count_tokens: CountTokens | None = None) -> Encoded:
    """The index file of a shard with these rows; all captions are counted in one call."""
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
    }
    arrays: list[Any] = [pa.array([row.key for row in rows], pa.string())]
    arrays += [pa.array(np.asarray(values[name], dtype)) for name, dtype in FIXED.items()]
    hashes = np.asarray([hash64(caption.encode()) for caption in captions], np.int64)
    arrays.append(pa.ListArray.from_arrays(offsets, hashes, type=_SCHEMA.field("caption_hash").type))
    lengths = np.asarray(tokens, np.int32)
    arrays.append(
        pa.ListArray.from_arrays(
            offsets if count_tokens else offsets * 0, lengths, type=_SCHEMA.field("caption_tokens").type
        )
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
    data = sink.getvalue().to_pybytes()
    return Encoded(data, Columns.parse(data, len(rows), "this one"))


class Columns:
    """One shard's columns: views of the mapped file, each made when first asked for.

    Args:
        record_batch: the Arrow record batch of the file.
    """

    def __init__(self, record_batch: Any) -> None:  # pyarrow has no types
        self._arrow = record_batch
        self._fixed: dict[str, npt.NDArray[Any]] = {}
        self._lists: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}

    @classmethod
    def open(cls, path: Path, entry: ShardEntry, *, check_hash: bool = True) -> Columns:
        """Map the index file of a shard.

        Args:
            path: of the file.
            entry: what the manifest says of it.
            check_hash: hash the file first; a caller that has done so may leave it out.

        Raises:
            FileNotFoundError: there is none.
            DataError: not the file that the manifest names.
        """
        with pa.memory_map(str(path)) as source:  # the mapping outlives the descriptor
            buffer = source.read_buffer()
        if check_hash and hashlib.sha256(buffer).hexdigest() != entry.index_sha256:
            raise DataError(f"index '{path}': SHA-256 differs from the manifest's; {_REMEDY}")
        return cls.parse(memoryview(buffer), entry.rows, str(path))

    @classmethod
    def parse(cls, data: bytes | memoryview, rows: int, name: str) -> Columns:
        """Views of an index file's bytes; `rows` is how many it must have, `name` stands in messages.

        Raises:
            DataError: not an index file, or one of other columns or rows.
        """
        try:
            batch = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)
            batch.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"index '{name}': not an index file: {error}; {_REMEDY}") from error
        if batch.schema != _SCHEMA or batch.num_rows != rows:
            raise DataError(
                f"index '{name}': expected {rows} rows of {_SCHEMA.names}, "
                f"got {batch.num_rows} of {batch.schema.names}; {_REMEDY}"
            )
        return cls(batch)

    @cached_property
    def keys(self) -> Any:
        """Arrow strings (rows,)."""
        return self._arrow.column("key")

    def fixed(self, name: str) -> npt.NDArray[Any]:
        """A column of `FIXED`: (rows,)."""
        if name not in self._fixed:
            self._fixed[name] = self._arrow.column(name).to_numpy()
        return self._fixed[name]

    def lists(self, name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """A column of `LISTS`: offsets (rows + 1,) and values; row r has values[offsets[r]:offsets[r + 1]]."""
        if name not in self._lists:
            column = self._arrow.column(name)
            self._lists[name] = column.offsets.to_numpy(), column.values.to_numpy()
        return self._lists[name]

    @property
    def num_captions(self) -> int:
        """Captions of all rows."""
        return len(self.lists("caption_hash")[1])

    @property
    def num_labels(self) -> int:
        """Rows that have a label."""
        return int((self.fixed("label") >= 0).sum())

    def histogram(self, tokens_of: Columns | None = None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Captions by token length (0 where none counted) and aspect ratio: cells, and captions in each.

        `tokens_of`: the columns, of the same captions, whose lengths count; default: these.
        """
        turned = self.fixed("orientation") >= 5
        height = np.where(turned, self.fixed("width"), self.fixed("height"))
        width = np.where(turned, self.fixed("height"), self.fixed("width"))
        bins = np.repeat(aspect_bin(height, width), np.diff(self.lists("caption_hash")[0]))
        tokens = (tokens_of or self).lists("caption_tokens")[1]
        return count_cells(pack_cells(tokens if len(tokens) else np.zeros(len(bins), np.int32), bins))


_REMEDY = "remove manifest.json and run `mmdata index` again, or fetch the folder again"
