"""Which column of a table is what: image, captions, label, and the columns to keep.

`as_list` reads a list of captions that a cell holds as text, as pandas, numpy and JSON write one into a CSV.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from mmdata.config.convert import ALL, RESERVED, ConvertConfig
from mmdata.convert.sources.arrow import as_text
from mmdata.convert.sources.tables import SourceTable, shown
from mmdata.errors import BadSample, ConfigError, excerpt
from mmdata.tars.texts import parse_label

logger = logging.getLogger("mmdata")

IMAGE_COLUMNS = (
    *("filepath", "file_path", "image", "image_path", "path", "file_name", "filename"),
    *("image_name", "image_file", "img", "img_path", "file", "jpg", "image_bytes", "photo"),
    *("url", "image_url", "img_url", "image_link", "image_urls"),
)
CAPTION_COLUMNS = (
    *("caption", "captions", "text", "title", "sentence", "sentences", "comment", "raw", "description", "alt_text"),
)
LABEL_COLUMNS = ("label", "class", "cls", "labels", "class_name", "category")
LABELS_SEEN = 1000
"""Cells that show whether a column of a usual name holds labels."""

_LITERAL = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ITEM = rf"(?:{_LITERAL}|None|nan)"
_LIST = re.compile(rf"\[\s*(?:{_ITEM}(?:[\s,]+{_ITEM})*\s*(?:,\s*)?)?\]", re.DOTALL)
_ITEMS = re.compile(_ITEM, re.DOTALL)


@dataclass(frozen=True)
class TableColumns:
    """Columns by meaning.

    Attributes:
        image: of paths, URLs or images.
        captions: one or more, or none in a table of labels.
        label, split, hash, boxes: None without such a column.
        keep: columns by the names under which a sample's JSON holds them.
        others: further columns, with the names under which it holds them where a row has them.
    """

    image: str
    captions: tuple[str, ...]
    label: str | None
    split: str | None
    hash: str | None
    boxes: str | None
    keep: dict[str, str]
    others: dict[str, str]

    @property
    def wanted(self) -> list[str]:
        """The columns to read."""
        named = (self.image, *self.captions, self.label, self.split, self.hash, self.boxes, *self.keep.values())
        return list(dict.fromkeys(name for name in (*named, *self.others) if name is not None))

    def kept(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """The cells of a row that a sample's JSON holds, by the names under which it holds them."""
        kept = {stored: cells.get(name) for stored, name in self.keep.items()}
        return kept | {self.others[name]: value for name, value in cells.items() if name in self.others}


def _stored_name(name: str, taken: Container[str]) -> str:
    """The name itself, or the first of "caption_", "caption__", … that is neither reserved nor taken."""
    while name in RESERVED or name in taken:
        name += "_"
    return name


def choose_columns(tables: Sequence[SourceTable], config: ConvertConfig) -> TableColumns:
    """The columns that the settings name, or the first of the usual names that the tables have.

    Tables with labels may have no captions. The first table knows the columns of all.

    Raises:
        ConfigError: the table has no such column; the message lists its columns.
    """
    table = tables[0]
    image = _column(table, config.image_column, "image") if config.image_column else _image_column(table)
    label = None
    if config.label_column:
        label = _column(table, config.label_column, "label")
    elif config.label_column is None:
        label = next((name for name in _usual(table, LABEL_COLUMNS)[:1] if _holds_labels(tables, name)), None)
    if config.caption_columns:
        captions = tuple(_column(table, name, "caption") for name in config.caption_columns)
    else:
        captions = tuple(_usual(table, CAPTION_COLUMNS)[:1])
    if not captions and not label and config.label_column is None:
        with_names = [name for name in table.columns if table.class_names(name)]
        label = with_names[0] if len(with_names) == 1 else None
    if image is None or not (captions or label):
        usual = {} if image else {"image": IMAGE_COLUMNS}
        usual |= {} if captions or label else {"caption": CAPTION_COLUMNS}
        missing = [f"no {purpose} column of a usual name ({', '.join(names)})" for purpose, names in usual.items()]
        raise ConfigError(
            f"table '{table.path}': {' and '.join(missing)}; there are: {shown(table.columns)}; "
            f"name {'it' if len(usual) == 1 else 'them'} with {table.how_to_name(list(usual))}"
        )
    split = _column(table, "split", "split") if config.split else None
    hash_column = _column(table, config.hash_column, "hash") if config.hash_column else None
    boxes = _column(table, config.blur_boxes, "boxes") if config.blur_boxes else None
    named = [name for name in config.keep if name != ALL]
    keep = {name: image if name == "path" else _column(table, name, "keep") for name in named}
    if image in keep:  # stored as "path", whatever the table calls it
        keep = {"path" if name == image else name: column for name, column in keep.items()}
    others = _others(table, {image, *captions, label, *keep.values()}, keep) if ALL in config.keep else {}
    return TableColumns(image, captions, label, split, hash_column, boxes, keep, others)


def _others(table: SourceTable, apart: Container[str | None], keep: Collection[str]) -> dict[str, str]:
    """The other columns that `keep: "*"` keeps, with the names under which they are stored; logs what it changes."""
    others, left_out = dict[str, str](), list[str]()
    for name in table.columns:
        if name in apart:
            continue
        if name in table.binary:
            left_out.append(name)
            continue
        others[name] = _stored_name(name, {*keep, *others.values()})
        if others[name] != name:
            logger.warning(
                "table '%s': keep '*' stores the column '%s' as '%s': a sample's JSON uses the name itself",
                table.path,
                name,
                others[name],
            )
    if left_out:
        logger.warning(
            "table '%s': keep '*' leaves out %s, whose cells are bytes, which JSON does not hold; one with text in it "
            "is kept if it is named too",
            table.path,
            shown(sorted(left_out)),
        )
    return others


def _holds_labels(tables: Sequence[SourceTable], name: str) -> bool:
    """Whether a column of a usual name is one of labels, by its first cells: most are, and none is a fraction."""
    if tables[0].class_names(name):
        return True
    rows = (row for table in tables for row in table.rows([name]))
    found = (as_text(row.cells.get(name)) for row in rows if row.cells is not None)
    cells = list(islice((cell for cell in found if cell is not None and str(cell).strip()), LABELS_SEEN))
    strange = [cell for cell in cells if not _is_label(cell)]
    fractions = [cell for cell in strange if _is_fraction(cell)]
    if not fractions and 2 * len(strange) <= len(cells):
        return True
    what = "some of" if len(strange) < len(cells) else "all of"
    logger.warning(
        "table '%s': column '%s' is not taken for labels: %s its values, such as %s, are neither class numbers nor "
        "names; --label-column names another column, or this one all the same",
        tables[0].path,
        name,
        what,
        excerpt((fractions or strange)[0]),
    )
    return False


def _is_label(cell: Any) -> bool:
    try:
        parse_label(int(cell) if isinstance(cell, bool) else cell)
    except BadSample:
        return False
    return not _is_fraction(cell) and not (isinstance(cell, str) and as_list(cell) is not None)


def _is_fraction(cell: Any) -> bool:
    """Whether a cell is a number with digits behind the point, such as 0.3 or "0.3"."""
    with suppress(TypeError, ValueError, OverflowError):
        number = float(cell)
        return math.isfinite(number) and not number.is_integer()
    return False


def _image_column(table: SourceTable) -> str | None:
    """The column of images: of a usual name, one with images before one with paths; else the only one with images."""
    usual = _usual(table, IMAGE_COLUMNS)
    holding = [name for name in usual if name in table.images]
    only = list(table.images) if len(table.images) == 1 else []
    return next(iter((*holding, *usual, *only)), None)


def _column(table: SourceTable, name: str, purpose: str) -> str:
    if name not in table.columns:
        raise ConfigError(f"table '{table.path}': no column '{name}' ({purpose}); there are: {shown(table.columns)}")
    return name


def _usual(table: SourceTable, usual: Sequence[str]) -> list[str]:
    by_name = {name.casefold(): name for name in reversed(table.columns)}
    return [by_name[name] for name in usual if name in by_name]


def as_list(text: str) -> list[str | None] | None:
    r"""The strings and Nones of a list that is written as text, or None if it is something else. Nothing is executed.

    Example:
        `["a", "b"]` (JSON), `['a', "b's"]` (Python and pandas) and `['a' 'b']` (numpy) give two strings each;
        `['a', None]` gives one and None; `[a photo]` gives None.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list):
        items = cast("list[Any]", found)
        return items if all(item is None or isinstance(item, str) for item in items) else None
    # Not ast.literal_eval of the whole: it joins numpy's neighbouring strings without a word.
    if not _LIST.fullmatch(text):
        return None
    try:
        return [None if item in ("None", "nan") else str(ast.literal_eval(item)) for item in _ITEMS.findall(text)]
    except (ValueError, SyntaxError):
        return None
