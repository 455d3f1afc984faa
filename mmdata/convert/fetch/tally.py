"""Counts what becomes of URLs, by reason and host, for the log of a run."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from typing import TypeVar

from yarl import URL

from mmdata.errors import Reason, counted, printable

K = TypeVar("K")

HOSTS_SHOWN = 3
HOSTS_KEPT = 10_000
"""Hosts counted for a reason; when there are more, the rarest half is forgotten."""


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
        self._hosts: dict[Reason, Counter[str]] = {}
        self._began = self._marked_at = monotonic()
        self._marked = (0, 0)

    def good(self, size: int) -> None:
        """Count an image of `size` bytes."""
        self.urls += 1
        self.bytes += size

    def bad(self, url: str, reason: Reason) -> None:
        """Count a URL without an image."""
        self.urls += 1
        self.reasons[reason] += 1
        hosts = self._hosts.setdefault(reason, Counter())
        hosts[_host_of(url)] += 1
        if len(hosts) > HOSTS_KEPT:
            self._hosts[reason] = Counter(dict(hosts.most_common(HOSTS_KEPT // 2)))

    def line(self) -> str:
        """What was fetched so far, and the rates since the last line."""
        now = monotonic()
        elapsed = max(now - self._marked_at, 1e-9)
        urls, size = self.urls - self._marked[0], self.bytes - self._marked[1]
        self._marked_at, self._marked = now, (self.urls, self.bytes)
        rates = f"{urls / elapsed:,.0f} a second, {size / elapsed / 1e6:,.1f} MB/s"
        return f"{self._so_far()}; {rates}{self._listed()}"

    def table(self) -> str:
        """What was fetched in all: a line, and one for each reason with its commonest hosts."""
        lines = [f"{self._so_far()}, {self.bytes / 1e6:,.1f} MB in {monotonic() - self._began:,.0f} s"]
        width = max((len(str(reason)) for reason in self.reasons), default=0)
        for reason, count in _commonest_first(self.reasons):
            lines.append(f"  {reason!s:{width}}  {count:>9,}  {self._commonest(reason)}")
        return "\n".join(lines)

    def _so_far(self) -> str:
        good = self.urls - self.reasons.total()
        share = good / self.urls if self.urls else 1.0
        return f"fetched {good:,} of {counted(self.urls, 'URL')} ({share:.1%})"

    def _listed(self) -> str:
        return "".join(
            f"; {count:,} {reason} ({self._commonest(reason)})" for reason, count in _commonest_first(self.reasons)
        )

    def _commonest(self, reason: Reason) -> str:
        return ", ".join(f"{host} {count:,}" for host, count in _commonest_first(self._hosts[reason])[:HOSTS_SHOWN])


def _commonest_first(counts: Counter[K]) -> list[tuple[K, int]]:
    return sorted(counts.items(), key=lambda one: (-one[1], str(one[0])))


def _host_of(url: str) -> str:
    try:
        return printable(URL(url.strip()).host or "no host")
    except (ValueError, TypeError):
        return "no host"
