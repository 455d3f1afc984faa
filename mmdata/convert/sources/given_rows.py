"""Rows that a program gives as dicts, read as a table is. Each is taken once, and kept in a temporary file.

Beside what a table has, a row may have a key, and a reason why it is left out. No two samples get one key.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from PIL import Image, ImageOps

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.arrow import as_stored
from mmdata.convert.sources.rows import (
    InputRow,
    SourceKind,
    fits_header,
    has_url,
    image_key,
    numbered_key,
    refuse_strangers,
    row_key,
)
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.sources.tables import ImageBytes, SourceTable, TableRow, with_path
from mmdata.errors import BadSample, ConfigError, DataError, Reason, excerpt
from mmdata.files import naming
from mmdata.hashing import hash64
from mmdata.images.pillow import file_of
from mmdata.system import read_at
from mmdata.tars.tar import split_name

Rows = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""Dicts of an image, captions and more, or a function that gives them."""

_HEAD_BYTES = 8
_MOST_BYTES = 2**30
"""Longest value of a row; Linux reads at most 2 GiB at once."""
KEY = "key"
"""Name of the cell with the key of a row's sample."""
LEFT_OUT = "left_out"
"""Name of the cell that says why a row is left out: "REASON: text", or "REASON", of the list, or any other text."""
CAPTIONS = ["caption", "captions"]
"""Cells that are both taken, as some rows may have the one and some the other."""


class GivenTable(SourceTable):
    """Rows of a program as a table. A context manager: each row is taken once, and kept in a temporary file.

    Args:
        rows: the dicts.
        folder: on the disk that has room for the temporary file.

    Attributes:
        sha256: of all rows, images included.
        has_keys: whether any row has a key.

    Raises:
        ConfigError: `rows` are neither an iterable nor a function that returns one.
        DataError: no row, or none that is a dict.
    """

    kind = SourceKind.ROWS

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.path = Path("rows")
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            self._take_all(rows, folder)
        except BaseException:
            self._file.close()
            raise

    def _take_all(self, rows: Rows, folder: Path) -> None:
        columns: dict[str, None] = {}
        images: dict[str, None] = {}
        whole, first_fault, taken = hashlib.sha256(), "", 0
        for row in _dicts(rows):
            try:
                cells, blobs = _storable(row)
                fault = ""
            except ValueError as error:
                cells, blobs, fault = {}, dict[str, bytes](), str(error)
                first_fault = first_fault or f"row {taken}: {fault}"
            head = json.dumps([cells, {name: len(data) for name, data in blobs.items()}, fault]).encode()
            taken += 1
            with naming(folder):
                for data in (len(head).to_bytes(_HEAD_BYTES, "little"), head, *blobs.values()):
                    whole.update(data)
                    self._file.write(data)
            columns.update(dict.fromkeys(cells))
            images.update(dict.fromkeys(blobs))
        with naming(folder):
            self._file.flush()
        if not columns and first_fault:
            raise DataError(
                f"rows: none of {taken} can be used ({first_fault}); each is a dict such as "
                '{"image": "a.jpg", "caption": "a dog"}'
            )
        self.num_rows = taken
        self.sha256, self.has_keys = whole.hexdigest(), KEY in columns
        self.columns = [name for name in columns if name not in (KEY, LEFT_OUT)]
        self.images = self.binary = tuple(images)
        self.types: dict[str, str] = {}

    def __enter__(self) -> GivenTable:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows. Bytes of columns not asked for are not read; their cells are None. See `SourceTable.rows`."""
        wanted, at = {*columns, KEY, LEFT_OUT}, 0
        for number in range(self.num_rows or 0):
            size, at = int.from_bytes(self._read(at, _HEAD_BYTES), "little"), at + _HEAD_BYTES
            (cells, lengths, fault), at = json.loads(self._read(at, size)), at + size
            for name, length in lengths.items():
                cells[name] = with_path(self._read(at, length), cells[name]) if name in wanted else None
                at += length
            yield TableRow.broken(f"row {number}", fault) if fault else _row(number, cells)

    def _read(self, at: int, size: int) -> bytes:
        data = read_at(self._file.fileno(), size, at)
        assert len(data) == size, "the temporary file of rows was cut"
        return data

    def how_to_name(self, purposes: Sequence[str]) -> str:
        """What names columns. See `SourceTable.how_to_name`."""
        settings = {"image": "image_column=…", "caption": "caption_columns=[…]"}
        return f"ConvertConfig({', '.join(settings[purpose] for purpose in purposes)})"


def _row(number: int, cells: dict[str, Any]) -> TableRow:
    """A row of the table, with its key; one with a text in `left_out` is left out for that reason."""
    fault, key = _left_out(cells.get(LEFT_OUT)), cells.get(KEY)
    try:
        return TableRow(f"row {number}", cells, fault, key="" if key is None else _checked(key))
    except BadSample as bad:
        return TableRow(f"row {number}", cells, fault or (bad.reason, bad.detail))


def _dicts(rows: Any) -> Iterable[object]:
    """The rows of a program, whatever they are; an error of the program passes."""
    if not isinstance(rows, Iterable):
        if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):  # as torch's datasets of the first kind
            rows = map(rows.__getitem__, range(len(rows)))
        elif callable(rows):
            rows = rows()
        else:
            found = type(rows).__name__
            raise ConfigError(f"source: a path, an iterable of dicts, or a function that returns one; got {found}")
        if not isinstance(rows, Iterable):
            raise ConfigError(f"source: the function is to return an iterable of dicts; got {type(rows).__name__}")
    return cast("Iterable[object]", rows)


def _storable(row: object) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The cells of a row as JSON has them, for bytes the path beside them; and the bytes by column.

    Raises:
        ValueError: the row cannot be used.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a dict is expected, got {type(row).__name__}")
    cells: dict[str, Any] = {}
    blobs: dict[str, bytes] = {}
    for name, value in cast("Mapping[object, object]", row).items():
        if not isinstance(name, str):
            raise ValueError(f"the key {excerpt(name)} is {type(name).__name__}, not a string")
        try:
            value = _plain(value)
            if isinstance(value, bytes) and len(value) > _MOST_BYTES:
                raise ValueError(f"{len(value)} bytes; the limit is {_MOST_BYTES}")
            cell = value.path if isinstance(value, ImageBytes) else None if isinstance(value, bytes) else value
            cells[name] = json.loads(json.dumps(cell, default=_as_json))
        except (TypeError, ValueError, RecursionError, OSError, SyntaxError) as error:
            raise ValueError(f"{excerpt(name)} cannot be stored: {excerpt(str(error), 300)}") from error
        if isinstance(value, bytes):
            blobs[name] = value
    return cells, blobs


def _plain(value: Any) -> Any:
    """A cell with an image as bytes or as a path."""
    if isinstance(value, Image.Image):
        return file_of(value) or _as_png(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:  # of `datasets`, with Image(decode=False)
        found = cast("dict[str, Any]", value)
        return found["path"] if found["bytes"] is None else with_path(found["bytes"], found["path"])
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


@contextmanager
def open_rows(rows: Rows, config: ConvertConfig, folder: Path) -> Generator[GivenSource]:
    """The rows of a program as a source, until the end of the context.

    Args:
        rows: the dicts.
        config: the settings about columns are used.
        folder: on the disk that has room for the rows.

    Raises:
        DataError: no row, or none that is a dict.
        ConfigError: no such column, or a setting that is for other sources.
    """
    refuse_strangers(Path("rows"), config, SourceKind.ROWS)
    with GivenTable(rows, folder) as table:
        yield GivenSource(table, config)


class GivenSource(TableSource):
    """Rows of a program: dicts of an image, captions, a label, a key, and more, which a sample's JSON keeps.

    Paths are those of the program: absolute, or relative to its current folder. With `images` they are relative to that
    folder, and nothing outside it is read.

    Args:
        table: the rows.
        config: the settings about columns are used.
    """

    can_be_sent = False  # another process cannot call the program

    def __init__(self, table: GivenTable, config: ConvertConfig) -> None:
        if config.caption_columns is None and set(CAPTIONS) <= set(table.columns):
            config = config.model_copy(update={"caption_columns": CAPTIONS})
        if table.has_keys and KEY in config.keep:
            table.columns.append(KEY)
        super().__init__(Path.cwd(), [table], (), config)
        self._table = table
        self._below = os.getcwd() if config.images == "." else ""
        self._are_merged = config.group_by != "none" and (config.group_by is not None or not config.keep_duplicates)

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """All rows; those before `start` are read too, for their keys. See `Source.rows`."""
        return islice(self._rows(), start, None)

    def _rows(self) -> Iterator[InputRow]:
        images: dict[int, bytes] = {}  # of the row with a key, by hashes of both
        for row in super().rows():
            if self._below and isinstance(row.image, str) and row.image and not has_url(row):
                row = replace(row, image=os.path.join(self._below, row.image))
            if self._table.has_keys and row.fault is None:
                key = row.key or numbered_key(row.number)
                image = image_key(row) if self._are_merged else row_key(row.number)
                if images.setdefault(hash64(key.encode()), image) != image:
                    detail = f"key {excerpt(key)}: another row, of another image, has it"
                    row = replace(row, fault=(Reason.BROKEN_ROW, detail))
            yield row

    def describe(self) -> dict[str, Any]:
        """A hash of the rows. See `Source.describe`."""
        columns = {name: value for name, value in super().describe().items() if name not in ("kind", "files")}
        return {"kind": "rows", "sha256": self._table.sha256, **columns}

    def _find_root(self, folder: Path, images: str) -> tuple[str, str]:
        return (os.sep, "") if images == "." else super()._find_root(folder, images)


def _left_out(said: Any) -> tuple[Reason, str] | None:
    """The fault that a program gives to a row: `_left_out("missing_caption: no object")` has that reason.

    None, NaN, which tables have in its place, and blanks say nothing.
    """
    if not said or said != said or (isinstance(said, str) and not said.strip()):
        return None
    if not isinstance(said, str):
        return Reason.BROKEN_ROW, f"{LEFT_OUT} is {type(said).__name__}, not a text"
    reason, _, detail = said.strip().partition(": ")
    if reason in [str(one) for one in Reason]:
        return Reason(reason), detail or "the program left it out"
    return Reason.BROKEN_ROW, said


def _checked(given: Any) -> str:
    """A key as the program gave it, if shards can have it; a number is one too.

    Raises:
        BadSample: they cannot.
    """
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise BadSample(Reason.BROKEN_ROW, f"the key is {type(given).__name__}, not a string")
    key = str(given)
    fits = key.isprintable() and fits_header(key) and split_name(f"{key}.jpg") == (key, "jpg")
    if not fits or {"", ".", ".."} & set(key.split("/")):
        detail = f"key {excerpt(key)}: a key has no dot and no empty folder in it, and fits into the header of a tar"
        raise BadSample(Reason.BROKEN_ROW, detail)
    return key
