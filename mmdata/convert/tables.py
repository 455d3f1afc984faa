"""Tables as they are found: CSV, TSV, JSONL, Parquet. Each row that can be told apart comes out once, whole or faulty.

Text is read as UTF-8; bytes that are not stay in the cell as surrogates, so that one bad cell costs one row.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mmdata.errors import DataError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")
MAX_LINE = 64 * 2**20
"""Longest line of a text table; a longer one means the file is something else."""
MAX_BROKEN_LINES = 100
"""A quoted field that breaks after more lines than this has swallowed rows: an error, not one bad row."""
JSONL_ROWS_SEEN = 100
"""Rows of a JSONL file whose keys are taken as its columns."""


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        place: where it starts, as "captions.csv, line 12".
        cells: values by column; None where the row could not be parsed.
        fault: why it could not.
    """

    place: str
    cells: dict[str, Any] | None
    fault: str = ""


class Table(Protocol):
    """A table that can be read from its start any number of times."""

    path: Path
    columns: list[str]
    schema: object
    """Equal for tables that may be read as one; None where the format has none."""

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows, in order, with at least these columns."""
        ...


@dataclass(frozen=True)
class FilePrint:
    """Identity of a table's content, and a bound on its rows that costs no parsing."""

    name: str
    bytes: int
    sha256: str
    lines: int


def open_table(path: Path, *, quotes: bool = True) -> Table:
    """Open a table by its extension.

    Raises:
        DataError: unknown extension, not UTF-8, no header, a Parquet file that is cut short.
    """
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return DelimitedTable(path, delimiter="," if kind == ".csv" else "\t", quotes=quotes)
    if kind in (".jsonl", ".ndjson"):
        return JsonLinesTable(path)
    if kind in (".parquet", ".pq"):
        return ParquetTable(path)
    advice = "; `mmdata index` makes an index for tars" if path.suffix == ".tar" else ""
    raise DataError(f"table '{path}': unknown kind '{path.suffix}'; known: .csv .tsv .jsonl .parquet{advice}")


def fingerprint(path: Path) -> FilePrint:
    """Hash a table's file, and count its lines on the way."""
    digest, size, lines = hashlib.sha256(), 0, 1
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
            lines += max(block.count(b"\n"), block.count(b"\r"))  # either may end a line, and both together
    return FilePrint(path.name, size, digest.hexdigest(), lines)


class DelimitedTable:
    """A CSV or TSV file with a header line."""

    def __init__(self, path: Path, *, delimiter: str, quotes: bool) -> None:
        self.path = path
        self._dialect: dict[str, Any] = {
            "delimiter": delimiter,
            "quoting": csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
            "strict": True,
        }
        _refuse_utf16(path)
        self.columns = self._header()
        doubled = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if doubled:
            raise DataError(f"table '{path}': columns {doubled} are there twice; rename one in the header")
        self.schema: object = sorted(self.columns)

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows after the header; blank lines are none. See `Table.rows`."""
        records = self._records()
        next(records, None)
        yield from records

    def _header(self) -> list[str]:
        try:
            names = next((values for values in self._reader(_Lines(self.path)) if values), None)
        except csv.Error as error:
            raise DataError(f"table '{self.path}': its header line does not parse: {error}") from error
        if names is None:
            raise DataError(f"table '{self.path}': no header line with the names of its columns")
        return [name.strip() for name in names]

    def _reader(self, lines: _Lines) -> Any:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
        return csv.reader(lines, **self._dialect)

    def _records(self) -> Iterator[TableRow]:
        lines = _Lines(self.path)
        reader = self._reader(lines)
        while True:
            first = reader.line_num + 1
            place = f"{self.path.name}, line {first}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield TableRow(place, None, self._fault(error, lines, first, reader.line_num))
                continue
            if not values:
                continue
            if len(values) != len(self.columns):
                yield TableRow(place, None, f"{len(values)} fields where the header has {len(self.columns)}")
                continue
            yield TableRow(place, dict(zip(self.columns, values, strict=True)))

    def _fault(self, error: csv.Error, lines: _Lines, first: int, last: int) -> str:
        if last - first >= MAX_BROKEN_LINES or (lines.ended and last > first):
            raise DataError(
                f"table '{self.path}', line {first}: a quotation mark opened there is not closed as it should be "
                f"(seen up to line {last}: {error}); repair it, or read quotation marks as text with --no-quotes"
            )
        return str(error) if first == last else f"lines {first} to {last}: {error}"


class JsonLinesTable:
    """A file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_utf16(path)
        self.columns: list[str] = []
        seen = 0
        for row in self.rows(()):
            if row.cells is not None:
                self.columns += [name for name in row.cells if name not in self.columns]
                seen += 1
            if seen == JSONL_ROWS_SEEN:
                break
        self.schema: object = None

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All lines but blank ones. See `Table.rows`."""
        for number, line in enumerate(_Lines(self.path), 1):
            if not line.strip():
                continue
            place = f"{self.path.name}, line {number}"
            try:
                value = parse_json(line)
            except (ValueError, RecursionError) as error:
                yield TableRow(place, None, f"not JSON: {error}")
                continue
            if isinstance(value, dict):
                yield TableRow(place, cast("dict[str, Any]", value))
            else:
                yield TableRow(place, None, f"a JSON object is expected, got {type(value).__name__}")


class ParquetTable:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            schema: pa.Schema = file.schema_arrow
            self.num_rows: int = file.metadata.num_rows
        self.columns = list(schema.names)
        self.schema: object = sorted((field.name, str(field.type)) for field in schema)

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows; only `columns` are read. See `Table.rows`."""
        number = 0
        with self._open() as file:
            try:
                for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
                    values = [_as_python(batch.column(name)) for name in columns]
                    for cells in zip(*values, strict=True):
                        number += 1
                        yield TableRow(
                            f"{self.path.name}, row {number}", dict(zip(columns, map(_text, cells), strict=True))
                        )
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"table '{self.path}', after row {number}: not readable as Parquet: {error}") from error

    def _open(self) -> Any:
        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"table '{self.path}': not a whole Parquet file: {error}") from error


def _as_python(column: Any) -> list[Any]:
    """Values of an Arrow array; strings as bytes, because one that is not UTF-8 would fail the whole array."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_python(column.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.large_binary()).to_pylist()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        if pa.types.is_string(inner) or pa.types.is_large_string(inner):
            return column.cast(pa.large_list(pa.large_binary())).to_pylist()
    return column.to_pylist()


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, list):
        return [_text(item) for item in cast("list[Any]", value)]
    return value


class _Lines:
    """Lines of a text file with their ends kept; `ended` once the last was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        with self._path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise DataError(f"table '{self._path}', line {number}: longer than 64 MiB; is it a text table?")
                # Python 3.10's csv module refuses NUL; captions lose control characters anyway.
                yield line.replace("\0", "\x01")
        self.ended = True


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity, no key twice. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twins)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' is there twice")
    return content


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(head) == 4 and 0 in (head[0], head[1]) and head[2:] != b"\0\0"):
        raise DataError(f"table '{path}': looks like UTF-16; tables are UTF-8: iconv -f UTF-16 -t UTF-8 '{path.name}'")
