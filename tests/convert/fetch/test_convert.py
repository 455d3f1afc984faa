"""A table of URLs, converted: bytes, accounts, ledger, settings, and the program. Real servers on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError
from mmdata.index import Manifest
from tests.convert.conftest import content, jsonl, left_out, start
from tests.convert.fetch.sites import Answer, Site, redirect
from tests.programs import PATIENCE_S
from tests.waiting import wait_until

PHOTOS = 12
TERMINATED = "terminated; nothing was published, run the same command again: it continues where this ended\n"


@pytest.fixture
def album(site: Site, photo: Callable[..., bytes]) -> Site:
    """A site of 0.jpg to 11.jpg."""
    for number in range(PHOTOS):
        site.answers[f"/{number}.jpg"] = Answer(200, photo(20, 30, seed=number))
    return site


def rows_of(site: Site, count: int = PHOTOS, **more: Any) -> list[dict[str, Any]]:
    urls = [site.url(f"/{number}.jpg", f"127.0.0.{1 + number % 3}") for number in range(count)]
    return [{"url": url, "caption": f"photo {number}", **more} for number, url in enumerate(urls)]


def make(table: Path, out: Path, **settings: Any) -> Any:
    config = ConvertConfig(**{"max_bad_share": 0.9, "allow_private_addresses": True, **settings})
    return convert(table, out, config, engine=threads(2))


def members(out: Path) -> dict[str, bytes]:
    with tarfile.open(out / "000000.tar") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_parquet_of_urls_is_converted_byte_for_byte_and_keeps_the_urls(album: Site, tmp_path: Path) -> None:
    rows = rows_of(album)
    pq.write_table(
        pa.Table.from_pylist([{"URL": row["url"], "TEXT": row["caption"]} for row in rows]), tmp_path / "t.parquet"
    )
    report = make(tmp_path / "t.parquet", tmp_path / "out")
    assert report.accounts["written"] == PHOTOS == len(rows)
    assert report.source["image"] == "URL"
    found = members(tmp_path / "out")
    for number, row in enumerate(rows):
        assert found[f"{number:09}.jpg"] == album.answers[f"/{number}.jpg"].body  # type: ignore[union-attr]
        assert json.loads(found[f"{number:09}.json"]) == {"captions": [row["caption"]], "url": row["url"]}


def test_table_without_a_header_as_that_of_cc3m_is_converted(album: Site, tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    table.write_text("".join(f"{row['caption']}\t{row['url']}\n" for row in rows_of(album)))
    assert make(table, tmp_path / "out", columns=["caption", "url"]).accounts["written"] == PHOTOS


def test_output_is_the_same_whenever_servers_answer(album: Site, tmp_path: Path) -> None:
    table = jsonl(tmp_path / "t.jsonl", [*rows_of(album), {"url": album.url("/gone.jpg"), "caption": "x"}])
    make(table, tmp_path / "out", shard_rows=5)
    album.answers |= {path: late(answer) for path, answer in album.answers.items() if isinstance(answer, Answer)}
    make(table, tmp_path / "again", shard_rows=5, connections_per_host=3)
    assert content(tmp_path / "out") == content(tmp_path / "again")


def late(answer: Answer) -> Any:
    async def run(request: web.Request, before: int) -> web.StreamResponse:
        await asyncio.sleep(random.uniform(0, 0.1))
        return web.Response(body=answer.body)

    return run


def test_rows_that_cannot_be_had_are_in_the_ledger_with_their_urls(album: Site, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(album.answers["/0.jpg"].body)  # type: ignore[union-attr]
    album.answers |= {
        "/page.jpg": Answer(200, b"<!DOCTYPE html><html><p>not found</html>"),
        "/path.jpg": Answer(200, b"a.jpg"),  # the name of a file that is there
        "/up.jpg": Answer(200, b"../a.jpg"),
        "/empty.jpg": Answer(200, b""),
        "/noai.jpg": Answer(200, b"x", {"X-Robots-Tag": "noai"}),
        "/inside.jpg": redirect("file:///etc/passwd"),
    }
    bad = ["page", "path", "up", "empty", "noai", "inside", "gone"]
    urls = [*(album.url(f"/{name}.jpg") for name in bad), "file:///etc/passwd"]
    table = jsonl(tmp_path / "t.jsonl", [*rows_of(album), *({"url": url, "caption": "x"} for url in urls)])
    report = make(table, tmp_path / "out")
    assert report.accounts["written"] == PHOTOS
    found = [(line["path"], line["reason"]) for line in left_out(tmp_path / "out")]
    reasons = ["not_an_image"] * 3 + ["empty_file", "opted_out", "refused_address", "http_status", "refused_address"]
    assert found == list(zip(urls, reasons, strict=True))


def test_private_addresses_are_refused_unless_allowed(album: Site, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(album.answers["/0.jpg"].body)  # type: ignore[union-attr]
    table = jsonl(tmp_path / "t.jsonl", [{"url": "a.jpg", "caption": "x"}, *rows_of(album, 2)])
    report = make(table, tmp_path / "out", allow_private_addresses=False)
    assert report.accounts["reasons"] == {"refused_address": 2}
    assert (
        left_out(tmp_path / "out")[0]["detail"] == "address 127.0.0.1 is loopback; --allow-private-addresses allows it"
    )
    assert not album.requests


def test_hashes_are_compared_wherever_the_image_lies(album: Site, tmp_path: Path) -> None:
    images = [album.answers[f"/{number}.jpg"].body for number in range(6)]  # type: ignore[union-attr]
    (tmp_path / "local.jpg").write_bytes(images[5])
    hashes = [
        hashlib.sha256(images[0]).hexdigest(),
        hashlib.md5(images[1]).hexdigest().upper(),
        None,
        hashlib.sha256(b"another").hexdigest(),
        "12ab",
        hashlib.md5(b"another").hexdigest(),
    ]
    rows: list[dict[str, Any]] = [{**row, "sum": one} for row, one in zip(rows_of(album, 6), hashes, strict=True)]
    rows[5]["url"] = "local.jpg"
    report = make(jsonl(tmp_path / "t.jsonl", rows), tmp_path / "out", hash_column="sum", keep=("sum",))
    assert report.accounts["written"] == 3
    found = left_out(tmp_path / "out")
    assert [(line["row"], line["reason"]) for line in found] == [
        (3, "hash_differs"),
        (4, "broken_row"),
        (5, "hash_differs"),
    ]
    right = hashlib.sha256(images[3]).hexdigest()
    assert found[0]["detail"] == (
        f"sha256 of the image's {len(images[3])} bytes is {right}, the table says {hashes[3]}"
    )
    assert found[1]["detail"] == "the hash '12ab' is neither an MD5 (32 digits) nor a SHA-256 (64 digits)"
    with pytest.raises(ConfigError, match=r"no column 'md5' \(hash\)"):
        make(tmp_path / "t.jsonl", tmp_path / "out2", hash_column="md5")
    binary = [{**row, "sum": hashlib.sha256(images[0]).digest()} for row in rows_of(album, 2)]
    pq.write_table(pa.Table.from_pylist(binary), tmp_path / "t.parquet")
    accounts = make(tmp_path / "t.parquet", tmp_path / "out3", hash_column="sum").accounts
    assert accounts["reasons"] == {"hash_differs": 1}


def test_rows_of_one_url_with_other_hashes_are_not_merged(album: Site, tmp_path: Path) -> None:
    image = album.answers["/0.jpg"].body  # type: ignore[union-attr]
    right = hashlib.md5(image).hexdigest()
    hashes = [right, "0" * 32, f" {right.upper()} ", "  ", None, ""]
    row = rows_of(album, 1)[0]
    rows = [{**row, "caption": f"text {number}", "sum": one} for number, one in enumerate(hashes)]
    report = make(jsonl(tmp_path / "t.jsonl", rows), tmp_path / "out", hash_column="sum", max_bad_share=1.0)
    found = [(line["row"], line["reason"]) for line in left_out(tmp_path / "out")]
    assert found[0] == (1, "hash_differs")
    assert (report.accounts["written"], report.accounts["merged"]) == (1, 1)  # rows 0 and 2
    assert found[1:] == [(3, "duplicate_image"), (4, "duplicate_image"), (5, "duplicate_image")]


def test_image_of_several_rows_is_fetched_once(album: Site, tmp_path: Path) -> None:
    rows = rows_of(album, 2)
    rows += [{**rows[0], "caption": f"more {number}"} for number in range(5)]
    report = make(jsonl(tmp_path / "t.jsonl", rows), tmp_path / "out")
    assert (report.accounts["written"], report.accounts["merged"]) == (2, 5)
    assert album.images() == 2


def test_settings_of_opt_outs_are_in_the_manifest_and_others_are_not(album: Site, tmp_path: Path) -> None:
    album.answers["/robots.txt"] = Answer(200, b"User-agent: *\nDisallow: /\n")
    table = jsonl(tmp_path / "t.jsonl", rows_of(album, 3))
    report = make(table, tmp_path / "out", ignore_opt_outs=True, contact="me@lab.example", connections_per_host=3)
    assert report.accounts["written"] == 3
    settings = (Manifest.read(tmp_path / "out").accounts or {})["run"]["settings"]
    assert (settings["ignore_opt_outs"], settings["allow_private_addresses"]) == (True, True)
    assert not {"contact", "connections_per_host"} & set(settings)
    assert album.headers["User-Agent"].endswith(" (+me@lab.example)")
    assert make(table, tmp_path / "out", ignore_opt_outs=True).was_complete
    with pytest.raises(ValueError, match=r"ignore_opt_outs: was true, is false"):
        make(table, tmp_path / "out")


@pytest.mark.parametrize("contact", ["a\nb", "me (home)", " ", "mé@x"])
def test_contact_that_is_no_header_is_an_error(contact: str) -> None:
    with pytest.raises(ValueError, match="must be a URL or a mail address"):
        ConvertConfig(contact=contact)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"group_by": "content"}, "group_by=content"),
        ({"train_tokenizer": 300, "val_share": 0.5}, "train_tokenizer with val_share"),
    ],
)
def test_settings_that_read_images_twice_are_refused(
    album: Site, tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    table = jsonl(tmp_path / "t.jsonl", rows_of(album))
    with pytest.raises(ConfigError, match=rf"line 1: its image is behind a URL, and {what} reads every image twice"):
        make(table, tmp_path / "out", **settings)
    assert not album.requests


def test_duplicates_of_urls_that_cannot_be_merged_are_not_counted_as_differing(album: Site, tmp_path: Path) -> None:
    album.answers["/1.jpg"] = album.answers["/0.jpg"]
    accounts = make(jsonl(tmp_path / "t.jsonl", rows_of(album)), tmp_path / "out").accounts
    assert (accounts["duplicate"], "differing" in accounts) == (1, False)


def test_program_ends_its_output_with_the_reasons(album: Site, tmp_path: Path) -> None:
    rows = [*rows_of(album), {"url": album.url("/gone.jpg"), "caption": "x"}, {"url": "ftp://\x1b/a", "caption": "y"}]
    table = jsonl(tmp_path / "t.jsonl", rows)
    flags = ["--allow-private-addresses", "--max-bad-share", 0.5, "contact=me@lab.example", "connections_per_host=4"]
    stdout, stderr = (process := start(table, tmp_path / "out", *flags)).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert re.fullmatch(
        r"fetched 12 of 14 URLs \(85\.7%\), 0\.0 MB in \d+ s, \d+ a second; "
        r"no image: 1 http_status, 1 refused_address\n",
        stderr,
    ), stderr
    assert "quarantined" in stdout
    assert album.headers["User-Agent"].endswith(" (+me@lab.example)")


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGTERM, 143, TERMINATED),
        (signal.SIGINT, 130, "interrupted\n"),
    ],
)
def test_signal_in_the_middle_ends_the_run_and_a_rerun_is_as_undisturbed(
    album: Site, tmp_path: Path, number: int, status: int, message: str
) -> None:
    table = jsonl(tmp_path / "t.jsonl", rows_of(album))
    late_ones = {path: album.answers[path] for path in ("/7.jpg", "/8.jpg")}

    async def never(request: web.Request, before: int) -> web.StreamResponse:
        await asyncio.sleep(600)
        raise AssertionError

    album.answers |= dict.fromkeys(late_ones, never)
    process = start(table, tmp_path / "out", "--allow-private-addresses")
    wait_until(lambda: album.images() >= PHOTOS, program=process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (status, "")
    assert message in stderr
    assert "Traceback" not in stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".mmdata.lock", ".mmdata-convert"}
    album.answers |= late_ones
    make(table, tmp_path / "out", max_bad_share=0.05)
    make(table, tmp_path / "undisturbed", max_bad_share=0.05)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
