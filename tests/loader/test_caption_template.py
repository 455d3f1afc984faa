"""`data.caption_template` and `data.caption_dropout`: texts that are planned, and the same however they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmdata
from mmdata import Batch, Loader, cli
from mmdata.cli.data.plan import plan_of
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.hashing import hash64
from mmdata.text.tokenizer import Tokenizer
from mmdata.text.transform import TextTransform

from .conftest import Corpus, texts_of
from .test_caption_sources import recaption, write_table
from .worker_processes import transforms

Same = Callable[[Batch, Batch], bool]
TEMPLATE = "a small photo of {}, near the street"


@pytest.fixture(scope="module")
def written(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose captions are written in the template."""
    folder = tmp_path_factory.mktemp("written") / "shards"
    samples = [replace(one, captions=[TEMPLATE.replace("{}", text) for text in one.captions]) for one in corpus.samples]
    corpus.write_beside(folder, samples)
    return folder


def _read(batch: Any) -> Any:
    """A batch without the hashes of its captions, which know nothing of the template."""
    return {name: value for name, value in batch.items() if name != "caption_hash"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_buckets": 3, "image_size": 48, "patch_size": 8},
        {"text_buckets": [32]},
        {"captions": "every"},
        {"select": "key < '00031'"},
    ],
)
def test_batches_are_those_of_captions_written_in_the_template(
    corpus: Corpus, same: Same, written: Path, changes: dict[str, Any]
):
    settings = {**changes}
    with (
        corpus.loader(caption_template=TEMPLATE, **settings) as ours,
        corpus.loader(shards=str(written), **settings) as other,
    ):
        for epoch in (0, 1):
            ours.set_epoch(epoch)
            other.set_epoch(epoch)
            batches = list(ours)
            assert len(batches) > 1
            assert all(same(_read(one), _read(other)) for one, other in zip(batches, other, strict=True))


def test_a_stream_has_the_template_too(corpus: Corpus, same: Same, written: Path):
    ours = mmdata.stream(corpus.folder / "shards", {**corpus.settings, "caption_template": TEMPLATE})
    other = mmdata.stream(written, corpus.settings)
    assert all(same(_read(one), _read(other)) for one, other in zip(ours, other, strict=True))


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_captions_of_tables_are_counted_in_the_template(corpus: Corpus, tmp_path: Path, num_processes: int):
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    sources = {"join": write_table(corpus, tmp_path / "recaps.parquet"), "captions": {"join:recap": 1.0}}
    settings = {**sources, "caption_template": TEMPLATE, "num_processes": num_processes}
    with corpus.loader(**settings) as loader:
        assert texts_of(loader) == {row: TEMPLATE.replace("{}", recaption(row)) for row in range(50)}
        bounds = sorted({bucket.length for bucket in loader.plan.policy.buckets})
        loader.set_epoch(1)
        for batch, step in zip(loader, loader.plan.steps(1), strict=True):
            counts = np.minimum(tokenizer.count(batch["captions"]), 32)[step.rows >= 0]
            assert step.bucket.length == min(bound for bound in bounds if bound >= counts.max())


def run_index(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    return cli.main(["index", *map(str, words)])


def test_an_index_may_hold_the_lengths_in_the_template(
    corpus: Corpus, tmp_path: Path, same: Same, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with corpus.loader(caption_template=TEMPLATE) as loader:
        counted = list(loader)
    shards, tokenizer = corpus.folder / "shards", corpus.folder / "tokenizer"
    (said,) = [one for one in caplog.messages if "caption lengths" in one]
    assert said == (
        f"50 rows of '{shards}': caption lengths are not in the index for tokenizer '{tokenizer}' and caption_template "
        f"'{TEMPLATE}' and are counted now; `mmdata index {shards} --tokenizer {tokenizer} --caption-template "
        f"'{TEMPLATE}' --out FOLDER` makes an index that holds them: then set data.shards to FOLDER"
    )
    caplog.clear()
    out = tmp_path / "index"
    assert run_index(monkeypatch, shards, "--tokenizer", tokenizer, "--caption-template", TEMPLATE, "--out", out) == 0
    with corpus.loader(shards=str(out), caption_template=TEMPLATE) as loader:
        assert all(same(one, other) for one, other in zip(loader, counted, strict=True))
    assert not [one for one in caplog.messages if "caption lengths" in one]
    # The counts are of this template: without it they are counted anew.
    with corpus.loader(shards=str(out)) as loader, corpus.loader() as plain:
        assert [batch["input_ids"].shape for batch in loader] == [batch["input_ids"].shape for batch in plain]


@pytest.mark.parametrize("words", [["--caption-template", "a {}"], ["--tokenizer", "clip", "--caption-template", "a"]])
def test_a_template_that_cannot_be_counted_is_refused(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
):
    assert run_index(monkeypatch, corpus.folder / "shards", *words) == 2
    assert f"--caption-template '{words[-1]}': needs --tokenizer, which counts, and {{}} " in capsys.readouterr().err


@pytest.mark.parametrize("template", ["a photo of", "{} and {}", "", "a {lang} {}"])
def test_a_template_without_one_place_is_refused(corpus: Corpus, template: str):
    with pytest.raises(ConfigError, match=r"caption_template.*: must hold \{\} once, and no other braces: got '"):
        corpus.loader(caption_template=template)


def test_a_plan_of_shards_alone_asks_for_the_tokenizer(corpus: Corpus):
    shards, overrides = str(corpus.folder / "shards"), [f"data.caption_template={TEMPLATE!r}"]
    with pytest.raises(ConfigError, match=r"data\.caption_template changes the lengths of captions: give data"):
        plan_of(shards, overrides)
    assert plan_of(shards, [*overrides, f"data.tokenizer={corpus.folder / 'tokenizer'}"]).plan.num_rows == 50


def test_negative_captions_stand_in_the_template(corpus: Corpus, tmp_path: Path):
    file = tmp_path / "negatives.parquet"
    keys = [one.key for one in corpus.samples]
    pyarrow.parquet.write_table(pa.table({"key": keys, "captions": [[f"a cat {key}"] for key in keys]}), file)
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    with corpus.loader(caption_template=TEMPLATE, negative_captions=str(file)) as loader:
        for batch in loader:
            for i, key in enumerate(batch["keys"]):
                if batch["valid"][i]:
                    tokens = batch["negative_input_ids"][i][batch["negative_attention_mask"][i].bool()].tolist()
                    text = TEMPLATE.replace("{}", f"a cat {key}")
                    assert tokens == tokenizer.encode([text], 32)[0][0][: len(tokens)].tolist()
                    assert len(tokens) == tokenizer.count([text])[0]
                    # A wrong caption that is another row's true one is found by its hash, which has no template.
                    assert batch["negative_caption_hash"][i] == hash64(f"a cat {key}".encode())


def test_an_evaluation_has_the_template_and_no_dropout(corpus: Corpus):
    settings = {"caption_template": TEMPLATE, "caption_dropout": 0.5, "val": {"share": 0.5}}
    data = evaluation_data(DataConfig.model_validate({**corpus.settings, **settings}))
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    with Loader.from_config(data, rank=0, world_size=1) as loader:
        texts = texts_of(loader)
        assert all(text.startswith("a small photo of picture ") for text in texts.values())
        everything = loader.all_captions(np.array(sorted(texts)))
        row = int(everything.rows[0])
        tokens = everything.input_ids[0][everything.attention_mask[0].bool()].tolist()
        listed = [TEMPLATE.replace("{}", text) for text in corpus.samples[row].captions]
        assert tokens in [tokenizer.encode([text], 32)[0][0].tolist()[: len(tokens)] for text in listed]


# Dropout

DROPPED: dict[str, Any] = {"caption_dropout": 0.4, "caption_template": TEMPLATE}


def dropped(rows: int, epoch: int, probability: float, seed: int) -> np.ndarray:
    transform = TextTransform(dropout=probability, seed=seed)
    return np.array([transform.is_dropped(number=row, epoch=epoch) for row in range(rows)])


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5, 0.9])
def test_rows_are_dropped_within_binomial_bounds(probability: float):
    found = np.stack([dropped(4000, epoch, probability, seed=3) for epoch in range(5)])
    deviation = np.sqrt(found.size * probability * (1 - probability))
    assert abs(found.sum() - found.size * probability) <= 4 * deviation
    for one, other in ((found[:-1], found[1:]), (found[:, :-1], found[:, 1:])):
        both, expected = (one & other).sum(), probability**2
        assert abs(both - one.size * expected) <= 5 * np.sqrt(one.size * expected * (1 - expected))


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 2**40), st.integers(0, 2**20 - 1), st.integers(-9, 9))
def test_a_row_that_is_dropped_is_dropped_at_any_higher_probability(
    one: float, other: float, number: int, epoch: int, seed: int
):
    low, high = (
        TextTransform(dropout=probability, seed=seed).is_dropped(number=number, epoch=epoch)
        for probability in sorted((one, other))
    )
    assert low <= high
    text = TextTransform(dropout=one, template="a {}", seed=seed)("b", number=number, epoch=epoch)
    assert text in ("", "a b")
    assert TextTransform(dropout=0.0)("b", number=number, epoch=epoch) == "b"


def test_a_dropped_caption_is_empty_and_stays_in_its_batch(corpus: Corpus):
    empty = Tokenizer.load(corpus.folder / "tokenizer").encode([""], 2)[0][0].tolist()
    with corpus.loader(**DROPPED) as loader, corpus.loader(caption_template=TEMPLATE) as plain:
        loader.set_epoch(3)
        plain.set_epoch(3)
        seen = 0
        for batch, other in zip(loader, plain, strict=True):
            assert batch["rows"].tolist() == other["rows"].tolist()
            assert batch["input_ids"].shape == other["input_ids"].shape
            for i, row in enumerate(batch["rows"].tolist()):
                if row < 0:
                    continue
                if dropped(50, 3, 0.4, seed=5)[row]:
                    seen += 1
                    assert batch["captions"][i] == ""
                    assert batch["input_ids"][i][batch["attention_mask"][i].bool()].tolist() == empty
                    assert batch["caption_hash"][i] == hash64(b"")
                    assert batch["valid"][i]
                else:
                    assert torch.equal(batch["input_ids"][i], other["input_ids"][i])
                    assert batch["caption_hash"][i] != hash64(b"")
        assert 10 < seen < 30


def test_a_dropout_of_every_caption_is_refused(corpus: Corpus):
    with pytest.raises(ConfigError, match=r"caption_dropout': .*; got 1\.0"):
        corpus.loader(caption_dropout=1.0)


def test_a_function_sees_captions_in_the_template_and_no_dropped_ones(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    transforms(tmp_path, monkeypatch, "def mark(text, rng):\n    return '<' + text + '>'\n")
    with corpus.loader(**DROPPED, text_transform="my_transforms:mark") as loader:
        texts = texts_of(loader)
    for row, text in texts.items():
        if dropped(50, 0, 0.4, seed=5)[row]:
            assert text == ""
        else:
            assert text in [f"<{TEMPLATE.replace('{}', caption)}>" for caption in corpus.samples[row].captions]


def test_a_stream_drops_the_same_samples_in_any_order(corpus: Corpus):
    def found(**changes: Any) -> set[str]:
        stream = mmdata.stream(corpus.folder / "shards", {**corpus.settings, **DROPPED, **changes})
        return {
            key
            for batch in stream
            for key, text, valid in zip(batch["keys"], batch["captions"], batch["valid"].tolist(), strict=True)
            if valid and not text
        }

    assert 10 < len(found()) < 30
    assert found() == found(shuffle=False)
