"""What was spent on a URL: failures and time, counted over all attempts, those that start over for room too."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import monotonic


class Effort:
    """What was spent on one URL.

    Attributes:
        failures: attempts that failed, of those that may be made again.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._began: float | None = None
        self._failed_at: set[int] = set()

    def begin(self) -> None:
        """Start the clock with the first request; waiting for its turn is no effort."""
        self._began = monotonic() if self._began is None else self._began

    def failed(self) -> None:
        """Count a failure."""
        self.failures += 1

    def spent_s(self) -> float:
        """Seconds since the first request, without waits for room."""
        return 0.0 if self._began is None else monotonic() - self._began

    def is_new_to(self, host: object) -> bool:
        """Whether the URL asks this of a host for the first time."""
        is_new = id(host) not in self._failed_at
        self._failed_at.add(id(host))
        return is_new

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Stop the clock."""
        spent = self.spent_s()
        yield
        if self._began is not None:
            self._began = monotonic() - spent
