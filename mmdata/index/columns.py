"""Reads the columns of a shard: a record batch in an uncompressed Arrow IPC file; `encode` makes it.

Index files are read whole, never mapped: a file that is cut short while it is mapped ends the process with SIGBUS.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmdata.errors import DataError
from mmdata.hashing import fast_hash
from mmdata.images.probe import FORMATS
from mmdata.index.histogram import MAX_TOKENS, aspect_bin, count_cells, pack_cells
from mmdata.index.read_together import read_together
from mmdata.storage.listed import ListedShard
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

SCHEMA_VERSION = 4
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
    """

    def __init__(  # pyarrow has no types
        self, record_batch: Any, name: str, data: bytes | memoryview, *, shard_bytes: int | None = None
    ) -> None:
        self.data = data
        self._of = f"index '{name}'"
        self._shard_bytes = shard_bytes
        self._arrow = record_batch
        self._fixed: dict[str, npt.NDArray[Any]] = {}
        self._lists: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return self._arrow.num_rows

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
        data = read_together(path, "index", offset, entry.index_bytes)
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

    def values(self, name: str) -> list[Any]:
        """All values of a column, one a row, as Python has them."""
        return self._arrow.column(name).to_pylist()

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
        """Raise DataError if a column has a value that no row can have."""
        if self._shard_bytes is not None:
            offsets = self.fixed(name.replace("_bytes", "_offset")) if name.endswith("_bytes") else None
            formats = values if name == "image_format" else self.fixed("image_format")
            lacks_images = len(formats) > 0 and bool((formats == NO_IMAGE).all())
            self._refuse(
                name,
                _wrong_number(name, values, size=self._shard_bytes, offsets=offsets, lacks_images=lacks_images),
            )

    def _check_list(self, name: str, offsets: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """As `_check_fixed`, for a list column."""
        if self._shard_bytes is None:
            return
        if name == "caption_hash":
            self._refuse(name, _wrong_captions(offsets, formats=self.fixed("caption_format")))
        else:
            self._refuse(name, _wrong_tokens(offsets, values, captions=self.lists("caption_hash")[0]))

    def _refuse(self, name: str, wrong: _WrongValue | None) -> None:
        if wrong is not None:
            raise DataError(
                f"{self._of}: column '{name}', row {wrong.row} (sample '{self.keys[wrong.row].as_py()}'): "
                f"{wrong.value}, and expected {wrong.expected}; {_REMEDY}"
            )

    @cached_property
    def keys(self) -> Any:
        """Arrow strings (rows,)."""
        return self._arrow.column("key")

    def keys_of(self, rows: npt.NDArray[np.int64] | slice) -> list[str]:
        """Keys of some rows: (n,), or a slice."""
        keys = self.keys
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return [keys[row].as_py() for row in numbers]

    def fixed(self, name: str) -> npt.NDArray[Any]:
        """A column of `FIXED`: (rows,)."""
        if name not in self._fixed:
            values = view(self._arrow.column(name), FIXED[name], of=self._of)
            self._check_fixed(name, values)
            self._fixed[name] = values
        return self._fixed[name]

    def lists(self, name: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
        """A column of `LISTS`: offsets (rows + 1,) and values; row r has values[offsets[r]:offsets[r + 1]]."""
        if name not in self._lists:
            column = self._arrow.column(name)
            offsets = view(column.offsets, np.int32, of=self._of)
            values = view(column.values, LISTS[name], of=self._of)
            self._check_list(name, offsets, values)
            self._lists[name] = offsets, values
        return self._lists[name]

    def members(self, row: int) -> dict[str, IndexedMember]:
        """All members of a row but its image, by extension, in the tar's order."""
        return {one["extension"]: IndexedMember(**one) for one in self._members[row].as_py()}

    def members_of(self, rows: npt.NDArray[np.int64]) -> Any:
        """The column `members` of n rows, an Arrow array of lists (n,)."""
        return self._members.take(pa.array(rows))

    @cached_property
    def _members(self) -> Any:
        column = self._arrow.column("members")
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

    def histogram(self, tokens_of: ShardColumns | None = None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Captions by length in tokens and aspect ratio: the cells that occur, and the captions in each.

        Of a corpus of labels only, the rows are counted in their place, with 0 tokens.

        Args:
            tokens_of: columns of the same captions that give the lengths; default: these. Captions without a length
                count as 0 tokens.
        """
        turned = self.fixed("orientation") >= 5
        height = np.where(turned, self.fixed("width"), self.fixed("height"))
        width = np.where(turned, self.fixed("height"), self.fixed("width"))
        bins = aspect_bin(np.maximum(height, 1), np.maximum(width, 1))  # a row without an image counts as a square
        if self.num_captions:
            bins = np.repeat(bins, np.diff(self.lists("caption_hash")[0]))
        tokens = (tokens_of or self).lists("caption_tokens")[1]
        return count_cells(pack_cells(tokens if len(tokens) else np.zeros(len(bins), np.int32), bins))


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


class _WrongValue(NamedTuple):
    """The first impossible value of a column: its row, the value, and what was expected."""

    row: int
    value: int
    expected: str


@cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _wrong_number(
    name: str,
    values: npt.NDArray[Any],
    *,
    size: int,
    offsets: npt.NDArray[Any] | None = None,
    lacks_images: bool = False,
) -> _WrongValue | None:
    """The first wrong value of a column with one number a row, or None.

    Args:
        name: of the column.
        values: (rows,).
        size: of the shard in bytes.
        offsets: (rows,), for a column of sizes in bytes: the offset of each payload, 0 to `size`.
        lacks_images: whether no row has an image; else all have one.
    """
    if not len(values) or name not in _BOUNDS:
        return None
    low, high, expected = _BOUNDS[name]
    if lacks_images and name in _WITHOUT_IMAGE:
        low, high, expected = _WITHOUT_IMAGE[name], _WITHOUT_IMAGE[name], "no image, as image_format says"
    if high is None:
        high = size
    if offsets is not None:
        # Offsets are at most `size`, so a sum that overflows is negative: as unsigned, above any size.
        if values.min() >= 0 and (offsets + values).view(np.uint64).max() <= size:
            return None
        wrong = (values < 0) | (values > size - offsets)
    else:
        least, greatest = _limits(values.dtype)
        if (low <= least or values.min() >= low) and (high >= greatest or values.max() <= high):
            return None
        wrong = (values < low) | (values > high)
    row = int(wrong.argmax())
    return _WrongValue(row, int(values[row]), expected.format(size=size))


def _wrong_captions(offsets: npt.NDArray[np.int32], *, formats: npt.NDArray[np.uint8]) -> _WrongValue | None:
    """The first row without a caption, or None; all rows of a shard of labels only are without.

    Args:
        offsets: (rows + 1,), those of `ShardColumns.lists`.
        formats: (rows,), column caption_format.
    """
    lengths = np.diff(offsets)
    if len(formats) and (formats == NO_CAPTION).all():
        wrong, expected = lengths != 0, "no caption, as caption_format says"
    else:
        wrong, expected = (lengths < 1) | (formats == NO_CAPTION), "1 caption or more"
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    return _WrongValue(row, int(lengths[row]), expected)


def _wrong_tokens(
    offsets: npt.NDArray[np.int32], values: npt.NDArray[Any], *, captions: npt.NDArray[np.int32]
) -> _WrongValue | None:
    """The first row whose captions and token counts differ in number, or with an impossible count; or None.

    Args:
        offsets: (rows + 1,), of the token counts.
        values: tokens of each caption; empty if no tokenizer counted them.
        captions: (rows + 1,), offsets of the captions.
    """
    if len(offsets) < 2 or not len(values):
        return None
    if offsets.tobytes() != captions.tobytes():  # both (rows + 1,)
        row = int((np.diff(offsets) != np.diff(captions)).argmax())
        return _WrongValue(row, int(np.diff(offsets)[row]), f"{np.diff(captions)[row]}, one for each caption")
    if values.view(np.uint32).max() > MAX_TOKENS:  # as unsigned, a negative value is larger than MAX_TOKENS
        place = int(((values < 0) | (values > MAX_TOKENS)).argmax())
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        return _WrongValue(row, int(values[place]), f"0 to {MAX_TOKENS} tokens")
    return None
