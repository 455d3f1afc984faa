"""A conversion has the same bytes whoever makes it and wherever it is killed; every input row is accounted for."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
import yaml

import mmdata
from tests.programs import PATIENCE_S

from .conftest import (
    FAULTS,
    GOOD,
    Corpus,
    Site,
    content,
    counts,
    kill_when,
    left_out,
    photo,
    run_mmdata,
)

FLAGS = ["keep=[boxes]", "--train-tokenizer", 300, "--shard-rows", 16, "--max-bad-share", 0.2]
"""Those of the corpus's own conversion."""
PHOTOS = 100
MOST_BYTES = 2**28  # of endless bodies of 1 GiB; a system's socket buffers alone may take 40 MB an answer
"""Bytes of an endless answer that may be on their way when a connection is closed."""


def test_every_input_row_is_written_merged_or_left_out_with_its_reason(corpus: Corpus):
    found, rows = counts(corpus.printed), corpus.table.read_text().splitlines()
    bad = left_out(corpus.shards)
    assert Counter(row["reason"] for row in bad) == Counter([*FAULTS, "broken_row"])
    assert {row["reason"]: row["path"] for row in bad if row["path"]} == {r: f["image"] for r, f in FAULTS.items()}
    assert (found["in"], found["written"], found["merged"]) == (len(rows), GOOD, 1)
    assert found["in"] == found["written"] + found["merged"] + len(bad)
    assert {name: found[name] for name in [*FAULTS, "broken_row"]} == dict.fromkeys([*FAULTS, "broken_row"], 1)


def test_samples_are_the_files_and_captions_of_the_table(corpus: Corpus):
    index = mmdata.Index.open(corpus.shards)
    rows = [json.loads(line) for line in corpus.table.read_text().splitlines()[:GOOD]]
    rows[1]["captions"].append("another caption of it")
    images = [(corpus.table.parent / row["image"]).read_bytes() for row in rows]
    assert [(sample.image_bytes, sample.captions) for sample in map(index.__getitem__, range(len(index)))] == [
        (image, row["captions"]) for image, row in zip(images, rows, strict=True)
    ]


def test_tars_are_plain_and_webdataset_reads_the_same_pairs(corpus: Corpus, tmp_path: Path):
    index = mmdata.Index.open(corpus.shards)
    tars = [str(tar) for tar in sorted(corpus.shards.glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in samples] == [index[row].key for row in range(GOOD)]
    for row, sample in enumerate(samples):
        (image,) = (sample[extension] for extension in ("jpg", "png", "webp") if extension in sample)
        assert image == index[row].image_bytes
        captions = json.loads(sample["json"])["captions"] if "json" in sample else [sample["txt"].decode()]
        assert captions == index[row].captions
    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        for sample in samples[:20]:
            writer.write({name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")})
    before = (tmp_path / "theirs.tar").read_bytes()
    run_mmdata("index", tmp_path)
    assert (tmp_path / "theirs.tar").read_bytes() == before
    theirs = mmdata.Index.open(tmp_path)
    assert [(theirs[row].key, theirs[row].captions, theirs[row].image_bytes) for row in range(20)] == [
        (index[row].key, index[row].captions, index[row].image_bytes) for row in range(20)
    ]
    assert run_mmdata("verify", tmp_path).stdout.startswith("ok")


def test_bytes_are_the_same_with_several_workers(corpus: Corpus, tmp_path: Path):
    run_mmdata("convert", corpus.table, tmp_path / "out", *FLAGS, "--workers", 3)
    assert content(tmp_path / "out") == content(corpus.shards)


def num_tars(folder: Path) -> int:
    """Tars in a folder whose files come and go meanwhile, which `Path.rglob` does not bear."""
    return sum(name.endswith(".tar") for _, _, names in os.walk(folder) for name in names)


def test_bytes_are_the_same_after_kills(corpus: Corpus, tmp_path: Path):
    out = tmp_path / "out"
    words = ["convert", corpus.table, out, *FLAGS, "--workers", 2]
    for tars in (1, 3):
        kill_when(lambda tars=tars: num_tars(out) >= tars, words)
    run_mmdata(*words)
    assert content(out) == content(corpus.shards)


def test_jobs_that_share_an_output_give_the_bytes_of_one(corpus: Corpus, tmp_path: Path):
    flags = ["--tokenizer", corpus.shards / "tokenizer", "--shard-rows", 7, "--max-bad-share", 0.2, "--val-share", 0.3]
    share = re.search(r"\[(--[a-z-]+) K/N\]", run_mmdata("convert", "--help").stdout)
    assert share
    run_mmdata("convert", corpus.table, tmp_path / "one", *flags, "--workers", 1)
    for job in (3, 1, 2):
        run_mmdata("convert", corpus.table, tmp_path / "out", *flags, share[1], f"{job}/3", "--workers", 1)
        assert not list((tmp_path / "out").rglob("manifest.json"))
    printed = run_mmdata("convert", corpus.table, tmp_path / "out", *flags, "--finish").stdout
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert counts(printed)["written"] == GOOD
    train, val = (mmdata.Index.open(tmp_path / "out" / name) for name in ("train", "val"))
    assert len(train) + len(val) == GOOD
    assert min(len(train), len(val)) > 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")
def test_bytes_are_the_same_through_ray(corpus: Corpus, tmp_path: Path):
    run_mmdata("convert", corpus.table, tmp_path / "out", *FLAGS, "--engine", "ray", "--workers", 2)
    assert content(tmp_path / "out") == content(corpus.shards)


def test_too_many_bad_rows_publish_nothing(corpus: Corpus, tmp_path: Path):
    flags = ["--shard-rows", 16, "--max-bad-share", 0.05, "--workers", 1]
    done = run_mmdata("convert", corpus.table, tmp_path / "out", *flags, check=False)
    assert done.returncode != 0
    assert "missing_image" in done.stderr
    assert not (tmp_path / "out/__mmdata__/manifest.json").exists()
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.fixture
def album(serve: Callable[[Path], Site], tmp_path: Path) -> Site:
    """A site of `PHOTOS` photos."""
    (tmp_path / "site").mkdir()
    for number in range(PHOTOS):
        (tmp_path / f"site/{number}.jpg").write_bytes(photo(8, 12, seed=500 + number))
    return serve(tmp_path / "site")


def table_of(path: Path, site: Site, names: list[str]) -> list[Any]:
    """A table of URLs, and the words that convert it."""
    rows = [{"url": f"{site.url}/{name}", "caption": f"photo {name}"} for name in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = path.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump({"max_image_bytes": 1_000_000, "shard_rows": 4}))
    return ["convert", path, "--recipe", recipe, "--allow-private-addresses"]


def test_conversion_of_urls_that_is_killed_in_the_middle_goes_on_and_has_the_same_bytes(album: Site, tmp_path: Path):
    last, out = f"/{PHOTOS - 1}.jpg", tmp_path / "out"
    command, table, *flags = table_of(tmp_path / "urls.jsonl", album, [f"{number}.jpg" for number in range(PHOTOS)])
    run_mmdata(command, table, tmp_path / "whole", *flags)
    release = threading.Event()
    album.answers[last] = lambda handler: release.wait(PATIENCE_S)
    killed = kill_when(lambda: album.asked[last] > 1 and num_tars(out) > 3, [command, table, out, *flags])
    assert killed == -signal.SIGKILL
    assert not (out / "__mmdata__").exists()
    release.set()
    del album.answers[last]
    before = album.asked.copy()
    run_mmdata(command, table, out, *flags)
    assert content(out) == content(tmp_path / "whole")
    assert len(mmdata.Index.open(out)) == PHOTOS
    assert last in album.asked - before
    assert "/0.jpg" not in album.asked - before


def endless(handler: Any, *, status: int = 200, **headers: str) -> None:
    """A body that begins as a JPEG and goes on for 1 GiB, if the client takes it."""
    handler.start(status, **headers)
    path, piece = handler.path.partition("?")[0], photo(24, 32, seed=1)[:600] + random.Random(1).randbytes(2**16)
    while handler.server.sent[path] < 2**30:
        handler.server.sent[path] += handler.connection.send(piece)


def test_hostile_servers_cost_their_rows_and_are_read_within_bounds(album: Site, tmp_path: Path):
    whole = photo(24, 32, seed=1)
    page = b"<!doctype html><title>Log in</title>"
    album.answers = {
        "/endless.jpg": endless,
        "/lies-large.jpg": lambda handler: endless(handler, Content_Length=str(10**12)),
        "/lies-small.jpg": lambda handler: handler.reply(200, whole, Content_Length=str(len(whole) // 2)),
        "/circle.jpg": lambda handler: handler.reply(302, b"", Location="/circle.jpg"),
        "/file.jpg": lambda handler: handler.reply(302, b"", Location="file:///etc/passwd"),
        "/page.jpg": lambda handler: handler.reply(200, page, Content_Type="image/jpeg"),
        "/packed.jpg": lambda handler: handler.reply(200, whole, Content_Encoding="gzip"),
    }
    reasons = {
        "/endless.jpg": "image_too_large",
        "/lies-large.jpg": "image_too_large",
        "/lies-small.jpg": "bad_answer or corrupt_image",  # the other bytes may come before the connection is closed
        "/circle.jpg": "bad_answer",
        "/file.jpg": "refused_address",
        "/page.jpg": "not_an_image",
        "/packed.jpg": "bad_answer",
        "/gone.jpg": "http_status",
    }
    names = [*reasons, *(f"/{number}.jpg" for number in range(4))]
    command, *words = table_of(tmp_path / "urls.jsonl", album, [name[1:] for name in names])
    printed = run_mmdata(command, words[0], tmp_path / "out", *words[1:]).stdout
    found = {"/" + row["path"].rpartition("/")[2]: row["reason"] for row in left_out(tmp_path / "out")}
    assert found.keys() == reasons.keys()
    assert all(reason in reasons[path].split(" or ") for path, reason in found.items()), found
    assert (counts(printed)["in"], counts(printed)["written"]) == (len(names), 4)
    assert all(sent < MOST_BYTES for sent in album.sent.values())
    assert set(album.sent) == {"/endless.jpg", "/lies-large.jpg"}
    assert max(album.asked.values()) <= 20
