"""Which files of a corpus are not what they were when a published conversion read them."""

from __future__ import annotations

import heapq
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mmdata.convert.settle.output import Output
from mmdata.convert.settle.retried import RetriedRows
from mmdata.convert.settle.row_list import TIMINGS_NAME
from mmdata.convert.sources.files import UNREAD, in_zip, modified_ns
from mmdata.convert.sources.rows import Source, files_of, images_of
from mmdata.errors import Reason, counted
from mmdata.progress import Track
from mmdata.storage.folder import INNER

MOST_ROWS = 1_000_000
"""Rows whose files are looked at, which takes half a minute on a local disk and 120 MB of memory."""
BATCH_ROWS = 10_000
"""Recorded rows in memory at once."""


@dataclass
class ChangedFiles:
    """Files that have changed since a conversion, whose shards are of the old ones.

    Attributes:
        changed: files with another time of their last change.
        supplied: files that are there now and were missing.
        gone: files that are missing now.
        retried: folders of the conversion that this one retries, and of its retries before this one.
        rows: number of the first rows whose files alone were compared; None for all.
        first: path of the first file that has changed or is gone.
        first_supplied: path of the first one that was missing.
    """

    changed: int = 0
    supplied: int = 0
    gone: int = 0
    retried: tuple[str, ...] = ()
    rows: int | None = None
    first: str = ""
    first_supplied: str = ""

    def add(self, path: str, before: int | None, now: int | None) -> None:
        """Count a file, whose last change was at `before` and is at `now`; None for one that is missing."""
        if before == now:
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
        found: list[str] = []
        if self.changed:
            has = "has" if self.changed == 1 else "have"
            found.append(f"{counted(self.changed, 'file')} {has} another modification time than at the conversion")
        if self.gone:
            found.append(f"{_files(self.gone)} no longer there")
        if found:
            lines.append(f"{' and '.join(found)} (the first is '{self.first}'): {anew}")
        if self.supplied:
            folders = " ".join(f"--retry {shlex.quote(folder)}" for folder in (*self.retried, out))
            lines.append(
                f"{_files(self.supplied)} there now and missing before (the first is '{self.first_supplied}'): to "
                f"convert their rows alone, name a new folder and add {folders} --reason {Reason.MISSING_IMAGE}; {anew}"
            )
        if self.rows is not None:
            lines.append(f"only the files of the first {self.rows:,} rows were looked at for changes")
        return lines


def _files(number: int) -> str:
    return f"{counted(number, 'file')} {'is' if number == 1 else 'are'}"


def find_changes(source: Source, outputs: Sequence[Output], track: Track) -> ChangedFiles:
    """Compare the times of a corpus's files with those that a conversion has recorded, of the first MOST_ROWS rows.

    Args:
        source: the corpus.
        outputs: all folders of the conversion.
        track: shows progress.
    """
    changes = ChangedFiles(retried=source.folders if isinstance(source, RetriedRows) else ())
    if images_of(source) is not None or in_zip(source.root) is not None:
        return changes  # the images are in the table or in the archive, which is known by its hash
    seen: set[str] = set()  # several rows may name one file
    recorded: Iterator[tuple[int, list[int | None]]] | None = None
    most = min(source.rows_at_most, MOST_ROWS)
    for place, row in enumerate(track(source.rows(), "look for changed files", most, is_exact=source.rows_are_exact)):
        if place == MOST_ROWS:
            changes.rows = MOST_ROWS
            break
        if not (files := files_of(row)):
            continue
        recorded = recorded or _recorded(outputs)
        number = int(source.numbers[row.number]) if isinstance(source, RetriedRows) else row.number
        times = next((times for recorded_row, times in recorded if recorded_row == number), [])
        for path, before in zip(files, times, strict=False):
            if before != UNREAD and path not in seen:
                seen.add(path)
                changes.add(path, before, modified_ns(source.root, path))
    return changes


def _recorded(outputs: Sequence[Output]) -> Iterator[tuple[int, list[int | None]]]:
    """The rows of a conversion in ascending order, each with the times of its files: None for a missing file."""
    return heapq.merge(*(_read(output.copy_of(INNER + TIMINGS_NAME)) for output in outputs))


def _read(path: Path) -> Iterator[tuple[int, list[int | None]]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=["row", "modified_ns"]):
            columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
            yield from zip(*columns, strict=True)
