"""Tables that are joined with an index: Parquet, CSV or TSV, one file or several of the same columns."""

from __future__ import annotations

import glob
import keyword
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from mmdata.errors import ConfigError, DataError, excerpt, meant
from mmdata.recognize import wide_encoding
from mmdata.safe_read import check_exists, check_regular
from mmdata.tables.arrow_values import date_kind, iso_texts
from mmdata.tars.foreign import expand_braces

SUFFIXES = (".parquet", ".csv", ".tsv")
_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
KEY_COLUMNS = ("key", "uid")
"""The column that holds keys, if none is named: the first of these that a table has."""


def in_condition(name: str) -> str:
    """A column's name as a condition writes it: in backquotes if it is no name of Python's."""
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"`{name}`"


class KeyedTable:
    """Columns by name, read when they are asked for.

    Args:
        files: paths, or patterns such as metadata/*.parquet and metadata/{000..099}.parquet.
        of: name of the setting, for messages.
        key: column of keys; None: key, or uid.
        setting: in which `key` was given, for messages.

    Attributes:
        files: the paths, in order.
        names: of the columns.
        types: Arrow's type of each; of text files as their first rows have it.
        key: name of the column of keys.

    Raises:
        ConfigError: no such file or column, or files of different columns; the nearest one is named.
        DataError: a file is no table.
    """

    def __init__(self, files: Sequence[str], *, of: str, key: str | None = None, setting: str = "key") -> None:
        self._of, self._setting = of, setting
        self.files = find_files(files, of=of)
        self.types = self._types(self.files[0])
        self.names = list(self.types)
        for path in self.files[1:]:
            if missing := [name for name in self.names if name not in self._types(path)]:
                raise ConfigError(f"{of}: '{path}' has no column '{missing[0]}', and '{self.files[0]}' has")
        self.key = self._choose_key(key)

    def __str__(self) -> str:
        return files_in_words(self.files)

    def keys(self) -> Any:
        """The keys as texts, an Arrow array (n,); null where a row has none.

        Raises:
            ConfigError: the column holds neither texts nor whole numbers.
            DataError: a file is damaged.
        """
        values = self._read(self.key, as_text=True)
        kind = values.type
        if pa.types.is_integer(kind):
            return values.cast(pa.string())
        if date_kind(kind):
            return iso_texts(values)
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(
                f"{self._of}: {self}, column '{self.key}': values of type {kind}, and keys are texts: store them as "
                "texts, as the tars name the samples"
            )
        return values.cast(pa.large_string())  # of more than 2 GB in all, too

    @property
    def key_hint(self) -> str:
        """For messages that no key was found: what is wrong with keys that are numbers."""
        kind = self.types[self.key]
        if not (_is_parquet(self.files[0]) and pa.types.is_integer(kind)):
            return ""
        return f"; they are {kind}, which has no leading zeros: store the keys as texts, as the tars name the samples"

    def column(self, name: str) -> Any:
        """A column, an Arrow array (n,), in the order of files and rows.

        Raises:
            ConfigError: no such column.
            DataError: a file is damaged.
        """
        if name not in self.names:
            raise ConfigError(
                f"{self._of}: {self}: no column '{name}'{meant(name, self.names)}; it has {', '.join(self.names)}"
            )
        return self._read(name, as_text=False)

    def place(self, row: int) -> str:
        """File and row of a row of the table, for messages; rows of a file are counted from 0."""
        for path in self.files:
            count = self._count(path)
            if row < count:
                return f"'{path}' row {row}"
            row -= count
        raise IndexError(row)

    def _check_encoding(self, path: Path) -> None:
        """Refuse what spreadsheets call Unicode text, of which pyarrow would read something."""
        with path.open("rb") as file:
            encoding = wide_encoding(file.read(4))
        if encoding:
            raise DataError(f"{self._of}: {not_utf8(path, encoding)}")

    def _choose_key(self, key: str | None) -> str:
        chosen = key or next((name for name in KEY_COLUMNS if name in self.names), None)
        if chosen is None and len(self.names) == 1:
            chosen = self.names[0]
        if chosen is None or chosen not in self.names:
            what = f"no column '{key}'{meant(key, self.names)}" if key else "no column key or uid"
            listed = ", ".join(self.names)
            raise ConfigError(
                f"{self._of}: {self}: {what}; it has {listed}: name the column of keys ({self._setting}: NAME)"
            )
        return chosen

    def _types(self, path: Path) -> dict[str, Any]:
        if not _is_parquet(path):
            self._check_encoding(path)

        def read() -> tuple[list[str], list[Any]]:
            if _is_parquet(path):
                schema = pyarrow.parquet.read_schema(path)
            else:
                # All of it: a column may turn from dates to texts at any row.
                options = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
                schema = pyarrow.csv.read_csv(path, parse_options=_delimiter(path), convert_options=options).schema
            return schema.names, schema.types  # names that are no UTF-8 are an error here

        names, types = self._checked(path, read)
        if not _is_parquet(path) and len(names) == 1:
            own = "tabs" if path.suffix.lower() == ".tsv" else "commas"
            for separator, name in _SEPARATORS.items():
                if separator in names[0] and name != own:
                    raise ConfigError(
                        f"{self._of}: '{path}': its first line has {name} and no {own}, which separate columns of a "
                        f"{path.suffix.lower()}: write it with {own}"
                    )
        return dict(zip(names, map(_plain, types), strict=True))

    def _count(self, path: Path) -> int:
        if _is_parquet(path):
            metadata: Any = self._checked(path, partial(pyarrow.parquet.read_metadata, path))
            return metadata.num_rows
        return len(self._read_one(path, self.key, as_text=True))

    def _read(self, name: str, *, as_text: bool) -> Any:
        parts = _of_one_unit([self._read_one(path, name, as_text=as_text) for path in self.files])
        if len({part.type for part in parts}) > 1:
            kinds = ", ".join(sorted({str(part.type) for part in parts}))
            raise ConfigError(f"{self._of}: {self}, column '{name}': values of different types in its files: {kinds}")
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=parts[0].type)

    def _read_one(self, path: Path, name: str, *, as_text: bool) -> Any:
        def read() -> Any:
            if _is_parquet(path):
                column: Any = pyarrow.parquet.read_table(path, columns=[name]).column(name)
                return column.cast(_plain(column.type))
            # Keys are texts: 000012 is not 12.
            options = pyarrow.csv.ConvertOptions(
                include_columns=[name], column_types={name: pa.string()} if as_text else None, strings_can_be_null=True
            )
            column = pyarrow.csv.read_csv(path, parse_options=_delimiter(path), convert_options=options).column(name)
            return column.cast(_plain(column.type))

        return self._checked(path, read)

    def _checked(self, path: Path, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
            is_encoding = isinstance(error, UnicodeDecodeError) or "UTF8" in str(error)
            remedy = "; write it in UTF-8" if is_encoding else ""
            raise DataError(
                f"{self._of}: '{path}' cannot be read as a table: {excerpt(str(error), 200)}{remedy}"
            ) from error


def find_files(given: Sequence[str], *, of: str) -> list[Path]:
    """The files of a table, in order; none is read.

    Args:
        given: paths and patterns, see `KeyedTable`.
        of: name of the setting, for messages.

    Raises:
        ConfigError: no such file, or one of another kind.
        DataError: it is no regular file.
    """
    return [path for one in given for word in _words(one) for path in _find(word, of)]


def _find(given: str, of: str) -> list[Path]:
    if "://" in given:
        raise ConfigError(f"{of}: '{given}': a table lies on a disk; download it, and give its path")
    found = sorted(map(Path, glob.glob(given))) if glob.has_magic(given) else [Path(given)]
    if not found:
        raise ConfigError(f"{of}: '{given}' matches no file")
    for path in found:
        check_exists(path, of)
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"{of}: '{path}': no table; known are {', '.join(SUFFIXES)}")
        check_regular(path, "table")
    return found


def files_in_words(files: Sequence[Path]) -> str:
    """'scores.parquet', or 'part-0.parquet' and 9 more."""
    return f"'{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def take_rows(column: Any, rows: NDArray[np.int64]) -> Any:
    """The values of n rows of a column as one Arrow array, of more than 2 GB, too; null where the row is -1."""
    kind = column.type
    if pa.types.is_string(kind):
        column = column.cast(pa.large_string())
    elif pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
        column = column.cast(pa.large_list(pa.large_string()))
    return column.take(pa.array(rows, mask=rows < 0)).combine_chunks()


def not_utf8(path: Path, encoding: str) -> str:
    """The message for a text file in another encoding."""
    return (
        f"'{path}' looks like {encoding}, and text files are read as UTF-8: "
        f"iconv -f {encoding} -t UTF-8 '{path.name}' > NEW makes one"
    )


def _words(given: str) -> list[str]:
    return [given] if Path(given).exists() else expand_braces(given)


def _plain(kind: Any) -> Any:
    """The type as which values are read: categories as what they are of, decimal numbers as floats, times as texts.

    Times of a day (16:00:00) compare as texts as they do in time; dates stay what they are.
    """
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_time(kind):
        return pa.string()
    return pa.float64() if pa.types.is_decimal(kind) else kind


def _of_one_unit(parts: list[Any]) -> list[Any]:
    """Columns of several files; where all are times, with one zone or none, those of the finest unit among them."""
    kinds = {part.type for part in parts}
    if len(kinds) < 2 or not all(map(pa.types.is_timestamp, kinds)) or len({kind.tz for kind in kinds}) > 1:
        return parts
    finest = max((kind.unit for kind in kinds), key=("s", "ms", "us", "ns").index)
    return [part.cast(pa.timestamp(finest, next(iter(kinds)).tz)) for part in parts]


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _delimiter(path: Path) -> Any:
    return pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)
