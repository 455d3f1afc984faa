"""CSV and TSV tables. The delimiter is counted, not guessed: the one that gives the first lines the same fields."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.rows import SourceKind
from mmdata.convert.sources.tables import MAX_LINE, SourceTable, TableRow, TextLines, refuse_twice
from mmdata.errors import DataError

DELIMITERS = (",", "\t", ";", "|")
"""Delimiters that are looked for."""
LINES_COUNTED = 100
"""Lines in which fields are counted to find the delimiter."""
MAX_BROKEN_LINES = 100
"""A faulty quoted field over more lines than this has swallowed rows, which is an error and not one bad row."""
_URL = re.compile(r"\s*https?://\S+\s*", re.IGNORECASE)


class DelimitedTable(SourceTable):
    """A CSV or TSV file, with a header line unless the settings name the columns.

    Args:
        path: of the file.
        config: the delimiter is counted in the first lines unless it names one.
        usual: delimiter of its format, which is taken where the lines do not tell.
    """

    kind = SourceKind.DELIMITED

    def __init__(self, path: Path, config: ConvertConfig, *, usual: str = ",") -> None:
        self.path = path
        self._encoding = config.encoding
        self._dialect: dict[str, Any] = {
            "delimiter": config.delimiter or sniff_delimiter(path, config, usual=usual),
            "quoting": csv.QUOTE_MINIMAL if config.quotes else csv.QUOTE_NONE,
            "strict": True,
        }
        self.columns = list(config.columns or ()) or self._header()
        self._has_header = not config.columns
        refuse_twice(path, self.columns)
        self.types = dict.fromkeys(self.columns, "text")

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows after the header; blank lines are skipped. See `SourceTable.rows`."""
        records = self._records()
        if self._has_header:
            next(records, None)
        yield from records

    def how_to_name(self, purposes: Sequence[str]) -> str:
        """What names columns; without a header line, all of them. See `SourceTable.how_to_name`."""
        flags = super().how_to_name(purposes)
        return f"{flags}, or, if the table has no header line, all with columns=[image,caption]"

    def _header(self) -> list[str]:
        try:
            names = next(
                (values for values in _reader(TextLines(self.path, self._encoding), self._dialect) if values), None
            )
        except csv.Error as error:
            raise DataError(f"table '{self.path}': its header line does not parse: {error}") from error
        if names is None:
            raise DataError(f"table '{self.path}': the file has no lines; the first is to name its columns")
        if any(map(_URL.fullmatch, names)):
            raise DataError(
                f"table '{self.path}': its first line holds a URL, so it is a row and no header; name the columns in "
                "their order, as in columns=[url,caption]"
            )
        return [name.strip() for name in names]

    def _records(self) -> Iterator[TableRow]:
        lines = TextLines(self.path, self._encoding)
        reader = _reader(lines, self._dialect)
        while True:
            first = reader.line_num + 1
            place = f"{self.path.name}, line {first}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield TableRow.broken(place, self._fault(error, lines, first, reader.line_num))
                continue
            if not values:
                continue
            if len(values) != len(self.columns):
                yield TableRow.broken(place, f"{len(values)} fields where the header has {len(self.columns)}")
                continue
            yield TableRow(place, dict(zip(self.columns, values, strict=True)))

    def _fault(self, error: csv.Error, lines: TextLines, first: int, last: int) -> str:
        if last - first >= MAX_BROKEN_LINES or (lines.ended and last > first):
            raise DataError(
                f"table '{self.path}', line {first}: a quotation mark opened there is not closed as it should be "
                f"(seen up to line {last}: {error}); repair it, or read quotation marks as text with quotes=false"
            )
        return str(error) if first == last else f"lines {first} to {last}: {error}"


def sniff_delimiter(path: Path, config: ConvertConfig, *, usual: str = ",") -> str:
    """The delimiter that splits the first line into two fields or more, and most of the next lines into as many.

    `usual` is taken if no delimiter splits the first line, or if several are as good.

    Example:
        "image|caption" and lines such as "a.jpg|a dog, a cat" give "|".
    """
    lines = list(islice(TextLines(path, config.encoding), LINES_COUNTED))
    quoting = csv.QUOTE_MINIMAL if config.quotes else csv.QUOTE_NONE
    best, best_share = usual, 0.0
    for delimiter in (usual, *(one for one in DELIMITERS if one != usual)):
        counts: list[int] = []
        with suppress(csv.Error):  # the rows name it
            for record in _reader(lines, {"delimiter": delimiter, "quoting": quoting}):
                counts += [len(record)] if record else []
        if counts and counts[0] > 1 and (share := counts.count(counts[0]) / len(counts)) > best_share:
            best, best_share = delimiter, share
    return best


def _reader(lines: Iterable[str], dialect: dict[str, Any]) -> Any:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    return csv.reader(lines, **dialect)
