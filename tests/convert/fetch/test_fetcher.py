"""What becomes of one URL: answers, failures, retries and redirects, over a real server."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from mmdata.convert.fetch.addresses import address_fault, any_address
from mmdata.convert.fetch.faults import short
from mmdata.convert.fetch.fetcher import Fetcher, parse_url
from mmdata.convert.fetch.request import retry_after
from mmdata.errors import BadSample
from tests.convert.fetch.conftest import Outcome, fetch_all, quick
from tests.convert.fetch.sites import Answer, Site, cut, dribble, first, redirect, reset

GOOD = Answer(200, b"an image")
Fetched = Callable[..., Outcome]


def matches(found: Outcome, reason: str, detail: str) -> None:
    assert isinstance(found, tuple), found
    assert found[0] == reason, found
    assert re.search(detail, found[1]), found


def test_image_is_fetched_with_truthful_headers(fetched: Fetched, site: Site) -> None:
    assert fetched(GOOD, ignore_opt_outs=True) == b"an image"
    assert site.headers["User-Agent"] == "mmdata/test"
    assert site.headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in site.headers
    assert site.requests == {"127.0.0.1/a.jpg": 1}


@pytest.mark.parametrize(
    ("answer", "reason", "detail", "requests"),
    [
        (Answer(404), "http_status", r"^status 404 Not Found$", 1),
        (Answer(403), "http_status", r"^status 403 Forbidden$", 1),
        (Answer(204, b""), "http_status", r"^status 204 No Content$", 1),
        (Answer(300), "http_status", r"^status 300 Multiple Choices$", 1),
        (Answer(302), "http_status", r"^status 302 Found$", 1),
        (Answer(503), "http_status", r"^status 503 Service Unavailable \(4 times asked\)$", 4),
        (Answer(429, b"", {"Retry-After": "0"}), "http_status", r"^status 429 Too Many Requests \(4 times asked\)$", 4),
        (
            Answer(429, b"", {"Retry-After": "7200"}),
            "http_status",
            r"^status 429 .*; the host asks to wait 7,200 s$",
            1,
        ),
        (Answer(200, b"x" * 65, {}), "image_too_large", r"^the server declares 65 bytes; the limit is 64$", 1),
        (dribble(b"x" * 40, 0.0), "image_too_large", r"^the answer goes on after 64 bytes, the limit$", 1),
        (Answer(200, b"x", {"Content-Encoding": "gzip"}), "bad_answer", r"Content-Encoding 'gzip', though identity", 1),
        (Answer(200, b"x", {"Content-Encoding": "br, gzip"}), "bad_answer", r"Content-Encoding 'br, gzip'", 1),
        (reset, "unreachable", r"^the connection failed: .* \(4 times asked\)$", 8),  # aiohttp asks twice, at once
        (cut(b"x" * 8, declared=60), "unreachable", r"^the connection failed: .* \(4 times asked\)$", 4),
    ],
)
def test_url_is_left_out_with_its_reason(
    fetched: Fetched, site: Site, answer: Any, reason: str, detail: str, requests: int
) -> None:
    matches(fetched(answer, max_bytes=64), reason, detail)
    assert site.images() == requests


@pytest.mark.parametrize(
    "answer",
    [
        [Answer(503), GOOD],
        [Answer(500), Answer(429), Answer(408), GOOD],
        first(reset, GOOD),
        first(cut(b"an", declared=8), GOOD),
        Answer(200, b"an image", {"Content-Encoding": "identity"}),
        dribble(b"an image", 0.0, times=1),
    ],
)
def test_failure_that_passes_costs_nothing(fetched: Fetched, answer: Any) -> None:
    assert fetched(answer) == b"an image"


def test_retry_after_is_waited_for_by_all_requests_of_the_host(site: Site) -> None:
    opens: list[float] = []

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        """Too early is 429 again, so each request that does not wait is one more."""
        if not opens:
            opens.append(time.monotonic() + 1)
        if time.monotonic() < opens[0]:
            return web.Response(status=429, headers={"Retry-After": "1"})
        return web.Response(body=b"an image")

    site.answers["/a.jpg"] = answer
    urls = [site.url(f"/a.jpg?{number}") for number in range(6)]
    assert fetch_all(urls, ignore_opt_outs=True) == [b"an image"] * 6
    assert site.images() <= 6 + 2  # the two that were under way when the first was answered


@pytest.mark.usefixtures("clock")
def test_host_that_asks_for_a_long_pause_is_not_asked_again(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(503, b"", {"Retry-After": "3600"})
    site.answers["127.0.0.2/b.jpg"] = GOOD
    urls = [site.url("/a.jpg"), *(site.url(f"/b.jpg?{number}") for number in range(5)), site.url("/b.jpg", "127.0.0.2")]
    found = fetch_all(urls, ignore_opt_outs=True, per_host=1)
    matches(found[0], "http_status", "status 503 Service Unavailable; the host asks to wait 3,600 s")
    for one in found[1:-1]:
        matches(one, "host_left_alone", r"^the host asks to wait 3,600 s more \(Retry-After\); try later$")
    assert found[-1] == b"an image"
    assert site.requests == {"127.0.0.1/a.jpg": 1, "127.0.0.2/b.jpg": 1}


@pytest.mark.parametrize("answer", [reset, Answer(429), lambda *_: asyncio.sleep(60)])
def test_host_without_answers_is_left_alone(site: Site, answer: Any) -> None:
    site.answers["127.0.0.1/a.jpg"] = answer
    site.answers["127.0.0.2/a.jpg"] = GOOD
    urls = [site.url(f"/a.jpg?{number}") for number in range(300)] + [site.url("/a.jpg", "127.0.0.2")]
    found = fetch_all(urls, ignore_opt_outs=True, answer_s=1.0, silent_urls=5, silent_s=0.0)
    assert site.requests["127.0.0.1/a.jpg"] <= 2 * (5 + 2)  # aiohttp asks twice after a reset
    matches(found[299], "host_left_alone", r"^5 URLs of the host in a row had no answer; it is not asked for \d+ s$")
    assert found[300] == b"an image"


@pytest.mark.usefixtures("clock")
def test_host_is_asked_again_after_it_was_left_alone(site: Site) -> None:
    async def run() -> list[Any]:
        found: list[Any] = []
        settings = quick(ignore_opt_outs=True, attempts=1, silent_urls=2, silent_s=0.0, alone_s=0.5)
        async with Fetcher(settings, fault_of=any_address) as fetcher:
            for number in range(5):
                await asyncio.sleep(0.6 if number == 3 else 0)
                try:
                    found.append(await fetcher.fetch(site.url(f"/a.jpg?{number}")))
                except BadSample as bad:
                    found.append(str(bad.reason))
        return found

    site.answers["/a.jpg"] = [Answer(429), Answer(429), GOOD]
    assert asyncio.run(run()) == ["http_status", "http_status", "host_left_alone", b"an image", b"an image"]


def test_host_with_an_answer_now_and_then_is_not_left_alone(site: Site) -> None:
    site.answers["/a.jpg"] = [*[Answer(429)] * 4, GOOD, *[Answer(429)] * 4, GOOD]
    urls = [site.url(f"/a.jpg?{number}") for number in range(12)]
    found = fetch_all(urls, ignore_opt_outs=True, attempts=1, per_host=1, silent_urls=5, silent_s=0.0)
    assert found.count(b"an image") == 4


def test_retry_after_holds_seconds_or_a_date() -> None:
    assert retry_after("120") == 120
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("Wed, 21 Oct 2215 07:28:00 GMT") > 10**9
    assert [retry_after(value) for value in ("", "soon", "-5", "1e400", "Wed, 99 Oct 2015 07:28:00 GMT")] == [0] * 5


@pytest.mark.parametrize(
    ("answer", "settings", "detail"),
    [
        (dribble(b"x", 0.01), {"slow_s": 0.2}, r"^\d+ bytes a second came for .* s, fewer than 1,000$"),
        (dribble(b"x" * 100, 0.01), {"body_s": 0.2, "least_bytes_per_s": 1}, r"^not complete after 0.2 s$"),
        (dribble(b"x", 60), {"silence_s": 0.2, "attempts": 1}, r"^no byte of the body came for 0.2 s$"),
        (lambda *_: asyncio.sleep(60), {"answer_s": 0.2, "attempts": 2}, r"^no answer \(2 times asked\)$"),
    ],
)
def test_slow_answer_ends(fetched: Fetched, answer: Any, settings: dict[str, Any], detail: str) -> None:
    matches(fetched(answer, ignore_opt_outs=True, **settings), "timed_out", detail)


def test_redirects_are_followed(fetched: Fetched, site: Site) -> None:
    site.answers |= {f"/{number}": redirect(f"/{number + 1}", 301 + number) for number in (0, 1, 2)}
    site.answers["/3"] = redirect(site.url("/last.jpg?x=1#part", "127.0.0.2"), 308)
    site.answers["127.0.0.2/last.jpg"] = GOOD
    assert fetched(redirect("0", 307)) == b"an image"
    site.answers["/3"] = redirect("/4")
    site.answers["/4"] = redirect("/a.jpg")
    matches(fetched(redirect("0")), "bad_answer", "^redirected more than 5 times$")


@pytest.mark.parametrize(
    ("location", "reason", "detail"),
    [
        (
            "file:///etc/passwd",
            "refused_address",
            "only http and https are fetched, and 'file:.* is of 'file'",
        ),
        ("ftp://a.example/x", "refused_address", "is of 'ftp'"),
        ("http://127.0.0.2:{port}/b.jpg", "refused_address", "address 127.0.0.2 is loopback; --allow-private"),
        ("http://[::ffff:127.0.0.2]:{port}/b.jpg", "refused_address", "is loopback"),
        ("http://[::1]:{port}/b.jpg", "refused_address", "address ::1 is loopback"),
        ("http://0x7f.2:{port}/b.jpg", "refused_address", "of '0x7f.2' is loopback"),
        ("http://2130706434:{port}/b.jpg", "refused_address", "^not a URL that can be asked for: 2130706434 - is not"),
    ],
)
def test_redirect_to_a_refused_address_is_not_followed(site: Site, location: str, reason: str, detail: str) -> None:
    def fault_of(address: str) -> str:
        return "" if address == "127.0.0.1" else address_fault(address)  # it stands for a public address

    site.answers["/a.jpg"] = redirect(location.format(port=site.port))
    site.answers["/b.jpg"] = GOOD
    found = fetch_all([site.url("/a.jpg")], fault_of=fault_of, ignore_opt_outs=True)
    matches(found[0], reason, detail)
    assert site.requests == {"127.0.0.1/a.jpg": 1}


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("file:///etc/passwd", "only http and https"),
        ("file:a.jpg", "only http and https"),
        ("s3://bucket/a.jpg", "is of 's3'"),
        ("https:///a.jpg", "names no host"),
        ("http://[::1/a.jpg", "not a URL"),
        ("http://a.example:99999/a.jpg", "not a URL"),
    ],
)
def test_url_that_is_not_of_the_web_is_refused(url: str, detail: str) -> None:
    matches(fetch_all([url])[0], "refused_address", detail)
    with pytest.raises(BadSample, match=detail):
        parse_url(url)


def test_host_without_a_server_is_unreachable(site: Site) -> None:
    closed = site.port
    site.__exit__()
    found = fetch_all([f"http://127.0.0.1:{closed}/a.jpg"], attempts=2)
    site.__enter__()
    matches(
        found[0],
        "unreachable",
        r"^robots.txt cannot be read: the connection failed: Connection refused \(2 times asked\)$",
    )


def test_answer_that_is_not_http_is_named() -> None:
    async def run() -> Outcome:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return (await asyncio.to_thread(fetch_all, [f"http://127.0.0.1:{port}/"], ignore_opt_outs=True))[0]

    matches(asyncio.run(run()), "bad_answer", "^the answer is not HTTP: ")


def test_https_without_a_certificate_is_unreachable(site: Site) -> None:
    url = site.url("/a.jpg").replace("http:", "https:")
    matches(fetch_all([url], ignore_opt_outs=True)[0], "unreachable", "^no safe connection: ")


def test_fault_of_this_machine_is_raised() -> None:
    def full(address: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        fetch_all(["http://127.0.0.1:9/"], fault_of=full, ignore_opt_outs=True)


def test_connections_are_bounded_for_each_host_and_in_all(site: Site) -> None:
    async def slow(request: web.Request, before: int) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return web.Response(body=b"an image")

    site.answers["/a.jpg"] = slow
    urls = [site.url(f"/a.jpg?{number}", f"127.0.0.{1 + number % 8}") for number in range(80)]
    assert fetch_all(urls, connections=6) == [b"an image"] * 80
    assert site.most_at_once.pop("") <= 6
    assert max(site.most_at_once.values()) == 2


def test_connection_is_kept_only_while_its_host_is_asked_again(site: Site) -> None:
    connections: set[int] = set()
    said: list[str | None] = []

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        connections.add(id(request.transport))
        said.append(request.headers.get("Connection"))
        return web.Response(body=b"an image")

    site.answers["/a.jpg"] = answer
    assert fetch_all([site.url(f"/a.jpg?{number}") for number in range(20)], per_host=1) == [b"an image"] * 20
    assert len(connections) == 1
    assert said == [None] * 19 + ["close"]


def test_words_of_a_server_are_short_and_printable() -> None:
    assert short("Not\x1b[31m Found") == "Not\\x1b[31m Found"
    assert short("x" * 100) == "x" * 80 + "…"
