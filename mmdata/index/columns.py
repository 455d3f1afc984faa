"""Reads the columns of a shard from its index file, an uncompressed Arrow IPC file; `encode` makes it.

Index files are read whole, never mapped: a file that is cut short while it is mapped ends the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmdata.errors import DataError
from mmdata.hashing import fast_hash
from mmdata.index.arrow_view import view
from mmdata.index.histogram import aspect_bin, count_cells, pack_cells
from mmdata.index.read_together import read_together
from mmdata.index.values import WrongValue, wrong_captions, wrong_number, wrong_tokens
from mmdata.storage.listed import ListedShard

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

SCHEMA_VERSION = 3
"""Version of index and manifest."""

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        *(pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in FIXED.items()),
        *(
            pa.field(name, pa.list_(pa.field("item", pa.from_numpy_dtype(dtype), nullable=False)), nullable=False)
            for name, dtype in LISTS.items()
        ),
    ]
)


class Columns:
    """One shard's columns. Each is a view of the index file's bytes, made when first asked for.

    Args:
        record_batch: the Arrow record batch of the file.
        name: of the file, for messages.
        data: the file's bytes.
        shard_bytes: size of the tar, against which values are checked; None checks no values.
    """

    def __init__(  # pyarrow has no types
        self, record_batch: Any, name: str, data: bytes | memoryview, *, shard_bytes: int | None = None
    ) -> None:
        self._data = data
        self._of = f"index '{name}'"
        self._shard_bytes = shard_bytes
        self._arrow = record_batch
        self._fixed: dict[str, npt.NDArray[Any]] = {}
        self._lists: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return self._arrow.num_rows

    @classmethod
    def open(cls, path: Path, entry: ListedShard) -> Columns:
        """Read the index file of a shard.

        Its XXH3 is compared with the manifest's. The cache and `verify` compare the SHA-256, which takes ten times as
        long.

        Args:
            path: of the file.
            entry: the shard's entry in the manifest.

        Raises:
            FileNotFoundError: there is none.
            DataError: not a regular file, or not the one that the manifest names. Values are checked later, by `fixed`
                and `lists`.
        """
        data = read_together(path, "index")
        if fast_hash(data) != entry.index_xxh3:
            raise DataError(f"index '{path}': XXH3 differs from the manifest's; {_REMEDY}")
        return cls.parse(data, entry.rows, str(path), shard_bytes=entry.bytes)

    @classmethod
    def parse(cls, data: bytes | memoryview, rows: int, name: str, *, shard_bytes: int | None = None) -> Columns:
        """Views of an index file's bytes.

        Args:
            data: the bytes.
            rows: how many the file must have.
            name: of the file, for messages.
            shard_bytes: size of the tar, against which a column's values are checked when it is first asked for.

        Raises:
            DataError: not an index file, or one of other columns or rows.
        """
        try:
            batch = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)
            batch.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"index '{name}': not an index file: {error}; {_REMEDY}") from error
        if batch.schema != SCHEMA or batch.num_rows != rows:
            raise DataError(
                f"index '{name}': expected {rows} rows of {SCHEMA.names}, "
                f"got {batch.num_rows} of {batch.schema.names}; {_REMEDY}"
            )
        return cls(batch, name, data, shard_bytes=shard_bytes)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that were read."""
        return hashlib.sha256(self._data).hexdigest()

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
            self._refuse(name, wrong_number(name, values, size=self._shard_bytes, offsets=offsets))

    def _check_list(self, name: str, offsets: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> None:
        """As `_check_fixed`, for a list column."""
        if self._shard_bytes is None:
            return
        if name == "caption_hash":
            self._refuse(name, wrong_captions(offsets, formats=self.fixed("caption_format")))
        else:
            self._refuse(name, wrong_tokens(offsets, values, captions=self.lists("caption_hash")[0]))

    def _refuse(self, name: str, wrong: WrongValue | None) -> None:
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

    @property
    def num_captions(self) -> int:
        """Captions of all rows."""
        return len(self.lists("caption_hash")[1])

    @property
    def num_labels(self) -> int:
        """Rows that have a label."""
        return int((self.fixed("label") >= 0).sum())

    def histogram(self, tokens_of: Columns | None = None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Captions by length in tokens and aspect ratio: the cells that occur, and the captions in each.

        Of a corpus of labels only, the rows are counted in their place, with 0 tokens.

        Args:
            tokens_of: columns of the same captions that give the lengths; default: these. Captions without a length
                count as 0 tokens.
        """
        turned = self.fixed("orientation") >= 5
        height = np.where(turned, self.fixed("width"), self.fixed("height"))
        width = np.where(turned, self.fixed("height"), self.fixed("width"))
        bins = aspect_bin(height, width)
        if self.num_captions:
            bins = np.repeat(bins, np.diff(self.lists("caption_hash")[0]))
        tokens = (tokens_of or self).lists("caption_tokens")[1]
        return count_cells(pack_cells(tokens if len(tokens) else np.zeros(len(bins), np.int32), bins))


_REMEDY = (
    "fetch the folder again, or make it anew: a conversion with `mmdata convert --overwrite`, an index by removing "
    "manifest.json and running `mmdata index` with the same --tokenizer"
)
