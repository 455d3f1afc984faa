"""Opens a source of rows: a table of paths and captions, a folder of images and caption files, or tars."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdata.convert.folder import FolderSource
from mmdata.convert.open_table import find_tables, fingerprint, open_table
from mmdata.convert.packed import PackedSource, is_packed
from mmdata.convert.parquet import ParquetTable, as_text
from mmdata.convert.recipe import ConvertConfig
from mmdata.convert.rows import Row, Source
from mmdata.convert.tables import Table, differences, shown
from mmdata.errors import ConfigError, DataError, Reason, excerpt
from mmdata.safe_read import check_regular

IMAGE_COLUMNS = ("filepath", "file_path", "image", "image_path", "path", "file_name", "filename")
CAPTION_COLUMNS = ("caption", "captions", "text", "title")
LABEL_COLUMNS = ("label", "class", "cls")


def open_source(path: Path, config: ConvertConfig) -> Source:
    """Open a folder of images, a folder of tars, a tar, or a table.

    Args:
        path: the folder, or the file.
        config: table, images and column settings are used.

    Raises:
        DataError: no such path, an unreadable table, a damaged tar, an empty corpus.
        ConfigError: no such column.
    """
    if not path.exists():
        raise DataError(f"source '{path}': no such file or folder")
    if not path.is_dir():
        check_regular(path, "source")
    if config.table is None and is_packed(path):
        return PackedSource(path, config)
    if path.is_dir() and config.table is None:
        return FolderSource(path, config)
    if path.is_dir():
        return TableSource(path, find_tables(path, config.table or ""), config)
    return TableSource(path.parent, [path], config)


class TableSource:
    """One or more tables of images and captions, read one after the other."""

    classes: tuple[str, ...] = ()
    may_repeat = True

    def __init__(self, folder: Path, paths: Sequence[Path], config: ConvertConfig) -> None:
        self.root = os.path.realpath(folder / config.images)
        if not os.path.isdir(self.root):
            raise ConfigError(f"images '{config.images}': no such folder in '{folder}'")
        self._tables = [open_table(path, quotes=config.quotes) for path in paths]
        for table in self._tables[1:]:
            if difference := differences(self._tables[0], table):
                raise DataError(
                    f"tables '{self._tables[0].path}' and '{table.path}' differ in their columns: {difference}; "
                    "make them alike, or convert them one by one"
                )
        self._files = [fingerprint(path) for path in paths]
        self.rows_at_most = sum(
            table.num_rows if isinstance(table, ParquetTable) else file.lines
            for table, file in zip(self._tables, self._files, strict=True)
        )
        if next((row for table in self._tables for row in table.rows(table.columns[:1])), None) is None:
            raise DataError(f"table '{paths[0]}': no rows; the corpus is empty")
        self.columns = choose_columns(self._tables[0], config)
        for table in self._tables:
            if isinstance(table, ParquetTable):
                table.refuse_as_image(self.columns.image)
                self._refuse_to_keep(table)

    def rows(self) -> Iterator[Row]:
        """Rows of all tables. See `Source.rows`."""
        columns = self.columns
        wanted = list(dict.fromkeys((columns.image, *columns.captions, *columns.label, *columns.keep.values())))
        number = 0
        for table in self._tables:
            for place, cells, fault in table.rows(wanted):
                if cells is None:
                    yield Row(number, place, fault=(Reason.BROKEN_ROW, fault))
                else:
                    yield Row(
                        number,
                        place,
                        image=cells.get(columns.image),
                        captions=tuple(as_text(cells.get(name)) for name in columns.captions),
                        label=next((as_text(cells.get(name)) for name in columns.label), None),
                        extra={stored: as_text(cells.get(name)) for stored, name in columns.keep.items()},
                    )
                number += 1

    def _refuse_to_keep(self, table: ParquetTable) -> None:
        """Raise ConfigError if a column of images, not of paths, is to be kept in each sample's JSON."""
        for stored, name in self.columns.keep.items():
            if name == self.columns.image and table.holds_images(name):
                raise ConfigError(
                    f"table '{table.path}': column {excerpt(name)} holds images (type "
                    f"{table.types[name][:200]}), and no path to keep; leave '{stored}' out of --keep"
                )

    def describe(self) -> dict[str, Any]:
        """Names, hashes and columns of the tables. See `Source.describe`."""
        return {
            "kind": "table",
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            "image": self.columns.image,
            "captions": list(self.columns.captions),
            "label": next(iter(self.columns.label), None),
        }


@dataclass(frozen=True)
class Columns:
    """Columns by meaning; `label` holds one name or none, `keep` maps the stored name to the column."""

    image: str
    captions: tuple[str, ...]
    label: tuple[str, ...]
    keep: dict[str, str]


def choose_columns(table: Table, config: ConvertConfig) -> Columns:
    """The columns that the settings name, or the first of the usual names that the table has.

    Raises:
        ConfigError: the table has no such column; the message lists its columns.
    """
    image = _column(table, config.image_column, IMAGE_COLUMNS, "image")
    if config.caption_columns:
        captions = tuple(_column(table, name, (), "caption") for name in config.caption_columns)
    else:
        captions = (_column(table, None, CAPTION_COLUMNS, "caption"),)
    label: tuple[str, ...] = ()
    if config.label_column:
        label = (_column(table, config.label_column, (), "label"),)
    elif config.label_column is None:
        label = tuple(_usual(table, LABEL_COLUMNS)[:1])
    keep = {name: image if name == "path" else _column(table, name, (), "keep") for name in config.keep}
    if image in keep:  # stored as "path", whatever the table calls it
        keep = {"path" if name == image else name: column for name, column in keep.items()}
    return Columns(image, captions, label, keep)


def _column(table: Table, name: str | None, usual: Sequence[str], purpose: str) -> str:
    known = shown(table.columns)
    if name is not None:
        if name not in table.columns:
            raise ConfigError(f"table '{table.path}': no column '{name}' ({purpose}); there are: {known}")
        return name
    found = _usual(table, usual)
    if not found:
        raise ConfigError(
            f"table '{table.path}': no {purpose} column of a usual name ({', '.join(usual)}); there are: {known}; "
            f"name it with --{purpose}-column (the first line must be a header)"
        )
    return found[0]


def _usual(table: Table, usual: Sequence[str]) -> list[str]:
    by_name = {name.casefold(): name for name in reversed(table.columns)}
    return [by_name[name] for name in usual if name in by_name]
