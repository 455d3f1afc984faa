"""Files that name rows: a mask or row numbers (.npy), or keys (a text file, or a column of a table)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mmdata.errors import ConfigError, DataError, excerpt
from mmdata.recognize import wide_encoding
from mmdata.safe_read import check_exists, open_regular, read_regular
from mmdata.tables.table import SUFFIXES as SUFFIXES_OF_TABLES
from mmdata.tables.table import KeyedTable, not_utf8

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SUFFIXES = (".npy", ".txt", *SUFFIXES_OF_TABLES)
"""Ends of the names of files that select rows; anything else is a condition."""
READ_AHEAD = 2**20
"""Values that are read of an array at a time, at least."""
UID_TYPES = ("u8", "u8")
"""DataComp's uids: the first and the last 16 hexadecimal digits as two numbers."""


def is_file(text: str) -> bool:
    """Whether a selection is the name of a file."""
    return text.lower().endswith(SUFFIXES)


class ReadsLines(Protocol):
    """Reads a file of keys; see `read_lines`."""

    def __call__(self, file: str, column: str | None, *, of: str) -> list[str]: ...


def read_lines(file: str, column: str | None, *, of: str) -> list[str]:
    """The lines of a text file without empty ones, or a column of a table as texts without missing values.

    Raises:
        ConfigError: no such file or column, or a column of other values; the nearest one is named.
        DataError: the file is damaged.
    """
    path = Path(file)
    if path.suffix.lower() in SUFFIXES_OF_TABLES:
        return KeyedTable([file], of=of, key=column, setting="column").keys().drop_null().to_pylist()
    check_exists(path, of)
    if column is not None:
        raise ConfigError(f"{of}: '{file}' is a text file and has no column '{column}'; leave the column out")
    data = read_regular(path, "file of keys")
    if encoding := wide_encoding(data[:4]):
        raise DataError(f"{of}: {not_utf8(path, encoding)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{of}: '{file}' is no text in UTF-8 (byte {error.start}); write a key a line") from None
    return [line for line in (line.strip() for line in text.splitlines()) if line]


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
        path = Path(file)
        check_exists(path, of)
        self._of = f"{of}: '{file}'"
        self._file: BinaryIO = open(open_regular(path, "file"), "rb")  # noqa: SIM115 - closed with the object
        try:
            version = np.lib.format.read_magic(self._file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, _, self.dtype = read_header(self._file)
        except ValueError as error:
            raise DataError(f"{self._of} is no .npy file ({excerpt(str(error), 100)}); numpy.save writes one") from None
        if len(shape) != 1 or self.dtype.hasobject:
            raise ConfigError(
                f"{self._of} is an array of {self.dtype} and shape {shape}; a mask, row numbers and uids have one "
                "dimension"
            )
        self._begin = self._file.tell()
        if path.stat().st_size != self._begin + shape[0] * self.dtype.itemsize:
            raise DataError(
                f"{self._of} has {path.stat().st_size:,} bytes, which do not hold {shape[0]:,} values; write it again"
            )
        self._length = shape[0]
        self._ahead_begin, self._ahead = 0, np.empty(0, self.dtype)

    def __del__(self) -> None:
        if file := getattr(self, "_file", None):
            file.close()

    def __len__(self) -> int:
        return self._length

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Values begin … end−1; quick where the next call goes on from here."""
        ahead = self._ahead_begin, self._ahead_begin + len(self._ahead)
        if not ahead[0] <= begin <= end <= ahead[1]:
            self._file.seek(self._begin + begin * self.dtype.itemsize)
            self._ahead_begin = begin
            self._ahead = np.fromfile(self._file, self.dtype, max(end - begin, READ_AHEAD))
            if begin + len(self._ahead) < min(end, self._length):
                raise DataError(f"{self._of} became shorter while it was read")
        return self._ahead[begin - self._ahead_begin : end - self._ahead_begin]


def uids_of(file: NpyFile) -> list[str]:
    """DataComp's uids as texts of 32 hexadecimal digits."""
    values = file.read(0, len(file))
    first, last = (values[name].tolist() for name in file.dtype.names or ())
    return [f"{a:016x}{b:016x}" for a, b in zip(first, last, strict=True)]


def has_uids(dtype: np.dtype[Any]) -> bool:
    """Whether an array's values are uids, as DataComp's tools write them."""
    return dtype.names is not None and [dtype[name].str[1:] for name in dtype.names] == list(UID_TYPES)
