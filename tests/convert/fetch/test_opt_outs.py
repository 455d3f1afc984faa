"""Opt-outs: headers, robots.txt and TDMRep, alone and over a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from mmdata.convert.fetch import fetcher
from mmdata.convert.fetch.addresses import any_address
from mmdata.convert.fetch.fetcher import Fetcher
from mmdata.convert.fetch.opt_outs import MAX_RULES_BYTES, Rules, opted_out_by_headers, parse_tdmrep
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
        ("otherbot: noindex", ""),
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
    ("value", "is_reserved"), [("1", True), (" 1 ", True), ("0", False), ("", False), ("11", False)]
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
                "opted_out",
                "robots.txt cannot be read, so all is disallowed: status 500 Internal Server Error (4 times asked)",
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


def one_after_the_other(urls: list[str], pauses: list[float], **settings: Any) -> list[Outcome]:
    """What becomes of each URL, asked for after the one before it and a pause in seconds."""

    async def run() -> list[Outcome]:
        found: list[Outcome] = []
        async with Fetcher(quick(**settings), fault_of=any_address) as fetcher:
            for row, (url, pause) in enumerate(zip(urls, pauses, strict=True)):
                try:
                    found.append(body := await fetcher.fetch(url, row))
                    fetcher.room.give_back(len(body))
                except BadSample as bad:
                    found.append((str(bad.reason), bad.detail))
                await asyncio.sleep(pause)
        return found

    return asyncio.run(run())


def test_a_host_in_a_pause_has_not_said_that_it_has_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "RULES_AGAIN_S", 0.0)
    with Site() as busy, Site() as other:  # two origins of one host
        busy.answers["/x.jpg"] = Answer(503, b"", {"Retry-After": "2"})
        other.answers["/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /")
        other.answers["/y.jpg"] = GOOD
        urls = [busy.url("/x.jpg"), other.url("/y.jpg"), other.url("/y.jpg")]
        _, paused, after = one_after_the_other(urls, [0.0, 2.5, 0.0], longest_wait_s=1.0)
    assert paused[0] == "http_status"
    assert after == ("opted_out", "robots.txt disallows it")
    assert "/y.jpg" not in other.requests


def test_rules_that_could_not_be_read_are_asked_for_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "RULES_AGAIN_S", 0.0)
    site.answers["/robots.txt"] = [Answer(503)] * 4 + [Answer(200, b"")]
    site.answers["/y.jpg"] = GOOD
    found = one_after_the_other([site.url("/y.jpg")] * 2, [0.0, 0.0])
    assert found[0][0] == "opted_out"
    assert found[1] == b"an image"


def test_a_reservation_that_could_not_be_read_is_asked_for_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "RULES_AGAIN_S", 0.0)
    reserved = Answer(200, b'[{"location": "/", "tdm-reservation": 1}]')
    site.answers["/.well-known/tdmrep.json"] = [Answer(503)] * 4 + [reserved]
    site.answers["/y.jpg"] = GOOD
    found = one_after_the_other([site.url("/y.jpg")] * 2, [0.0, 0.0])
    assert found == [b"an image", ("opted_out", "tdmrep.json reserves it")]


def test_too_many_requests_for_the_rules_disallow_for_now(site: Site) -> None:
    site.answers["/robots.txt"] = Answer(429, b"")
    site.answers["/y.jpg"] = GOOD
    (found,) = one_after_the_other([site.url("/y.jpg")], [0.0])
    assert found[0] == "opted_out"
