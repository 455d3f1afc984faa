"""URLs that failed are fetched again, and no others. Real servers on loopback."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, Retry, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.progress import Track
from tests.convert.conftest import jsonl, left_out
from tests.convert.fetch.sites import Answer, Site, redirect

PHOTOS = 8


@pytest.fixture
def album(site: Site, photo: Callable[..., bytes]) -> Site:
    """A site of 0.jpg to 7.jpg."""
    for number in range(PHOTOS):
        site.answers[f"/{number}.jpg"] = Answer(200, photo(20, 30, seed=number))
    return site


@pytest.fixture
def table(album: Site, tmp_path: Path) -> Path:
    """Row n has the URL n.jpg; rows 8 and 9 that of 1.jpg, row 9 with no caption of its own; row 10 a copy of 0.jpg."""
    names = [*range(PHOTOS), 1, 1, "copy"]
    rows = [
        {"url": album.url(f"/{name}.jpg"), "caption": f"caption {1 if n == 9 else n}"} for n, name in enumerate(names)
    ]
    return jsonl(tmp_path / "t.jsonl", rows)


def make(table: Path, out: Path, *retry: Any, **settings: Any) -> Any:
    config = ConvertConfig(**{"max_bad_share": 0.95, "allow_private_addresses": True, "shard_rows": 3, **settings})
    return convert(table, out, config, chosen=Retry(*retry) if retry else None, engine=threads(2))


def members(*folders: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.tar"))):
        with tarfile.open(path) as tar:
            for member in tar:
                assert member.name not in found
                found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found


def test_what_failed_is_fetched_again_and_nothing_else(album: Site, table: Path, tmp_path: Path) -> None:
    good = {name: album.answers[name] for name in ("/1.jpg", "/4.jpg", "/5.jpg", "/6.jpg", "/0.jpg")}
    album.answers |= {
        "/1.jpg": Answer(404),
        "/4.jpg": Answer(404),
        "/5.jpg": Answer(200, b"x", {"X-Robots-Tag": "noai"}),
        "/6.jpg": redirect("file:///etc/passwd"),
    }
    first = make(table, tmp_path / "a")
    assert first.accounts["reasons"] == {"http_status": 5, "opted_out": 1, "refused_address": 1}
    album.requests.clear()
    album.answers |= {**good, "/copy.jpg": good["/0.jpg"], "/4.jpg": Answer(410)}
    report = make(table, tmp_path / "b", [tmp_path / "a"], ["http_status", "refused_address"])
    counts = {name: report.accounts[name] for name in ("rows", "written", "merged", "duplicate", "quarantined")}
    assert counts == {"rows": 6, "written": 2, "merged": 1, "duplicate": 2, "quarantined": 1}
    asked = {name.removeprefix("127.0.0.1"): n for name, n in album.requests.items() if name.endswith(".jpg")}
    assert asked == {"/1.jpg": 1, "/4.jpg": 1, "/6.jpg": 1, "/copy.jpg": 1}
    assert [(line["row"], line["place"], line["reason"]) for line in left_out(tmp_path / "b")] == [
        (4, "t.jsonl, line 5", "http_status"),
        (9, "t.jsonl, line 10", "duplicate_image"),
        (10, "t.jsonl, line 11", "duplicate_image"),
    ]
    album.answers |= good
    report = make(table, tmp_path / "c", [tmp_path / "a", tmp_path / "b"], ["http_status", "opted_out"])
    assert (report.accounts["rows"], report.accounts["written"]) == (2, 2)
    make(table, tmp_path / "whole")
    assert members(*(tmp_path / name for name in "abc")) == members(tmp_path / "whole")


def test_interrupted_retry_goes_on_with_its_units(album: Site, table: Path, tmp_path: Path) -> None:
    good = dict(album.answers)
    album.answers |= {f"/{number}.jpg": Answer(404) for number in range(1, PHOTOS)}
    make(table, tmp_path / "a")
    album.answers |= good
    retry = ([tmp_path / "a"], ["http_status"])
    make(table, tmp_path / "whole", *retry)

    class Cut(Exception):
        pass

    class Cutting(Track):
        def __call__(self, rows: Any, what: str, total: int, *, is_exact: bool = True) -> Any:
            for number, row in enumerate(rows):
                if what == "convert" and number == 8:
                    raise Cut
                yield row

    config = ConvertConfig(allow_private_addresses=True, shard_rows=3)
    with pytest.raises(Cut):
        convert(table, tmp_path / "b", config, chosen=Retry(*retry), engine=threads(1), track=Cutting())
    album.requests.clear()
    with pytest.raises(DataError, match=r"unfinished conversion \(other rows are tried again"):
        make(table, tmp_path / "b", *retry[:1], ["http_status", "timed_out"])
    make(table, tmp_path / "b", *retry)
    asked = {name.removeprefix("127.0.0.1") for name in album.requests if name.endswith(".jpg")}
    assert asked.isdisjoint({"/1.jpg", "/2.jpg", "/3.jpg"})
    assert "/7.jpg" in asked
    assert members(tmp_path / "b") == members(tmp_path / "whole")


def test_opt_outs_may_be_ignored_in_a_retry_whose_manifest_says_so(album: Site, table: Path, tmp_path: Path) -> None:
    body = album.answers["/5.jpg"].body  # type: ignore[union-attr]
    album.answers["/5.jpg"] = Answer(200, body, {"X-Robots-Tag": "noai"})
    make(table, tmp_path / "a", contact="me@lab.example")
    report = make(table, tmp_path / "b", [tmp_path / "a"], ["opted_out"], ignore_opt_outs=True, connections=2)
    assert report.accounts["written"] == 1
    assert report.accounts["run"]["settings"]["ignore_opt_outs"] is True
