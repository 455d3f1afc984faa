"""Rows that could not be used: each is masked in its batch and listed with a reason; too many end the run."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mmdata.errors import ConfigError, DataError, Reason
from mmdata.files import naming, read_json_lines, write_whole
from mmdata.launcher import Ranks

logger = logging.getLogger("mmdata")

MIN_ROWS_FOR_RATE = 1000
"""Rows seen before the share of bad rows is checked: among fewer rows a share says little."""
KEPT_ENTRIES = 10_000
"""Entries that a ledger keeps in memory; a file holds all (`Ledger.write_to`)."""
LIMIT = "data.loading.max_bad_share sets the limit"
VERIFY = "`mmdata verify` checks the shards"
ADVICE = {
    Reason.MISSING_FIELD: "leave such rows out (data.select), or the entry out of data.fields or data.targets; of "
    "joined tars missing: keep in data.join keeps them",
    Reason.TRANSFORM_FAILED: "data.transform raised or gave other pixels than it should",
    Reason.TEXT_TRANSFORM_FAILED: "data.text_transform raised or gave something else than a text",
}
"""What to do about rows that are masked for a reason of which no shard is at fault; for others it is `VERIFY`."""

Stage = Literal["read", "decode", "transform", "caption", "field"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which one is named of a row that fails at several."""


@dataclass(frozen=True)
class LedgerEntry:
    """A row that is masked in its batch.

    Attributes:
        epoch, step: of the batch.
        row: in the index; -1 for a sample of a stream that is in no batch.
        shard, key: of the sample.
        offset: of the image, or of the caption if that is bad, in the shard, in bytes; of a sample that is in no batch,
            of its first member.
        stage: at which the row failed.
        reason: a value of `mmdata.errors.Reason`.
        detail: for a person to read.
    """

    epoch: int
    step: int
    row: int
    shard: str
    key: str
    offset: int
    stage: Stage
    reason: str
    detail: str

    @property
    def sample(self) -> str:
        """The sample, for messages."""
        return f"shard '{self.shard}', sample '{self.key}'"


@dataclass(frozen=True)
class RowCounts:
    """Rows seen, and how many of them were masked, by reason."""

    seen: int = 0
    masked: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.seen + other.seen, self.masked + other.masked)

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.seen - other.seen, self.masked - other.masked)

    @property
    def reasons(self) -> str:
        """How many were masked for each reason, for messages."""
        return ", ".join(f"{reason} {count}" for reason, count in self.masked.most_common())

    def state(self) -> dict[str, Any]:
        """The entries of a loader's state."""
        return {"rows_seen": self.seen, "rows_masked": dict(self.masked)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> RowCounts:
        """Read the entries of a loader's state; raises ConfigError for impossible ones."""
        seen, masked = state.get("rows_seen"), state.get("rows_masked")
        counts: list[Any] = [seen, *masked.values()] if isinstance(masked, dict) else [None]
        if any(type(count) is not int or count < 0 for count in counts) or sum(counts[1:]) > counts[0]:
            raise ConfigError(
                "loader state: 'rows_seen' must be an integer from 0 on, and 'rows_masked' integers by reason, at most "
                f"'rows_seen' in sum: got {seen!r} and {masked!r}; give the dictionary that state_dict() returned, or "
                "start anew"
            )
        return cls(counts[0], Counter(masked))


class Ledger(list[LedgerEntry]):
    """The rows that were masked, newest last. Ends the run when they exceed a share of the rows seen.

    With several ranks a rank only warns of its own rows: if it ended alone, the other ranks would wait for it in a
    collective. The training loop calls `judge` on all ranks with the counts of all (`Loader.check_rows`).

    As a list it has the newest entries, at most `KEPT_ENTRIES`; `write_to` appends all to a file.

    Args:
        max_bad_share: of the rows seen; checked after each batch from 1,000 rows on, and at the end of an epoch.
        ranks: rank and world size.
        commands: those of mmdata that can look into a row: a stream has no index for `replay`, an iterable no shards.

    Attributes:
        earlier: counts of all ranks before the run was resumed.
        own: counts of this rank since then.
    """

    def __init__(
        self,
        max_bad_share: float,
        ranks: Ranks = Ranks(),  # noqa: B008  # immutable
        *,
        commands: Sequence[str] = ("replay", "verify"),
    ) -> None:
        super().__init__()
        self._commands = commands
        self.earlier = self.own = RowCounts()
        self._ranks = ranks
        self._warned = False
        self._max_bad_share = max_bad_share
        self._path: Path | None = None

    def __repr__(self) -> str:
        counts, reasons = self.counts, self.counts.reasons
        return f"Ledger({counts.masked.total():,} of {counts.seen:,} rows masked{reasons and ': '}{reasons})"

    @property
    def masked(self) -> Counter[str]:
        """Exact number of rows masked since the loader was built or resumed, by reason."""
        return self.own.masked

    @property
    def counts(self) -> RowCounts:
        """Counts of the whole run: of all ranks until it was resumed, of this rank since."""
        return self.earlier + self.own

    def write_to(self, path: str | os.PathLike[str], *, epoch: int, step: int) -> None:
        """Append each entry to a file as it comes, one JSON object a line.

        Removes the entries of batches from (epoch, step) on: a run that was killed wrote them, and the resumed run
        makes these batches again. So the file has each masked row once.
        """
        self._path = Path(path)
        cut_ledger(self._path, epoch=epoch, step=step)

    def restore(self, counts: RowCounts) -> None:
        """Continue from the counts of a run that was stopped."""
        self.earlier, self.own = counts, RowCounts()
        self.clear()

    def merge(self, counts: Sequence[RowCounts]) -> RowCounts:
        """Add up the counts of all ranks; those from before the run was resumed count once.

        Example:
            Resumed at 100 rows; two ranks now have 108 rows each: 116 in all.
        """
        return sum((count - self.earlier for count in counts), start=self.earlier)

    def add(self, entries: list[LedgerEntry], rows_seen: int) -> None:
        """Add the rows of one batch.

        Raises:
            DataError: with one rank, more than `max_bad_share` of the rows could not be used.
        """
        # Each reason is logged once: a corpus with a common fault would flood the log.
        logged = set(self.own.masked)
        listed = "`.ledger` lists them" if self._path is None else f"'{self._path}' lists them"
        for entry in entries:
            if entry.reason not in logged:
                logged.add(entry.reason)
                logger.warning(
                    "%s: %s (%s); %s, as later rows like it will be: %s",
                    entry.sample,
                    entry.reason,
                    entry.detail,
                    "masked" if entry.row >= 0 else "left out",
                    listed,
                )
        self.extend(entries)
        del self[:-KEPT_ENTRIES]
        self.own += RowCounts(rows_seen, Counter(entry.reason for entry in entries))
        if entries and self._path is not None:
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
        if self.counts.seen >= MIN_ROWS_FOR_RATE:
            self.check()

    def check(self) -> None:
        """Check the rows of this rank: raises a DataError; with several ranks, warns once instead."""
        if self._warned:
            return
        try:
            self.judge(self.counts)
        except DataError as error:
            if self._ranks.world_size == 1:
                raise
            self._warned = True
            logger.warning(
                "rank %d of %d: %s. A rank that ended alone would leave the others waiting, so this one continues. The "
                "rows of all ranks decide: mmdata's trainer and integrations judge them; in a loop of your own, "
                "check_rows(merge_states(states)), called with the states of all ranks on every rank at the same step",
                self._ranks.rank,
                self._ranks.world_size,
                str(error),
            )

    def judge(self, counts: RowCounts) -> None:
        """Raise a DataError if more than `max_bad_share` of the rows in `counts` are masked."""
        bad = counts.masked.total()
        if bad > self._max_bad_share * counts.seen:
            first = ""
            for entry in self[:1]:
                first = f"; the first: {entry.sample}: {entry.detail}"
                if "replay" in self._commands:
                    first += f"; `mmdata replay CONFIG {entry.row} --epoch {entry.epoch}` makes this row alone"
            advice = [text for reason, text in ADVICE.items() if counts.masked[reason.value]]
            others = set(counts.masked) - {reason.value for reason in ADVICE}
            if others and "verify" in self._commands and "mmdata verify" not in first:
                advice.insert(0, VERIFY)
            raise DataError(
                f"{bad} of {counts.seen} rows could not be used ({counts.reasons}), more than max_bad_share "
                f"{self._max_bad_share:.1%}{first}. {'; '.join([*advice, LIMIT])}"
            )


def cut_ledger(path: Path, *, epoch: int, step: int) -> None:
    """Remove from a ledger's file the entries of batches from (epoch, step) on, and a last line that is not whole.

    A run that was killed wrote them, and the resumed run makes these batches again.

    Raises:
        DataError: another line is no entry.
    """
    if not path.is_file():
        return
    entries = read_json_lines(path, {"epoch": int, "step": int})
    kept = [json.dumps(entry) + "\n" for entry in entries if (entry["epoch"], entry["step"]) < (epoch, step)]
    write_whole(path, "".join(kept).encode())
