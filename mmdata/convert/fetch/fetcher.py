"""Fetches images behind URLs: redirects are followed by hand, opt-outs are honoured, passing failures are retried."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from functools import partial
from time import monotonic
from types import TracebackType

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, ThreadedResolver
from aiohttp.abc import AbstractResolver
from yarl import URL

from mmdata.convert.fetch.addresses import AddressFault, CachedResolver, address_fault, any_address, guarded_socket
from mmdata.convert.fetch.faults import UrlFault, short
from mmdata.convert.fetch.hosts import Host, jitter
from mmdata.convert.fetch.request import Answer, Need, ask, look_up
from mmdata.convert.fetch.room import NoRoom, Room
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import Reason, excerpt

MAX_REDIRECTS = 5
KEEP_ALIVE_S = 2.0
"""Time that an unused connection stays open: thousands of hosts must not hold as many files open."""
_USER = re.compile(r"^([a-z][a-z0-9+.-]*:|)([/\\]*)[^/?#]*@", re.IGNORECASE)


class Fetcher:
    """Fetches URLs. An async context manager; used within one event loop.

    Args:
        settings: of the fetching.
        resolver: finds addresses; None asks the system, in threads.
        fault_of: judges addresses; None takes what the settings say.

    Attributes:
        room: for the bodies of rows that are fetched ahead.
    """

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolver: AbstractResolver | None = None,
        fault_of: AddressFault | None = None,
    ) -> None:
        self.room = Room(settings.bytes_ahead)
        self._settings = settings
        self._resolver = resolver
        self._fault_of = fault_of or (any_address if settings.allow_private_addresses else address_fault)
        self._hosts: dict[str, Host] = {}

    async def __aenter__(self) -> Fetcher:
        settings = self._settings
        self._names = CachedResolver(self._resolver or ThreadedResolver(), self._fault_of)
        connector = TCPConnector(
            limit=0,  # `Host.slot` is the limit
            resolver=self._names,
            use_dns_cache=False,
            keepalive_timeout=KEEP_ALIVE_S,
            socket_factory=guarded_socket(self._fault_of),
        )
        self._connections = asyncio.Semaphore(settings.connections)
        self._session = ClientSession(
            connector=connector,
            timeout=ClientTimeout(total=None, sock_connect=settings.connect_s),
            headers={"User-Agent": settings.user_agent, "Accept": "image/*, */*;q=0.5", "Accept-Encoding": "identity"},
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def fetch(self, url: str, row: int = 0) -> bytes:
        """The body behind a URL. Its bytes stay counted in `room`; who takes the body frees the row.

        Args:
            url: as the table has it.
            row: number of the row, which no other one has; `room` prefers the first.

        Raises:
            UrlFault: why there is none.
        """
        target = parse_url(url)
        try:
            await self.room.reserve(row, self.room.guess)
            body = await self._get(target, row)
        except BaseException:
            self.room.free(row)
            raise
        self.room.settle(row, len(body))
        return body

    async def _get(self, url: URL, row: int | None = None) -> bytes:
        """Follow a URL, again while its failures may pass. `row` None: a file of rules, cut at MAX_RULES_BYTES."""
        effort = _Effort()
        while True:
            try:
                return await self._follow(url, row, effort)
            except NoRoom as error:
                assert row is not None
                await self.room.reserve(row, error.size)
            except UrlFault as fault:
                if fault.reason is Reason.HOST_LEFT_ALONE and effort.last:
                    raise effort.final(fault.detail) from fault
                if not fault.may_pass:
                    raise
                effort.failures += 1
                effort.last = fault
                await asyncio.sleep(self._pause_s(effort, fault, is_image=row is not None))

    def _pause_s(self, effort: _Effort, fault: UrlFault, *, is_image: bool) -> float:
        """The pause after a failure. Raises the failure if there is no further attempt."""
        settings = self._settings
        patience_s = settings.patience_s * (1 if is_image else 2)  # a site's rules decide about all of its URLs
        if (
            effort.failures >= settings.attempts
            or effort.hung_s >= patience_s
            or fault.after_s > settings.longest_wait_s
        ):
            raise effort.final(f"the host asks to wait {fault.after_s:,.0f} s" if fault.after_s else "") from fault
        longest_s = min(settings.longest_wait_s, settings.backoff_s * 2 ** (effort.failures - 1))
        pause_s = max(random.uniform(0, longest_s), jitter(fault.after_s))
        effort.spent_s += pause_s
        if effort.spent_s >= settings.budget_s:
            raise effort.final(f"no further attempt after {settings.budget_s:g} s") from fault
        return pause_s

    async def _follow(self, url: URL, row: int | None, effort: _Effort) -> bytes:
        """The body at the end of up to MAX_REDIRECTS redirects, each of which is checked as the first URL was."""
        honours = row is not None and not self._settings.ignore_opt_outs
        need = None if row is None else partial(self.room.need, row)
        status = 0
        for _ in range(MAX_REDIRECTS + 1):
            host = self._host(url)
            host.wanted += 1
            try:
                if honours:
                    await host.check_allowed(url)
                status, body, location = await self._ask(url, host, effort, need, honours)
            finally:
                host.wanted -= 1
            if not location:
                return body
            url = parse_url(location, base=url)
        raise UrlFault(Reason.BAD_ANSWER, f"redirected more than {MAX_REDIRECTS} times", status=status)

    async def _ask(self, url: URL, host: Host, effort: _Effort, need: Need | None, honours: bool) -> Answer:
        async with host.slot():
            began = asked = monotonic()
            try:
                await look_up(self._names, url)  # while it keeps its slot: there are as many threads as slots
                asked = monotonic()
                # Of thousands of hosts, only those that are asked again at once may keep a connection.
                is_last = need is not None and host.wanted == 1
                answer = await ask(self._session, url, self._settings, need=need, is_last=is_last, honours=honours)
            except UrlFault as fault:
                if fault.reason is Reason.TIMED_OUT:
                    effort.hung_s += monotonic() - asked
                host.failed(effort, fault)
                raise
            finally:
                effort.spent_s += monotonic() - began
            host.answered()
            return answer

    def _host(self, url: URL) -> Host:
        name = (url.host or "").rstrip(".").lower()
        if name not in self._hosts:
            self._hosts[name] = Host(self._settings, self._connections, self._get)
        return self._hosts[name]


@dataclass(eq=False)
class _Effort:
    """What was spent on a URL, also while its body had no room.

    Waits for its turn are no effort: how long others take must not decide how a URL is filed.

    Attributes:
        failures: attempts that failed, of those that may be made again.
        last: the last of these failures; it is the reason of a URL that is given up.
        spent_s: seconds of its requests and of the pauses between them.
        hung_s: seconds of the requests that ended with a timeout.
    """

    failures: int = 0
    last: UrlFault | None = None
    spent_s: float = 0.0
    hung_s: float = 0.0

    def final(self, why: str = "") -> UrlFault:
        """The last failure, with the number of attempts and why there is no further one."""
        assert self.last is not None
        times = f" ({self.failures} times asked)" if self.failures > 1 else ""
        detail = f"{self.last.detail}{times}{f'; {why}' if why else ''}"
        # Rules that were not read tell by `may_pass` why.
        return UrlFault(self.last.reason, detail, status=self.last.status, may_pass=self.last.may_pass)


def parse_url(url: str, *, base: URL | None = None) -> URL:
    """A URL that may be asked for.

    Args:
        url: any text.
        base: URL of the answer that redirects to it.

    Raises:
        UrlFault: it is not one of http or https, or has no host.
    """
    text = url.strip()
    try:
        found = URL(text) if base is None else base.join(URL(text))
        host = found.host
    except (ValueError, TypeError) as error:
        raise UrlFault(Reason.REFUSED_ADDRESS, f"not a URL: {excerpt(_shown(text))} ({short(str(error))})") from error
    if found.scheme not in ("http", "https"):
        detail = f"only http and https are fetched, and {excerpt(_shown(text))} is of '{short(found.scheme)}'"
        raise UrlFault(Reason.REFUSED_ADDRESS, detail)
    if not host:
        raise UrlFault(Reason.REFUSED_ADDRESS, f"not a URL: {excerpt(_shown(text))} names no host")
    return found.with_fragment(None)


def _shown(text: str) -> str:
    """A URL, or a part of one, for a message: without a name and a password."""
    return _USER.sub(r"\1\2", text)
