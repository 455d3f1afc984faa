"""Fetches images behind URLs: redirects are followed by hand, opt-outs are honoured, passing failures are retried."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic
from types import TracebackType

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, ThreadedResolver
from aiohttp.abc import AbstractResolver
from multidict import CIMultiDictProxy
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)
from yarl import URL

from mmdata.convert.fetch.addresses import AddressFault, CachedResolver, address_fault, any_address, guarded_socket
from mmdata.convert.fetch.effort import Effort
from mmdata.convert.fetch.faults import BadStatus, LeftAlone, NoRoom, TooManyRedirects, TryAgain, short
from mmdata.convert.fetch.hosts import Host
from mmdata.convert.fetch.opt_outs import MAX_RULES_BYTES, Rules, opted_out_by_headers, parse_tdmrep
from mmdata.convert.fetch.request import Answer, Asked, ask, jitter, look_up
from mmdata.convert.fetch.room import Room, Space
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import BadSample, Reason, excerpt

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
        """The body behind a URL. Its bytes stay counted in `room`; who takes the body gives them back.

        Args:
            url: as the table has it.
            row: number of the row; `room` prefers the first.

        Raises:
            BadSample: why there is none.
        """
        target = parse_url(url)
        space = Space(self.room, row)
        need = self.room.guess
        effort = Effort()
        try:
            while True:
                with effort.paused():
                    await space.reserve(need)
                try:
                    body = await self._retried(target, space, effort)
                except NoRoom as error:
                    need = error.need
                    continue
                space.settle(len(body))
                return body
        except BaseException:
            space.free()
            raise

    async def _retried(self, url: URL, space: Space | None, effort: Effort | None = None) -> bytes:
        """Follow a URL, again while its failures may pass. `space` None: a small file, cut at MAX_RULES_BYTES."""
        settings, effort = self._settings, effort or Effort()
        pauses = wait_random_exponential(settings.backoff_s, max=settings.longest_wait_s)

        patience_s = settings.patience_s * (1 if space else 2)  # a site's rules decide about all of its URLs

        def is_enough(state: RetryCallState) -> bool:
            effort.failed(_failure(state).final)
            is_over = effort.failures >= settings.attempts or effort.spent_s() >= settings.budget_s
            return is_over or effort.hung_s >= patience_s or _failure(state).after_s > settings.longest_wait_s

        attempts = AsyncRetrying(
            retry=retry_if_exception_type(TryAgain),
            stop=is_enough,
            wait=lambda state: max(pauses(state), jitter(_failure(state).after_s)),
            retry_error_callback=lambda state: _give_up(state, effort),
        )
        try:
            return await attempts(self._follow, url, space, effort)
        except LeftAlone as error:
            if effort.last is None:
                raise
            raise effort.final(error.detail) from error

    async def _follow(self, url: URL, space: Space | None, effort: Effort) -> bytes:
        """The body at the end of up to MAX_REDIRECTS redirects, each of which is checked as the first URL was."""
        honours = space is not None and not self._settings.ignore_opt_outs
        asked = Asked(MAX_RULES_BYTES, cut=True)
        if space is not None:
            asked = Asked(self._settings.max_bytes, space=space, refuse=_refuse_opted_out if honours else None)
        for _ in range(MAX_REDIRECTS + 1):
            host = self._host(url)
            with host.wanting():
                if honours:
                    await self._check_allowed(url, host)
                answer = await self._ask(url, host, asked, effort)
            if not answer.location:
                return answer.body
            url = parse_url(answer.location, base=url)
        raise TooManyRedirects(MAX_REDIRECTS)

    async def _ask(self, url: URL, host: Host, asked: Asked, effort: Effort) -> Answer:
        async with AsyncExitStack() as stack:
            with effort.paused():
                await stack.enter_async_context(host.slot())
            effort.begin()
            if effort.failures and effort.spent_s() >= self._settings.budget_s:
                raise effort.final(f"no further attempt after {self._settings.budget_s:g} s")
            began = monotonic()
            try:
                await look_up(self._names, url)  # while it keeps its slot: there are as many threads as slots
                began = monotonic()
                # Of thousands of hosts, only those that are asked again at once may keep a connection.
                is_last = asked.space is not None and host.wanted == 1
                answer = await ask(self._session, url, self._settings, replace(asked, is_last=is_last))
            except TryAgain as error:
                host.pause(error.after_s)
                final = error.final
                if final.reason is Reason.TIMED_OUT:
                    effort.hung_s += monotonic() - began
                if isinstance(final, BadStatus) and final.status != 429:
                    host.answered()
                else:
                    host.was_silent(is_new=effort.is_new_to(host))
                raise
            except BadSample as bad:
                if bad.reason in (Reason.TIMED_OUT, Reason.UNREACHABLE):
                    host.was_silent(is_new=effort.is_new_to(host))
                else:
                    host.answered()
                raise
            host.answered()
            return answer

    def _host(self, url: URL) -> Host:
        name = (url.host or "").rstrip(".").lower()
        if name not in self._hosts:
            self._hosts[name] = Host(self._settings, self._connections)
        return self._hosts[name]

    async def _check_allowed(self, url: URL, host: Host) -> None:
        """Raise BadSample if the rules of the site forbid a URL, or cannot be read."""
        host.check()  # of a host that is left alone no rules are known either
        rules = await host.rules(str(url.origin()), lambda: self._read_rules(url.origin(), host))
        if why := rules.forbid(str(url)):
            raise BadSample(Reason.OPTED_OUT, why)

    async def _read_rules(self, origin: URL, host: Host) -> Rules:
        """The rules of a site, from its robots.txt and tdmrep.json.

        Raises:
            BadSample: it has a robots.txt that cannot be read, which forbids all (RFC 9309, 2.3.1.4).
        """
        try:
            rules = Rules.of(await self._retried(origin.with_path("/robots.txt"), None))
        except TooManyRedirects:
            rules = Rules()  # RFC 9309, 2.3.1.2: as if it were not there
        except LeftAlone:
            raise
        except BadStatus as bad:
            if bad.may_pass:
                detail = f"robots.txt cannot be read, so all is disallowed for now: {bad.detail}"
                raise BadSample(Reason.RULES_UNKNOWN, detail) from bad
            rules = Rules()
        except BadSample as bad:
            if bad.reason is Reason.REFUSED_ADDRESS:
                raise
            raise BadSample(bad.reason, f"robots.txt cannot be read: {bad.detail}") from bad
        tdmrep = origin.with_path("/.well-known/tdmrep.json")
        if rules.forbid(str(tdmrep)):
            return rules
        try:
            return replace(rules, tdm=parse_tdmrep(await self._retried(tdmrep, None)))
        except LeftAlone:
            raise
        except BadSample as bad:
            host.check()  # the answer may have asked for a pause: there will be another one after it
            if isinstance(bad, BadStatus) and bad.status == 429:
                detail = f"tdmrep.json cannot be read, so nothing is taken for now: {bad.detail}"
                raise BadSample(Reason.RULES_UNKNOWN, detail) from bad
            # "failure to provide access […] implies that the origin server does not implement" it
            passing = (Reason.TIMED_OUT, Reason.UNREACHABLE)
            may_pass = bad.may_pass if isinstance(bad, BadStatus) else bad.reason in passing
            return replace(rules, is_whole=not may_pass)


def parse_url(url: str, *, base: URL | None = None) -> URL:
    """A URL that may be asked for.

    Args:
        url: any text.
        base: URL of the answer that redirects to it.

    Raises:
        BadSample: it is not one of http or https, or has no host.
    """
    text = url.strip()
    try:
        found = URL(text) if base is None else base.join(URL(text))
        host = found.host
    except (ValueError, TypeError) as error:
        raise BadSample(Reason.REFUSED_ADDRESS, f"not a URL: {excerpt(_shown(text))} ({short(str(error))})") from error
    if found.scheme not in ("http", "https"):
        detail = f"only http and https are fetched, and {excerpt(_shown(text))} is of '{short(found.scheme)}'"
        raise BadSample(Reason.REFUSED_ADDRESS, detail)
    if not host:
        raise BadSample(Reason.REFUSED_ADDRESS, f"not a URL: {excerpt(_shown(text))} names no host")
    return found.with_fragment(None)


def _shown(text: str) -> str:
    """A URL, or a part of one, for a message: without a name and a password."""
    return _USER.sub(r"\1\2", text)


def _refuse_opted_out(headers: CIMultiDictProxy[str]) -> None:
    """Raise BadSample if the headers of an answer opt out."""
    if header := opted_out_by_headers(headers.getall("X-Robots-Tag", ()), headers.getall("tdm-reservation", ())):
        raise BadSample(Reason.OPTED_OUT, f"the answer says {header}")


def _failure(state: RetryCallState) -> TryAgain:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, TryAgain)
    return error


def _give_up(state: RetryCallState, effort: Effort) -> bytes:
    """Raise the last failure."""
    error = _failure(state)
    raise effort.final(f"the host asks to wait {error.after_s:,.0f} s" if error.after_s else "") from error
