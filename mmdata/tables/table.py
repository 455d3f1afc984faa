"""Files of users: tables (Parquet, CSV, TSV) with a column of keys, lines of text, and arrays (.npy)."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.lib import format as npy
from numpy.typing import NDArray

from mmdata.errors import ConfigError, DataError, excerpt, meant
from mmdata.recognize import wide_encoding
from mmdata.safe_read import check_exists, check_regular, open_regular, read_regular
from mmdata.tables.values import DATES, iso_texts, kind_of
from mmdata.tars.foreign import expand_braces

SUFFIXES = (".parquet", ".csv", ".tsv")
KEY_COLUMNS = ("key", "uid")
"""The column that holds keys, if none is named: the first of these that a table has."""
_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
_READ_AHEAD = 2**20  # bytes of an array


class KeyedTable:
    """One or more files of the same columns, which are read when they are asked for.

    Args:
        files: paths, or patterns such as metadata/*.parquet and metadata/{000..099}.parquet.
        of: name of the setting, for messages.
        key: column of keys; None: key, or uid.
        remedy: how to name the column of keys, for messages.

    Attributes:
        types: Arrow's type of each column, by name.
        key: name of the column of keys.

    Raises:
        ConfigError: no such file or column, or files of different columns; the nearest one is named.
        DataError: a file is no table.
    """

    def __init__(self, files: Sequence[str], *, of: str, key: str | None = None, remedy: str = "key: NAME") -> None:
        self._of, self._files = of, find_files(files, of=of)
        self.types, *others = (self._types(path) for path in self._files)
        for path, types in zip(self._files[1:], others, strict=True):
            if missing := [name for name in self.types if name not in types]:
                raise ConfigError(f"{of}: '{path}' has no column '{missing[0]}', and '{self._files[0]}' has")
        alone = list(self.types) if len(self.types) == 1 else []
        self.key = key or next((name for name in (*KEY_COLUMNS, *alone) if name in self.types), "")
        if self.key not in self.types:
            what = f"no column '{key}'{meant(key, self.types)}" if key else "no column key or uid"
            listed = ", ".join(self.types)
            raise ConfigError(f"{of}: {self}: {what}; it has {listed}: name the column of keys ({remedy})")

    def __str__(self) -> str:
        return in_words(self._files)

    def keys(self) -> Any:
        """The keys as texts, an Arrow array (n,); null where a row has none.

        Raises:
            ConfigError: the column holds neither texts nor whole numbers.
            DataError: a file is damaged.
        """
        values = self._read(self.key, as_text=True)  # 000012 is not 12
        if (kind := kind_of(values.type)) in DATES:
            values = iso_texts(values)
        elif kind != "text" and not pa.types.is_integer(values.type):
            raise ConfigError(
                f"{self._of}: {self}, column '{self.key}': values of type {values.type}, and keys are texts: store "
                "them as texts, as the tars name the samples"
            )
        return values.cast(pa.large_string())  # of more than 2 GB in all, too

    @property
    def key_hint(self) -> str:
        """For messages that no key was found: what is wrong with keys that are numbers."""
        kind = self.types[self.key]
        if not (_is_parquet(self._files[0]) and pa.types.is_integer(kind)):
            return ""
        return f"; they are {kind}, which has no leading zeros: store the keys as texts, as the tars name the samples"

    def column(self, name: str) -> Any:
        """A column, an Arrow array (n,), in the order of files and rows; raises as `keys`."""
        return self._read(name)

    def place(self, row: int) -> str:
        """File and row of a row of the table, for messages; rows of a file are counted from 0."""
        for path in self._files:
            count = len(self._read_one(path, self.key))
            if row < count:
                return f"'{path}' row {row}"
            row -= count
        raise IndexError(row)

    def _types(self, path: Path) -> dict[str, Any]:
        if not _is_parquet(path):
            with path.open("rb") as file:
                check_encoding(path, file.read(4), of=self._of)

        def read() -> tuple[list[str], list[Any]]:
            # All of a text file: a column may turn from dates to texts at any row.
            schema = pyarrow.parquet.read_schema(path) if _is_parquet(path) else _read_csv(path).schema
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

    def _read(self, name: str, *, as_text: bool = False) -> Any:
        parts = _of_one_unit([self._read_one(path, name, as_text) for path in self._files])
        if len({part.type for part in parts}) > 1:
            kinds = ", ".join(sorted({str(part.type) for part in parts}))
            raise ConfigError(f"{self._of}: {self}, column '{name}': values of different types in its files: {kinds}")
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=parts[0].type)

    def _read_one(self, path: Path, name: str, as_text: bool = False) -> Any:
        def read() -> Any:
            if _is_parquet(path):
                table: Any = pyarrow.parquet.read_table(path, columns=[name])
            else:
                types = {name: pa.string()} if as_text else None
                table = _read_csv(path, include_columns=[name], column_types=types)
            return table.column(name).cast(_plain(table.column(name).type))

        return self._checked(path, read)

    def _checked(self, path: Path, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (pa.ArrowException, OSError, ValueError) as error:
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
    words = [word for one in given for word in ([one] if Path(one).exists() else expand_braces(one))]
    return [path for word in words for path in _find(word, of)]


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


def in_words(files: Sequence[Path]) -> str:
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


def read_lines(file: str, column: str | None, *, of: str) -> list[str]:
    """The lines of a text file without empty ones, or a column of a table as texts without missing values.

    Raises:
        ConfigError: no such file or column, or a column of other values; the nearest one is named.
        DataError: the file is damaged.
    """
    path = Path(file)
    if path.suffix.lower() in SUFFIXES:
        remedy = f"key in lines('{file}', 'NAME')"
        return KeyedTable([file], of=of, key=column, remedy=remedy).keys().drop_null().to_pylist()
    check_exists(path, of)
    if column is not None:
        raise ConfigError(f"{of}: '{file}' is a text file and has no column '{column}'; leave the column out")
    data = read_regular(path, "file of keys")
    check_encoding(path, data[:4], of=of)
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{of}: '{file}' is no text in UTF-8 (byte {error.start}); write a key a line") from None
    return [line for line in map(str.strip, lines) if line]


def check_encoding(path: Path, head: bytes, *, of: str) -> None:
    """Refuse what spreadsheets call Unicode text, of which pyarrow would read something; `head`: the first bytes."""
    if encoding := wide_encoding(head):
        raise DataError(
            f"{of}: '{path}' looks like {encoding}, and text files are read as UTF-8: "
            f"iconv -f {encoding} -t UTF-8 '{path.name}' > NEW makes one"
        )


class NpyFile:
    """A one-dimensional array in a .npy file, read in parts: a mask of 10^9 rows is not held, and never mapped.

    Args:
        file: of the array.
        of: name of the setting, for messages.

    Raises:
        ConfigError: no such file, or an array of more dimensions.
        DataError: the file is damaged.
    """

    def __init__(self, file: str, *, of: str) -> None:
        check_exists(Path(file), of)
        self._of = f"{of}: '{file}'"
        self._file: BinaryIO = open(open_regular(file), "rb", _READ_AHEAD)  # noqa: SIM115 - closed with the object
        try:
            is_first = npy.read_magic(self._file) == (1, 0)
            read_header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
            shape, _, self.dtype = read_header(self._file)
        except ValueError as error:
            raise DataError(f"{self._of} is no .npy file ({excerpt(str(error), 100)}); numpy.save writes one") from None
        if len(shape) != 1 or self.dtype.hasobject or not self.dtype.itemsize:
            raise ConfigError(
                f"{self._of} is an array of {self.dtype} and shape {shape}; masks, weights, row numbers and uids "
                "have one dimension"
            )
        self._begin, self._length = self._file.tell(), shape[0]
        if (size := self._file.seek(0, 2)) != self._begin + shape[0] * self.dtype.itemsize:
            raise DataError(f"{self._of} has {size:,} bytes, which do not hold {shape[0]:,} values; write it again")

    def __del__(self) -> None:
        if file := getattr(self, "_file", None):
            file.close()

    def __len__(self) -> int:
        return self._length

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Values begin … end−1; quick where the next call goes on from here."""
        self._file.seek(self._begin + begin * self.dtype.itemsize)
        data = self._file.read((end - begin) * self.dtype.itemsize)
        if len(data) < (end - begin) * self.dtype.itemsize:
            raise DataError(f"{self._of} became shorter while it was read")
        return np.frombuffer(data, self.dtype)


def _read_csv(path: Path, **options: Any) -> Any:
    parse = pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)
    convert = pyarrow.csv.ConvertOptions(strings_can_be_null=True, **options)
    return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)


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
