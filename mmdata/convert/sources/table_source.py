"""Rows of tables: which cells are the image, the captions and the label, and which of the others are kept.

The folder that the paths are relative to is found here; where no image is found, `where_looked` says where.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path, PurePath
from typing import Any

from mmdata.config.convert import ConvertConfig, Grouping
from mmdata.convert.sources.arrow import ArrowTable, as_stored, as_text
from mmdata.convert.sources.columns import choose_columns
from mmdata.convert.sources.files import corpus_folder, digest_of_zip, is_file, is_folder, is_hidden, names_in
from mmdata.convert.sources.open_table import FilePrint, fingerprint, open_table
from mmdata.convert.sources.rows import InputRow, Source, refuse_strangers
from mmdata.convert.sources.tables import SourceTable, differences, shown
from mmdata.errors import ConfigError, DataError, Reason, excerpt

PATHS_SEEN = 20
"""Rows whose images are looked for to find the folder of the images."""

logger = logging.getLogger("mmdata")
SHOWN_CHARACTERS = 200
FILES_SEEN = 20_000
"""Files below the folder of the table among which one of the image's name is looked for."""
_OF = {"table": "table's", "annotations": "annotations'"}
"""Whose the paths are, for each kind of source that has some."""


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
        can_seek: whether rows can be read without those before them.
        left_out_column: its cell says why a row is left out; None: there is no such column.

    Raises:
        DataError: no row, or tables that differ.
        ConfigError: no such column.
    """

    group_by: Grouping = "image"
    can_be_sent = True
    left_out_column: str | None = None

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
        self.can_seek = all(isinstance(table, ArrowTable) for table in tables)
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

    def rows(self) -> Iterator[InputRow]:
        """Rows of all tables. See `Source.rows`."""
        return (row for row, _ in self._read())

    def rows_with_labels(self) -> Iterator[InputRow]:
        """See `Source.rows_with_labels`. No other column is read."""
        if not self.columns.label:
            return
        label, split, left_out = self.columns.label, self.columns.split, self.left_out_column
        wanted = [name for name in (label, split, left_out) if name is not None]
        for place, cells, _ in (row for table in self._tables for row in table.rows(wanted)):
            if cells is None or (split and cells.get(split) != self._split) or (left_out and cells.get(left_out)):
                continue
            yield InputRow(0, place, label=as_text(cells.get(label)))

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
                elif columns.split and (part := cells.get(columns.split)) != self._split:
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
            label=as_text(_cell(cells, columns.label)),
            hash=_cell(cells, columns.hash),
            boxes=_cell(cells, columns.boxes),
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
            "label": self.columns.label,
            **({"images": self._found_in} if self._found_in else {}),
            **digest_of_zip(self.root),
            **({"columns": self._tables[0].columns} if self._tables[0].guessed else {}),
        }


def _cell(cells: dict[str, Any], name: str | None) -> Any:
    return None if name is None else cells.get(name)


def find_images(folder: Path, images: str, paths: Sequence[str]) -> tuple[str, str]:
    """The folder that a table's paths are relative to, and its name if it was found and not named.

    Args:
        folder: of the table.
        images: as the settings give it: relative to `folder`, to the folder above it, or to the current one.
        paths: the first of the table. If none exists in `folder`, a sub-folder that has one is taken; COCO's
            annotations/ have their images in folders beside annotations/. A .zip is a folder here.

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
    near = _folders(folder) | (_folders(folder.parent) if folder.name == "annotations" else {})
    found = [name for name, place in near.items() if _has_any(place, paths)]
    if len(found) > 1:
        raise ConfigError(
            f"table in '{folder}': its images are in several folders: {shown(found)}; "
            "name the one that the paths are relative to with --images"
        )
    return (os.path.realpath(near[found[0]]), found[0]) if found else (os.path.realpath(folder), "")


def _folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder by name; of a .zip the one that it holds, if it holds nothing else.

    A .zip that cannot be read is no folder: nobody has named it.
    """
    found: dict[str, Path] = {}
    for name in names_in(folder):
        try:
            if not is_hidden(name) and is_folder(folder / name):
                found[name] = corpus_folder(folder / name)
        except (DataError, OSError) as error:
            logger.warning("no images are looked for in '%s': %s", folder / name, error)
    return found


def _has_any(folder: Path, paths: Sequence[str]) -> bool:
    """Whether one of the paths is a file in the folder; what is no path is none."""
    return any(".." not in path.split("/") and "\0" not in path and is_file(folder / path) for path in paths)


def where_looked(source: Source, path: str) -> str:
    """For a message about a table of which no image is found: where the first was looked for, and the remedy.

    Args:
        source: any; the text is empty for one without paths in a table, or in annotations.
        path: of the image, as the table gives it; "" if the table holds none.
    """
    kind = source.describe()["kind"]
    if kind not in _OF or not path or "://" in path or "\0" in path:
        return ""
    looked = path if os.path.isabs(path) else os.path.join(source.root, path)
    relative = "" if os.path.isabs(path) else f"the {_OF[kind]} paths are relative to '{source.root}', and "
    said = f"; {relative}{excerpt(looked, SHOWN_CHARACTERS)} does not exist"
    return f"{said}: {_remedy(source.root, path, kind)}"


def _remedy(root: str, path: str, kind: str) -> str:
    found = _of_that_name(root, path)
    if found is None and os.path.isabs(path):
        return f"give the {kind} paths that exist on this machine, absolute ones or relative to --images FOLDER"
    if found is None:
        return "name the folder that they are relative to with --images FOLDER"
    wrong, right = _without_common_end(path, found)
    if not wrong:
        return f"{os.path.join(root, found)!r} does, so name the folder with --images {os.path.join(root, right)}"
    return f"{os.path.join(root, found)!r} does, so write {right!r} in place of {wrong!r} in the {kind}"


def _of_that_name(root: str, path: str) -> str | None:
    """The file below `root`, relative to it, whose path has the longest end in common with `path`."""
    name, best, seen = PurePath(path).name, None, 0
    for folder, folders, files in _walk(root):
        folders.sort()  # the order of the system differs from one to the next
        seen += len(files)
        if name in files:
            found = os.path.relpath(os.path.join(folder, name), root)
            if best is None or len(_without_common_end(path, found)[0]) < len(_without_common_end(path, best)[0]):
                best = found
        if seen > FILES_SEEN:
            break
    return best


def _walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """As os.walk, which ends here where a folder lies deeper than Python's stack: what is found is a hint."""
    with suppress(RecursionError):
        yield from os.walk(root)


def _without_common_end(path: str, found: str) -> tuple[str, str]:
    """Both without the parts of their end that are equal: ("old/", "pics/") of old/a/1.jpg and pics/a/1.jpg."""
    ours, theirs = PurePath(path).parts, PurePath(found).parts
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(reversed(ours), reversed(theirs), strict=False))))
    wrong, right = (PurePath(*parts[: len(parts) - same]) for parts in (ours, theirs))
    return _folder(wrong), _folder(right)


def _folder(path: PurePath) -> str:
    return "" if path == PurePath() else f"{path.as_posix().rstrip('/')}/"
