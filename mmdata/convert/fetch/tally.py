"""Counts what becomes of URLs, by reason, for the log of a run."""

from __future__ import annotations

from collections import Counter
from time import monotonic

from mmdata.errors import Reason, counted


class Tally:
    """What became of the URLs of a run.

    Attributes:
        urls: asked for so far.
        bytes: of images.
        reasons: number of URLs without an image for each reason.
    """

    def __init__(self) -> None:
        self.urls = 0
        self.bytes = 0
        self.reasons: Counter[Reason] = Counter()
        self._began = monotonic()

    def good(self, size: int) -> None:
        """Count an image of `size` bytes."""
        self.urls += 1
        self.bytes += size

    def bad(self, reason: Reason) -> None:
        """Count a URL without an image."""
        self.urls += 1
        self.reasons[reason] += 1

    def line(self) -> str:
        """What was fetched so far, how fast, and the reasons of all others."""
        bad, elapsed_s = self.reasons.total(), max(monotonic() - self._began, 1e-9)
        share = 1 - bad / self.urls if self.urls else 1.0
        line = f"fetched {self.urls - bad:,} of {counted(self.urls, 'URL')} ({share:.1%})"
        line += f", {self.bytes / 1e6:,.1f} MB in {elapsed_s:,.0f} s, {self.urls / elapsed_s:,.0f} a second"
        if bad:
            reasons = sorted(self.reasons.items(), key=lambda one: (-one[1], str(one[0])))
            line += f"; no image: {', '.join(f'{count:,} {reason}' for reason, count in reasons)}"
        return line
