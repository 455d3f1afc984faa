"""The reason of a URL that was given up is its last failure, whatever else was asked meanwhile and however long."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.convert.fetch.conftest import Clock, Outcome, fetch_all
from tests.convert.fetch.sites import Answer, Site, first, reset

Fetched = Callable[..., Outcome]


@pytest.mark.parametrize(("status", "words"), [(500, "Internal Server Error"), (429, "Too Many Requests")])
def test_url_that_failed_with_a_status_is_filed_so_when_its_time_is_over(
    fetched: Fetched, site: Site, clock: Clock, status: int, words: str
) -> None:
    """The pause that the host asks for is longer than what is left."""
    found = fetched(Answer(status, b"", {"Retry-After": "1"}), ignore_opt_outs=True, budget_s=0.5)
    assert found == ("http_status", f"status {status} {words}; no further attempt after 0.5 s")
    assert site.images() == 1


def test_refused_connections_are_unreachable_however_long_urls_wait_for_their_turn() -> None:
    with socket.socket() as nobody:  # bound, and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{nobody.getsockname()[1]}/{number}.jpg" for number in range(40)]
        found = fetch_all(urls, ignore_opt_outs=True, per_host=1, attempts=50, budget_s=0.3, silent_urls=1000)
    assert Counter(reason for reason, _ in found) == {"unreachable": 40}  # type: ignore[misc]
    assert all(str(detail).startswith("the connection failed: Connection refused") for _, detail in found)  # type: ignore[misc]


@pytest.mark.parametrize(("answer", "reason"), [(reset, "unreachable"), (Answer(429), "http_status")])
def test_only_urls_that_were_not_asked_are_filed_as_of_a_host_left_alone(site: Site, answer: Any, reason: str) -> None:
    paths = [f"/{number}.jpg" for number in range(60)]
    site.answers |= dict.fromkeys(paths, answer)
    found = fetch_all([site.url(path) for path in paths], ignore_opt_outs=True, silent_urls=5, silent_s=0.0)
    reasons = {path: one[0] for path, one in zip(paths, found, strict=True)}
    asked = {path for path in paths if site.requests[f"127.0.0.1{path}"]}
    assert {path for path, one in reasons.items() if one == reason} == asked
    assert {one for path, one in reasons.items() if path not in asked} == {"host_left_alone"}


def test_rules_that_fail_with_a_status_are_unknown_when_their_time_is_over(site: Site, clock: Clock) -> None:
    site.answers |= {"/robots.txt": Answer(500, b"", {"Retry-After": "1"}), "/a.jpg": Answer(200, b"an image")}
    found = fetch_all([site.url("/a.jpg")], budget_s=0.5)
    assert found == [
        (
            "rules_unknown",
            "robots.txt cannot be read, so all is disallowed for now: status 500 Internal Server Error; "
            "no further attempt after 0.5 s",
        )
    ]


def hangs(clock: Clock) -> Any:
    """No answer for 15 s of the clock, and none after them."""

    async def answer(*_: Any) -> Any:
        clock.now += 15
        await asyncio.Event().wait()

    return answer


@pytest.mark.parametrize(("patience_s", "requests"), [(15.0, 1), (16.0, 2)])
@pytest.mark.sweep(keep=1)
def test_url_that_hangs_is_not_asked_again_once_it_took_too_long(
    fetched: Fetched, site: Site, clock: Clock, patience_s: float, requests: int
) -> None:
    found = fetched(hangs(clock), ignore_opt_outs=True, answer_s=3, patience_s=patience_s)
    assert found == ("timed_out", "no answer" if requests == 1 else "no answer (2 times asked)")
    assert site.images() == requests


def test_rules_that_hang_have_twice_the_patience(site: Site, clock: Clock) -> None:
    site.answers |= {"/robots.txt": first(hangs(clock), Answer(404)), "/a.jpg": Answer(200, b"an image")}
    assert fetch_all([site.url("/a.jpg")], answer_s=3, patience_s=15.0) == [b"an image"]
    assert site.requests["127.0.0.1/robots.txt"] == 2


@contextmanager
def raw(site: Site, speak: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> Generator[tuple[str, list[int]]]:
    """A server of bytes, in the loop of a site: its URL, and a list with an item for each connection."""
    connections: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await speak(writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = site._call(asyncio.start_server(answer, "127.0.0.1", 0))
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.jpg", connections
    finally:
        site._loop.call_soon_threadsafe(server.close)


def repeat(begin: bytes, piece: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Bytes, and then a piece now and then, without end."""

    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)

    return speak


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_ANSWER, NO_BODY = {"answer_s": 3}, {"silence_s": 0.3}
ENDLESS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "headers": (repeat(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"), NO_ANSWER, "no answer"),
    "a header": (repeat(b"HTTP/1.1 200 OK\r\nx: ", b"y"), NO_ANSWER, "no answer"),
    "100 Continue": (repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), NO_ANSWER, "no answer"),
    "an extension of a chunk": (repeat(CHUNKED + b"5;", b"x"), NO_BODY, r"no byte of the body came for 0\.3 s"),
    "a body that is not ended": (
        repeat(CHUNKED + b"5\r\nhello\r\n0;", b"x"),
        NO_BODY,
        r"no byte of the body came for 0\.3 s",
    ),
    "a slow body": (
        repeat(CHUNKED, b"1\r\nx\r\n"),
        {"slow_s": 0.3},
        r"\d+ bytes a second came for .* s, fewer than 1,000",
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.sweep(keep=1)
def test_answer_without_end_times_out(site: Site, kind: str) -> None:
    speak, settings, detail = ENDLESS[kind]
    with raw(site, speak) as (url, connections):
        (found,) = fetch_all([url], ignore_opt_outs=True, patience_s=0.1, **settings)
        assert found[0] == "timed_out"
        assert re.fullmatch(detail, str(found[1])), found
        assert len(connections) == 1
