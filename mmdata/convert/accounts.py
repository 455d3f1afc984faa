"""Counts what becomes of each row. Accounts balance, or nothing is published.

Every input row is written, a duplicate, filtered or quarantined; each row that is not written has a line in
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
"""Reasons that the error of a failed conversion explains."""
EARLY = 1000
"""Quarantined rows below which a conversion does not end early."""


class Accounts:
    """Counts rows and keeps their ledger.

    Args:
        ledger: open file that gets a JSON object a line: row, place, path, reason, detail.

    Attributes:
        rows: input rows.
        written: rows in a shard.
        reasons: number of rows left out for each reason.
        losses: of written rows with an unusable text file.
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

    def count(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass rows through, counting them."""
        for row in rows:
            self.rows += 1
            yield row

    def leave_out(self, *, row: int, place: str, path: str, reason: Reason, detail: str) -> None:
        """Count a row that is not written, and record it."""
        self.reasons[reason] += 1
        self._first.setdefault(reason, f"{place}: {detail}")
        line = {"row": row, "place": place, "path": path, "reason": str(reason), "detail": detail}
        # A name that is not UTF-8 holds surrogates; backslashreplace writes them as escapes, which are valid in JSON.
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace")
        self._ledger.write(text + b"\n")

    def check(self, max_bad_share: float, *, rows_at_most: int | None = None) -> None:
        """Raise DataError if too many rows are quarantined.

        Args:
            max_bad_share: largest quarantined share of the input rows.
            rows_at_most: during a conversion, an upper bound of the input rows. A conversion fails early only with at
                least EARLY quarantined rows and when the remaining rows cannot save it.
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
        accounted = self.written + self.duplicate + self.filtered + self.quarantined
        if accounted != self.rows:
            raise DataError(f"accounts do not balance: {self.rows} rows came in, {accounted} are accounted for")
        if not self.written:
            raise DataError(f"none of {self.rows} rows could be written; nothing is published. {self._explain()}")

    def _explain(self) -> str:
        top = [reason for reason, _ in self.reasons.most_common(EXAMPLES)]
        return "; ".join(f"{self.reasons[reason]} {reason} (first: {self._first[reason]})" for reason in top)

    def as_dict(self) -> dict[str, Any]:
        """The counts for the manifest; "lost" only if there are losses."""
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
