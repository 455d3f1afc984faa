"""Sites, and fetching from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from mmdata.convert.fetch.addresses import any_address
from mmdata.convert.fetch.fetcher import Fetcher
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.errors import BadSample
from tests.convert.fetch.sites import Site

Outcome = bytes | tuple[str, str]
"""The body, or the reason and the detail."""


def quick(**settings: Any) -> FetchSettings:
    """Settings with short pauses between attempts."""
    return FetchSettings(**{"user_agent": "mmdata/test", "backoff_s": 0.02, **settings})


async def fetch_with(fetcher: Fetcher, urls: Sequence[str]) -> list[Outcome]:
    """All URLs at once; rows of bodies are freed."""

    async def one(row: int, url: str) -> Outcome:
        try:
            body = await fetcher.fetch(url, row)
        except BadSample as bad:
            return str(bad.reason), bad.detail
        fetcher.room.free(row)
        return body

    async with fetcher:
        found = await asyncio.gather(*(one(row, url) for row, url in enumerate(urls)))
    assert fetcher.room.used == 0
    return found


def fetch_all(
    urls: Sequence[str], *, resolver: Any = None, fault_of: Any = any_address, **settings: Any
) -> list[Outcome]:
    fetcher = Fetcher(quick(**settings), resolver=resolver, fault_of=fault_of)
    return asyncio.run(fetch_with(fetcher, urls))


@pytest.fixture
def site() -> Generator[Site, None, None]:
    """A server without content."""
    with Site() as one:
        yield one


@pytest.fixture
def fetched(site: Site) -> Callable[..., Outcome]:
    """`fetched(answer)`: what becomes of one URL with that answer."""

    def run(answer: Any, **settings: Any) -> Outcome:
        site.answers["/a.jpg"] = answer
        return fetch_all([site.url("/a.jpg")], **settings)[0]

    return run


class Clock:
    """Time that passes where somebody sleeps, and there at once: no machine is too slow for a limit."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the fetcher; timeouts of requests have their own."""
    clock = Clock()
    sleep = asyncio.sleep

    async def pass_by(seconds: float) -> None:
        clock.now += seconds
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    for name in ("fetcher", "hosts"):
        monkeypatch.setattr(f"mmdata.convert.fetch.{name}.monotonic", clock)
    return clock
