"""What a table is. Each row that can be delimited is yielded once, with its cells or with a fault.

Text is read as UTF-8 unless the settings name another encoding; bytes that do not fit stay in the cell as surrogates,
so that one bad cell costs one row. It may be compressed with gzip or zstd; the first bytes tell, and not the name.
"""

from __future__ import annotations

import codecs
import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar, NamedTuple, TextIO, TypeVar, cast

import pyarrow as pa

from mmdata.config.convert import Grouping, TableFormat
from mmdata.convert.sources.files import in_zip, open_file
from mmdata.convert.sources.rows import SourceKind
from mmdata.errors import ConfigError, DataError, Reason, excerpt
from mmdata.recognize import wide_encoding
from mmdata.tars.texts import Loss

T = TypeVar("T")

COMPRESSED_SUFFIXES = (".gz", ".zst")
"""Ends of the names of compressed tables, as captions.csv.gz."""
_COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

FORMATS: dict[str, TableFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
SUFFIXES = (*FORMATS, *(text + packed for text in TEXT_SUFFIXES for packed in COMPRESSED_SUFFIXES))
MAX_LINE = 64 * 2**20
"""Longest line of a text table; a file with a longer one is something else."""
MAX_NAMES = 20
"""Columns that a message names."""
MAX_DIFFERENCES = 5
"""Differences between two tables that a message names."""


class ImageBytes(bytes):
    """An image that a cell holds, as Hugging Face's {bytes, path}.

    Attributes:
        path: beside it in the cell, for people.
    """

    path: str


def with_path(data: bytes, path: str | None) -> bytes:
    """An image that a cell holds, with the path beside it if there is one."""
    if not path:
        return data
    image = ImageBytes(data)
    image.path = path
    return image


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        place: its start, as "captions.csv, line 12".
        cells: values by column; None if the row could not be parsed.
        fault: why the row cannot be used.
        losses: parts of the row that cannot be used.
        key: of the row's sample; "" for its number.
    """

    place: str
    cells: dict[str, Any] | None
    fault: tuple[Reason, str] | None = None
    losses: Mapping[Loss, str] = MappingProxyType({})
    key: str = ""

    @classmethod
    def broken(cls, place: str, detail: str) -> TableRow:
        """A row that could not be parsed."""
        return cls(place, None, (Reason.BROKEN_ROW, detail))


class SourceTable(ABC):
    """A table that can be read from its start any number of times.

    Attributes:
        kind: whether it is delimited text, JSON or Arrow, COCO's annotations, or of a program.
        group_by: see `Source`.
        path: of the file.
        columns: their names.
        types: type of each column; several tables must agree. Empty if the format has no types.
        num_rows: None if nobody has read the rows yet; `TableSource` counts them.
        images: columns whose cells may be whole images instead of paths.
        binary: columns whose cells hold bytes, which JSON cannot.
    """

    kind: ClassVar[SourceKind]
    group_by: ClassVar[Grouping] = "image"
    path: Path
    columns: list[str]
    types: dict[str, str]
    num_rows: int | None = None
    images: tuple[str, ...] = ()
    binary: tuple[str, ...] = ()

    @abstractmethod
    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows, in order, with at least these columns; a cell of a binary column holds bytes."""

    def rows_from(self, columns: Sequence[str], start: int) -> Iterator[TableRow]:
        """The rows from number `start` on."""
        return islice(self.rows(columns), start, None)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Names of the class numbers in a column, if the file has them; else empty."""
        return ()

    def how_to_name(self, purposes: Sequence[str]) -> str:
        """For messages: what names the columns of purposes, such as "image", that have no usual name."""
        return " and ".join(f"--{purpose}-column" for purpose in purposes)


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


def choose_part(folder: Path | str, parts: Mapping[str, T], split: str | None) -> T:
    """One part of a corpus: `split`, or the only part.

    Raises:
        DataError: there are several parts, and `split` is None or none of them.
    """
    if split is None and len(parts) == 1:
        return next(iter(parts.values()))
    if split is None:
        raise DataError(
            f"source '{folder}': has {len(parts)} parts, which are converted one by one: {shown(list(parts))}; "
            f"choose one with --split {'train' if 'train' in parts else next(iter(parts))}"
        )
    if split not in parts:
        raise ConfigError(f"split '{split}': no such part in '{folder}'; there are: {shown(list(parts))}")
    return parts[split]


def differences(first: SourceTable, other: SourceTable) -> str:
    """How the columns of two tables differ: "'caption' is string in the first and int64 in the second"; or ""."""
    names = [name for name in {**first.types, **other.types} if first.types.get(name) != other.types.get(name)]
    types = [[table.types.get(name, "missing")[:200] for table in (first, other)] for name in names]
    said = [
        f"{excerpt(name)} is {one} in the first and {two} in the second"
        for name, (one, two) in zip(names, types, strict=True)
    ]
    more = f"; and {len(names) - MAX_DIFFERENCES} more" if len(names) > MAX_DIFFERENCES else ""
    return "; ".join(said[:MAX_DIFFERENCES]) + more


class TextLines:
    """Lines of a text file with their line ends; `ended` is True once the last line was read."""

    def __init__(self, path: Path, encoding: str = "utf-8") -> None:
        self._path = path
        self._encoding = encoding
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        number = 0
        try:
            with naming_damage(self._path), open_text(self._path, self._encoding) as file:
                while line := file.readline(MAX_LINE):
                    number += 1
                    if number == 1 and is_utf8(self._encoding):
                        _refuse_wide(self._path, line)
                    if len(line) == MAX_LINE:
                        raise DataError(f"table '{self._path}', line {number}: longer than 64 MiB; is it a text table?")
                    # Python 3.10's csv module raises for NUL; cleaning removes control characters anyway.
                    yield line.replace("\0", "\x01")
        except UnicodeError as error:
            raise DataError(
                f"table '{self._path}', after line {number}: not {self._encoding}: {error}; name its encoding, as in "
                "encoding=latin-1"
            ) from error
        self.ended = True


def _refuse_wide(path: Path, line: str) -> None:
    """Raise DataError if the first line of a table, read as UTF-8, is in UTF-16 or UTF-32."""
    if encoding := wide_encoding(line[:4].encode("utf-8", "surrogateescape")[:4]):
        raise DataError(
            f"table '{path}': looks like {encoding}; say so with encoding={encoding.lower()}, or make it UTF-8: "
            f"iconv -f {encoding} -t UTF-8 '{path.name}'"
        )


def open_text(path: Path, encoding: str) -> TextIO:
    """A text file for reading, decompressed; bytes that do not fit the encoding become surrogates where it can."""
    name = "utf-8-sig" if is_utf8(encoding) else encoding
    return io.TextIOWrapper(open_bytes(path), encoding=name, errors="surrogateescape", newline="")


def is_utf8(encoding: str) -> bool:
    """Whether a name is one of UTF-8."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def compression_of(path: Path) -> str | None:
    """ "gzip" or "zstd"; None for a file that is not compressed."""
    with open_file(path) as file:
        head = file.read(4)
    return next((name for magic, name in _COMPRESSION_MAGIC.items() if head.startswith(magic)), None)


def open_bytes(path: Path) -> BinaryIO:
    """A file for reading, decompressed. Reading raises OSError where it is cut or damaged; see `naming_damage`."""
    compression = compression_of(path)
    if compression is None:
        return open_file(path)
    return cast(BinaryIO, pa.input_stream(open_file(path) if in_zip(path) else str(path), compression=compression))


def name_inside(path: Path) -> str:
    """The name of a file without the end that says how it is compressed."""
    inside = path.name[: -len(path.suffix)] if path.suffix.lower() in COMPRESSED_SUFFIXES else path.name
    return inside if compression_of(path) else path.name


@contextmanager
def naming_damage(path: Path) -> Generator[None]:
    """Raise DataError in place of the OSError for a compressed file that is cut or damaged."""
    try:
        yield
    except OSError as error:
        if error.errno is not None or (compression := compression_of(path)) is None:
            raise
        raise DataError(
            f"table '{path}': not whole {compression} data ({error}); fetch it again, or unpack what there is"
        ) from error
