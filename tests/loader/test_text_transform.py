"""`data.text_transform`: a user's function of captions, the same in threads, processes, on ranks and after a resume."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmdata
from mmdata.errors import ConfigError, DataError
from mmdata.inspect.replay import find_step, replay
from mmdata.loader import source
from mmdata.loader.workers.threads import ThreadedBatches
from mmdata.seeding import Purpose, random_raw
from mmdata.text.tokenizer import Tokenizer

from .conftest import Corpus, texts_of
from .test_caption_sources import recaption, write_table
from .worker_processes import transforms

TEXTS = """
    def change(text, rng):
        words = [word for word in text.split() if rng.random() < 0.7]
        return " ".join(["look:", *words, *words[: rng.randrange(9)]])

    def prefix(text, rng):
        return "a dog a dog " + text

    def long_ago(text, rng):
        if len(text) > 170:
            raise ValueError("too long")
        return text

    def never(text, rng):
        return 5
"""


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transforms(tmp_path, monkeypatch, TEXTS)


def change(text: str, rng: random.Random) -> str:
    words = [word for word in text.split() if rng.random() < 0.7]
    return " ".join(["look:", *words, *words[: rng.randrange(9)]])


CHANGE: dict[str, Any] = {"text_transform": "my_transforms:change"}
PREFIX: dict[str, Any] = {"text_transform": "my_transforms:prefix"}


def test_a_row_has_the_text_of_its_own_generator(corpus: Corpus):
    with corpus.loader() as loader:
        captions = texts_of(loader, 1)
    with corpus.loader(**CHANGE) as loader:
        texts = texts_of(loader, 1)
    assert len(texts) == 50
    for row in range(50):
        raw = random_raw(1, seed=5, epoch=1, purpose=Purpose.TEXT_TRANSFORM, position=row)
        assert texts[row] == change(captions[row], random.Random(int(raw[0])))


def test_tokens_are_those_of_the_text_cut_to_the_batch(corpus: Corpus, caplog: pytest.LogCaptureFixture):
    tokenizer: Any = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    cut = 0
    with corpus.loader(**PREFIX) as loader:
        for batch in loader:
            length = batch["input_ids"].shape[1]
            counts = np.array(tokenizer.count(batch["captions"]))[batch["valid"].numpy()]
            cut += (np.minimum(counts, 32) > length).sum()
            tokenizer.max_length = length
            expected = tokenizer.encode(batch["captions"], length)[0][batch["valid"].numpy()]
            assert np.array_equal(batch["input_ids"][batch["valid"]].numpy(), expected)
        assert loader.stats.cut == cut > 0
    (said,) = [one for one in caplog.messages if "text_transform" in one]
    assert said.startswith("text_transform 'my_transforms:prefix': a text was cut to the text length of its batch")


def test_the_function_changes_what_a_source_gives(corpus: Corpus, tmp_path: Path):
    sources = {"join": write_table(corpus, tmp_path / "recaps.parquet"), "captions": {"join:recap": 1.0}}
    with corpus.loader(**PREFIX, **sources) as loader:
        assert texts_of(loader) == {row: f"a dog a dog {recaption(row)}" for row in range(50)}


def test_a_row_whose_text_fails_is_masked(corpus: Corpus):
    settings = {"text_transform": "my_transforms:long_ago", "max_bad_share": 1.0}
    with corpus.loader(**settings) as loader, corpus.loader(**settings, num_processes=1) as process:
        batches = list(loader)
        list(process)
        assert list(loader.ledger) == list(process.ledger)
    bad = {entry.row for entry in loader.ledger}
    assert 0 < len(bad) < 50
    assert {(e.stage, e.reason, e.detail) for e in loader.ledger} == {
        ("caption", "text_transform_failed", "ValueError: too long")
    }
    for batch in batches:
        for row, valid, text in zip(batch["rows"].tolist(), batch["valid"].tolist(), batch["captions"], strict=True):
            assert valid == (row >= 0 and row not in bad)
            assert (text == "") == (not valid)


def test_a_function_that_always_fails_ends_the_run(corpus: Corpus):
    with (
        corpus.loader(text_transform="my_transforms:never") as loader,
        pytest.raises(
            DataError,
            match=r"^50 of 50 rows could not be used .*: returned int, .* data.text_transform raised",
        ),
    ):
        list(loader)
    some = corpus.loader(text_transform="my_transforms:long_ago")
    with pytest.raises(DataError, match=r"data.text_transform raised or gave something else than a text; data.loading"):
        list(some)


def test_a_process_cannot_import_the_notebook(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys.modules["__main__"], "mine", lambda text, rng: f"{text} {rng.random()}", raising=False)
    message = (
        r"text_transform '__main__:mine': data\.loading\.num_processes is 1, and another process cannot import it "
        r"by its name: it is defined in the program itself, .*Define it at the top of a file of its own, or set"
    )
    with pytest.raises(ConfigError, match=message):
        corpus.loader(num_processes=1, text_transform="__main__:mine")
    with pytest.raises(ConfigError, match=r"text_transform '.*<lambda>': data\.loading\.num_processes is 1"):
        corpus.loader(num_processes=1, text_transform=lambda text, rng: text)
    monkeypatch.setattr(source, "has_gpu", lambda: True)
    caplog.set_level(logging.INFO, "mmdata")
    with corpus.loader(text_transform="__main__:mine") as loader:
        assert isinstance(loader._source, ThreadedBatches)
        assert next(iter(loader))["valid"].all()
    assert "; another process cannot import text_transform '__main__:mine', so threads make" in caplog.messages[0]


def test_a_replay_shows_the_text(corpus: Corpus):
    with corpus.loader(**CHANGE) as loader:
        texts = texts_of(loader, 1)
        for row in (0, 7, 30):
            found = replay(loader.builder, find_step(loader.plan, row, 1))
            assert found.caption == found.made.batch["captions"][0] == texts[row]


def test_a_stream_has_texts_too(corpus: Corpus):
    for changes, expected in (({}, True), ({"text_buckets": [32]}, False)):
        stream = mmdata.stream(corpus.folder / "shards", {**corpus.settings, **PREFIX, **changes})
        texts = [text for batch in stream for text in batch["captions"] if text]
        assert len(texts) == 50
        assert all(text.startswith("a dog a dog picture") for text in texts)
        assert (stream.stats.cut > 0) == expected


def test_one_length_for_all_batches_leaves_room_for_longer_texts(corpus: Corpus):
    with corpus.loader(**PREFIX) as loader, corpus.loader(**PREFIX, text_buckets=[32]) as longer:
        list(loader)
        list(longer)
        assert loader.stats.cut > 0 == longer.stats.cut
