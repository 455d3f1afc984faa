"""The rows of a program as a source: what a table's rows have, and keys of their own. No two samples get one key."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.belonging import SourceKind, refuse_strangers
from mmdata.convert.sources.given_rows import GivenTable, Rows
from mmdata.convert.sources.rows import InputRow, has_url, image_key, numbered_key, row_key
from mmdata.convert.sources.table_source import TableSource
from mmdata.errors import BadSample, Reason, excerpt
from mmdata.hashing import hash64
from mmdata.tars.tar import header, split_name

KEY = "key"
"""Name of the cell with the key of a row's sample."""
LEFT_OUT = "left_out"
"""Name of the cell that says why a row is left out: "REASON: text" with a reason of the list, or any other text."""
CAPTIONS = ["caption", "captions"]
"""Cells that are both taken, as some rows may have the one and some the other."""
LONGEST_EXTENSION = ".json"


@contextmanager
def open_rows(rows: Rows, config: ConvertConfig, folder: Path) -> Generator[GivenSource]:
    """The rows of a program as a source, until the end of the context.

    Args:
        rows: the dicts.
        config: the settings about columns are used.
        folder: on the disk that has room for the rows, if they can be read once only.

    Raises:
        DataError: no row, or no dict among the first.
        ConfigError: no such column, or a setting that is for other sources.
    """
    refuse_strangers(Path("rows"), config, SourceKind.ROWS)
    with GivenTable(rows, folder) as table:
        yield GivenSource(table, config)


class GivenSource(TableSource):
    """Rows of a program: dicts of an image, captions, a label, a key, and more, which a sample's JSON keeps.

    A row with a text in `left_out` is left out for that reason.

    Paths are those of the program: absolute, or relative to its current folder. With `images` they are relative to that
    folder, and nothing outside it is read.

    Args:
        table: the rows.
        config: the settings about columns are used.
    """

    can_be_sent = False  # another process cannot call the program

    def __init__(self, table: GivenTable, config: ConvertConfig) -> None:
        if config.caption_columns is None and set(CAPTIONS) <= set(table.columns):
            config = config.model_copy(update={"caption_columns": CAPTIONS})
        super().__init__(Path.cwd(), [table], (), config)
        self._sha256 = table.sha256
        self._below = os.getcwd() if config.images == "." else ""
        self._are_merged = config.group_by != "none" and (config.group_by is not None or not config.keep_duplicates)
        apart = {KEY, LEFT_OUT} - set(config.keep)
        self.columns = replace(self.columns, left_out=self.columns.left_out | apart)

    def rows(self) -> Iterator[InputRow]:
        """All rows. See `Source.rows`."""
        keys = _Keys(repeat=self._are_merged)
        for row, cells in self._read():
            if self._below and isinstance(row.image, str) and row.image and not has_url(row):
                row = replace(row, image=os.path.join(self._below, row.image))
            if (said := cells.get(LEFT_OUT)) and row.fault is None:
                row = replace(row, fault=_left_out(said))
            try:
                yield replace(row, key=keys.take(row, cells.get(KEY)))
            except BadSample as bad:
                yield replace(row, fault=(bad.reason, bad.detail))

    def rows_from(self, start: int) -> Iterator[InputRow]:
        """The rows from one on; those before it are read too, for their keys."""
        return islice(self.rows(), start, None)

    def describe(self) -> dict[str, Any]:
        """A hash of the rows. See `Source.describe`."""
        columns = {name: value for name, value in super().describe().items() if name not in ("kind", "files")}
        return {"kind": "rows", "sha256": self._sha256, **columns}

    def _find_root(self, folder: Path, images: str) -> tuple[str, str]:
        return (os.sep, "") if images == "." else super()._find_root(folder, images)


def _left_out(said: Any) -> tuple[Reason, str]:
    """The fault that a program gives to a row: `_left_out("missing_caption: no object")` has that reason."""
    if not isinstance(said, str):
        return Reason.BROKEN_ROW, f"{LEFT_OUT} is {type(said).__name__}, not a text"
    reason, _, detail = said.partition(": ")
    return (Reason(reason), detail) if detail and reason in [str(one) for one in Reason] else (Reason.BROKEN_ROW, said)


class _Keys:
    """Keys that were given, each to one row, or to rows of one image.

    Args:
        repeat: whether rows of one image become one sample, and may have one key.
    """

    def __init__(self, *, repeat: bool) -> None:
        self._repeat = repeat
        self._images: dict[int, bytes] = {}  # of the row with this key, by hashes of both
        self._has_key = bytearray()  # for each row

    def take(self, row: InputRow, given: Any) -> str:
        """The key of a row's sample; "" for its number.

        Raises:
            BadSample: a key that cannot be one, or that another row has.
        """
        has_key = given is not None and row.fault is None
        self._has_key.append(has_key)
        if not has_key:
            if self._images and row.fault is None and hash64(numbered_key(row.number).encode()) in self._images:
                raise BadSample(Reason.BROKEN_ROW, f"key '{numbered_key(row.number)}', its number: another row has it")
            return ""
        key = _checked(given)
        image = image_key(row) if self._repeat else row_key(row.number)
        if self._images.setdefault(hash64(key.encode()), image) != image or self._is_numbered(key, row.number):
            raise BadSample(Reason.BROKEN_ROW, f"key {excerpt(key)}: another row, of another image, has it")
        return key

    def _is_numbered(self, key: str, before: int) -> bool:
        """Whether a key is that of a row before this one that was given none."""
        number = int(key) if key.isascii() and key.isdigit() else before
        return number < before and numbered_key(number) == key and not self._has_key[number]


def _checked(given: Any) -> str:
    """A key as the program gave it, if shards can have it; a number is one too.

    Raises:
        BadSample: they cannot.
    """
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise BadSample(Reason.BROKEN_ROW, f"the key is {type(given).__name__}, not a string")
    key = str(given)
    try:
        header(key + LONGEST_EXTENSION, 0)
        fits = key.isprintable() and split_name(f"{key}.jpg") == (key, "jpg")
    except ValueError:
        fits = False
    if not fits or {"", ".", ".."} & set(key.split("/")):
        detail = f"key {excerpt(key)}: a key has no dot and no empty folder in it, and fits into the header of a tar"
        raise BadSample(Reason.BROKEN_ROW, detail)
    return key
