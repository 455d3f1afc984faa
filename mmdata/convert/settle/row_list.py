"""The list of all input rows in a conversion's folder: what became of each, as Parquet.

`rows/00000.parquet`, … have the same bytes for the same input and settings.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmdata.convert.row.examine import DIGEST_BYTES
from mmdata.convert.settle.settled import Settled, numbers_of
from mmdata.errors import Reason
from mmdata.files import end_file, naming, sync_folder
from mmdata.storage.folder import ROWS_NAME

compute: Any = pyarrow.compute  # pyarrow's functions have no types

FILE_ROWS = 1_000_000
"""Rows of a file, at least, before another one begins."""

_ROWS = pa.schema(
    [
        ("row", pa.int64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("place", pa.string()),
        ("path", pa.string()),
        ("key", pa.string()),
        ("shard", pa.int32()),
        ("digest", pa.binary(DIGEST_BYTES)),  # of the original image of a written row
    ]
)


class RowList:
    """Writes the list. A context manager.

    Args:
        folder: of the list, the `__mmdata__` of the shards.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ROWS_NAME
        self._folder.mkdir()
        self._numbers = count()
        self._path = self._folder
        self._file: BinaryIO | None = None  # the one that is being written
        self._rows = 0  # in it
        self._writer: Any = None

    def add(self, settled: Settled, part: int, shards: NDArray[np.int32]) -> None:
        """Add the rows of a unit that belong to a part, as a row group.

        Args:
            settled: the unit.
            part: number of the folder.
            shards: int32 (rows,), the shard of each written row's sample.
        """
        places = np.flatnonzero(settled.parts == part)
        if not len(places):
            return
        if self._rows >= FILE_ROWS:
            self._end_file()
        if self._file is None:
            self._path, self._rows = self._folder / f"{next(self._numbers):05d}.parquet", 0
            file = self._path.open("xb")
            self._writer, self._file = pq.ParquetWriter(file, _ROWS, compression="zstd", write_page_checksum=True), file
        with naming(self._path):
            self._writer.write_table(_published(settled, shards).take(pa.array(places)))
        self._rows += len(places)

    def finish(self) -> None:
        """Put the list on disk."""
        self._end_file()
        sync_folder(self._folder)

    def __enter__(self) -> RowList:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with suppress(OSError, pa.ArrowException):  # a full disk fails again when the end is written
                self._writer.close()
            with suppress(OSError):
                self._file.close()

    def _end_file(self) -> None:
        if self._file is not None:
            with naming(self._path):
                self._writer.close()
                end_file(self._file)
            self._file = None


def _published(settled: Settled, shards: NDArray[np.int32]) -> Any:
    """The rows of a unit as the list has them."""
    records, reason = settled.records, settled.reason
    is_left_out, is_written = pa.array(settled.is_left_out), pa.array(settled.is_written)
    kinds = compute.if_else(compute.equal(reason, str(Reason.DUPLICATE_IMAGE)), "duplicate", "quarantined")
    kinds = compute.if_else(compute.equal(reason, str(Reason.FILTERED)), "filtered", kinds)
    into = records.column("into")
    numbers = pa.array(settled.number_of(numbers_of(into)), mask=into.is_null().to_numpy(zero_copy_only=False))
    merged = compute.binary_join_element_wise("merged into row ", numbers.cast(pa.string()), "")
    columns = {
        "row": pa.array(settled.number_of(np.arange(len(shards)) + settled.receipt.start)),
        "status": compute.if_else(is_left_out, kinds, compute.if_else(is_written, "written", "merged")),
        "reason": reason,
        "detail": compute.if_else(is_left_out, _printable(settled.detail), merged),
        **{name: _printable(records.column(name)) for name in ("place", "path", "key")},
        "shard": pa.array(shards, mask=shards < 0),
        "digest": records.column("digest"),
    }
    for name in ("key", "digest"):
        columns[name] = compute.if_else(is_written, columns[name], pa.scalar(None, columns[name].type))
    return pa.table([columns[name] for name in _ROWS.names], schema=_ROWS)


def _printable(column: Any) -> Any:
    """Text in which bytes that are not UTF-8 are escaped, as in "\\udce9"."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = (None if cell is None else cell.decode("utf-8", "surrogatepass") for cell in column.to_pylist())
        return pa.array([text and text.encode("utf-8", "backslashreplace").decode() for text in texts], pa.string())
