"""What became of each row. Accounts balance, or nothing is published.

Every row that comes in is written, a duplicate, filtered or quarantined; whatever is not written has a line in
quarantine.jsonl.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from mmdata.convert.rows import Row
from mmdata.errors import DataError, Reason
from mmdata.shards.texts import Losses

EXAMPLES = 3
"""Reasons explained in the message of a conversion that failed."""
EARLY = 1000
"""Quarantined rows before a conversion may end early."""


class Accounts:
    """Counts rows and keeps their ledger.

    Args:
        ledger: open file; one JSON object a line: row, place, path, reason, detail.

    Attributes:
        rows: rows that came in.
        written: rows that went into a shard.
        reasons: count of each reason a row was left out for.
        losses: written rows of which a text file could not be used.
    """

    def __init__(self, ledger: BinaryIO) -> None:
        self.rows = 0
        self.written = 0
        self.reasons: Counter[Reason] = Counter()
        self.losses = Losses()
        self._ledger = ledger
        self._first: dict[Reason, str] = {}

    @property
    def duplicate(self) -> int:
        """Rows whose image an earlier row has."""
        return self.reasons[Reason.DUPLICATE_IMAGE]

    @property
    def filtered(self) -> int:
        """Rows left out on purpose."""
        return self.reasons[Reason.FILTERED]

    @property
    def quarantined(self) -> int:
        """Rows that cannot be used."""
        return self.reasons.total() - self.duplicate - self.filtered

    def count(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass rows on and count them as they come in."""
        for row in rows:
            self.rows += 1
            yield row

    def leave_out(self, *, row: int, place: str, path: str, reason: Reason, detail: str) -> None:
        """Count a row that is not written, and record it."""
        self.reasons[reason] += 1
        self._first.setdefault(reason, f"{place}: {detail}")
        line = {"row": row, "place": place, "path": path, "reason": str(reason), "detail": detail}
        # A name that is not UTF-8 holds surrogates: backslashreplace makes of them the escapes that JSON knows.
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self._ledger.write(text + b"\n")

    def check(self, max_bad_share: float, *, rows_at_most: int | None = None) -> None:
        """Raise DataError where too many rows are quarantined.

        Args:
            max_bad_share: of the rows that came in.
            rows_at_most: before the end, how many can still have come in by then. A long run that is lost is ended
                early; a short one goes through, so that its ledger is complete.
        """
        if rows_at_most is not None and self.quarantined < EARLY:
            return
        total = self.rows if rows_at_most is None else max(self.rows, rows_at_most)
        if self.quarantined > max_bad_share * total:
            raise DataError(
                f"{self.quarantined} of {'' if rows_at_most is None else 'at most '}{total} rows are unusable, over "
                f"max_bad_share={max_bad_share}; nothing is published. {self._explain()}. "
                f"Each has a line in '{self._ledger.name}'. Repair the corpus, or allow more with --max-bad-share"
            )

    def settle(self) -> None:
        """Raise DataError unless every row is accounted for and at least one was written."""
        told = self.written + self.duplicate + self.filtered + self.quarantined
        if told != self.rows:
            raise DataError(f"accounts do not balance: {self.rows} rows came in, {told} are accounted for")
        if not self.written:
            raise DataError(f"none of {self.rows} rows could be written; nothing is published. {self._explain()}")

    def _explain(self) -> str:
        top = [reason for reason, _ in self.reasons.most_common(EXAMPLES)]
        return "; ".join(f"{self.reasons[reason]} {reason} (first: {self._first[reason]})" for reason in top)

    def as_dict(self) -> dict[str, Any]:
        """The counts, as the manifest keeps them; "lost" only where something was."""
        lost = {"lost": self.losses.as_dict()} if self.losses.counts else {}
        return {
            "rows": self.rows,
            "written": self.written,
            "duplicate": self.duplicate,
            "filtered": self.filtered,
            "quarantined": self.quarantined,
            "reasons": {str(reason): self.reasons[reason] for reason in sorted(self.reasons)},
            **lost,
        }
