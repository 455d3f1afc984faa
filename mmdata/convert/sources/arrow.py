"""Parquet and Arrow tables with captions and either paths of images or, in a binary column, the images."""

from __future__ import annotations

import datetime
import decimal
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mmdata.convert.sources.rows import SourceKind
from mmdata.convert.sources.tables import SourceTable, TableRow, refuse_twice, with_path
from mmdata.errors import ConfigError, DataError, excerpt

ARROW_MAGIC = b"ARROW1"
"""First bytes of an Arrow file with a footer; a stream has no magic."""


class ArrowTable(SourceTable):
    """A table whose columns have Arrow types: a `ParquetTable` or an `ArrowFile`.

    Attributes:
        form: name of the file's format, for messages.
    """

    kind = SourceKind.ARROW
    form: ClassVar[str]

    def __init__(self, path: Path, schema: Any, num_rows: int) -> None:
        self.path = path
        self.num_rows = num_rows
        self._features = _hugging_face_features(schema.metadata or {})
        self.columns = list(schema.names)
        refuse_twice(path, self.columns)
        self._types: dict[str, Any] = {field.name: field.type for field in schema}
        self.types = {name: str(kind) for name, kind in self._types.items()}
        self.images = tuple(name for name in self.columns if self.holds_images(name))
        self.binary = tuple(name for name in self.columns if _has_bytes(self._types[name]))

    def refuse_as_image(self, name: str) -> None:
        """Raise ConfigError for a column that holds neither paths nor images."""
        kind = _plain_type(self._types[name])
        if not (_is_text(kind) or _is_binary(kind) or _is_image_struct(kind) or pa.types.is_null(kind)):
            raise ConfigError(
                f"table '{self.path}': column {excerpt(name)} is of type {str(kind)[:200]}; the image column "
                "holds paths (string), images (binary), or structs of bytes and path; name it with --image-column"
            )

    def holds_images(self, name: str) -> bool:
        """Whether the cells of a column may be whole images instead of paths."""
        kind = _plain_type(self._types[name])
        return _is_binary(kind) or _is_image_struct(kind)

    def class_names(self, column: str) -> tuple[str, ...]:
        """Names of the class numbers in a column that `datasets` wrote as a ClassLabel; else empty."""
        feature = self._features.get(column)
        names = cast("dict[str, Any]", feature).get("names") if isinstance(feature, dict) else None
        if not isinstance(names, list):
            return ()
        return tuple(str(name) for name in cast("list[Any]", names))

    def rows(self, columns: Sequence[str]) -> Iterator[TableRow]:
        """All rows; only `columns` are read. See `SourceTable.rows`."""
        return self.rows_from(columns, 0)

    def rows_from(self, columns: Sequence[str], start: int) -> Iterator[TableRow]:
        """The rows from one on; those before it are not read. See `SourceTable.rows_from`."""
        number = start
        size = 32 if any(self.holds_images(name) for name in columns) else 1024  # images are large
        try:
            for batch in self._batches(list(columns), size, start):
                values = [_as_python(batch.column(name)) for name in columns]
                for cells in zip(*values, strict=True):
                    number += 1
                    yield TableRow(f"{self.path.name}, row {number}", dict(zip(columns, cells, strict=True)))
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise DataError(f"table '{self.path}', after row {number}: not readable as {self.form}: {error}") from error

    @abstractmethod
    def _batches(self, columns: list[str], size: int, start: int) -> Iterator[Any]:
        """The rows from `start` on with at least these columns, at most `size` of them at a time."""


class ParquetTable(ArrowTable):
    """A Parquet file."""

    form = "Parquet"

    def __init__(self, path: Path) -> None:
        try:
            with pq.ParquetFile(path) as file:
                super().__init__(path, file.schema_arrow, file.metadata.num_rows)
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise DataError(f"table '{path}': not a whole Parquet file: {error}") from error

    def _batches(self, columns: list[str], size: int, start: int) -> Iterator[Any]:
        # With pre_buffer, what was read of the file would stay in memory until its end.
        with pq.ParquetFile(self.path, pre_buffer=False) as file:
            groups = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            first = 0
            while first < len(groups) and start >= groups[first]:
                start -= groups[first]
                first += 1
            yield from _after(start, file.iter_batches(size, row_groups=range(first, len(groups)), columns=columns))


class ArrowFile(ArrowTable):
    """A file in Arrow's IPC format: a stream, as `datasets` writes it to disk, or a file with a footer (Feather)."""

    form = "Arrow"

    def __init__(self, path: Path) -> None:
        try:
            with pa.memory_map(str(path)) as file:
                reader, batches = _open_ipc(file)
                num_rows = sum(batch.num_rows for batch in batches)  # the file is mapped: this reads little of it
                super().__init__(path, reader.schema, num_rows)
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise DataError(
                f"table '{path}': not a whole Arrow file ({error}); write it again with save_to_disk, or as Parquet "
                'with to_parquet("train.parquet")'
            ) from error

    def _batches(self, columns: list[str], size: int, start: int) -> Iterator[Any]:
        with pa.memory_map(str(self.path)) as file:
            for whole in _after(start, _open_ipc(file)[1]):
                batch = whole.select(columns)
                batch.validate(full=True)  # Arrow itself trusts the offsets in a file, and would read behind its end
                for begin in range(0, batch.num_rows, size):
                    yield batch.slice(begin, size)


def _after(rows: int, batches: Iterable[Any]) -> Iterator[Any]:
    """Batches without their first rows."""
    for batch in batches:
        if rows < batch.num_rows:
            yield batch.slice(rows)
        rows = max(0, rows - batch.num_rows)


def _open_ipc(file: Any) -> tuple[Any, Iterator[Any]]:
    """The reader of an open file in Arrow's IPC format, and its batches."""
    is_stream = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
    file.seek(0)
    if is_stream:
        stream = pa.ipc.open_stream(file)
        return stream, iter(stream)
    footed = pa.ipc.open_file(file)
    return footed, (footed.get_batch(number) for number in range(footed.num_record_batches))


def _hugging_face_features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """The features that `datasets` writes into a Parquet file's schema; empty without readable ones."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return cast("dict[str, Any]", features) if isinstance(features, dict) else {}


def _plain_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_binary(kind: Any) -> bool:
    sized = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return sized or pa.types.is_binary_view(kind)


def _has_bytes(kind: Any) -> bool:
    """Whether values of a type hold bytes, at any depth."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return _is_binary(_plain_type(kind)) or any(_has_bytes(one) for one in inner)


def _is_image_struct(kind: Any) -> bool:
    """Whether a type is that of Hugging Face's Image feature: a struct of bytes and path, one of them null."""
    if not pa.types.is_struct(kind):
        return False
    names = {field.name: field.type for field in kind}
    path = names.get("path", pa.null())  # null: no row has one
    return "bytes" in names and _is_binary(names["bytes"]) and (_is_text(path) or pa.types.is_null(path))


def _as_python(column: Any) -> list[Any]:
    """Values of an Arrow array; strings that are not UTF-8 hold surrogates."""
    # Strings are cast to bytes and decoded one by one: to_pylist raises for the whole array if one is not UTF-8.
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_python(column.dictionary_decode())
    if _is_text(kind):
        return [as_text(value) for value in column.cast(pa.large_binary()).to_pylist()]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        if pa.types.is_string(inner) or pa.types.is_large_string(inner):
            return [as_text(value) for value in column.cast(pa.large_list(pa.large_binary())).to_pylist()]
    if _is_image_struct(kind):
        fields = dict(zip((field.name for field in kind), column.flatten(), strict=True))
        images = _as_python(fields["bytes"])
        paths = _as_python(fields["path"]) if "path" in fields else [None] * len(images)
        pairs = zip(images, paths, strict=True)
        return [path if image is None else with_path(image, path) for image, path in pairs]
    return column.to_pylist()


def as_text(value: Any) -> Any:
    """Bytes, also in lists, as text; bytes that are not UTF-8 become surrogates. Other values stay as they are."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, list):
        return [as_text(item) for item in cast("list[Any]", value)]
    return value


def as_stored(value: Any) -> Any:
    """A cell for a sample's JSON: bytes as text, dates and times in ISO 8601, decimal numbers as text."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else as_text(value)
