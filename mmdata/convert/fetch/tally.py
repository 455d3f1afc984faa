"""Counts what becomes of URLs, by reason and by host, for the log of a run."""

from __future__ import annotations

from collections import Counter
from time import monotonic

from yarl import URL

from mmdata.errors import Reason, counted, printable

HOSTS_SHOWN = 3
HOSTS_KEPT = 10_000
"""Hosts that are counted; when there are more, the rarest half is forgotten."""


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
        self._hosts: Counter[str] = Counter()
        self._began = monotonic()

    def good(self, size: int) -> None:
        """Count an image of `size` bytes."""
        self.urls += 1
        self.bytes += size

    def bad(self, url: str, reason: Reason) -> None:
        """Count a URL without an image."""
        self.urls += 1
        self.reasons[reason] += 1
        self._hosts[_host_of(url)] += 1
        if len(self._hosts) > HOSTS_KEPT:
            self._hosts = Counter(dict(self._hosts.most_common(HOSTS_KEPT // 2)))

    def line(self) -> str:
        """What was fetched so far, how fast, the reasons of all others, and the hosts that have most of these."""
        bad, elapsed_s = self.reasons.total(), max(monotonic() - self._began, 1e-9)
        share = 1 - bad / self.urls if self.urls else 1.0
        line = f"fetched {self.urls - bad:,} of {counted(self.urls, 'URL')} ({share:.1%})"
        line += f", {self.bytes / 1e6:,.1f} MB in {elapsed_s:,.0f} s, {self.urls / elapsed_s:,.0f} a second"
        if bad:
            reasons = sorted(self.reasons.items(), key=lambda one: (-one[1], str(one[0])))
            hosts = sorted(self._hosts.items(), key=lambda one: (-one[1], one[0]))[:HOSTS_SHOWN]
            line += f"; no image: {', '.join(f'{count:,} {reason}' for reason, count in reasons)}"
            line += f"; most of them of {', '.join(f'{host} ({count:,})' for host, count in hosts)}"
        return line


def _host_of(url: str) -> str:
    try:
        return printable(URL(url.strip()).host or "no host")
    except (ValueError, TypeError):
        return "no host"
