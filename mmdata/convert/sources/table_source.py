"""Rows of tables: which cells are the image, the captions and the label, and which of the others are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.convert.sources.arrow import ArrowTable, as_stored, as_text
from mmdata.convert.sources.belonging import SourceKind, refuse_strangers
from mmdata.convert.sources.columns import choose_columns
from mmdata.convert.sources.delimited import DelimitedTable
from mmdata.convert.sources.files import digest_of_zip
from mmdata.convert.sources.images_folder import find_images
from mmdata.convert.sources.open_table import FilePrint, fingerprint, open_table
from mmdata.convert.sources.rows import InputRow
from mmdata.convert.sources.tables import SourceTable, TableOptions, differences
from mmdata.errors import ConfigError, DataError, Reason, excerpt

PATHS_SEEN = 20
"""Rows whose images are looked for to find the folder of the images."""


class TableSource:
    """One or more tables of images and captions, read one after the other.

    Args:
        folder: that the paths in them are relative to, unless `config` names another.
        tables: with the same columns, of the same types.
        files: that the tables are in.
        config: the settings about columns are used.

    Attributes:
        holds_images: whether rows hold the bytes of images, so that many of them do not fit into memory. The number of
            rows is known then.
        can_be_sent: whether another process can read the tables.
        can_seek: whether rows can be read without those before them, and need no class number that these decide.

    Raises:
        DataError: no row, or tables that differ.
        ConfigError: no such column.
    """

    group_by: Grouping = "image"
    can_be_sent = True

    def __init__(
        self, folder: Path, tables: Sequence[SourceTable], files: Sequence[FilePrint], config: ConvertConfig
    ) -> None:
        self._tables, self._files = tables, files
        first = tables[0]
        for table in tables[1:]:
            if difference := differences(first, table):
                raise DataError(
                    f"tables '{first.path}' and '{table.path}' differ in their columns: {difference}; "
                    "make them alike, or convert them one by one"
                )
        counts = [table.num_rows for table in tables]
        self.rows_are_exact = None not in counts
        self.rows_at_most = sum(files[i].lines if count is None else count for i, count in enumerate(counts))
        if next((row for table in tables for row in table.rows(table.columns[:1])), None) is None:
            raise DataError(f"table '{first.path}': no rows; the corpus is empty")
        self.columns = choose_columns(first, config)
        self._split = config.split
        for table in tables:
            if isinstance(table, ArrowTable):
                table.refuse_as_image(self.columns.image)
                self._refuse_to_keep(table)
        self.holds_images = self.rows_are_exact and any(self.columns.image in table.images for table in tables)
        self.can_seek = all(isinstance(table, ArrowTable) for table in tables) and not self.columns.label
        self.has_captions = bool(self.columns.captions)
        self.classes = next((first.class_names(name) for name in self.columns.label), ())
        self.root, self._found_in = self._find_root(folder, config.images)

    @classmethod
    def open(cls, folder: Path, paths: Sequence[Path], config: ConvertConfig) -> TableSource:
        """Open the tables in files.

        Args:
            folder: that the paths in them are relative to, unless `config` names another.
            paths: of the files.
            config: the settings about tables and columns are used.
        """
        tables = [open_table(path, TableOptions.of(config)) for path in paths]
        refuse_strangers(paths[0], config, _kind(tables[0]))
        return cls(folder, tables, [fingerprint(path) for path in paths], config)

    def rows(self) -> Iterator[InputRow]:
        """Rows of all tables. See `Source.rows`."""
        return (row for row, _ in self._read())

    def rows_from(self, start: int) -> Iterator[InputRow]:
        """The rows from one on; images before it are not read.

        Raises:
            DataError: a file has changed since it was opened.
        """
        self.check_unchanged()
        return (row for row, _ in self._read(start))

    def check_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was opened."""
        for table, file in zip(self._tables, self._files, strict=False):  # rows of a program are in no file
            if file.has_changed(table.path):
                raise DataError(f"table '{table.path}': has changed since it was opened; run the conversion again")

    def _read(self, start: int = 0) -> Iterator[tuple[InputRow, dict[str, Any]]]:
        """Each row with its cells; those of a row with a fault are empty."""
        columns, number = self.columns, 0
        for table in self._tables:
            if table.num_rows is not None and number + table.num_rows <= start:
                number += table.num_rows
                continue
            wanted, skipped = columns.wanted(table.columns), max(0, start - number)
            number += skipped
            for place, cells, fault in table.rows_from(wanted, skipped):
                if cells is None:
                    yield InputRow(number, place, fault=(Reason.BROKEN_ROW, fault)), {}
                elif columns.split and (part := cells.get(columns.split[0])) != self._split:
                    yield InputRow(number, place, fault=(Reason.FILTERED, f"its split is {excerpt(part)}")), {}
                else:
                    yield self._row(number, place, cells), cells
                number += 1

    def _row(self, number: int, place: str, cells: dict[str, Any]) -> InputRow:
        columns = self.columns
        return InputRow(
            number,
            place,
            image=cells.get(columns.image),
            captions=tuple(as_text(cells.get(name)) for name in columns.captions),
            label=next((as_text(cells.get(name)) for name in columns.label), None),
            hash=next((cells.get(name) for name in columns.hash), None),
            boxes=next((cells.get(name) for name in columns.boxes), None),
            extra={stored: as_stored(value) for stored, value in columns.kept(cells).items()},
        )

    def _find_root(self, folder: Path, images: str) -> tuple[str, str]:
        """The folder that paths are relative to, and its name if it was found and not named."""
        return find_images(folder, images, self.first_paths())

    def first_paths(self) -> list[str]:
        """The first paths of images; none if the images are in the table."""
        rows = islice((row for table in self._tables for row in table.rows([self.columns.image])), PATHS_SEEN)
        paths = (row.cells.get(self.columns.image) for row in rows if row.cells is not None)
        return [path for path in paths if isinstance(path, str) and path]

    def first_captions(self, count: int) -> Iterator[InputRow]:
        """The first rows with their captions alone: an image in a table is not read."""
        columns = self.columns.captions
        for row in islice((row for table in self._tables for row in table.rows(columns)), count):
            if row.cells is not None:
                yield InputRow(0, row.place, captions=tuple(as_text(row.cells.get(name)) for name in columns))

    def _refuse_to_keep(self, table: ArrowTable) -> None:
        """Raise ConfigError if a column of images, not of paths, is to be kept in each sample's JSON."""
        for stored, name in self.columns.keep.items():
            if name == self.columns.image and table.holds_images(name):
                raise ConfigError(
                    f"table '{table.path}': column {excerpt(name)} holds images (type "
                    f"{table.types[name][:200]}), and no path to keep; leave '{stored}' out of keep"
                )

    def describe(self) -> dict[str, Any]:
        """Names, hashes and columns of the tables; all columns where they had to be named. See `Source.describe`."""
        return {
            "kind": "table",
            "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            "image": self.columns.image,
            "captions": list(self.columns.captions),
            "label": next(iter(self.columns.label), None),
            **({"images": self._found_in} if self._found_in else {}),
            **digest_of_zip(self.root),
            **({"columns": self._tables[0].columns} if _is_guessed(self._tables[0]) else {}),
        }


def _is_guessed(table: SourceTable) -> bool:
    return isinstance(table, DelimitedTable) and table.guessed


def _kind(table: SourceTable) -> SourceKind:
    if isinstance(table, ArrowTable):
        return SourceKind.ARROW
    return SourceKind.DELIMITED if isinstance(table, DelimitedTable) else SourceKind.JSON
