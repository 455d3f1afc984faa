"""Rows that a program gives as dicts, read as a table is: the same rows in the same order each time, or an error.

What can be read once only waits in a temporary file on the disk; nothing is held in memory but some bytes a row.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from PIL import Image, ImageOps

from mmdata.convert.sources.arrow import as_stored
from mmdata.convert.sources.json_tables import ROWS_SEEN
from mmdata.convert.sources.tables import SourceTable, TableRow
from mmdata.errors import ConfigError, DataError, excerpt
from mmdata.files import naming
from mmdata.images.pillow import file_of

Rows = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""Dicts of an image, captions and more, or a function that gives the same dicts whenever it is called."""

MOST_COLUMNS = 1000
"""Keys of rows that may be named as columns; there may be more."""
_HEAD_BYTES = 8
_MOST_READ = 2**30  # Linux reads at most 2 GiB at once


class GivenTable(SourceTable):
    """Rows of a program as a table. A context manager: it holds a temporary file, unless the rows can be read again.

    A list and a function are read for each pass over the rows, and compared with the first pass. Of any other iterable,
    such as a generator, each row is taken once, and kept in the file until the end.

    Args:
        rows: the dicts.
        folder: on the disk that has room for the temporary file.

    Attributes:
        sha256: of all rows, images included.

    Raises:
        ConfigError: `rows` are neither an iterable nor a function that returns one.
        DataError: no row, or no dict among the first.
    """

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.path = Path("rows")
        self._rows = rows
        self._digests = array("q")  # 8 bytes of each row's hash, to tell when a later pass gives others
        self._file = None if _can_be_read_again(rows) else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._folder = folder
        try:
            self._take_all()
        except BaseException:
            self.close()
            raise

    def _take_all(self) -> None:
        columns: dict[str, None] = {}
        images: dict[str, None] = {}
        whole, first_fault, seen = hashlib.sha256(), "", 0
        for record in _records(self._rows):
            digest = record.digest()
            whole.update(digest)
            self._digests.append(int.from_bytes(digest[:8], "little", signed=True))
            if self._file is not None:
                with naming(self._folder):
                    self._file.writelines(record.packed())
            if record.fault:
                first_fault = first_fault or f"row {len(self._digests) - 1}: {record.fault}"
                continue
            seen += 1
            if len(columns) < MOST_COLUMNS:
                columns.update(dict.fromkeys(record.cells()))
            if seen <= ROWS_SEEN:
                images.update(dict.fromkeys(record.blobs))
        if self._file is not None:
            with naming(self._folder):
                self._file.flush()
        if not seen and first_fault:
            raise DataError(
                f"rows: none of {len(self._digests)} can be used ({first_fault}); each is a dict such as "
                '{"image": "a.jpg", "caption": "a dog"}'
            )
        self.sha256, self.num_rows = whole.hexdigest(), len(self._digests)
        self.columns, self.images, self.binary = list(columns), tuple(images), tuple(images)
        self.types: dict[str, str] = {}

    def __enter__(self) -> GivenTable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows with all their columns. See `Table.rows`."""
        records = self._again() if self._file is None else self._kept(self._file.fileno())
        for number, record in enumerate(records):
            yield TableRow(f"row {number}", None if record.fault else record.cells(), record.fault)

    def how_to_name(self, purpose: str) -> str:
        """What names a column. See `Table.how_to_name`."""
        setting = "caption_columns=[…]" if purpose == "caption" else f"{purpose}_column=…"
        return f"name it with ConvertConfig({setting})"

    def _again(self) -> Iterator[_Record]:
        """All rows from the program, as long as they are those of the first pass."""
        number = 0
        for record in _records(self._rows):
            same = number < len(self._digests) and self._digests[number] == int.from_bytes(
                record.digest()[:8], "little", signed=True
            )
            if not same:
                raise _differs(number)
            yield record
            number += 1
        if number < len(self._digests):
            raise _differs(number)

    def _kept(self, descriptor: int) -> Iterator[_Record]:
        """All rows from the temporary file."""
        at = 0
        while head := os.pread(descriptor, _HEAD_BYTES, at):
            size, at = int.from_bytes(head, "little"), at + _HEAD_BYTES
            record = _Record.of_json(os.pread(descriptor, size, at))
            at += size
            for name, length in record.lengths.items():
                record.blobs[name] = _read(descriptor, length, at)
                at += length
            yield record


def _read(descriptor: int, size: int, at: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.pread(descriptor, min(size, _MOST_READ), at)
        assert part, "the temporary file of rows was cut"
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)


class _Record(NamedTuple):
    """One row in a form that can be stored.

    Attributes:
        json: the cells that are not bytes.
        blobs: bytes by column.
        fault: why the row cannot be used.
        lengths: of the blobs, in the order of the columns.
    """

    json: dict[str, Any]
    blobs: dict[str, bytes]
    fault: str
    lengths: dict[str, int]

    @classmethod
    def of_json(cls, data: bytes) -> _Record:
        cells, fault, lengths = json.loads(data)
        return cls(cells, {}, fault, lengths)

    def cells(self) -> dict[str, Any]:
        """All cells; those of bytes stand in the order that the program gave."""
        return {**self.json, **self.blobs}

    def head(self) -> bytes:
        return json.dumps([self.json, self.fault, self.lengths]).encode()

    def packed(self) -> Iterator[bytes]:
        head = self.head()
        yield len(head).to_bytes(_HEAD_BYTES, "little")
        yield head
        yield from self.blobs.values()

    def digest(self) -> bytes:
        whole = hashlib.sha256(self.head())
        for data in self.blobs.values():
            whole.update(data)
        return whole.digest()


def _can_be_read_again(rows: Any) -> bool:
    """Whether rows are read for each pass; if not, they are an iterable that is read once.

    Raises:
        ConfigError: they are neither.
    """
    if isinstance(rows, (list, tuple)):
        return True
    if isinstance(rows, Iterable) or _has_places(rows):
        return False
    if callable(rows):
        return True
    found = type(rows).__name__
    raise ConfigError(f"source: a path, an iterable of dicts, or a function that returns one; got {found}")


def _has_places(rows: Any) -> bool:
    """Whether rows are a dataset of torch's first kind, with a length and an item at each place."""
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def _records(rows: Any) -> Iterator[_Record]:
    """The rows of a program as records; an error of the program passes."""
    if not isinstance(rows, Iterable):
        rows = map(rows.__getitem__, range(len(rows))) if _has_places(rows) else rows()
        if not isinstance(rows, Iterable):
            raise ConfigError(f"source: the function is to return an iterable of dicts; got {type(rows).__name__}")
    for row in cast("Iterable[object]", rows):
        yield _record(row)


def _record(row: object) -> _Record:
    if not isinstance(row, Mapping):
        return _fault(f"a dict is expected, got {type(row).__name__}")
    cells: dict[str, Any] = {}
    blobs: dict[str, bytes] = {}
    for name, value in cast("Mapping[object, object]", row).items():
        if not isinstance(name, str):
            return _fault(f"the key {excerpt(name)} is {type(name).__name__}, not a string")
        try:
            value = _plain(value)
            cells[name] = None if isinstance(value, bytes) else json.loads(json.dumps(value, default=_as_json))
        except (TypeError, ValueError, RecursionError, OSError, SyntaxError) as error:
            return _fault(f"{excerpt(name)} cannot be stored: {excerpt(str(error), 300)}")
        if isinstance(value, bytes):
            blobs[name] = value
    return _Record(cells, blobs, "", {name: len(data) for name, data in blobs.items()})


def _fault(words: str) -> _Record:
    return _Record({}, {}, words, {})


def _plain(value: Any) -> Any:
    """A cell with an image as bytes or as a path."""
    if isinstance(value, Image.Image):
        return file_of(value) or _as_png(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:  # of `datasets`, with Image(decode=False)
        found = cast("dict[str, Any]", value)
        return found["path"] if found["bytes"] is None else found["bytes"]
    array: Any = value
    if getattr(value, "ndim", 0) >= 2 and str(getattr(value, "dtype", "")).endswith("uint8"):
        raise TypeError(f"an array of uint8, of shape {tuple(array.shape)}; give pixels as PIL.Image.fromarray(array)")
    return value


def _as_png(image: Image.Image) -> bytes:
    """An image of Pillow as a PNG, turned as its orientation says, with its ICC profile."""
    data = io.BytesIO()
    ImageOps.exif_transpose(image).save(data, "PNG")
    return data.getvalue()


def _as_json(value: Any) -> Any:
    """A value that JSON does not know: numbers and arrays of numpy and torch, dates, and paths."""
    if isinstance(value, bytes):
        raise TypeError("a value of type bytes")
    if (stored := as_stored(value)) is not value:
        return stored
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    raise TypeError(f"a value of type {type(value).__name__}")


def _differs(number: int) -> DataError:
    return DataError(
        f"rows: row {number} is another one than when the rows were first read; they are read several times, so let "
        "the function give the same rows whenever it is called, or give `convert` what it returns: that is read once"
    )
