"""Rows of tables: which cells are the image, the captions and the label, and which of the others are kept.

The folder that the paths are relative to is found here; where no image is found, `where_looked` says where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.arrow import ArrowTable, as_stored, as_text
from mmdata.convert.sources.columns import choose_columns
from mmdata.convert.sources.files import corpus_folder, digest_of_zip, folders_in, is_file, is_folder, is_hidden
from mmdata.convert.sources.open_table import FilePrint, fingerprint, open_table
from mmdata.convert.sources.rows import InputRow, Source, refuse_strangers
from mmdata.convert.sources.tables import SourceTable, TableRow, differences, shown
from mmdata.errors import ConfigError, DataError, Reason, excerpt

PATHS_SEEN = 20
"""Rows whose images are looked for to find the folder of the images."""
LONGEST_PATH = 4096
"""Bytes of the longest path in a column of bytes."""

SHOWN_CHARACTERS = 200


class TableSource(Source):
    """One or more tables of images and captions, read one after the other.

    Args:
        folder: that the paths in them are relative to, unless `config` names another.
        tables: with the same columns, of the same types.
        files: that the tables are in.
        config: the settings about columns are used.

    Raises:
        DataError: no row, or tables that differ.
        ConfigError: no such column.
    """

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
        self._counts = [sum(1 for _ in one.rows(())) if one.num_rows is None else one.num_rows for one in tables]
        self.num_rows = sum(self._counts)
        if not self.num_rows:
            raise DataError(f"table '{first.path}': no rows; the corpus is empty")
        first.columns = list(dict.fromkeys(name for table in tables for name in table.columns))  # of JSON they differ
        self.columns = choose_columns(tables, config)
        self._split = config.split
        for table in tables:
            if isinstance(table, ArrowTable):
                table.refuse_as_image(self.columns.image)
                self._refuse_to_keep(table)
        self.holds_images = any(self.columns.image in table.images for table in tables)
        self.can_seek = all(isinstance(table, ArrowTable) for table in tables)
        self.group_by = first.group_by
        self.has_captions = bool(self.columns.captions)
        self.classes = first.class_names(self.columns.label) if self.columns.label else ()
        self.root, self._found_in = self._find_root(folder, config.images)

    @classmethod
    def open(cls, folder: Path, paths: Sequence[Path], config: ConvertConfig) -> TableSource:
        """Open the tables in files.

        Args:
            folder: that the paths in them are relative to, unless `config` names another.
            paths: of the files.
            config: the settings about tables and columns are used.
        """
        tables = [open_table(path, config) for path in paths]
        refuse_strangers(paths[0], config, tables[0].kind)
        return cls(folder, tables, [fingerprint(path) for path in paths], config)

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """Rows of all tables. See `Source.rows`."""
        columns, number = self.columns, 0
        for table, count in zip(self._tables, self._counts, strict=True):
            if number + count <= start:
                number += count
                continue
            wanted, skipped = columns.wanted, max(0, start - number)
            number += skipped
            for row in table.rows_from(wanted, skipped):
                if row.cells is None:
                    yield InputRow(number, row.place, fault=row.fault)
                elif columns.split and (part := row.cells.get(columns.split)) != self._split:
                    yield InputRow(number, row.place, fault=(Reason.FILTERED, f"its split is {excerpt(part)}"))
                else:
                    yield self._row(number, row, row.cells)
                number += 1

    def rows_with_labels(self) -> Iterator[InputRow]:
        """See `Source.rows_with_labels`. No other column is read."""
        if not self.columns.label:
            return
        label, split = self.columns.label, self.columns.split
        wanted = [name for name in (label, split) if name is not None]
        for row in (row for table in self._tables for row in table.rows(wanted)):
            if row.cells is None or row.fault or (split and row.cells.get(split) != self._split):
                continue
            yield InputRow(0, row.place, label=as_text(row.cells.get(label)))

    def check_unchanged(self) -> None:
        """Raise DataError if a file has changed since it was opened."""
        for file in self._files:
            if file.has_changed():
                raise DataError(f"table '{file.path}': has changed since it was opened; run the conversion again")

    def _row(self, number: int, row: TableRow, cells: Mapping[Any, Any]) -> InputRow:
        columns = self.columns
        return InputRow(
            number,
            row.place,
            image=cells.get(columns.image),
            captions=tuple(as_text(cells.get(name)) for name in columns.captions),
            label=as_text(cells.get(columns.label)),
            hash=cells.get(columns.hash),
            boxes=cells.get(columns.boxes),
            extra={stored: as_stored(value) for stored, value in columns.kept(cells).items()},
            losses=dict(row.losses),
            key=row.key,
            fault=row.fault,
        )

    def _find_root(self, folder: Path, images: str) -> tuple[str, str]:
        """The folder that paths are relative to, and its name if it was found and not named."""
        return find_images(folder, images, self.first_paths())

    def first_paths(self) -> list[str]:
        """The first paths of images; none if the images are in the table.

        Raises:
            ConfigError: the column is one of bytes, and they are paths.
        """
        column = self.columns.image
        rows = islice((row for table in self._tables for row in table.rows([column])), PATHS_SEEN)
        cells = [row.cells.get(column) for row in rows if row.cells is not None]
        images = [cell for cell in cells if isinstance(cell, bytes) and cell]
        if isinstance(self._tables[0], ArrowTable) and images and all(map(_is_path, images)):
            raise ConfigError(
                f"table '{self._tables[0].path}': column {excerpt(column)} is binary and holds paths or URLs, such as "
                f"{excerpt(images[0].decode())}; cast it to string"
            )
        return [cell for cell in cells if isinstance(cell, str) and cell]

    def _refuse_to_keep(self, table: ArrowTable) -> None:
        """Raise ConfigError if a column of images, not of paths, is to be kept in each sample's JSON."""
        for stored, name in self.columns.keep.items():
            if name == self.columns.image and table.holds_images(name):
                raise ConfigError(
                    f"table '{table.path}': column {excerpt(name)} holds images (type "
                    f"{table.types[name][:200]}), and no path to keep; leave '{stored}' out of keep"
                )

    def describe(self) -> dict[str, Any]:
        """Names, hashes and columns of the tables. See `Source.describe`."""
        return {
            "kind": "table",
            "files": [{"name": file.path.name, "bytes": file.bytes, "sha256": file.sha256} for file in self._files],
            "image": self.columns.image,
            "captions": list(self.columns.captions),
            "label": self.columns.label,
            **({"images": self._found_in} if self._found_in else {}),
            **digest_of_zip(self.root),
        }


def find_images(folder: Path, images: str, paths: Sequence[str]) -> tuple[str, str]:
    """The folder that a table's paths are relative to, and its name if it was found and not named.

    Args:
        folder: of the table.
        images: as the settings give it: relative to `folder`, to the folder above it, or to the current one.
        paths: the first of the table. If none exists in `folder`, a sub-folder that has one is taken; COCO's
            annotations/ have their images in folders beside annotations/.

    Raises:
        ConfigError: there is no such folder, or several sub-folders have the paths.
    """
    if images != ".":
        for start in (folder, folder.parent, Path()):
            if is_folder(named := start / images):
                inner = corpus_folder(named)  # of a .zip that holds one folder, whose name the paths may lack
                return os.path.realpath(inner if _has_any(inner, paths) else named), ""
        raise ConfigError(f"images '{images}': no such folder in '{folder}', nor above it, nor in the current folder")
    paths = [path for path in paths if "://" not in path]
    if not paths or _has_any(folder, paths):
        return os.path.realpath(folder), ""
    places = [folder, *([folder.parent] if folder.name == "annotations" else [])]
    near = {name: place / name for place in places for name in folders_in(place) if not is_hidden(name)}
    found = [name for name, place in near.items() if _has_any(place, paths)]
    if len(found) > 1:
        raise ConfigError(
            f"table in '{folder}': its images are in several folders: {shown(found)}; "
            "name the one that the paths are relative to with --images"
        )
    return (os.path.realpath(near[found[0]]), found[0]) if found else (os.path.realpath(folder), "")


def _is_path(image: bytes) -> bool:
    """Whether bytes in place of an image are a printable path or URL; markup is neither."""
    with suppress(UnicodeDecodeError):
        return len(image) <= LONGEST_PATH and not image.startswith(b"<") and image.decode().isprintable()
    return False


def _has_any(folder: Path, paths: Sequence[str]) -> bool:
    """Whether one of the paths is a file in the folder; what is no path is none."""
    return any(".." not in path.split("/") and "\0" not in path and is_file(folder / path) for path in paths)


def where_looked(source: Source, path: str) -> str:
    """For a message about a table of which no image is found: where the first was looked for, and the remedy.

    Args:
        source: any; the text is empty for one without paths in a table.
        path: of the image, as the table gives it; "" if the table holds none.
    """
    if source.describe()["kind"] != "table" or not path or "://" in path or "\0" in path:
        return ""
    if os.path.isabs(path):
        return (
            f"; {excerpt(path, SHOWN_CHARACTERS)} does not exist: give the table paths that exist on this machine, "
            "absolute ones or relative to --images FOLDER"
        )
    looked = excerpt(os.path.join(source.root, path), SHOWN_CHARACTERS)
    return (
        f"; the table's paths are relative to '{source.root}', and {looked} does not exist: name the folder that they "
        "are relative to with --images FOLDER"
    )
