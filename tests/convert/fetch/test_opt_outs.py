"""Opt-outs: headers, robots.txt and TDMRep, alone and over a real server."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from typing import Any

import pytest
from aiohttp import web

from mmdata.convert.fetch import opt_outs
from mmdata.convert.fetch.addresses import any_address
from mmdata.convert.fetch.fetcher import Fetcher
from mmdata.convert.fetch.opt_outs import (
    MAX_LOCATIONS,
    MAX_RULES_BYTES,
    Location,
    Rules,
    opted_out_by_headers,
    parse_tdmrep,
    path_of,
)
from mmdata.errors import BadSample
from tests.convert.fetch.conftest import Outcome, fetch_all, quick
from tests.convert.fetch.sites import Answer, Site, redirect, reset

GOOD = Answer(200, b"an image")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("noai", "noai"),
        ("noimageai", "noimageai"),
        ("noindex", "noindex"),
        ("noimageindex", "noimageindex"),
        ("noml", "noml"),
        ("none", "none"),
        ("NoAI", "noai"),
        ("nofollow, noarchive , NOINDEX", "noindex"),
        ("mmdata: noai", "noai"),
        ("MMData: nofollow, noai", "noai"),
        ("*: noindex", "noindex"),
        ("otherbot: noindex, mmdata: noindex", "noindex"),
        ("unavailable_after: Wed, 25 Jun 2050 15:00:00 GMT, noai", "noai"),
        ("max-snippet: 5, max-image-preview: large, noml", "noml"),
        ("mmdata/0.1: noai", "noai"),
        ("otherbot/2.0: noindex, mmdata/0.1.0: noml", "noml"),
        ("otherbot: noindex", ""),
        ("otherbot/2.0: noindex", ""),
        ("otherbot: nofollow, noindex, noai", ""),
        ("all", ""),
        ("nofollow, nosnippet", ""),
        ("noindexes", ""),
        ("", ""),
        (" , : ,", ""),
    ],
)
def test_robots_tag_opts_out(value: str, word: str) -> None:
    expected = f"X-Robots-Tag: {word}" if word else ""
    assert opted_out_by_headers([value], []) == expected
    assert opted_out_by_headers(["otherbot: noai", value], ["0"]) == expected


@pytest.mark.parametrize(
    ("value", "is_reserved"),
    [
        ("1", True),
        (" 1 ", True),
        ("1, 1", True),
        ("0, 1", True),
        ("1.0", True),
        ("true", True),
        ("0, 0", False),
        ("0", False),
        ("", False),
        ("11", False),
    ],
)
def test_tdm_header_opts_out(value: str, is_reserved: bool) -> None:
    assert opted_out_by_headers([], [value]) == ("tdm-reservation: 1" if is_reserved else "")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"X-Robots-Tag": "noai"}, "X-Robots-Tag: noai"),
        ({"x-robots-tag": "mmdata: noimageindex"}, "X-Robots-Tag: noimageindex"),
        ({"TDM-Reservation": "1"}, "tdm-reservation: 1"),
    ],
)
def test_answer_that_opts_out_is_left_out_unread(site: Site, headers: dict[str, str], words: str) -> None:
    read = 0

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        nonlocal read
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 2**16)
            read += 1
        return response

    site.answers["/a.jpg"] = answer
    site.answers["/b.jpg"] = redirect("/c.jpg", 302)._replace(headers={**headers, "Location": "/c.jpg"})
    site.answers["/c.jpg"] = GOOD
    assert fetch_all([site.url("/a.jpg"), site.url("/b.jpg")]) == [("opted_out", f"the answer says {words}")] * 2
    assert read < 1000
    assert fetch_all([site.url("/b.jpg")], ignore_opt_outs=True) == [b"an image"]


def outcome_of(site: Site, path: str = "/a.jpg", **settings: Any) -> Outcome:
    site.answers.setdefault(path, GOOD)
    return fetch_all([site.url(path)], **settings)[0]


DISALLOWED = ("opted_out", "robots.txt disallows it")


@pytest.mark.parametrize(
    ("robots", "is_allowed"),
    [
        ("User-agent: *\nDisallow: /", False),
        ("User-agent: *\nDisallow:", True),
        ("User-agent: *\nDisallow: /\nAllow: /a.jpg", True),
        ("User-agent: *\nDisallow: /*.jpg$", False),
        ("User-agent: *\nDisallow: /b", True),
        ("User-agent: otherbot\nDisallow: /", True),
        ("User-agent: MMDATA\nDisallow: /\n\nUser-agent: *\nDisallow:", False),
        ("User-agent: mmdata\nDisallow:\n\nUser-agent: *\nDisallow: /", True),
        ("\ufeffUser-agent: *\r\nDisallow: /\r\n", False),
        ("<html>disallow</html>", True),
        ("", True),
        ("#" * MAX_RULES_BYTES + "\nUser-agent: *\nDisallow: /", True),
    ],
)
def test_robots_txt_is_honoured(site: Site, robots: str, is_allowed: bool) -> None:
    site.answers["/robots.txt"] = Answer(200, robots.encode())
    assert outcome_of(site) == (b"an image" if is_allowed else DISALLOWED)
    assert site.requests["127.0.0.1/a.jpg"] == int(is_allowed)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(404), b"an image"),
        (Answer(403), b"an image"),
        (Answer(401), b"an image"),
        (redirect("/robots2.txt"), DISALLOWED),
        (redirect("/robots.txt"), b"an image"),  # in a circle: "may assume that the file is unavailable"
        (
            Answer(500),
            (
                "rules_unknown",
                "robots.txt cannot be read, so all is disallowed for now: "
                "status 500 Internal Server Error (4 times asked)",
            ),
        ),
        (
            Answer(429, b"", {"Retry-After": "0"}),
            (
                "rules_unknown",
                "robots.txt cannot be read, so all is disallowed for now: status 429 Too Many Requests (4 times asked)",
            ),
        ),
        ([Answer(500), Answer(200, b"")], b"an image"),
        (
            Answer(200, b"?", {"Content-Encoding": "gzip"}),
            (
                "bad_answer",
                "robots.txt cannot be read: the server sends it with Content-Encoding 'gzip', "
                "though identity was asked for",
            ),
        ),
    ],
)
def test_robots_txt_that_is_not_there_allows_and_one_that_fails_forbids(
    site: Site, answer: Any, outcome: Outcome
) -> None:
    site.answers["/robots.txt"] = answer
    site.answers["/robots2.txt"] = Answer(200, b"User-agent: *\nDisallow: /")
    assert outcome_of(site) == outcome
    assert outcome_of(site, ignore_opt_outs=True) == b"an image"


def test_robots_txt_of_a_site_that_breaks_off_has_the_reason_of_the_site(site: Site) -> None:
    site.answers["/robots.txt"] = reset
    reason, detail = outcome_of(site)
    assert reason == "unreachable"
    assert str(detail).startswith("robots.txt cannot be read: the connection failed: ")


def one_after_the_other(urls: list[str], pauses: list[float], **settings: Any) -> list[Outcome]:
    """What becomes of URLs, with a pause after each."""

    async def run() -> list[Outcome]:
        found: list[Outcome] = []
        async with Fetcher(quick(**settings), fault_of=any_address) as fetcher:
            for url, pause in zip(urls, pauses, strict=True):
                try:
                    found.append(await fetcher.fetch(url))
                    fetcher.room.free(0)
                except BadSample as bad:
                    found.append((str(bad.reason), bad.detail))
                await asyncio.sleep(pause)
        return found

    return asyncio.run(run())


def reasons_of(found: list[Outcome]) -> list[str]:
    return ["" if isinstance(one, bytes) else one[0] for one in found]


@pytest.mark.usefixtures("clock")
def test_host_in_a_pause_has_not_said_that_it_has_no_rules(site: Site) -> None:
    """Another port of the host asks for the pause, so its rules were not asked for before."""
    with Site() as other:
        site.answers["/x.jpg"] = Answer(503, b"", {"Retry-After": "1"})
        other.answers["/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /")
        other.answers["/y.jpg"] = GOOD
        urls = [site.url("/x.jpg"), other.url("/y.jpg?1"), other.url("/y.jpg?2")]
        found = one_after_the_other(urls, [0, 1.1, 0], longest_wait_s=0.5)
    assert reasons_of(found) == ["http_status", "host_left_alone", "opted_out"]
    assert found[2] == DISALLOWED


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("status", "reason"), [(503, "host_left_alone"), (429, "host_left_alone")])
def test_tdmrep_of_a_host_that_asks_for_a_pause_is_read_after_it(site: Site, status: int, reason: str) -> None:
    site.answers["/a.jpg"] = GOOD
    reserves = Answer(200, b'[{"location": "/", "tdm-reservation": 1}]')
    site.answers["/.well-known/tdmrep.json"] = [Answer(status, b"", {"Retry-After": "1"}), reserves]
    found = one_after_the_other([site.url("/a.jpg")] * 2, [1.1, 0], longest_wait_s=0.5)
    assert reasons_of(found) == [reason, "opted_out"]
    assert site.images() == 0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("failure", [Answer(500), Answer(429, b"", {"Retry-After": "0"}), reset])
def test_rules_that_could_not_be_read_are_asked_for_again(site: Site, failure: Any) -> None:
    site.answers["/a.jpg"] = GOOD
    site.answers["/robots.txt"] = failure if callable(failure) else [failure, Answer(200, b"")]
    urls = [site.url(f"/a.jpg?{number}") for number in range(3)]
    if callable(failure):
        site.answers["/robots.txt"] = first_of(failure, 2)  # aiohttp asks twice
    found = one_after_the_other(urls, [0, 0.6, 0], attempts=1, rules_again_s=0.5)
    assert [bool(one) for one in reasons_of(found)] == [True, True, False]
    assert "opted_out" not in reasons_of(found)


@pytest.mark.usefixtures("clock")
def test_tdmrep_that_failed_is_asked_for_again(site: Site) -> None:
    site.answers["/a.jpg"] = GOOD
    site.answers["/.well-known/tdmrep.json"] = [Answer(500), Answer(200, b'[{"location": "/", "tdm-reservation": 1}]')]
    found = one_after_the_other([site.url("/a.jpg")] * 3, [0, 0.6, 0], attempts=1, rules_again_s=0.5)
    assert reasons_of(found) == ["", "", "opted_out"]


def first_of(answering: Any, times: int) -> Any:
    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        return await answering(request, before) if before < times else web.Response(body=b"")

    return answer


def test_rules_are_read_once_a_site(site: Site) -> None:
    site.answers["/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /private/")
    site.answers["/a.jpg"] = site.answers["/private/a.jpg"] = GOOD
    urls = [
        site.url(path + f"?{number}", host)
        for number in range(20)
        for path in ("/a.jpg", "/private/a.jpg")
        for host in ("127.0.0.1", "127.0.0.2")
    ]
    found = fetch_all(urls)
    assert (found.count(b"an image"), found.count(DISALLOWED)) == (40, 40)
    assert site.requests == {
        f"127.0.0.{host}{path}": count
        for host in (1, 2)
        for path, count in (("/robots.txt", 1), ("/.well-known/tdmrep.json", 1), ("/a.jpg", 20))
    }


def test_rules_of_the_site_that_a_redirect_leads_to_are_honoured(site: Site) -> None:
    site.answers["127.0.0.2/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /")
    site.answers["127.0.0.2/b.jpg"] = GOOD
    site.answers["/a.jpg"] = redirect(site.url("/b.jpg", "127.0.0.2"))
    assert fetch_all([site.url("/a.jpg")]) == [DISALLOWED]
    assert site.requests["127.0.0.2/b.jpg"] == 0


@pytest.mark.parametrize(
    ("tdmrep", "is_reserved"),
    [
        (b'[{"location": "/", "tdm-reservation": 1}]', True),
        (b'[{"location": "/*.jpg$", "tdm-reservation": "1"}]', True),
        (b'[{"location": "/a.jpg", "tdm-reservation": 0}, {"location": "/", "tdm-reservation": 1}]', False),
        (b'[{"location": "/", "tdm-reservation": 1.0}]', True),
        (b'[{"location": "/", "tdm-reservation": true}]', True),
        (b'[{"location": "/", "tdm-reservation": false}]', False),
        (b'[{"location": "/b", "tdm-reservation": 1}]', False),
        (b'[{"location": "/", "tdm-reservation": 0}]', False),
        (b'{"location": "/", "tdm-reservation": 1}', False),
        (b'[1, {"tdm-reservation": 1}, {"location": "/\\n", "tdm-reservation": 1}]', False),
        (b"<html>", False),
        (b"[" * 100_000, False),
        (b"\xff\xfe", False),
    ],
)
def test_tdmrep_is_honoured(site: Site, tdmrep: bytes, is_reserved: bool) -> None:
    site.answers["/.well-known/tdmrep.json"] = Answer(200, tdmrep)
    assert outcome_of(site) == (("opted_out", "tdmrep.json reserves it") if is_reserved else b"an image")
    assert outcome_of(site, ignore_opt_outs=True) == b"an image"


def test_tdmrep_that_fails_or_may_not_be_read_says_nothing(site: Site) -> None:
    site.answers["/.well-known/tdmrep.json"] = Answer(500)
    assert outcome_of(site) == b"an image"
    site.answers["/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /.well-known/")
    site.requests.clear()
    assert outcome_of(site) == b"an image"
    assert site.requests["127.0.0.1/.well-known/tdmrep.json"] == 0


def test_rules_hold_nothing_of_a_file_that_allows_all() -> None:
    assert Rules.of(b"User-agent: *\nAllow: /\n" * 1000) == Rules()
    assert parse_tdmrep(b"[]") == ()


@pytest.mark.parametrize(
    "robots",
    [
        *(f"User-agent: *\n{word}: /" for word in ("Dissallow", "dissalow", "Disalow", "diasllow", "DISALLAW")),
        "User-agent: mmdata/0.1.0\nDisallow: /",
        "User-Agent: MMData/9 # us\nDisallow: /\n\nUser-agent: *\nDisallow:",
        "useragent mmdata/0.1.0\nDisallow: /",
        "\ufeffUser-agent: mmdata/0.1.0\nDisallow: /",
    ],
)
def test_rules_that_are_misspelled_are_rules(robots: str) -> None:
    assert Rules.of(robots.encode()).forbid("http://a.example/b.jpg") == "robots.txt disallows it"


def test_version_of_another_program_is_not_ours() -> None:
    assert not Rules.of(b"User-agent: mmdata-images/1.0\nDisallow: /").forbid("http://a.example/b.jpg")


@pytest.mark.parametrize(
    ("location", "url", "fits"),
    [
        ("/", "http://a.example", True),
        ("/a", "http://a.example/ab?c", True),
        ("/a$", "http://a.example/ab", False),
        ("/a$", "http://a.example/a", True),
        ("/*.jpg$", "http://a.example/b/c.jpg", True),
        ("/*.jpg$", "http://a.example/b/c.jpg?d", False),
        ("/*b*b$", "http://a.example/ab", False),
        ("*/b", "http://a.example/a/bc", True),
        ("/a?q=", "http://a.example/a?q=1", True),
        ("/\u00e9", "http://a.example/%C3%a9", True),
        ("/%c3%A9", "http://a.example/\u00e9", True),
        ("/a%2Fb", "http://a.example/a/b", False),
        ("/a%2fb", "http://a.example/a%2Fb", True),
        ("/a b", "http://a.example/a%20b", True),
        ("/%2A", "http://a.example/b", False),
        ("/" + "*a" * 50, "http://a.example/" + "a" * 49 + "b" * 1000, False),
    ],
)
def test_location_fits(location: str, url: str, fits: bool) -> None:
    assert Location(location).fits(path_of(url)) == fits


def test_long_tdmrep_costs_little_and_what_is_not_compared_reserves() -> None:
    locations = [{"location": f"/{number}/*.jpg", "tdm-reservation": 0} for number in range(12_000)]
    rules = Rules(tdm=parse_tdmrep(json.dumps(locations).encode()))
    assert len(rules.tdm) == MAX_LOCATIONS
    begin = time.process_time()
    assert not any(rules.forbid(f"http://a.example/x/{number}.jpg") for number in range(100))
    assert time.process_time() - begin < 1.0  # 80 s, when each location was a parser
    locations[-1]["tdm-reservation"] = 1
    rules = Rules(tdm=parse_tdmrep(json.dumps(locations).encode()))
    assert not rules.forbid("http://a.example/0/a.jpg")
    assert rules.forbid("http://a.example/x.png") == "tdmrep.json reserves it"


def test_parsers_of_many_small_files_stay() -> None:
    parsers = opt_outs._Parsers(100_000)
    files = [zlib.compress(f"User-agent: *\nDisallow: /{number}".encode()) for number in range(1000)]
    first = [parsers.of(one) for one in files]
    assert all(parsers.of(one) is parser for one, parser in zip(files, first, strict=True))
    parsers.of(zlib.compress(b"#" * 200_000))
    assert parsers.of(files[0]) is not first[0]
