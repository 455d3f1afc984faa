"""What is known of a host: how many requests it answers now, when it wants to be asked again, and what it allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from time import monotonic
from typing import Any

from mmdata.convert.fetch.faults import LeftAlone
from mmdata.convert.fetch.opt_outs import Rules
from mmdata.convert.fetch.request import jitter
from mmdata.convert.fetch.settings import FetchSettings


class Host:
    """A host.

    Attributes:
        wanted: URLs that are asked for, or wait to be.
    """

    def __init__(self, settings: FetchSettings, connections: asyncio.Semaphore) -> None:
        self.wanted = 0
        self._rules: dict[str, _Reading] = {}  # by origin: scheme, host and port
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.per_host)
        self._connections = connections
        self._not_before = 0.0
        self._silent_urls = 0
        self._silent_since = 0.0
        self._alone_until = 0.0

    async def rules(self, origin: str, read: Callable[[], Coroutine[Any, Any, Rules]]) -> Rules:
        """The rules of an origin, read once; a failure is kept for `rules_again_s`, then they are read again.

        Raises:
            BadSample: they cannot be read.
        """
        reading = self._rules.get(origin)
        if reading is None or reading.until <= monotonic():
            reading = self._rules[origin] = _Reading(read(), self._settings.rules_again_s)
        return await asyncio.shield(reading.task)

    def pause(self, seconds: float) -> None:
        """Ask the host no more for so long."""
        self._not_before = max(self._not_before, monotonic() + seconds)

    def answered(self) -> None:
        """Say that the host gave an answer, of whatever kind but 429."""
        self._silent_urls = 0

    def was_silent(self, *, is_new: bool) -> None:
        """Say that a URL had no answer, or 429. After `silent_urls` in a row, and `silent_s`, the host is left alone.

        Args:
            is_new: whether this URL was not counted before.
        """
        self._silent_since = monotonic() if self._silent_urls == 0 else self._silent_since
        self._silent_urls += is_new or self._silent_urls == 0
        settings = self._settings
        if self._silent_urls >= settings.silent_urls and monotonic() - self._silent_since >= settings.silent_s:
            self._alone_until = monotonic() + settings.alone_s
            self._silent_urls = 0

    @contextmanager
    def wanting(self) -> Generator[None, None, None]:
        """Count a URL of the host in `wanted`."""
        self.wanted += 1
        try:
            yield
        finally:
            self.wanted -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """One of the host's connections, and one of all; waits for both, and for the end of a pause.

        Raises:
            LeftAlone: the host wants to be left alone for longer than `longest_wait_s`.
        """
        while True:
            await self._wait()
            async with self._slots:  # before one of all, so that who waits for a slow host keeps no other host waiting
                if max(self._not_before, self._alone_until) > monotonic():
                    continue
                async with self._connections:
                    yield
                return

    def check(self) -> None:
        """Raise LeftAlone if the host is not asked for longer than is waited."""
        alone = self._alone_until - monotonic()
        if alone > 0:
            most = self._settings.silent_urls
            raise LeftAlone(
                alone, f"{most} URLs of the host in a row had no answer; it is not asked for {alone:,.0f} s"
            )
        left = self._not_before - monotonic()
        if left > self._settings.longest_wait_s:
            raise LeftAlone(left, f"the host asks to wait {left:,.0f} s more (Retry-After); try later")

    async def _wait(self) -> None:
        self.check()
        left = self._not_before - monotonic()
        if left > 0:
            await asyncio.sleep(jitter(left))


class _Reading:
    """Rules that are read, or were.

    Attributes:
        task: that reads them.
        until: when they are read anew; for rules that were read whole, never.
    """

    def __init__(self, read: Coroutine[Any, Any, Rules], again_s: float) -> None:
        self.until = inf
        self._again_s = again_s
        self.task = asyncio.ensure_future(read)
        self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Rules]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, LeftAlone):  # no longer than that, since it says nothing of the rules
            self.until = monotonic() + min(error.after_s, self._again_s)
        elif error is not None or not task.result().is_whole:
            self.until = monotonic() + self._again_s
