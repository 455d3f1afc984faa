"""Which files of a corpus are not what they were when a published conversion read them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mmdata.convert.input_rows import TIMINGS_NAME
from mmdata.convert.output import Output
from mmdata.convert.retried import RetriedRows
from mmdata.convert.rows import Source, files_of, images_of
from mmdata.convert.seen import UNREAD, modified_ns
from mmdata.errors import Reason, counted
from mmdata.progress import Track
from mmdata.shards.folder import INNER


@dataclass
class Changes:
    """Files that have changed since a conversion, whose shards are of the old ones.

    Attributes:
        changed: files with another time of their last change, newer as a rule.
        supplied: files that are there now and were missing.
        gone: files that are missing now.
        first: path of the first file that is newer or gone.
        first_supplied: path of the first one that was missing.
    """

    changed: int = 0
    supplied: int = 0
    gone: int = 0
    first: str = ""
    first_supplied: str = ""

    def add(self, path: str, before: int | None, now: int | None) -> None:
        """Count a file, whose last change was at `before` and is at `now`; None for one that is missing."""
        if before in (now, UNREAD):
            return
        if before is None:
            self.supplied += 1
            self.first_supplied = self.first_supplied or path
        else:
            self.gone += now is None
            self.changed += now is not None
            self.first = self.first or path

    def in_words(self, out: str) -> list[str]:
        """A line for each kind, with its remedy; `out` is where the conversion lies."""
        lines: list[str] = []
        anew = "--overwrite converts all anew"
        if self.changed or self.gone:
            newer = f"{_files(self.changed)} newer than it" if self.changed else ""
            gone = f"{_files(self.gone)} no longer there" if self.gone else ""
            lines.append(f"{' and '.join(filter(None, (newer, gone)))} (the first is '{self.first}'): {anew}")
        if self.supplied:
            lines.append(
                f"{_files(self.supplied)} there now and missing before (the first is '{self.first_supplied}'): to "
                f"convert their rows alone, name a new folder and add --retry {shlex.quote(out)} --reason "
                f"{Reason.MISSING_IMAGE}; {anew}"
            )
        return lines


def _files(number: int) -> str:
    return f"{counted(number, 'file')} {'is' if number == 1 else 'are'}"


def find_changes(source: Source, outputs: Sequence[Output], track: Track) -> Changes:
    """Compare the times of a corpus's files with those that a conversion has recorded.

    Args:
        source: the corpus.
        outputs: all folders of the conversion.
        track: shows progress.
    """
    changes = Changes()
    recorded = _Recorded([output.copy_of(INNER + TIMINGS_NAME) for output in outputs])
    if images_of(source) is not None or not recorded.has_files:
        return changes
    seen: set[str] = set()  # several rows may name one file
    rows = track(source.rows(), "look for changed files", source.rows_at_most, is_exact=source.rows_are_exact)
    for row in rows:
        number = int(source.numbers[row.number]) if isinstance(source, RetriedRows) else row.number
        for path, before in zip(files_of(row), recorded.of(number), strict=False):
            if path not in seen:
                seen.add(path)
                changes.add(path, before, modified_ns(source.root, path))
    return changes


class _Recorded:
    """When the files of each row were changed last, as the lists of timings have it."""

    def __init__(self, lists: Sequence[Path]) -> None:
        batches = [batch for path in lists for batch in _read(path)]
        rows = np.concatenate([batch.column("row").to_numpy() for batch in batches])
        self._order = np.argsort(rows)
        self._rows = rows[self._order]
        columns = [batch.column("modified_ns") for batch in batches]
        lengths = [column.value_lengths().to_numpy() for column in columns]
        self._ends = np.cumsum(np.concatenate(lengths), dtype=np.int64)
        times = [column.flatten() for column in columns]
        self._is_missing = np.concatenate([values.is_null().to_numpy(zero_copy_only=False) for values in times])
        self._times = np.concatenate([values.fill_null(UNREAD).to_numpy() for values in times])

    @property
    def has_files(self) -> bool:
        """Whether any row has a file."""
        return bool(len(self._times))

    def of(self, row: int) -> list[int | None]:
        """The times of the files of a row, None for one that was missing."""
        place = self._order[np.searchsorted(self._rows, row)]
        files = slice(self._ends[place - 1] if place else 0, self._ends[place])
        found = zip(self._times[files].tolist(), self._is_missing[files].tolist(), strict=True)
        return [None if is_missing else time for time, is_missing in found]


def _read(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(columns=["row", "modified_ns"])
