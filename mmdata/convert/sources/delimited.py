"""CSV and TSV tables. The delimiter is counted, not guessed: the one that gives the first lines the same fields."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.convert.sources.headless import is_data, name_columns
from mmdata.convert.sources.tables import MAX_LINE, SourceTable, TableOptions, TableRow, TextLines, refuse_twice
from mmdata.errors import DataError

DELIMITERS = (",", "\t", ";", "|")
"""Delimiters that are looked for."""
LINES_COUNTED = 100
"""Lines in which fields are counted to find the delimiter."""
MAX_BROKEN_LINES = 100
"""A faulty quoted field over more lines than this has swallowed rows, which is an error and not one bad row."""


class DelimitedTable(SourceTable):
    """A CSV or TSV file, with a header line unless the options name the columns.

    Args:
        path: of the file.
        options: the delimiter is counted in the first lines unless they name it.
        usual: delimiter of its format, which is taken where the lines do not tell.

    Attributes:
        guessed: whether its first line is no header but a row with a URL, so that the columns were named by what they
            hold.
    """

    def __init__(self, path: Path, options: TableOptions, *, usual: str = ",") -> None:
        self.path = path
        self._encoding = options.encoding
        self._dialect: dict[str, Any] = {
            "delimiter": options.delimiter or sniff_delimiter(path, options, usual=usual),
            "quoting": csv.QUOTE_MINIMAL if options.quotes else csv.QUOTE_NONE,
            "strict": True,
        }
        self.columns = list(options.columns) or self._header()
        self.guessed = not options.columns and is_data(self.columns)
        if self.guessed:
            self.columns = name_columns(self._first_records())
        self._has_header = not (options.columns or self.guessed)
        refuse_twice(path, self.columns)
        self.types = dict.fromkeys(self.columns, "text")

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows after the header; blank lines are skipped. See `Table.rows`."""
        records = self._records()
        if self._has_header:
            next(records, None)
        yield from records

    def _header(self) -> list[str]:
        try:
            names = next((values for values in self._reader(TextLines(self.path, self._encoding)) if values), None)
        except csv.Error as error:
            raise DataError(f"table '{self.path}': its header line does not parse: {error}") from error
        if names is None:
            raise DataError(f"table '{self.path}': the file has no lines; the first is to name its columns")
        return [name.strip() for name in names]

    def _first_records(self) -> list[list[str]]:
        records: list[list[str]] = []
        with suppress(csv.Error):  # the rows name it
            for values in islice(self._reader(TextLines(self.path, self._encoding)), LINES_COUNTED):
                records += [values] if values else []
        return records

    def _reader(self, lines: TextLines) -> Any:
        return _reader(lines, self._dialect)

    def _records(self) -> Iterator[TableRow]:
        lines = TextLines(self.path, self._encoding)
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

    def _fault(self, error: csv.Error, lines: TextLines, first: int, last: int) -> str:
        if last - first >= MAX_BROKEN_LINES or (lines.ended and last > first):
            raise DataError(
                f"table '{self.path}', line {first}: a quotation mark opened there is not closed as it should be "
                f"(seen up to line {last}: {error}); repair it, or read quotation marks as text with quotes=false"
            )
        return str(error) if first == last else f"lines {first} to {last}: {error}"


def sniff_delimiter(path: Path, options: TableOptions, *, usual: str = ",") -> str:
    """The delimiter that splits the first line into two fields or more, and most of the next lines into as many.

    `usual` is taken if no delimiter splits the first line, or if several are as good.

    Example:
        "image|caption" and lines such as "a.jpg|a dog, a cat" give "|".
    """
    lines = list(islice(TextLines(path, options.encoding), LINES_COUNTED))
    best, best_share = usual, 0.0
    for delimiter in (usual, *(one for one in DELIMITERS if one != usual)):
        quoting = csv.QUOTE_MINIMAL if options.quotes else csv.QUOTE_NONE
        counts = list(_field_counts(lines, {"delimiter": delimiter, "quoting": quoting}))
        if counts and counts[0] > 1 and (share := counts.count(counts[0]) / len(counts)) > best_share:
            best, best_share = delimiter, share
    return best


def _field_counts(lines: list[str], dialect: dict[str, Any]) -> Iterator[int]:
    try:
        for record in _reader(lines, dialect):
            if record:
                yield len(record)
    except csv.Error:
        return  # the rows name it


def _reader(lines: Iterable[str], dialect: dict[str, Any]) -> Any:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    return csv.reader(lines, **dialect)
