"""Rows that could not be used: each masked in its batch, listed with its reason, and few enough, or the run ends."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path

from mmdata.atomic import write_whole
from mmdata.errors import DataError

logger = logging.getLogger("mmdata")

MIN_ROWS_FOR_RATE = 1000
KEPT_ENTRIES = 10_000


@dataclass(frozen=True)
class LedgerEntry:
    """A row that is masked in its batch."""

    epoch: int
    step: int
    row: int
    shard: str
    key: str
    reason: str
    detail: str


class Ledger:
    """Rows that were masked. Ends the run when they are more than a share of the rows seen.

    Args:
        max_bad_share: of the rows seen, from the thousandth row on, and again at the end of an epoch.

    Attributes:
        entries: the newest, at most `KEPT_ENTRIES`.
        masked: rows by reason, exact, of this process.
        rows_seen, rows_masked: of the whole run, with what was counted before it was resumed.
    """

    def __init__(self, max_bad_share: float) -> None:
        self.entries: deque[LedgerEntry] = deque(maxlen=KEPT_ENTRIES)
        self.masked: Counter[str] = Counter()
        self.rows_seen = self.rows_masked = 0
        self._max_bad_share = max_bad_share
        self._path: Path | None = None

    def write_to(self, path: Path, *, epoch: int, step: int) -> None:
        """Append each entry to a file as it comes, one JSON object a line.

        Entries of batches from (epoch, step) on, which a killed run left there and this one makes again, are cut off,
        and so is a line that a kill cut.
        """
        kept: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if (entry["epoch"], entry["step"]) < (epoch, step):
                    kept.append(line + "\n")
        if path.is_file():
            write_whole(path, "".join(kept).encode())
        self._path = path

    def restore(self, *, rows_seen: int, rows_masked: int) -> None:
        """Go on from the counts of a run that was stopped."""
        self.rows_seen, self.rows_masked = rows_seen, rows_masked
        self.entries.clear()
        self.masked.clear()

    def add(self, entries: list[LedgerEntry], rows_seen: int) -> None:
        """Account for the rows of one batch.

        Raises:
            DataError: too many rows could not be used.
        """
        for entry in entries:
            if entry.reason not in self.masked:
                logger.warning(
                    "shard '%s', sample '%s': %s (%s); left out, as all like it will be: `.ledger` lists them",
                    entry.shard,
                    entry.key,
                    entry.reason,
                    entry.detail,
                )
            self.masked[entry.reason] += 1
        self.entries += entries
        self.rows_seen += rows_seen
        self.rows_masked += len(entries)
        if entries and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
        if self.rows_seen >= MIN_ROWS_FOR_RATE:
            self.check()

    def check(self) -> None:
        """Raise a DataError if more than `max_bad_share` of the rows seen were masked."""
        if self.rows_masked > self._max_bad_share * self.rows_seen:
            counts = self.masked.most_common()
            if earlier := self.rows_masked - self.masked.total():
                counts.append(("before the run was resumed", earlier))
            listed = ", ".join(f"{reason} {count}" for reason, count in counts)
            first = [f"; the first: shard '{e.shard}', sample '{e.key}': {e.detail}" for e in list(self.entries)[:1]]
            raise DataError(
                f"{self.rows_masked} of {self.rows_seen} rows could not be used ({listed}), more than max_bad_share "
                f"{self._max_bad_share:.1%}{''.join(first)}. "
                "`mmdata verify` checks the shards; data.max_bad_share sets the limit"
            )
