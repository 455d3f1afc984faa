"""Shards behind HTTP, shards of others and streams give the rows of the local folder; bad servers end in an error."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import mmdata

from .conftest import GOOD, Batch, Corpus, Site, assert_same, global_batches, loaders, run_mmdata
from .test_convert import MOST_BYTES, endless


@pytest.fixture(scope="module")
def local(corpus: Corpus) -> list[Batch]:
    """The batches of the shards in the local folder."""
    return global_batches(loaders(corpus.settings(shards=str(corpus.shards))))


def behind(corpus: Corpus, site: Site, cache: Path, **loading: Any) -> dict[str, Any]:
    """Settings of the shards behind a URL."""
    return corpus.settings(shards=site.url, loading={"cache_dir": str(cache), **loading})


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_over_http_are_those_of_the_folder(
    corpus: Corpus, local: list[Batch], serve: Callable[[Path], Site], tmp_path: Path, world_size: int
):
    site = serve(corpus.shards)
    ranks = loaders(behind(corpus, site, tmp_path / "cache", num_workers=2), world_size)
    assert_same(global_batches(ranks), local)
    for loader in ranks:
        loader.close()
    asked = site.asked.copy()
    again = loaders(behind(corpus, site, tmp_path / "cache"))
    assert_same(global_batches(again), local)
    assert not [path for path in site.asked - asked if path.endswith(".tar")]


def test_tars_of_others_behind_urls_give_the_batches_of_the_same_tars_on_a_disk(
    corpus: Corpus, serve: Callable[[Path], Site], tmp_path: Path
):
    tars = tmp_path / "tars"
    tars.mkdir()
    for tar in corpus.shards.glob("*.tar"):
        shutil.copy(tar, tars)
    tokenizer = ["--tokenizer", corpus.shards / "tokenizer"]
    site = serve(tars)
    run_mmdata("index", f"{site.url}/00000{{0..3}}.tar", "--out", tmp_path / "far", *tokenizer)
    run_mmdata("index", tars, "--out", tmp_path / "near", *tokenizer)
    near = loaders(corpus.settings(shards=str(tmp_path / "near")))
    far = loaders(corpus.settings(shards=str(tmp_path / "far"), loading={"cache_dir": str(tmp_path / "cache")}))
    assert_same(global_batches(far), global_batches(near))
    assert run_mmdata("verify", tmp_path / "near").stdout.startswith("ok")


def test_stream_gives_each_sample_once_with_the_pixels_and_tokens_of_the_loader(corpus: Corpus):
    one_shape = {"image_buckets": None, "image_size": 32, "text_buckets": [77], "transform": "eval"}
    settings = corpus.settings(shards=str(corpus.shards), **one_shape)
    index = mmdata.Index.open(corpus.shards)
    captions = {index[row].key: set(index[row].captions) for row in range(GOOD)}
    pixels, tokens = {}, {}
    (loader,) = loaders(settings)
    for batch in chain(loader, loader, loader):  # a row of several captions has each of them in turn
        for place, key in enumerate(batch["keys"]):
            pixels[key] = batch["pixel_values"][place].tolist()
            tokens[batch["captions"][place]] = batch["input_ids"][place].tolist()
    found: list[str] = []
    for batch in mmdata.stream(sorted(map(str, corpus.shards.glob("*.tar"))), settings):
        for place, key in enumerate(batch["keys"]):
            if batch["valid"][place]:
                assert batch["captions"][place] in captions[key]
                assert batch["pixel_values"][place].tolist() == pixels[key]
                assert batch["input_ids"][place].tolist() == tokens[batch["captions"][place]]
                found.append(key)
    assert sorted(found) == sorted(captions)


def test_bad_servers_end_the_loader_with_an_error_that_names_the_shard(
    corpus: Corpus, serve: Callable[[Path], Site], tmp_path: Path
):
    site, shard = serve(corpus.shards), "/000001.tar"
    size = (corpus.shards / "000001.tar").stat().st_size
    page = b"<!doctype html><title>Log in</title>"
    answers: dict[str, Callable[[Any], None]] = {
        "endless": endless,
        "endless part": lambda handler: endless(handler, status=206, Content_Range=f"bytes 0-{size - 1}/{size}"),
        "lie": lambda handler: endless(handler, Content_Length=str(10**12)),
        "page": lambda handler: handler.reply(200, page, Content_Type="text/html"),
        "circle": lambda handler: handler.reply(302, b"", Location=shard),
        "other size": lambda handler: handler.reply(200, bytes(size + 512)),
        "other bytes": lambda handler: handler.reply(200, bytes(size)),
        "gone": lambda handler: handler.reply(404, b"none"),
    }
    for number, (kind, answer) in enumerate(answers.items()):
        site.answers[shard] = answer
        site.sent.clear()
        (loader,) = loaders(behind(corpus, site, tmp_path / f"cache{number}", max_bad_share=1.0))
        with pytest.raises((ValueError, RuntimeError), match=r"000001\.tar"):
            list(loader)
        assert site.sent[shard] < MOST_BYTES, kind
        loader.close()
    del site.answers[shard]
    good = loaders(behind(corpus, site, tmp_path / "cache"))
    assert len(global_batches(good)) == len(good[0])


def test_bad_servers_end_an_indexing_with_an_error_that_names_the_url(serve: Callable[[Path], Site], tmp_path: Path):
    site = serve(tmp_path)
    site.answers = {
        "/page.tar": lambda handler: handler.reply(200, b"<html></html>", Content_Type="text/html"),
        "/circle.tar": lambda handler: handler.reply(302, b"", Location="/circle.tar"),
    }
    for path in site.answers:
        done = run_mmdata("index", f"{site.url}{path}", "--out", tmp_path / "out", check=False)
        assert done.returncode != 0
        assert path in done.stderr
        assert not (tmp_path / "out/__mmdata__/manifest.json").exists()
