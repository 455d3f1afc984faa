"""Opens a source of rows: a table of paths and captions, a folder of images and caption files, or tars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.convert.annotations import open_annotated
from mmdata.convert.arrow import ArrowTable, as_text
from mmdata.convert.belonging import Kind, refuse_strangers
from mmdata.convert.chosen import ChosenRows
from mmdata.convert.delimited import DelimitedTable
from mmdata.convert.folder import FolderSource, NeedsTable
from mmdata.convert.images_folder import find_images
from mmdata.convert.layouts import METADATA, find_tables_of_folder
from mmdata.convert.open_table import find_tables, fingerprint, open_table
from mmdata.convert.packed import PackedSource, is_packed
from mmdata.convert.recipe import ConvertConfig
from mmdata.convert.rows import Row, Source
from mmdata.convert.tables import Table, differences, shown
from mmdata.errors import ConfigError, DataError, Reason, excerpt
from mmdata.safe_read import check_regular

IMAGE_COLUMNS = (
    *("filepath", "file_path", "image", "image_path", "path", "file_name", "filename"),
    *("image_name", "image_file", "img", "img_path", "file", "jpg", "image_bytes"),
    *("url", "image_url", "img_url", "image_link"),
)
CAPTION_COLUMNS = ("caption", "captions", "text", "title", "sentence", "sentences", "comment", "raw")
LABEL_COLUMNS = ("label", "class", "cls", "labels", "class_name", "category")
PATHS_SEEN = 20
"""Rows whose images are looked for to find the folder of the images."""


def open_source(path: Path, config: ConvertConfig, chosen: ChosenRows | None = None) -> Source:
    """Open a corpus: a table, a folder of images, a folder of Parquet files, a tar, or a folder of tars.

    Args:
        path: the folder, or the file.
        config: the settings about tables, columns and parts are used.
        chosen: of tars, the rows to take.

    Raises:
        DataError: no such path, an unreadable table, a damaged tar, an empty corpus, several parts and no `split`.
        ConfigError: no such column, or a setting that does not belong to this kind of source.
    """
    if not path.exists():
        raise DataError(f"source '{path}': no such file or folder")
    if not path.is_dir():
        check_regular(path, "source")
    if config.table is not None and path.is_file() and not path.match(config.table):
        raise ConfigError(f"table '{config.table}': '{path}' is a file itself; give its folder, or leave --table out")
    if config.table is None and is_packed(path):
        refuse_strangers(path, config, Kind.TARS)
        if config.split is not None:
            raise ConfigError(f"split '{config.split}': '{path}' holds tars, all of one part; give those of the part")
        return PackedSource(path, config, chosen)
    if chosen is not None:
        raise ConfigError(f"select: '{path}' holds no tars; rows of shards with an index can be selected")
    if (annotated := open_annotated(path, config)) is not None:
        return annotated
    if path.is_dir() and config.table is None:
        if tables := find_tables_of_folder(path, config.split):
            folder = tables[0].parent if tables[0].name in METADATA else path
            return TableSource(folder, tables, config.model_copy(update={"split": None}))
        try:
            source = FolderSource(path, config)
        except NeedsTable as error:
            return _only_table(path, error, config)
        except (ConfigError, DataError):
            if (table := _table_with_parts(path, config)) is None:
                raise
            return table
        refuse_strangers(path, config, Kind.FOLDER)
        return source
    if path.is_dir():
        return TableSource(path, find_tables(path, config.table or ""), config)
    return TableSource(path.parent, [path], config)


def _only_table(path: Path, error: NeedsTable, config: ConvertConfig) -> TableSource:
    """The table in a folder whose images have no captions; raises `error` if the folder has several tables."""
    if len(error.tables) > 1:
        raise error
    (table,) = error.tables
    try:
        return TableSource(table.parent, [table], config.model_copy(update={"split": None}))
    except (ConfigError, DataError) as unusable:
        raise type(unusable)(f"source '{path}' was read by its only table: {unusable}") from unusable


def _table_with_parts(path: Path, config: ConvertConfig) -> TableSource | None:
    """The only table in a folder whose images have no captions, if `split` names none of the folder's own parts."""
    if config.split is None:
        return None
    try:
        FolderSource(path, config.model_copy(update={"split": None}))
    except NeedsTable as error:
        return TableSource(error.tables[0].parent, error.tables, config) if len(error.tables) == 1 else None
    except (ConfigError, DataError):
        return None
    return None


class TableSource:
    """One or more tables of images and captions, read one after the other."""

    may_repeat = True

    def __init__(self, folder: Path, paths: Sequence[Path], config: ConvertConfig) -> None:
        self._tables = [open_table(path, config.tables) for path in paths]
        refuse_strangers(paths[0], config, _kind(self._tables[0]))
        for table in self._tables[1:]:
            if difference := differences(self._tables[0], table):
                raise DataError(
                    f"tables '{self._tables[0].path}' and '{table.path}' differ in their columns: {difference}; "
                    "make them alike, or convert them one by one"
                )
        self._files = [fingerprint(path) for path in paths]
        self.rows_at_most = sum(
            file.lines if (num_rows := table.num_rows) is None else num_rows
            for table, file in zip(self._tables, self._files, strict=True)
        )
        self.rows_are_exact = all(table.num_rows is not None for table in self._tables)
        if next((row for table in self._tables for row in table.rows(table.columns[:1])), None) is None:
            raise DataError(f"table '{paths[0]}': no rows; the corpus is empty")
        self.columns = choose_columns(self._tables[0], config)
        self._split = config.split
        for table in self._tables:
            if isinstance(table, ArrowTable):
                table.refuse_as_image(self.columns.image)
                self._refuse_to_keep(table)
        self.has_captions = bool(self.columns.captions)
        self.classes = next((self._tables[0].class_names(name) for name in self.columns.label), ())
        self.root, self._found_in = find_images(folder, config.images, self._first_paths())

    def rows(self) -> Iterator[Row]:
        """Rows of all tables. See `Source.rows`."""
        columns = self.columns
        others = (*columns.captions, *columns.label, *columns.split, *columns.hash, *columns.keep.values())
        wanted = list(dict.fromkeys((columns.image, *others)))
        number = 0
        for table in self._tables:
            for place, cells, fault in table.rows(wanted):
                if cells is None:
                    yield Row(number, place, fault=(Reason.BROKEN_ROW, fault))
                elif columns.split and (part := cells.get(columns.split[0])) != self._split:
                    yield Row(number, place, fault=(Reason.FILTERED, f"its split is {excerpt(part)}"))
                else:
                    yield Row(
                        number,
                        place,
                        image=cells.get(columns.image),
                        captions=tuple(as_text(cells.get(name)) for name in columns.captions),
                        label=next((as_text(cells.get(name)) for name in columns.label), None),
                        hash=next((cells.get(name) for name in columns.hash), None),
                        extra={stored: as_text(cells.get(name)) for stored, name in columns.keep.items()},
                    )
                number += 1

    def _first_paths(self) -> list[str]:
        """The first paths of images; none if the images are in the table."""
        rows = islice((row for table in self._tables for row in table.rows([self.columns.image])), PATHS_SEEN)
        paths = (row.cells.get(self.columns.image) for row in rows if row.cells is not None)
        return [path for path in paths if isinstance(path, str) and path]

    def _refuse_to_keep(self, table: ArrowTable) -> None:
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
            **({"images": self._found_in} if self._found_in else {}),
        }


def _kind(table: Table) -> Kind:
    if isinstance(table, ArrowTable):
        return Kind.ARROW
    return Kind.DELIMITED if isinstance(table, DelimitedTable) else Kind.JSON


@dataclass(frozen=True)
class Columns:
    """Columns by meaning; `label`, `split` and `hash` hold one name or none, `keep` maps stored names to columns."""

    image: str
    captions: tuple[str, ...]
    label: tuple[str, ...]
    split: tuple[str, ...]
    hash: tuple[str, ...]
    keep: dict[str, str]


def choose_columns(table: Table, config: ConvertConfig) -> Columns:
    """The columns that the settings name, or the first of the usual names that the table has.

    A table with labels may have no captions.

    Raises:
        ConfigError: the table has no such column; the message lists its columns.
    """
    image = config.image_column or _image_column(table)
    image = _column(table, image, IMAGE_COLUMNS, "image")
    label: tuple[str, ...] = ()
    if config.label_column:
        label = (_column(table, config.label_column, (), "label"),)
    elif config.label_column is None:
        label = tuple(_usual(table, LABEL_COLUMNS)[:1])
    if config.caption_columns:
        captions = tuple(_column(table, name, (), "caption") for name in config.caption_columns)
    else:
        captions = tuple(_usual(table, CAPTION_COLUMNS)[:1])
    if not captions and not label:
        captions = (_column(table, None, CAPTION_COLUMNS, "caption"),)
    split = (_column(table, "split", (), "split"),) if config.split else ()
    hash_column = (_column(table, config.hash_column, (), "hash"),) if config.hash_column else ()
    keep = {name: image if name == "path" else _column(table, name, (), "keep") for name in config.keep}
    if image in keep:  # stored as "path", whatever the table calls it
        keep = {"path" if name == image else name: column for name, column in keep.items()}
    return Columns(image, captions, label, split, hash_column, keep)


def _image_column(table: Table) -> str | None:
    """The column of images: of a usual name, one with images before one with paths; else the only one with images."""
    usual = _usual(table, IMAGE_COLUMNS)
    holding = [name for name in usual if name in table.images]
    only = list(table.images) if len(table.images) == 1 else []
    return next(iter((*holding, *usual, *only)), None)


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
            f"name it with --{purpose}-column, or, if the table has no header line, all with --columns image,caption"
        )
    return found[0]


def _usual(table: Table, usual: Sequence[str]) -> list[str]:
    by_name = {name.casefold(): name for name in reversed(table.columns)}
    return [by_name[name] for name in usual if name in by_name]
