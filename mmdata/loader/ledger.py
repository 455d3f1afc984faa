"""Rows that could not be used: each is masked in its batch and listed with its reason; too many end the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from mmdata.atomic import naming, write_whole
from mmdata.errors import ConfigError, DataError
from mmdata.launcher import Ranks

logger = logging.getLogger("mmdata")

MIN_ROWS_FOR_RATE = 1000
KEPT_ENTRIES = 10_000

Stage = Literal["read", "decode", "transform", "caption"]


@dataclass(frozen=True)
class LedgerEntry:
    """A row that is masked in its batch.

    Attributes:
        epoch, step: of the batch.
        row: in the index; -1 where a stream's sample came into no batch.
        shard, key: of the sample.
        offset: of its image in the shard, in bytes, or of its caption where that was at fault; -1 in a stream.
        stage: at which it failed.
        reason: of the closed list, `mmdata.errors.Reason`.
        detail: what was seen, for a person.
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


@dataclass(frozen=True)
class RowCounts:
    """Rows seen, and how many of them were masked, by reason."""

    seen: int = 0
    masked: Counter[str] = field(default_factory=Counter[str])

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.seen + other.seen, self.masked + other.masked)

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(self.seen - other.seen, self.masked - other.masked)

    def state(self) -> dict[str, Any]:
        """As JSON, a part of a loader's state."""
        return {"rows_seen": self.seen, "rows_masked": dict(self.masked)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> RowCounts:
        """Undo of `state`; raises ConfigError for what it cannot have given."""
        seen, masked = state.get("rows_seen"), state.get("rows_masked")
        counts = list(masked.values()) if isinstance(masked, dict) else [None]
        if any(type(count) is not int or count < 0 for count in [seen, *counts]) or sum(counts) > seen:  # type: ignore[arg-type,operator]
            raise ConfigError(
                "loader state: 'rows_seen' must be a whole number from 0 on, and 'rows_masked' numbers by reason that "
                f"are no more in sum: got {seen!r} and {masked!r}; give the dictionary that state_dict() returned, or "
                "start anew"
            )
        return cls(seen, Counter(masked))  # type: ignore[arg-type]


class Ledger(Sequence[LedgerEntry]):
    """The rows that were masked, newest last. Ends the run when they are more than a share of the rows seen.

    One of several ranks does not judge by its own rows: it would end while the others wait for it in a collective. It
    warns, and the program that runs all ranks calls `judge` on each with the counts of all (`Loader.check_rows`).

    As a sequence it holds the newest entries, at most `KEPT_ENTRIES`; `write_to` keeps all in a file.

    Args:
        max_bad_share: of the rows seen, from the thousandth row on, and again at the end of an epoch.
        ranks: which rank this is, for the warning.

    Attributes:
        earlier: rows of the run before it was resumed, of all its ranks.
        own: rows since then, of this rank.
    """

    def __init__(self, max_bad_share: float, ranks: Ranks = Ranks()) -> None:  # noqa: B008
        self.earlier = self.own = RowCounts()
        self._entries: deque[LedgerEntry] = deque(maxlen=KEPT_ENTRIES)
        self._ranks = ranks
        self._warned = False
        self._max_bad_share = max_bad_share
        self._path: Path | None = None

    def __len__(self) -> int:
        """Entries that are kept."""
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> LedgerEntry: ...

    @overload
    def __getitem__(self, index: slice) -> list[LedgerEntry]: ...

    def __getitem__(self, index: int | slice) -> LedgerEntry | list[LedgerEntry]:
        """An entry, or a list of them."""
        return self._entries[index] if isinstance(index, int) else list(self._entries)[index]

    @property
    def masked(self) -> Counter[str]:
        """Rows that were masked since the loader was built or resumed, by reason, exact."""
        return self.own.masked

    @property
    def counts(self) -> RowCounts:
        """Rows of the whole run, as far as this rank knows."""
        return self.earlier + self.own

    def write_to(self, path: str | os.PathLike[str], *, epoch: int, step: int) -> None:
        """Append each entry to a file as it comes, one JSON object a line.

        Entries of batches from (epoch, step) on are cut off: a run that was killed wrote them, and the resumed run
        makes these batches again. So each masked row stands in the file once.
        """
        self._path = Path(path)
        cut_ledger(self._path, epoch=epoch, step=step)

    def restore(self, counts: RowCounts) -> None:
        """Go on from the counts of a run that was stopped."""
        self.earlier, self.own = counts, RowCounts()
        self._entries.clear()

    def merge(self, counts: Sequence[RowCounts]) -> RowCounts:
        """The counts of all ranks as one: what they had before they were resumed counts once.

        Example:
            Resumed at 100 rows; now two ranks have counted 108 rows each: 116 in all.
        """
        return sum((count - self.earlier for count in counts), start=self.earlier)

    def add(self, entries: list[LedgerEntry], rows_seen: int) -> None:
        """Account for the rows of one batch.

        Raises:
            DataError: too many rows could not be used, and this is the only rank.
        """
        told = set(self.own.masked)
        for entry in entries:
            if entry.reason not in told:
                told.add(entry.reason)
                logger.warning(
                    "shard '%s', sample '%s': %s (%s); left out, as all like it will be: `.ledger` lists them",
                    entry.shard,
                    entry.key,
                    entry.reason,
                    entry.detail,
                )
        self._entries += entries
        self.own += RowCounts(rows_seen, Counter(entry.reason for entry in entries))
        if entries and self._path is not None:
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
        if self.counts.seen >= MIN_ROWS_FOR_RATE:
            self.check()

    def check(self) -> None:
        """Judge what this rank has seen: raise a DataError, or warn once if it is one of several."""
        if self._warned:
            return
        try:
            self.judge(self.counts)
        except DataError as error:
            if self._ranks.world_size == 1:
                raise
            self._warned = True
            logger.warning(
                "rank %d of %d: %s. A rank that ended alone would leave the others waiting, so this one goes on. "
                "check_rows(merge_states(states)), called with the states of all ranks on every rank at the same step, "
                "ends all of them, as in mmdata's trainer and integrations",
                self._ranks.rank,
                self._ranks.world_size,
                str(error),
            )

    def judge(self, counts: RowCounts) -> None:
        """Raise a DataError if more than `max_bad_share` of the rows in `counts` were masked."""
        bad = counts.masked.total()
        if bad > self._max_bad_share * counts.seen:
            listed = ", ".join(f"{reason} {count}" for reason, count in counts.masked.most_common())
            first = [f"; the first: shard '{e.shard}', sample '{e.key}': {e.detail}" for e in list(self._entries)[:1]]
            raise DataError(
                f"{bad} of {counts.seen} rows could not be used ({listed}), more than max_bad_share "
                f"{self._max_bad_share:.1%}{''.join(first)}. "
                "`mmdata verify` checks the shards; data.loading.max_bad_share sets the limit"
            )


def cut_ledger(path: Path, *, epoch: int, step: int) -> None:
    """Take out of a ledger's file what a killed run left there and a resumed one makes again.

    That is the entries of batches from (epoch, step) on, and a line that a kill cut. All others stay.
    """
    if not path.is_file():
        return
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if (entry["epoch"], entry["step"]) < (epoch, step):
                kept.append(line + "\n")
    write_whole(path, "".join(kept).encode())
