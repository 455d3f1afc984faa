"""Rows with URLs in, rows with images out: order, faults, mixtures, and an end at any time."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from mmdata.convert.fetch import FetchStage
from mmdata.convert.fetch.stage import refuse_urls
from mmdata.convert.sources.rows import InputRow, has_url
from mmdata.errors import ConfigError, Reason
from tests.convert.fetch.conftest import fetch_all, quick
from tests.convert.fetch.sites import Answer, Site, faulty
from tests.logs import messages, of_mmdata
from tests.programs import PATIENCE_S


def stage_of(**settings: Any) -> FetchStage:
    return FetchStage(quick(allow_private_addresses=True, **settings))


async def late(request: web.Request, before: int) -> web.StreamResponse:
    await asyncio.sleep(random.uniform(0, 0.05))
    return web.Response(body=request.query_string.encode())


def test_rows_come_in_their_order_whenever_servers_answer(site: Site) -> None:
    site.answers["/a.jpg"] = late
    urls = [site.url(f"/a.jpg?{number}", f"127.0.0.{1 + number % 9}") for number in range(200)]
    rows = [InputRow(number, f"line {number}", url, extra={"n": number}) for number, url in enumerate(urls)]
    with stage_of(rows_ahead=30) as stage:
        found = list(stage(rows))
    assert [(row.number, row.image, row.url) for row in found] == [
        (number, str(number).encode(), url) for number, url in enumerate(urls)
    ]
    assert found[7].extra == {"url": urls[7], "n": 7}
    assert found[7].place == "line 7"


def test_rows_without_a_url_pass_as_they_are_and_start_nothing() -> None:
    fault = (Reason.BROKEN_ROW, "x")
    rows = [
        InputRow(0, "", "a.jpg"),
        InputRow(1, "", b"bytes"),
        InputRow(2, "", None),
        InputRow(3, "", "http://127.0.0.1:9/a", fault=fault),
        InputRow(4, "", "http://127.0.0.1:9/a", merged_into=0),
        InputRow(5, "", "a/b:c.jpg"),
    ]
    threads = threading.active_count()
    with stage_of() as stage:
        for row, given in zip(stage(rows), rows, strict=True):
            assert row is given
            assert threading.active_count() == threads
    assert stage.tally.urls == 0


def test_rows_of_a_mixture_keep_their_order(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"an image")
    images = ["a.jpg", site.url("/a.jpg"), b"x" * 10, site.url("/none.jpg"), "FILE:///b.jpg", "c.jpg"]
    with stage_of() as stage:
        found = list(stage(InputRow(number, "", image) for number, image in enumerate(images)))
    assert [row.image for row in found] == ["a.jpg", b"an image", b"x" * 10, images[3], "FILE:///b.jpg", "c.jpg"]
    assert [row.fault and str(row.fault[0]) for row in found] == [
        *(None, None, None, "http_status", "refused_address", None)
    ]


def test_password_of_a_url_is_sent_and_not_stored(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"an image")
    secret = [f"http://me:se@cret@127.0.0.1:{site.port}/{name}" for name in ("a.jpg", "none.jpg", "x.jpg")]
    secret += ["ftp://me:secret@a.example/b.jpg", "http://me:secret@:99999/", "http://me:secret@[::1/"]
    rows = [
        InputRow(number, "", url, merged_into=0 if number == 2 else None, extra={"link": url} if number == 0 else {})
        for number, url in enumerate(secret)
    ]
    with stage_of(ignore_opt_outs=True) as stage:
        first, *others = stage(rows)
    assert (first.url, first.extra) == (site.url("/a.jpg"), {"url": site.url("/a.jpg"), "link": site.url("/a.jpg")})
    assert [row.image for row in others[:2]] == [site.url("/none.jpg"), site.url("/x.jpg")]
    assert site.headers["Authorization"].startswith("Basic ")
    assert all(row.fault for row in others if row.number != 2)
    assert "cret" not in str([first, *others, stage.tally.line()])


def test_rows_are_read_no_further_ahead_than_asked(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"x")
    read = 0

    def rows(images: Any) -> Iterator[InputRow]:
        nonlocal read
        for read in range(100):
            yield InputRow(read, "", images(read))

    with stage_of(rows_ahead=10) as stage:
        for done, _ in enumerate(stage(rows(lambda number: site.url(f"/a.jpg?{number}")))):
            assert read <= done + 10
    with stage_of(bytes_ahead=1000) as stage:  # images in the table, behind one that is fetched, count too
        for done, _ in enumerate(stage(rows(lambda number: b"x" * 100 if number else site.url("/a.jpg")))):
            assert read <= done + 11


def test_stage_that_is_left_early_ends_its_requests(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def never(request: web.Request, before: int) -> web.StreamResponse:
        await asyncio.sleep(600)
        raise AssertionError

    site.answers["/a.jpg"] = Answer(200, b"x")
    site.answers["/never.jpg"] = never
    urls = [site.url("/a.jpg"), *(site.url(f"/never.jpg?{number}", f"127.0.0.{number % 9}") for number in range(50))]
    threads = threading.active_count()
    gc.collect()  # asyncio logs tasks that earlier tests have left
    caplog.clear()
    with stage_of() as stage:
        next(stage(InputRow(number, "", url) for number, url in enumerate(urls)))
    assert threading.active_count() <= threads + 1  # a thread that looks names up may linger
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


BREAKS = """
import asyncio, sys, threading, warnings
from mmdata.convert.fetch import FetchStage, fetcher
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.convert.sources.rows import InputRow

def broken(*_, **__):
    raise RuntimeError("no more of them")

start = threading.Thread.start
if sys.argv[1] == "thread":
    threading.Thread.start = lambda self: broken() if self.name == "fetch" else start(self)
else:
    fetcher.ClientSession = broken
loops, new = [], asyncio.new_event_loop
asyncio.new_event_loop = lambda: loops.append(new()) or loops[-1]
try:
    with FetchStage(FetchSettings(user_agent="x")) as stage:
        list(stage([InputRow(0, "", "http://127.0.0.1:9/")]))
except RuntimeError as error:
    print(error, loops[0].is_closed(), threading.active_count())
"""


@pytest.mark.parametrize("broken", ["thread", "session"])
def test_stage_that_cannot_begin_says_why_and_ends(broken: str) -> None:
    done = subprocess.run([sys.executable, "-c", BREAKS, broken], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "no more of them True 1\n", done.stderr


def test_nearly_all_that_can_be_had_is_had_of_servers_that_fail_now_and_then() -> None:
    """One request in a hundred fails, in each of several ways; and one image in twenty is not there."""
    urls_of = range(3000)
    with Site(
        {"/a.jpg": faulty(Answer(200, b"an image"), every=100), "/robots.txt": faulty(Answer(404), every=100)}
    ) as site:
        urls = [site.url(f"/{'a' if n % 20 else 'gone'}.jpg?{n}", f"127.0.{n % 40}.1") for n in urls_of]
        found = fetch_all(urls, silence_s=1.0)
        assert site.images() > len(urls)  # some were asked for again
    ideal = sum(1 for n in urls_of if n % 20)
    assert found.count(b"an image") >= 0.995 * ideal
    assert sum(1 for one in found if one == ("http_status", "status 404 Not Found")) >= 0.995 * (len(urls) - ideal)


GROWS = """
import re, sys
from pathlib import Path
from mmdata.convert.fetch import FetchStage
from mmdata.convert.fetch.settings import FetchSettings
from mmdata.convert.sources.rows import InputRow

urls = (InputRow(n, "", f"http://127.0.0.{1 + n % 20}:{sys.argv[1]}/a.jpg?{n}") for n in range(3000))
settings = FetchSettings(user_agent="x", allow_private_addresses=True, bytes_ahead=8 * 2**20, rows_ahead=100)
kept = []
with FetchStage(settings) as stage:
    for row in stage(urls):
        if row.number in (600, 2999):
            print(re.search("VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
        if sys.argv[2:] == ["keep"]:
            kept.append(row)
"""


@pytest.mark.sweep
def test_memory_does_not_grow_with_the_rows(site: Site) -> None:
    """In a process of its own, by the most that it ever had; `ru_maxrss` would be the parent's, if that had more."""
    site.answers["/a.jpg"] = Answer(200, b"x" * 200_000)

    def growth(*arguments: str) -> int:
        command = [sys.executable, "-c", GROWS, str(site.port), *arguments]
        begin, end = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        return end - begin

    assert growth() < 40 * 1024  # KiB, while 480 MB came through
    assert growth("keep") > 400 * 1024  # what the measurement would show


def test_log_says_how_it_goes_and_closes_with_a_line(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mmdata.fetch")

    async def after_a_report(request: web.Request, before: int) -> web.StreamResponse:
        while not of_mmdata(caplog):
            await asyncio.sleep(0.01)
        return await late(request, before)

    site.answers["/a.jpg"] = after_a_report
    paths = ["/a.jpg?1", "/none.jpg", "/gone.jpg", "/a.jpg?22"]
    rows = [InputRow(number, "", site.url(path)) for number, path in enumerate(paths)]
    with stage_of(report_s=0.01) as stage:
        list(stage([*rows, InputRow(4, "", "ftp://files.example/a"), InputRow(5, "", "http://[::1")]))
    *lines, last = messages(caplog)
    assert lines
    assert all(line.startswith("fetched ") for line in lines)
    assert re.fullmatch(
        r"fetched 2 of 6 URLs \(33\.3%\), 0\.0 MB in \d+ s, \d+ a second; "
        r"no image: 2 http_status, 2 refused_address",
        last,
    )


def test_url_is_told_from_a_path() -> None:
    urls = ["http://a/b.jpg", "HTTPS://a/b", " https://a", "ftp://a", "file:a.jpg", "File:///a", "s3://a/b", "data://x"]
    paths = ["a.jpg", "/a.jpg", "a/b://c"[2:5], "//host/a.jpg", "C:/a.jpg", "http:", "filed/a.jpg", ""]
    assert [has_url(InputRow(0, "", one)) for one in urls] == [True] * len(urls)
    assert [has_url(InputRow(0, "", one)) for one in paths] == [False] * len(paths)


def test_rows_that_are_read_twice_may_have_no_url() -> None:
    rows = [InputRow(0, "t.csv, line 2", "a.jpg"), InputRow(1, "t.csv, line 3", "https://a.example/b.jpg")]
    with pytest.raises(
        ConfigError, match=r"^t\.csv, line 3: its image is behind a URL, and x reads every image twice; "
    ):
        list(refuse_urls(rows, "x"))


def test_conversions_without_urls_do_without_aiohttp() -> None:
    code = "import sys, mmdata.convert.conversion; print('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
