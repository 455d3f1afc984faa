"""Counts what becomes of each row. Accounts balance, or nothing is published.

Every input row is written, merged into the sample of another row, a duplicate, filtered or quarantined. Each row that
is neither written nor merged has a line in quarantine.jsonl.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from mmdata.config.convert import ConvertConfig
from mmdata.convert.fetch import is_unfetched
from mmdata.convert.sources.rows import NOT_QUARANTINED, Source
from mmdata.convert.sources.table_source import where_looked
from mmdata.errors import DataError, Reason
from mmdata.tars.texts import Losses

EXAMPLES = 3
"""Reasons that the error of a failed conversion explains."""


class Accounts:
    """Counts the rows that belong to one folder of shards, and keeps their ledger.

    Args:
        ledger: open file that gets a JSON object a line: row, place, path, reason, detail.

    Attributes:
        written: rows in a shard.
        merged: rows whose captions are in the sample of another row of the same image.
        differing: duplicates with captions or a label that the written row of their image has not; no URLs, whose
            images cannot be merged.
        reasons: number of rows left out for each reason.
        unfetched: of these, rows whose image could not be had from its URL.
        missing: the first path at which no image was found; "" for none.
        losses: of written rows with an unusable text file.
    """

    def __init__(self, ledger: BinaryIO) -> None:
        self.written = 0
        self.merged = 0
        self.differing = 0
        self.reasons: Counter[Reason] = Counter()
        self.unfetched: Counter[Reason] = Counter()
        self.first: dict[Reason, str] = {}
        self.missing = ""
        self.losses = Losses()
        self._ledger = ledger

    @property
    def rows(self) -> int:
        """All rows."""
        return self.written + self.merged + self.reasons.total()

    @property
    def duplicate(self) -> int:
        """Rows with the image of an earlier row."""
        return self.reasons[Reason.DUPLICATE_IMAGE]

    @property
    def filtered(self) -> int:
        """Rows left out on purpose."""
        return self.reasons[Reason.FILTERED]

    @property
    def quarantined(self) -> int:
        """Rows that cannot be used."""
        return self.reasons.total() - self.duplicate - self.filtered

    @property
    def bad(self) -> int:
        """Rows that cannot be used, for another reason than that their URL gave no image."""
        return self.quarantined - self.unfetched.total()

    @property
    def ledger(self) -> str:
        """Path of the ledger."""
        return self._ledger.name

    def leave_out(self, *, row: int, place: str, path: str, reason: Reason, detail: str) -> None:
        """Count a row that is neither written nor merged, and record it."""
        self.reasons[reason] += 1
        self.unfetched[reason] += is_unfetched(path, reason) and reason not in NOT_QUARANTINED
        self.first.setdefault(reason, f"{place}: {detail}")
        if reason is Reason.MISSING_IMAGE:
            self.missing = self.missing or path
        line = {"row": row, "place": place, "path": path, "reason": str(reason), "detail": detail}
        # A name that is not UTF-8 holds surrogates; backslashreplace writes them as escapes, which are valid in JSON.
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self._ledger.write(text + b"\n")

    def as_dict(self) -> dict[str, Any]:
        """The counts for the manifest; "lost", "differing" and "unfetched" only if there are such rows."""
        lost = {"lost": self.losses.as_dict()} if self.losses.counts else {}
        differing = {"differing": self.differing} if self.differing else {}
        unfetched = {"unfetched": self.unfetched.total()} if self.unfetched.total() else {}
        return {
            "rows": self.rows,
            "written": self.written,
            "merged": self.merged,
            "duplicate": self.duplicate,
            "filtered": self.filtered,
            "quarantined": self.quarantined,
            "reasons": {str(reason): self.reasons[reason] for reason in sorted(self.reasons)},
            **lost,
            **differing,
            **unfetched,
        }


class CannotPublish(DataError):
    """The rows of a conversion are not good enough to publish, whoever converts them again."""


class NothingWritten(CannotPublish):
    """No row of a conversion could be written.

    Args:
        message: for people.
        accounts: of all folders.

    Attributes:
        accounts: as one; see `Accounts.as_dict`.
        ledgers: paths of their ledgers.
    """

    def __init__(self, message: str, accounts: Sequence[Accounts]) -> None:
        super().__init__(message)
        self.accounts = add_up([one.as_dict() for one in accounts])
        self.ledgers = [one.ledger for one in accounts]


def check_accounts(accounts: Sequence[Accounts], config: ConvertConfig, source: Source, *, has_not_in: bool) -> None:
    """Compare the rows that came in with the accounts of all folders of a conversion.

    Args:
        accounts: of each folder.
        config: the largest shares of rows that cannot be used.
        source: of the rows.
        has_not_in: whether images of other folders are left out.

    Raises:
        NothingWritten: no row could be written.
        CannotPublish: too many rows are quarantined, a row is not accounted for, or a folder is empty.
    """
    rows = source.num_rows
    bad, unfetched = _add(one.reasons - one.unfetched for one in accounts), _add(one.unfetched for one in accounts)
    ledgers = " or ".join(f"'{one.ledger}'" for one in accounts if one.quarantined)
    if (count := sum(one.bad for one in accounts)) > config.max_bad_share * rows:
        raise CannotPublish(
            f"{count} of {rows} rows are unusable, over max_bad_share={config.max_bad_share}; nothing is published. "
            f"{_explain(bad, accounts, source)}. Each has a line in {ledgers}. "
            "Repair the corpus, or allow more with --max-bad-share"
        )
    if (count := unfetched.total()) > config.max_unfetched_share * rows:
        raise CannotPublish(
            f"{count} of {rows} rows have a URL that gave no image, over "
            f"max_unfetched_share={config.max_unfetched_share}; nothing is published. "
            f"{_explain(unfetched, accounts, source)}. Each has a line in {ledgers}. Start again when the servers "
            "answer, or allow more with max_unfetched_share=… after OUT"
        )
    if (accounted := sum(one.rows for one in accounts)) != rows:
        raise CannotPublish(f"not every row is accounted for: {rows} rows came in, and {accounted} are in the accounts")
    written = sum(one.written for one in accounts)
    if not written:
        reasons = _add(one.reasons for one in accounts)
        if has_not_in and reasons[Reason.DUPLICATE_IMAGE] == rows:
            raise CannotPublish(
                f"the images of all {rows:,} rows are in the folders of --not-in; nothing is left to convert"
            )
        why = _explain(reasons, accounts, source)
        raise NothingWritten(f"none of {rows} rows could be written; nothing is published. {why}", accounts)
    for number, one in enumerate(accounts):
        if not one.written:
            raise CannotPublish(none_for(number, written, config))


def none_for(part: int, written: int, config: ConvertConfig) -> str:
    """What is wrong if no sample is left for training, part 0, or for validation, part 1."""
    return (
        f"val_share {config.val_share} of {written} samples leaves none for {('training', 'validation')[part]}; "
        "nothing is published: choose another --val-share"
    )


def _add(counts: Iterable[Counter[Reason]]) -> Counter[Reason]:
    return sum(counts, Counter[Reason]())


def _explain(reasons: Counter[Reason], accounts: Sequence[Accounts], source: Source) -> str:
    """The most frequent reasons, each with its first row."""
    first: dict[Reason, str] = {}
    for one in accounts:
        first = {**one.first, **first}
    top = [reason for reason, _ in reasons.most_common(EXAMPLES)]
    listed = "; ".join(f"{reasons[reason]} {reason} (first: {first[reason]})" for reason in top)
    if any(one.written for one in accounts):
        return listed
    return listed + where_looked(source, next((one.missing for one in accounts if one.missing), ""))


def add_up(accounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accounts of several folders, as one: counts are added, other values are those of the first."""
    total = dict(accounts[0])
    for one in accounts[1:]:
        for name, value in one.items():
            if isinstance(value, int):
                total[name] = total.get(name, 0) + value
            elif name in ("reasons", "lost"):
                total[name] = dict(sorted((Counter(total.get(name, {})) + Counter(value)).items()))
    return total
