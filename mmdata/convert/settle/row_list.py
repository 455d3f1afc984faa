"""The list of all input rows in a conversion's folder: what became of each, as Parquet.

`rows/00000.parquet`, … have the same bytes for the same input and settings.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmdata.convert.row.examine import DIGEST_BYTES
from mmdata.convert.settle.decide import Decided
from mmdata.errors import Reason
from mmdata.files import end_file, naming, sync_folder
from mmdata.storage.folder import ROWS_NAME

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


class InputRows:
    """Writes the list. A context manager.

    Args:
        folder: of the lists, the `__mmdata__` of the shards.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ROWS_NAME
        self._folder.mkdir()
        self._numbers = count()
        self._open: _ParquetFile | None = None

    def add(self, decided: Decided, part: int, shards: NDArray[np.int32]) -> None:
        """Add the rows of a unit that belong to a part.

        Args:
            decided: the unit.
            part: number of the folder.
            shards: int32 (rows,), the shard of each written row's sample.
        """
        places = np.flatnonzero(decided.parts == part)
        if not len(places):
            return
        if self._open is not None and self._open.rows >= FILE_ROWS:
            self._open.close()
            self._open = None
        if self._open is None:
            self._open = _ParquetFile(self._folder / f"{next(self._numbers):05d}.parquet", _ROWS)
        self._open.write(_table(decided, places, shards))

    def finish(self) -> None:
        """Put the lists on disk."""
        if self._open is not None:
            self._open.close()
        sync_folder(self._folder)

    def __enter__(self) -> InputRows:
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.discard()


class _ParquetFile:
    """A Parquet file that is being written.

    Attributes:
        rows: so far.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self._path = path
        self.rows = 0
        self._file = path.open("xb")
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Add rows, as a row group."""
        with naming(self._path):
            self._writer.write_table(table)
        self.rows += table.num_rows

    def close(self) -> None:
        """Put the file on disk."""
        with naming(self._path):
            self._writer.close()
            end_file(self._file)

    def discard(self) -> None:
        """Close the file, whatever has been written."""
        with suppress(OSError, pa.ArrowException):  # a full disk fails again when the end is written
            self._writer.close()
        with suppress(OSError):
            self._file.close()


def _table(decided: Decided, places: NDArray[np.int64], shards: NDArray[np.int32]) -> Any:
    records, chosen = decided.records, places.tolist()
    faults = [decided.faults.get(place) for place in chosen]
    written = decided.written
    merged = set(records.merged.tolist())
    columns = {
        "row": [decided.number_of(decided.receipt.start + place) for place in chosen],
        "status": [_status(place, decided, bool(written[place]), place in merged) for place in chosen],
        "reason": [fault and str(fault[0]) for fault in faults],
        "detail": [_detail(decided, place) for place in chosen],
        **{name: _taken(records.texts(name), chosen) for name in ("place", "path", "key")},
        "shard": pa.array(shards[places], mask=shards[places] < 0),
    }
    digests = records.digest_of_each()
    columns["digest"] = [digests[place] if written[place] else None for place in chosen]
    columns["key"] = [key if written[place] else None for key, place in zip(columns["key"], chosen, strict=True)]
    return pa.table([pa.array(columns[field.name], field.type) for field in _ROWS], schema=_ROWS)


def _status(place: int, decided: Decided, is_written: bool, is_merged: bool) -> str:
    if is_written:
        return "written"
    fault = decided.faults.get(place)
    if fault is None:
        assert is_merged
        return "merged"
    if fault[0] is Reason.DUPLICATE_IMAGE:
        return "duplicate"
    return "filtered" if fault[0] is Reason.FILTERED else "quarantined"


def _detail(decided: Decided, place: int) -> str | None:
    if (fault := decided.faults.get(place)) is not None:
        return _printable(fault[1])
    into = decided.records.into(place)
    return None if into is None else f"merged into row {decided.number_of(into)}"


def _taken(texts: list[str | None], places: list[int]) -> list[str | None]:
    return [None if (text := texts[place]) is None else _printable(text) for place in places]


def _printable(text: str) -> str:
    """Text in which bytes that are not UTF-8 are escaped, as in "\\udce9"."""
    return text.encode("utf-8", "backslashreplace").decode()
