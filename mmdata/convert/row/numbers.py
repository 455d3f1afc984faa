"""Refuses a corpus whose captions are numbers: the boxes of YOLO, or a column of ids that has the name of captions."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mmdata.config.convert import ConvertConfig
from mmdata.convert.row.fields import FieldReader
from mmdata.convert.sources.rows import Source
from mmdata.errors import BadSample, DataError, excerpt

ROWS_SEEN = 100
"""First rows whose captions are looked at."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:[\s,;]+{_NUMBER})*")


def refuse_numbers(source: Source, path: Path, config: ConvertConfig) -> None:
    """Raise DataError if most of the first captions are numbers only, unless the settings name what holds them."""
    if config.caption_columns or not source.has_captions:
        return
    fields = FieldReader(classes=source.classes)
    seen = 0
    numbers: list[tuple[str, str]] = []  # the place of a row, and its caption
    for row in islice(source.rows(), ROWS_SEEN):
        if row.fault:
            continue
        with suppress(BadSample):  # the examination of the row names its fault
            captions = fields(row).captions
            seen += len(captions)
            numbers += [(row.place, caption) for caption in captions if _NUMBERS.fullmatch(caption)]
    if len(numbers) <= seen // 2:
        return
    place, caption = numbers[0]
    found = f"most of its captions are numbers only ({place}: {excerpt(caption)})"
    if source.describe()["kind"] == "folder":
        raise DataError(
            f"source '{path}': {found}, as in YOLO's files of boxes; write captions into the text files, or give a "
            "table of images and captions as the source (its column is named with --caption-column)"
        )
    raise DataError(
        f"source '{path}': {found}; name what holds the captions with --caption-column, which may hold numbers then"
    )
