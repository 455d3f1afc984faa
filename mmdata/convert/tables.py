"""CSV, TSV and JSON Lines tables. Each row that can be delimited is yielded once, with its cells or with a fault.

Text is read as UTF-8; other bytes stay in the cell as surrogates, so that one bad cell costs one row.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from mmdata.errors import DataError, excerpt
from mmdata.shards.captions import unique_keys

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")
MAX_LINE = 64 * 2**20
"""Longest line of a text table; a file with a longer one is something else."""
MAX_BROKEN_LINES = 100
"""A faulty quoted field over more lines than this has swallowed rows, which is an error and not one bad row."""
JSONL_ROWS_SEEN = 100
"""Rows of a JSONL file whose keys are its columns."""
MAX_NAMES = 20
"""Columns that a message names."""
MAX_DIFFERENCES = 5
"""Differences between two tables that a message names."""


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        place: its start, as "captions.csv, line 12".
        cells: values by column; None if the row could not be parsed.
        fault: why the row could not be parsed.
    """

    place: str
    cells: dict[str, Any] | None
    fault: str = ""


class Table(Protocol):
    """A table that can be read from its start any number of times."""

    path: Path
    columns: list[str]
    types: dict[str, str]
    """Type of each column; several tables must agree. Empty if the format has no types."""

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows, in order, with at least these columns; a cell of a binary column holds bytes."""
        ...


def refuse_twice(path: Path, columns: Sequence[str]) -> None:
    """Raise DataError for a duplicate column name, which would be ambiguous."""
    if doubled := [name for name, count in Counter(columns).items() if count > 1]:
        raise DataError(
            f"table '{path}': column names that are there twice: {shown(doubled)}; rename one of each "
            "(in the header of a CSV, or the schema of a Parquet file)"
        )


def shown(names: Sequence[str]) -> str:
    """Names of up to MAX_NAMES columns, for a message."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    shortened = (name if name.isprintable() and len(name) <= 80 else excerpt(name) for name in names[:MAX_NAMES])
    return ", ".join(shortened) + more


def differences(first: Table, other: Table) -> str:
    """How the columns of two tables differ: "'caption' is string in the first and int64 in the second"; or ""."""
    found: list[str] = []
    for name in dict.fromkeys([*first.types, *other.types]):
        one, two = first.types.get(name), other.types.get(name)
        if one is None or two is None:
            found.append(f"{excerpt(name)} is only in the {'second' if one is None else 'first'}")
        elif one != two:
            found.append(f"{excerpt(name)} is {one[:200]} in the first and {two[:200]} in the second")
    more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
    return "; ".join(found[:MAX_DIFFERENCES]) + more


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
        refuse_twice(path, self.columns)
        self.types = dict.fromkeys(self.columns, "text")

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows after the header; blank lines are skipped. See `Table.rows`."""
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
    """A file with a JSON object in each line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_utf16(path)
        _refuse_json_array(path)
        self.types: dict[str, str] = {}
        columns: dict[str, None] = {}
        seen, first_fault = 0, ""
        for row in self.rows(()):
            if row.cells is not None:
                columns.update(dict.fromkeys(row.cells))
                seen += 1
            else:
                first_fault = first_fault or f"{row.place}: {row.fault}"
            if seen == JSONL_ROWS_SEEN:
                break
        if not seen and first_fault:
            raise DataError(
                f"table '{path}': no line of it is a JSON object ({first_fault}); JSON Lines have one object a line, "
                "and a document over several lines must be written anew"
            )
        self.columns = list(columns)

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All lines that are not blank. See `Table.rows`."""
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


class _Lines:
    """Lines of a text file with their line ends; `ended` is True once the last line was read."""

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
                # Python 3.10's csv module raises for NUL; cleaning removes control characters from captions anyway.
                yield line.replace("\0", "\x01")
        self.ended = True


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity, no duplicate key.

    Raises:
        ValueError, RecursionError: it is not that.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_json_array(path: Path) -> None:
    """Raise DataError if a file begins like one JSON array of objects."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").split()
    if head and (head[0] == b"[" or head[0].startswith(b"[{")):
        raise DataError(
            f"table '{path}': one JSON array, and JSON Lines have one object a line, without brackets and commas "
            f"between them: jq -c '.[]' '{path.name}' > lines.jsonl"
        )


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(head) == 4 and 0 in (head[0], head[1]) and head[2:] != b"\0\0"):
        raise DataError(f"table '{path}': looks like UTF-16; tables are UTF-8: iconv -f UTF-16 -t UTF-8 '{path.name}'")
