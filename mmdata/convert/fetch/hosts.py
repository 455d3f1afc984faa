"""What is known of a host: how many requests it answers now, when it wants to be asked again, and what it allows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from yarl import URL

from mmdata.convert.fetch.faults import UrlFault
from mmdata.convert.fetch.opt_outs import Rules, parse_tdmrep
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import Reason


class Host:
    """A host.

    Args:
        settings: of the fetching.
        connections: of all hosts.
        get: reads a small file of the host.

    Attributes:
        wanted: URLs that are asked for, or wait to be.
    """

    def __init__(
        self,
        settings: FetchSettings,
        connections: asyncio.Semaphore,
        get: Callable[[URL], Coroutine[Any, Any, bytes]],
    ) -> None:
        self.wanted = 0
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.per_host)
        self._connections = connections
        self._get = get
        self._not_before = 0.0
        self._silent_urls: set[object] = set()
        self._silent_since = 0.0
        self._alone_until = 0.0
        self._rules: dict[URL, asyncio.Future[Rules]] = {}  # by origin: scheme, host and port
        self._rules_until: dict[URL, float] = {}

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """One of the host's connections, and one of all; waits for both, and for the end of a pause.

        Raises:
            UrlFault: the host is left alone; see `check`.
        """
        while True:
            self.check()
            if (left := self._not_before - monotonic()) > 0:
                await asyncio.sleep(jitter(left))
            async with self._slots:  # before one of all, so that who waits for a slow host keeps no other host waiting
                if max(self._not_before, self._alone_until) > monotonic():
                    continue
                async with self._connections:
                    yield
                return

    def check(self) -> None:
        """Raise UrlFault if the host is not asked for longer than is waited."""
        alone = self._alone_until - monotonic()
        if alone > 0:
            most = self._settings.silent_urls
            detail = f"{most} URLs of the host in a row had no answer; it is not asked for {alone:,.0f} s"
            raise UrlFault(Reason.HOST_LEFT_ALONE, detail, after_s=alone)
        left = self._not_before - monotonic()
        if left > self._settings.longest_wait_s:
            detail = f"the host asks to wait {left:,.0f} s more (Retry-After); try later"
            raise UrlFault(Reason.HOST_LEFT_ALONE, detail, after_s=left)

    def answered(self) -> None:
        """Say that the host gave an answer, of whatever kind but 429."""
        self._silent_urls.clear()

    def failed(self, url: object, fault: UrlFault) -> None:
        """Say that a request failed. After `silent_urls` in a row, and `silent_s`, the host is left alone.

        Args:
            url: is the same object for all requests of a URL, which counts once.
            fault: of the request.
        """
        settings, now = self._settings, monotonic()
        self._not_before = max(self._not_before, now + fault.after_s)
        if not fault.is_silence:
            self.answered()
            return
        if not self._silent_urls:
            self._silent_since = now
        self._silent_urls.add(url)
        if len(self._silent_urls) >= settings.silent_urls and now - self._silent_since >= settings.silent_s:
            self._alone_until = now + settings.alone_s
            self._silent_urls.clear()

    async def check_allowed(self, url: URL) -> None:
        """Raise UrlFault if the rules of the site forbid a URL, or cannot be read.

        They are read once; if that fails, they are read again after `rules_again_s`.
        """
        self.check()  # of a host that is left alone no rules are known either
        origin = url.origin()
        if self._rules_until.get(origin, 0.0) <= monotonic():
            self._rules_until[origin] = inf
            self._rules[origin] = asyncio.ensure_future(self._read_rules(origin))
        rules = await asyncio.shield(self._rules[origin])
        if why := rules.forbid(str(url)):
            raise UrlFault(Reason.OPTED_OUT, why)

    async def _read_rules(self, origin: URL) -> Rules:
        again_s = self._settings.rules_again_s
        try:
            rules = await self._read_robots(origin)
            if not rules.forbid(str(origin.with_path("/.well-known/tdmrep.json"))):
                rules = await self._read_tdmrep(origin, rules)
        except UrlFault as fault:
            if fault.reason is Reason.HOST_LEFT_ALONE:  # no longer than that, since it says nothing of the rules
                again_s = min(fault.after_s, again_s)
            self._rules_until[origin] = monotonic() + again_s
            raise
        if not rules.is_whole:
            self._rules_until[origin] = monotonic() + again_s
        return rules

    async def _read_robots(self, origin: URL) -> Rules:
        """The rules of a site's robots.txt.

        Raises:
            UrlFault: it has one that cannot be read, which forbids all (RFC 9309, 2.3.1.4).
        """
        try:
            return Rules.of(await self._get(origin.with_path("/robots.txt")))
        except UrlFault as fault:
            if fault.reason in (Reason.HOST_LEFT_ALONE, Reason.REFUSED_ADDRESS):
                raise
            if fault.status and fault.may_pass:
                detail = f"robots.txt cannot be read, so all is disallowed for now: {fault.detail}"
                raise UrlFault(Reason.RULES_UNKNOWN, detail) from fault
            if fault.status:
                return Rules()  # RFC 9309, 2.3.1.2 and 2.3.1.3: as if it were not there
            raise UrlFault(fault.reason, f"robots.txt cannot be read: {fault.detail}") from fault

    async def _read_tdmrep(self, origin: URL, rules: Rules) -> Rules:
        """The rules with those of a site's tdmrep.json."""
        try:
            return replace(rules, tdm=parse_tdmrep(await self._get(origin.with_path("/.well-known/tdmrep.json"))))
        except UrlFault as fault:
            if fault.reason is Reason.HOST_LEFT_ALONE:
                raise
            self.check()  # the answer may have asked for a pause: there will be another one after it
            if fault.status == 429:
                detail = f"tdmrep.json cannot be read, so nothing is taken for now: {fault.detail}"
                raise UrlFault(Reason.RULES_UNKNOWN, detail) from fault
            # "failure to provide access […] implies that the origin server does not implement" it
            return replace(rules, is_whole=not (fault.may_pass or fault.is_silence))


def jitter(at_least_s: float) -> float:
    """A pause of at least so long, and up to a tenth longer, so that those who wait do not come together."""
    return at_least_s * random.uniform(1.0, 1.1)
