"""How many rows of a table of URLs may be lost, and how many connections a host has. Real servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mmdata.convert import ConvertConfig, Report, convert, preview
from mmdata.convert.preview_lines import preview_lines
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from tests.convert.conftest import jsonl
from tests.convert.fetch.sites import Answer, Site

GOOD = 12


@pytest.fixture
def rows(site: Site, photo: Callable[..., bytes]) -> list[dict[str, Any]]:
    """Twelve photos, eighteen links that are dead in several ways, and a photo whose caption is empty."""
    for number in range(GOOD):
        site.answers[f"/{number}.jpg"] = Answer(200, photo(20, 30, seed=number))
    site.answers |= {"/page.jpg": Answer(200, b"<!DOCTYPE html><html>"), "/empty.jpg": Answer(200, b"")}
    paths = [*(f"/{number}.jpg" for number in range(GOOD)), *(f"/gone{number}.jpg" for number in range(16))]
    captions = [*(f"photo {number}" for number in range(len(paths) + 2)), ""]
    urls = [site.url(path) for path in (*paths, "/page.jpg", "/empty.jpg", "/0.jpg?again")]
    return [{"url": url, "caption": caption} for url, caption in zip(urls, captions, strict=True)]


def make(table: Path, out: Path, **settings: Any) -> Report:
    return convert(table, out, ConvertConfig(allow_private_addresses=True, **settings), engine=threads(2))


def test_dead_links_do_not_count_against_the_limit_of_bad_rows(
    rows: list[dict[str, Any]], site: Site, tmp_path: Path
) -> None:
    accounts = make(jsonl(tmp_path / "t.jsonl", rows), tmp_path / "out").accounts
    assert (accounts["written"], accounts["quarantined"], accounts["unfetched"]) == (GOOD, 19, 18)
    assert accounts["reasons"] == {"empty_caption": 1, "empty_file": 1, "http_status": 16, "not_an_image": 1}


def test_bad_rows_of_a_table_of_urls_do_count(rows: list[dict[str, Any]], site: Site, tmp_path: Path) -> None:
    table = jsonl(tmp_path / "t.jsonl", [*rows, {**rows[1], "url": site.url("/1.jpg?again"), "caption": None}])
    with pytest.raises(DataError) as caught:
        make(table, tmp_path / "out")
    assert str(caught.value).startswith(
        "2 of 32 rows are unusable, over max_bad_share=0.05; nothing is published. 1 empty_caption (first: "
    )
    assert "http_status" not in str(caught.value)
    said = preview_lines(preview(table, ConvertConfig(allow_private_addresses=True)))
    assert any(line.startswith("nothing would be published: more than 5 % of the rows cannot be used") for line in said)


def test_images_that_are_no_urls_count_as_before(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table = jsonl(tmp_path / "t.jsonl", [*rows, {"url": "a.jpg", "caption": "x"}, {"url": "b.jpg", "caption": "y"}])
    with pytest.raises(DataError, match=r"^3 of 33 rows are unusable, over max_bad_share=0.05; .* 2 missing_image \("):
        make(table, tmp_path / "out")


@pytest.mark.parametrize("url", ["s3://bucket/a.jpg", "gs://bucket/a.jpg", "file:a.jpg", "file:///a.jpg"])
def test_urls_that_are_not_of_the_web_are_no_dead_links(rows: list[dict[str, Any]], tmp_path: Path, url: str) -> None:
    table = jsonl(tmp_path / "t.jsonl", [*rows[:3], *({"url": url, "caption": "a photo"} for _ in range(4))])
    with pytest.raises(DataError, match=r"^4 of 7 rows are unusable, over max_bad_share=0.05; .* 4 refused_address \("):
        make(table, tmp_path / "out", group_by="none", keep_duplicates=True)
    found = preview(table, ConvertConfig(allow_private_addresses=True, group_by="none", keep_duplicates=True))
    assert (found.bad.likely, found.unfetched.likely) == (4, 0)


def test_a_limit_of_dead_links_may_be_set_and_raised_again(
    rows: list[dict[str, Any]], site: Site, tmp_path: Path
) -> None:
    table = jsonl(tmp_path / "t.jsonl", rows)
    with pytest.raises(
        DataError,
        match=r"^18 of 31 rows have a URL that gave no image, over max_unfetched_share=0.5; nothing is published. "
        r"16 http_status \(first: .*\); 1 .* Start again when the servers answer, or allow more with "
        "max_unfetched_share=… after OUT$",
    ):
        make(table, tmp_path / "out", max_unfetched_share=0.5)
    asked = site.images()
    assert make(table, tmp_path / "out", max_unfetched_share=0.6).accounts["written"] == GOOD
    assert site.images() == asked  # what was fetched stayed


@pytest.mark.parametrize("settings", [{}, {"connections_per_host": 5}])
def test_connections_of_a_host_are_two_or_as_many_as_are_set(
    site: Site, tmp_path: Path, photo: Callable[..., bytes], settings: dict[str, int]
) -> None:
    most = settings.get("connections_per_host", 2)

    async def answer(request: web.Request, before: int) -> web.StreamResponse:
        while site.most_at_once["127.0.0.1"] < most:  # no fewer
            await asyncio.sleep(0.01)
        return web.Response(body=photo(20, 30, seed=int(request.path[1:-4])))

    site.answers |= {f"/{number}.jpg": answer for number in range(GOOD)}
    rows = [{"url": site.url(f"/{number}.jpg"), "caption": "a photo"} for number in range(GOOD)]
    table = jsonl(tmp_path / "t.jsonl", rows)
    report = make(table, tmp_path / "out", ignore_opt_outs=True, **settings)
    assert report.accounts["written"] == GOOD
    assert site.most_at_once["127.0.0.1"] == most
    assert make(table, tmp_path / "out", ignore_opt_outs=True, connections_per_host=9).was_complete
