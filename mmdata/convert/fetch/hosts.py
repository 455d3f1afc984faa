"""What is known of a host: how many requests it answers now, when it wants to be asked again, and what it allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from mmdata.convert.fetch.faults import LeftAlone
from mmdata.convert.fetch.opt_outs import Rules
from mmdata.convert.fetch.request import jitter
from mmdata.convert.fetch.settings import FetchSettings


class Host:
    """A host.

    Attributes:
        rules: by origin (scheme, host and port): the task that reads its rules, and when it was begun.
        wanted: URLs that are asked for, or wait to be.
    """

    def __init__(self, settings: FetchSettings, connections: asyncio.Semaphore) -> None:
        self.rules: dict[str, tuple[asyncio.Task[Rules], float]] = {}
        self.wanted = 0
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.per_host)
        self._connections = connections
        self._not_before = 0.0

    def pause(self, seconds: float) -> None:
        """Ask the host no more for so long."""
        self._not_before = max(self._not_before, monotonic() + seconds)

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
                if self._not_before > monotonic():
                    continue
                async with self._connections:
                    yield
                return

    async def _wait(self) -> None:
        left = self._not_before - monotonic()
        if left > self._settings.longest_wait_s:
            raise LeftAlone(left)
        if left > 0:
            await asyncio.sleep(jitter(left))
