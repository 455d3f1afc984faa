"""What was spent on a URL: failures and time, counted over all attempts, those that start over for room too.

The last failure is the reason of a URL that is given up, whatever ended the attempts: how long others take must not
decide how a URL is filed.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import monotonic

from mmdata.convert.fetch.faults import BadStatus
from mmdata.errors import BadSample


class Effort:
    """What was spent on one URL.

    Attributes:
        failures: attempts that failed, of those that may be made again.
        last: the last of these failures.
        hung_s: seconds of the requests that ended with a timeout.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.last: BadSample | None = None
        self.hung_s = 0.0
        self._began: float | None = None
        self._failed_at: set[int] = set()

    def begin(self) -> None:
        """Start the clock with the first request; waiting for its turn is no effort."""
        self._began = monotonic() if self._began is None else self._began

    def failed(self, failure: BadSample) -> None:
        """Count a failure."""
        self.failures += 1
        self.last = failure

    def final(self, why: str = "") -> BadSample:
        """The last failure, for good, with the number of attempts and why there is no further one."""
        assert self.last is not None
        times = f" ({self.failures} times asked)" if self.failures > 1 else ""
        detail = f"{self.last.detail}{times}{f'; {why}' if why else ''}"
        if isinstance(self.last, BadStatus):
            return BadStatus(self.last.status, detail)
        return BadSample(self.last.reason, detail)

    def spent_s(self) -> float:
        """Seconds since the first request, without waits for room and for the URL's turn."""
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
