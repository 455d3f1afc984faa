"""The columns of a shard: a record batch in an index file; `encode` makes it.

Index files are read, never mapped: a file that is cut short while it is mapped ends the process with SIGBUS.

A histogram counts the captions of a shard by length and aspect ratio, in cells. A cell is one integer, part of the
format on disk. A caption of 12 tokens with an image of 480 × 640 pixels (height × width): round(32 · log2(640 / 480)) =
round(13.28) = 13 steps wider than a square, so aspect bin 128 + 13 = 141, and cell 12 · 256 + 141 = 3213. Unpacked,
3213 is (12, 141), and bin 141 stands for the ratio 2^(13 / 32) = 1.325; the image's own is 1.333.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmdata.errors import DataError
from mmdata.hashing import fast_hash
from mmdata.images.probe import FORMATS
from mmdata.index.store import read_part
from mmdata.storage.folder import ListedShard
from mmdata.tars.captions import NO_CAPTION
from mmdata.tars.scan import NO_IMAGE, IndexedMember

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
    "image_xxh3": np.dtype(np.int64),
}
"""Columns with one number a row; the units are bytes, and pixels as stored.

`image_hash` (`hash64`, a part of the SHA-256) identifies the image in batches. `image_xxh3` (`fast_hash`) is compared
when an image is loaded.
"""

LISTS: dict[str, np.dtype[Any]] = {"caption_hash": np.dtype(np.int64), "caption_tokens": np.dtype(np.int32)}
"""Columns with one number a caption; caption_tokens is empty for all rows when no tokenizer counted them."""

MEMBERS = pa.list_(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("extension", pa.string(), nullable=False),
                *(pa.field(name, pa.int64(), nullable=False) for name in ("offset", "size", "xxh3")),
            ]
        ),
        nullable=False,
    )
)
"""Type of the column `members`: all members of a row but its image, in the order of the tar (`IndexedMember`)."""

SCHEMA_VERSION = 5
"""Version of index and manifest."""

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        *(pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in FIXED.items()),
        *(
            pa.field(name, pa.list_(pa.field("item", pa.from_numpy_dtype(dtype), nullable=False)), nullable=False)
            for name, dtype in LISTS.items()
        ),
        pa.field("members", MEMBERS, nullable=False),
    ]
)


ASPECT_BINS = 256
"""Number of aspect bins, for ratios from 1:16 to 15.6:1."""
SQUARE_BIN = 128
"""Bin of the ratio 1."""
BINS_PER_OCTAVE = 32
"""Bins for each doubling of the ratio: a bin's ratio is off by a factor of at most 2^(1/64), or 1.1 %."""
MAX_TOKENS = 2**31 // ASPECT_BINS - 1
"""Longest caption that fits into a cell, an int32: 8,388,607 tokens."""

_WITHOUT_IMAGE = {"image_format": NO_IMAGE, "height": 0, "width": 0}

_INSIDE = "0 to {size}, the shard's bytes"
_BOUNDS: dict[str, tuple[int, int | None, str]] = {
    "image_offset": (0, None, _INSIDE),
    "caption_offset": (0, None, _INSIDE),
    "image_bytes": (0, None, "bytes that lie in the shard"),
    "caption_bytes": (0, None, "bytes that lie in the shard"),
    "image_format": (0, len(FORMATS) - 1, f"0 to {len(FORMATS) - 1}, or a newer mmdata"),
    "caption_format": (0, 3, "0 to 3, or a newer mmdata"),
    "height": (1, 2**31 - 1, "1 or more pixels"),
    "width": (1, 2**31 - 1, "1 or more pixels"),
    "orientation": (1, 8, "1 to 8"),
    "label": (-1, 2**63 - 1, "-1 or a class number"),
}
"""Smallest and largest value of a column, and both in words; None stands for the shard's size in bytes."""
_REMEDY = (
    "fetch the folder again, or make it anew: a conversion with `mmdata convert --overwrite`, an index by removing "
    "manifest.json and running `mmdata index` with the same --tokenizer"
)


class ShardColumns:
    """One shard's columns. Each is a view of the index file's bytes, made when first asked for.

    Args:
        record_batch: of Arrow.
        name: of the file, for messages.
        data: its bytes in the file.
        shard_bytes: size of the tar, against which values are checked; None checks no values.

    Attributes:
        data: as given.
        arrow: the record batch.
    """

    def __init__(  # pyarrow has no types
        self, record_batch: Any, name: str, data: bytes | memoryview, *, shard_bytes: int | None = None
    ) -> None:
        self.data = data
        self.arrow = record_batch
        self._of = f"index '{name}'"
        self._shard_bytes = shard_bytes
        self._fixed: dict[str, npt.NDArray[Any]] = {}
        self._lists: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return self.arrow.num_rows

    @classmethod
    def open(cls, path: Path, offset: int, *, entry: ListedShard) -> ShardColumns:
        """Read the columns of a shard from an index file.

        Their XXH3 is compared with the manifest's. The cache compares the SHA-256, which takes ten times as long.

        Args:
            path: of the file.
            offset: where in it the record batch of the shard begins.
            entry: the shard's entry in the manifest.

        Raises:
            FileNotFoundError: there is none.
            DataError: not a regular file, or not the one that the manifest names. Values are checked later, by `fixed`
                and `lists`.
        """
        data = read_part(path, "index", offset, entry.index_bytes)
        if fast_hash(data) != entry.index_xxh3:
            raise DataError(f"index '{path}', shard '{entry.name}': XXH3 differs from the manifest's; {_REMEDY}")
        return cls.parse(data, entry.rows, f"{path}', shard '{entry.name}", shard_bytes=entry.bytes)

    @classmethod
    def parse(cls, data: bytes | memoryview, rows: int, name: str, *, shard_bytes: int | None = None) -> ShardColumns:
        """Views of the bytes of a record batch.

        Args:
            data: the bytes.
            rows: how many it must have.
            name: of the file, for messages.
            shard_bytes: size of the tar, against which a column's values are checked when it is first asked for.

        Raises:
            DataError: not a record batch, or one of other columns or rows.
        """
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), SCHEMA)
            batch.validate()
            for column in batch.columns[:-1]:  # `members`, the last, is validated when it is asked for
                column.validate(full=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise DataError(f"index '{name}': not the columns of a shard: {error}; {_REMEDY}") from error
        if batch.num_rows != rows:
            raise DataError(f"index '{name}': expected {rows} rows, got {batch.num_rows}; {_REMEDY}")
        return cls(batch, name, data, shard_bytes=shard_bytes)

    def check(self) -> None:
        """Check the values of all columns; `fixed` and `lists` check the one that is asked for.

        Raises:
            DataError: a column has a value that no row of the shard can have.
        """
        for name in FIXED:
            self.fixed(name)
        for name in LISTS:
            self.lists(name)

    def _check_fixed(self, name: str, values: npt.NDArray[Any]) -> None:
        """Raise DataError if a column has a value that no row of the shard can have."""
        size = self._shard_bytes
        if size is None or not len(values) or name not in _BOUNDS:
            return
        low, high, expected = _BOUNDS[name]
        most: Any = size if high is None else high
        if name in _WITHOUT_IMAGE:
            formats = values if name == "image_format" else self.fixed("image_format")
            if (formats == NO_IMAGE).all():
                low, most, expected = _WITHOUT_IMAGE[name], _WITHOUT_IMAGE[name], "no image, as image_format says"
        if name.endswith("_bytes"):
            most = size - self.fixed(name.replace("_bytes", "_offset"))  # offsets are 0 to `size`: no overflow
        self._refuse(name, (values < low) | (values > most), values, expected.format(size=size))

    def _check_lists(self, name: str, offsets: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """As `_check_fixed`, for a list column."""
        if self._shard_bytes is None or len(offsets) < 2:
            return
        lengths = np.diff(offsets)
        if name == "caption_hash":
            lacks = self.fixed("caption_format") == NO_CAPTION
            if lacks.all():  # a shard of labels only
                self._refuse(name, lengths != 0, lengths, "no caption, as caption_format says")
            else:
                self._refuse(name, (lengths < 1) | lacks, lengths, "1 caption or more")
        elif len(values):  # no tokenizer counted them otherwise
            captions = np.diff(self.lists("caption_hash")[0])
            self._refuse(name, lengths != captions, lengths, "one for each caption")
            wrong = (values < 0) | (values > MAX_TOKENS)
            rows = np.repeat(np.arange(len(lengths)), lengths) if wrong.any() else None
            self._refuse(name, wrong, values, f"0 to {MAX_TOKENS} tokens", rows)

    def _refuse(
        self,
        name: str,
        wrong: npt.NDArray[np.bool_],
        values: npt.NDArray[Any],
        expected: str,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Raise DataError for the first wrong value, if any; `rows` are those of the values, if not one each."""
        if wrong.any():
            place = int(wrong.argmax())
            row = place if rows is None else int(rows[place])
            raise DataError(
                f"{self._of}: column '{name}', row {row} (sample '{self.keys[row].as_py()}'): {values[place]}, and "
                f"expected {expected}; {_REMEDY}"
            )

    @cached_property
    def keys(self) -> Any:
        """Arrow strings (rows,)."""
        return self.arrow.column("key")

    def keys_of(self, rows: npt.NDArray[np.int64] | slice) -> list[str]:
        """Keys of some rows: (n,), or a slice."""
        keys = self.keys
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return [keys[row].as_py() for row in numbers]

    def fixed(self, name: str) -> npt.NDArray[Any]:
        """A column of `FIXED`: (rows,)."""
        if name not in self._fixed:
            values = view(self.arrow.column(name), FIXED[name], of=self._of)
            self._check_fixed(name, values)
            self._fixed[name] = values
        return self._fixed[name]

    def lists(self, name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """A column of `LISTS`: offsets (rows + 1,) and values; row r has values[offsets[r]:offsets[r + 1]]."""
        if name not in self._lists:
            column = self.arrow.column(name)
            offsets = view(column.offsets, np.int32, of=self._of)
            values = view(column.values, LISTS[name], of=self._of)
            self._check_lists(name, offsets, values)
            self._lists[name] = offsets, values
        return self._lists[name]

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row but its image, by extension, in the tar's order."""
        return {one["extension"]: IndexedMember(**one) for one in self._members[row].as_py()}

    @cached_property
    def _members(self) -> Any:
        column = self.arrow.column("members")
        try:
            column.validate(full=True)
        except pa.ArrowException as error:
            raise DataError(f"{self._of}: column 'members': {error}; {_REMEDY}") from error
        return column

    @property
    def num_images(self) -> int:
        """Rows that have an image: all, or none."""
        return int((self.fixed("image_format") != NO_IMAGE).sum())

    @property
    def num_captions(self) -> int:
        """Captions of all rows."""
        return len(self.lists("caption_hash")[1])

    @property
    def num_labels(self) -> int:
        """Rows that have a label."""
        return int((self.fixed("label") >= 0).sum())

    def histogram(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Captions by length in tokens and aspect ratio: the cells that occur, and the captions in each.

        Captions without a length count as 0 tokens. Of a corpus of labels only, the rows are counted in their place.
        """
        turned = self.fixed("orientation") >= 5
        height = np.where(turned, self.fixed("width"), self.fixed("height"))
        width = np.where(turned, self.fixed("height"), self.fixed("width"))
        bins = aspect_bin(np.maximum(height, 1), np.maximum(width, 1))  # a row without an image counts as a square
        if self.num_captions:
            bins = np.repeat(bins, np.diff(self.lists("caption_hash")[0]))
        tokens = self.lists("caption_tokens")[1]
        return count_cells(pack_cells(tokens if len(tokens) else np.zeros(len(bins), np.int32), bins))


class Histograms(NamedTuple):
    """The histograms of n shards.

    Attributes:
        offsets: int32 (n + 1,); shard i has cells[offsets[i]:offsets[i + 1]], and counts likewise.
        cells, counts: int32.
    """

    offsets: npt.NDArray[np.int32]
    cells: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """The sum of the counts of each shard, (n,)."""
        sums = offsets_of(self.counts)
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]


def aspect_bin(height: npt.ArrayLike, width: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Aspect bins of images, EXIF orientation applied.

    Args:
        height: (n,) or scalar, in pixels, positive.
        width: as height.

    Returns:
        int32, shaped as the arguments: 128 for a square, 160 for 2:1 (width : height), 96 for 1:2; from 0 to 255.
    """
    steps = np.round(BINS_PER_OCTAVE * np.log2(np.asarray(width, np.float64) / np.asarray(height, np.float64)))
    return np.clip(steps + SQUARE_BIN, 0, ASPECT_BINS - 1).astype(np.int32)


def aspect_ratio(bins: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Width / height in the geometric middle of a bin: 128 -> 1.0, 160 -> 2.0."""
    return np.exp2((np.asarray(bins, np.float64) - SQUARE_BIN) / BINS_PER_OCTAVE)


def pack_cells(tokens: npt.ArrayLike, bins: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Cells of n captions: tokens · 256 + aspect bin.

    Raises:
        ValueError: a length below 0 or above MAX_TOKENS.
    """
    lengths = np.asarray(tokens, np.int64)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= MAX_TOKENS:
        raise ValueError(f"captions have 0 to {MAX_TOKENS} tokens: got {lengths.min()} to {lengths.max()}")
    return (lengths * ASPECT_BINS + np.asarray(bins, np.int64)).astype(np.int32)


def unpack_cells(cells: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(tokens, aspect bins) of n cells: the inverse of `pack_cells`."""
    packed = np.asarray(cells, np.int32)
    return packed >> 8, packed & (ASPECT_BINS - 1)


def count_cells(cells: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The distinct cells of a shard's captions, ascending, and how many captions each has."""
    found, counts = np.unique(np.asarray(cells, np.int32), return_counts=True)
    return found, counts.astype(np.int32)


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Offsets (n + 1,) of lists with these lengths in one flat array: [2, 0, 3] -> [0, 2, 2, 5]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def spans(begins: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions begins[i] … begins[i] + lengths[i] − 1 of all i, concatenated: ([3, 9], [2, 1]) -> [3, 4, 9]."""
    return np.arange(int(lengths.sum())) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)


def view(array: Any, dtype: npt.DTypeLike, *, of: str) -> npt.NDArray[Any]:
    """The values of an Arrow array, not copied.

    Args:
        array: n numbers.
        dtype: numpy's name for their type.
        of: the file, for the message.

    Returns:
        (n,).

    Raises:
        DataError: some of the values are missing.
    """
    if array.null_count:
        raise DataError(f"{of}: {array.null_count} of the {len(array)} values of a column are missing; make it anew")
    if not len(array):
        return np.empty(0, dtype)
    # Not `to_numpy`: it imports pandas where pandas is installed, which takes longer than planning a window.
    _, values = array.buffers()
    return np.frombuffer(values, dtype, count=len(array), offset=array.offset * np.dtype(dtype).itemsize)
