"""`num_workers: auto`: how many threads a loader needs, found while it runs, from how long its caller waits.

Only who makes a batch, and when, depends on it; what is in the batches does not.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger("mmdata")

START = 2
"""Threads at first."""
INTERVAL_S, INTERVAL_BATCHES = 2.0, 10
"""One look: so long, and so many batches, at least. The batches made ahead before a change are in none."""
WAITS, NEVER_WAITS = 0.02, 0.002
"""Shares of the caller's time: above the first it waits for batches, below the second it never does."""
GAIN = 1.02
"""Times as many samples a second, at least: a change that gives less is taken back."""
AGAIN = 32
"""Looks after which what was taken back is tried again; twice as many after each time."""
LONG = 64
"""Looks in a row without waiting, after which one thread less is tried; twice as many after each failure."""


class Tuner:
    """Says how many threads to have, one look after the other.

    Where the caller waits, a quarter more threads are tried (one at least); they stay if more samples came a second, or
    if the waiting has ended. Where it has not waited for long, one thread less is tried, and stays if it still does not
    wait. Each change is one line of the log.

    `prefetch` stays as it is: it decides how much memory a run takes, and one that runs out of memory at night is worse
    than one that waits.

    Args:
        most: threads.
        start: threads at first; at most `most`.
        ahead: batches that may have been made before a change.

    Attributes:
        count: threads to have now.

    Example:
        2 threads, 400 samples/s, and the caller waits 60 % of its time: 3 are tried. 590 samples/s: they stay, and 4
        are tried. 585 samples/s: back to 3, and 4 again after 32 looks.
    """

    def __init__(self, *, most: int, start: int = START, ahead: int = 2) -> None:
        self.count = min(start, most)
        self._most, self._ahead = most, ahead
        self._tried: _Trial | None = None
        self._patience, self._again = 0, AGAIN  # looks until more threads are tried; after the next failure
        self._idle, self._long = 0, LONG  # looks in a row without waiting; so many until fewer are tried
        self._rows, self._batches, self._seconds, self._waited_s = 0, 0, 0.0, 0.0
        self.pause()

    def pause(self) -> None:
        """The next batches do not count: they were made ahead of a change, or beside an evaluation between epochs."""
        self._skip = self._ahead + 1

    def add(self, rows: int, seconds: float, waited_s: float) -> int:
        """Take account of a batch.

        Args:
            rows: of it.
            seconds: since the batch before it was there, of which
            waited_s: the caller waited.

        Returns:
            Threads to have from now on.
        """
        if self._skip or self._most == 1:
            self._skip = max(0, self._skip - 1)
            return self.count
        self._rows += rows
        self._batches += 1
        self._seconds += seconds
        self._waited_s += waited_s
        if self._seconds >= INTERVAL_S and self._batches >= INTERVAL_BATCHES:
            rate, share = self._rows / self._seconds, self._waited_s / self._seconds
            before = self.count
            self._rows, self._batches, self._seconds, self._waited_s = 0, 0, 0.0, 0.0
            if self._tried:
                self._judge(self._tried, rate, share)
            else:
                self._look(rate, share)
            if self.count != before:
                self.pause()
        return self.count

    def _look(self, rate: float, share: float) -> None:
        """Try something, where there is a reason to."""
        self._patience = max(0, self._patience - 1)
        self._idle = self._idle + 1 if share < NEVER_WAITS else 0
        if share > WAITS and self.count < self._most and not self._patience:
            self._try(min(self._most, self.count + max(1, self.count // 4)), rate, share)
        elif self._idle >= self._long and self.count > 1:
            self._try(self.count - 1, rate, share)

    def _try(self, count: int, rate: float, share: float) -> None:
        self._tried = _Trial(self.count, rate, share)
        self.count, self._idle = count, 0

    def _judge(self, tried: _Trial, rate: float, share: float) -> None:
        """Keep what was tried, or take it back."""
        self._tried = None
        more = self.count > tried.workers
        helped = share <= WAITS or (more and rate >= GAIN * tried.rate)
        change = f"{tried.workers} → {self.count} workers: {tried.rate:,.0f} → {rate:,.0f} samples/s"
        gain = f"({rate / max(tried.rate, 1e-9) - 1:+.0%}), waiting {tried.share:.0%} → {share:.0%} of the time"
        logger.info("num_workers auto: %s %s%s", change, gain, "" if helped else f"; back to {tried.workers}")
        if helped:
            self._again = AGAIN
            return
        self.count = tried.workers
        if more:
            self._patience, self._again = self._again, 2 * self._again
        else:
            self._long *= 2


class _Trial(NamedTuple):
    """What was before a change: threads, samples a second, share of its time that the caller waited."""

    workers: int
    rate: float
    share: float
