"""Some rows of a source as a source of their own: rows of given numbers, or those of shards that a condition selects.

They are numbered from 0 without gaps, as rows of any source, and keep the keys that they have in the whole. What people
read (ledger, list of rows, messages) has their numbers in the whole source, which `numbering` gives.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmdata.convert.sources.rows import NOT_QUARANTINED, InputRow, Source, numbered_key
from mmdata.convert.sources.tars import PackedFiles, PackedSource
from mmdata.errors import ConfigError, DataError, excerpt
from mmdata.safe_read import open_regular

NEAR = 1000
"""Rows that are rather read and passed over than skipped, where images are in a table."""

File = str | os.PathLike[str]
Choice = File | Sequence[File] | Sequence[int] | NDArray[np.integer[Any]] | Callable[[Source], NDArray[np.int64]]
"""Rows of a source: files with a row a line (its number, or its line of quarantine.jsonl), numbers, or what finds them.
"""


@dataclass(frozen=True)
class SelectedRows:
    """Rows of an index, by the places of their images. The command makes it, which knows conditions.

    Attributes:
        words: the condition, for messages.
        offsets: by the name of a tar, the offsets of its chosen images, ascending int64.
    """

    words: str
    offsets: Mapping[str, NDArray[np.int64]]

    def __call__(self, source: Source) -> NDArray[np.int64]:
        """Numbers of these rows in a source of tars.

        Raises:
            ConfigError: it is no source of tars, or no row is selected.
            DataError: an image is not where the index says.
        """
        if not isinstance(source, PackedSource):
            raise ConfigError("select: the source is no folder of tars; rows of shards with an index can be selected")
        selected = sum(map(len, self.offsets.values()))
        if not selected:
            raise ConfigError(f"select {excerpt(self.words)}: no row is selected")
        found = np.array([row.number for row in source.rows() if self._holds(row)], np.int64)
        if len(found) < selected:
            raise DataError(
                f"select {excerpt(self.words)}: the index of '{source.root}' lists {selected:,} selected images, "
                f"{len(found):,} are where it says; `mmdata verify {source.root}` names what has changed"
            )
        return found

    def _holds(self, row: InputRow) -> bool:
        assert isinstance(row.files, PackedFiles)
        offsets = self.offsets.get(row.files.tar)
        if row.files.indexed is None or offsets is None:
            return False
        offset = row.files.indexed[0]
        place = int(np.searchsorted(offsets, offset))
        return place < len(offsets) and int(offsets[place]) == offset


class ChosenSource(Source):
    """The chosen rows of a source.

    Args:
        corpus: all rows.
        chosen: which of them.

    Attributes:
        corpus: as given.
        numbers: int64 (N,), those of the rows in the corpus, ascending.

    Raises:
        ConfigError: no row, or one that is not in the corpus.
    """

    def __init__(self, corpus: Source, chosen: Choice) -> None:
        self.corpus = corpus
        chosen = read_choice(chosen)
        self.numbers = np.unique(chosen(corpus)) if callable(chosen) else chosen
        _check_within(corpus, self.numbers)
        self.root = corpus.root
        self.num_rows = len(self.numbers)
        self.has_captions = corpus.has_captions
        self.classes = corpus.classes
        self.group_by = corpus.group_by
        self.holds_images, self.can_be_sent, self.can_seek = corpus.holds_images, corpus.can_be_sent, corpus.can_seek

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        """The chosen rows; of a table with images, those far from them are not read. See `Source.rows`."""
        far = np.flatnonzero(np.diff(self.numbers[start:]) > NEAR) if self.corpus.can_seek else []
        bounds = [start, *(int(place) + start + 1 for place in far), len(self.numbers)]
        for begin, end in pairwise(bounds):
            yield from self._of(self.corpus.rows(int(self.numbers[begin])), begin, end)

    def rows_with_labels(self) -> Iterator[InputRow]:
        """Those of the whole corpus: so a class has one number, whichever rows are chosen."""
        return self.corpus.rows_with_labels()

    def check_unchanged(self) -> None:
        """See `Source.check_unchanged`."""
        self.corpus.check_unchanged()

    def describe(self) -> dict[str, Any]:
        """The corpus, and which of its rows. See `Source.describe`."""
        return {**self.corpus.describe(), "rows": hashlib.sha256(self.numbers.tobytes()).hexdigest()[:16]}

    def number_of(self, rows: Any) -> Any:
        """The number in the corpus of one of these rows, or the numbers of several."""
        return self.numbers[rows]

    def _of(self, rows: Iterator[InputRow], place: int, end: int) -> Iterator[InputRow]:
        """The chosen rows from place `place` to before `end`; `rows` begin at or before the first."""
        wanted = iter(self.numbers[place:end].tolist())
        number = next(wanted, None)
        for row in rows:
            if row.number == number:
                yield replace(row, number=place, key=row.key or numbered_key(row.number))
                place, number = place + 1, next(wanted, None)
            if number is None:
                return
        raise DataError(f"rows: the source has no row {number}; its rows are numbered from 0")


def numbering(source: Source) -> Callable[[Any], Any]:
    """What gives the number, for people, of a row of a source, or the numbers of several rows."""
    return source.number_of if isinstance(source, ChosenSource) else lambda rows: rows


def read_choice(chosen: Choice) -> NDArray[np.int64] | Callable[[Source], NDArray[np.int64]]:
    """The numbers of a choice, ascending, each once; what finds them in a source is given back.

    Raises:
        ConfigError: no number, a negative one, or something else than numbers of rows.
        DataError: the file with the numbers is no regular one.
    """
    if callable(chosen):
        return chosen
    files = [chosen] if isinstance(chosen, (str, os.PathLike)) else chosen
    if isinstance(files, list) and files and all(isinstance(file, (str, os.PathLike)) for file in files):
        numbers = np.unique(np.concatenate([_read_numbers(file) for file in cast("list[File]", files)]))
    else:
        numbers = _given_numbers(chosen)
    if len(numbers) and numbers[0] < 0:
        raise ConfigError(f"rows: {numbers[0]} is no row of the source, which has rows numbered from 0")
    _refuse_none(numbers)
    return numbers


def _refuse_none(numbers: NDArray[np.int64]) -> None:
    if not len(numbers):
        raise ConfigError("rows: none is chosen")


def _check_within(corpus: Source, numbers: NDArray[np.int64]) -> None:
    """Raise ConfigError if there is no number, or one above those of the corpus."""
    _refuse_none(numbers)
    if numbers[-1] >= corpus.num_rows:
        raise ConfigError(
            f"rows: {numbers[-1]} is no row of the source, which has {corpus.num_rows:,} rows, numbered from 0"
        )


def _given_numbers(chosen: object) -> NDArray[np.int64]:
    """Numbers that a program gives: a list, or an array of integers."""
    expected = "rows: the numbers of rows are expected, a list of integers; of a mask, give np.flatnonzero(mask)"
    try:
        given = np.asarray(chosen)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{expected}; {error}") from error
    if given.shape == (0,):
        return given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu" or int(given.max()) >= 2**63:
        raise ConfigError(f"{expected}; got {type(chosen).__name__}, {given.dtype} of shape {given.shape}")
    return np.unique(given.astype(np.int64))


def _read_numbers(path: File) -> NDArray[np.int64]:
    """The numbers in a file.

    Raises:
        ConfigError: no such file, or a line with something else.
        DataError: no regular file, such as a pipe.
    """
    try:
        with open(open_regular(path, "rows"), "rb") as file:
            return np.unique(np.fromiter(_parsed(path, file), np.int64))
    except OSError as error:
        raise ConfigError(f"rows '{os.fspath(path)}': cannot be read ({error.strerror})") from error


def _parsed(path: File, lines: Iterator[bytes]) -> Iterator[int]:
    for place, line in enumerate(lines, 1):
        text = _number_in(line) if line.startswith(b"{") else line.strip()
        if text and not (text.isdigit() and len(text) < len(str(2**63))):
            got = excerpt(text.decode("utf-8", "replace"))
            raise ConfigError(
                f"rows '{os.fspath(path)}', line {place}: {got} is no number of a row; give one a line, from 0, "
                "or a quarantine.jsonl, whose lines have 'row'"
            )
        if text:
            yield int(text)


def _number_in(line: bytes) -> bytes:
    """The number of a row in its line of quarantine.jsonl; empty for a row that could be used, as a duplicate."""
    try:
        found = json.loads(line)
        return b"" if found.get("reason") in NOT_QUARANTINED else str(found["row"]).encode()
    except (ValueError, KeyError, RecursionError):
        return line
