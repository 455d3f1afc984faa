"""Real servers on loopback for images behind URLs. 127.0.0.1, 127.0.0.2, … are hosts of their own on one port."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from aiohttp import web

OPT_OUT_FILES = ("/robots.txt", "/.well-known/tdmrep.json")


class Answer(NamedTuple):
    """What a path answers with. Without a body, the text of its status."""

    status: int = 200
    body: bytes = b"no"
    headers: Mapping[str, str] = {}


Answering = Callable[[web.Request, int], Awaitable[web.StreamResponse]]
"""A function of a request and of the number of requests for its host and path before it."""


class Site:
    """A server. A context manager.

    Attributes:
        answers: by path, or by host and path together ("127.0.0.2/a.jpg"); others are 404. A list holds one answer for
            each request; its last one stays.
        requests: for each host and path.
        headers: of the last request.
        most_at_once: by host, requests that were open together; of "" over all hosts.
    """

    def __init__(self, answers: Mapping[str, Answer | list[Answer] | Answering] | None = None) -> None:
        self.answers = dict(answers or {})
        self.requests: Counter[str] = Counter()
        self.headers: dict[str, str] = {}
        self.most_at_once: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def images(self) -> int:
        """Requests other than those for opt-outs."""
        return sum(count for name, count in self.requests.items() if not name.endswith(OPT_OUT_FILES))

    def __enter__(self) -> Site:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(30)

    async def _start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._answer), handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "0.0.0.0", 0, backlog=512)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # answers that would take a minute
        await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        host = (request.headers.get("Host") or "").rpartition(":")[0]
        for name in (host, ""):
            self._open[name] += 1
            self.most_at_once[name] = max(self.most_at_once[name], self._open[name])
        try:
            return await self._of(request, host)
        finally:
            for name in (host, ""):
                self._open[name] -= 1

    async def _of(self, request: Any, host: str) -> web.StreamResponse:
        before = self.requests[host + request.path]
        self.requests[host + request.path] += 1
        self.headers = dict(request.headers)
        found = self.answers.get(host + request.path) or self.answers.get(request.path) or Answer(404)
        if callable(found):
            return await found(request, before)
        if isinstance(found, list):
            found = found[min(before, len(found) - 1)]
        return web.Response(status=found.status, body=found.body, headers=found.headers)


def redirect(to: str, status: int = 302) -> Answer:
    return Answer(status, b"", {"Location": to})


async def reset(request: web.Request, before: int) -> web.StreamResponse:
    """The connection is cut before an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def first(answering: Answering, then: Answer) -> Answering:
    """One kind of answer to the first request, another one to those after it."""

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        if before == 0:
            return await answering(request, before)
        return web.Response(status=then.status, body=then.body, headers=then.headers)

    return answer


def cut(body: bytes, *, declared: int) -> Answering:
    """A body that ends before its declared length."""

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(declared)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


def dribble(piece: bytes, pause_s: float, *, times: int = 10**6) -> Answering:
    """A body of unknown length, piece by piece."""

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for _ in range(times):
            await response.write(piece)
            await asyncio.sleep(pause_s)
        return response

    return answer


FAULTS = ("reset", "error", "cut", "slow")


def faulty(good: Answer, *, every: int) -> Answering:
    """Each `every`-th request meets the next of FAULTS, a late answer among them."""
    count = 0

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        nonlocal count
        count += 1
        fault = FAULTS[count // every % len(FAULTS)] if count % every == 0 else ""
        if fault == "reset":
            return await reset(request, before)
        if fault == "cut":
            return await cut(good.body[:2], declared=len(good.body))(request, before)
        await asyncio.sleep(5 if fault == "slow" else 0)
        return web.Response(status=500 if fault == "error" else good.status, body=good.body)

    return answer
