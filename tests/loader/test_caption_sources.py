"""`data.captions` as sources with probabilities: captions of the shards, and of a joined table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mmdata import Loader
from mmdata.cli.data.plan import plan_of
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError, DataError
from mmdata.plan.from_config import build_plan
from mmdata.tables.table import take_rows
from mmdata.text.tokenizer import Tokenizer
from tests.joins import load

from .conftest import WORDS, Corpus

ORDER = np.random.default_rng(1).permutation(50).tolist()


def recaption(row: int) -> str:
    return f"recaption {row} " + " ".join(np.random.default_rng(row).choice(WORDS, row % 30 + 1))


def several(row: int) -> list[str]:
    """0 to 3 captions; that of a row with none is null, every second time an empty list."""
    return [f"several {row} {number} " + "tree " * (row % 11) for number in range(row % 4)]


def write_table(corpus: Corpus, file: Path, rows: list[int] = ORDER, **columns: Any) -> list[dict[str, Any]]:
    """A table of captions of some rows, as `data.join`."""
    captions = {
        "recap": pa.array([recaption(row) for row in rows], pa.string()),
        "several": pa.array([several(row) or None for row in rows], pa.list_(pa.string())),
        "score": [row / 50 for row in rows],
    }
    return [{"table": corpus.table(file, rows, **captions, **columns)}]


BOTH = {"shards": 0.4, "join:recap": 0.35, "join:several": 0.25}


@pytest.fixture
def mixed(corpus: Corpus, tmp_path: Path) -> dict[str, Any]:
    """Settings of three sources."""
    return {"join": write_table(corpus, tmp_path / "recaps.parquet"), "captions": BOTH}


def texts_of(loader: Loader, epochs: int = 1) -> dict[tuple[int, int], str]:
    """The caption of each row in each epoch: (row, epoch) -> text."""
    found: dict[tuple[int, int], str] = {}
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            rows, texts = batch["rows"].tolist(), batch["captions"]
            found |= {(row, epoch): text for row, text in zip(rows, texts, strict=True) if row >= 0}
    return found


def test_each_row_has_a_caption_of_one_of_its_sources(corpus: Corpus, mixed: dict[str, Any]):
    with corpus.loader(**mixed) as loader:
        found = texts_of(loader, epochs=40)
    assert len(found) == 50 * 40
    seen = {row: {text for (of, _), text in found.items() if of == row} for row in range(50)}
    # Every caption of 40 draws; the least likely, one of three of a source of 0.25, is missed with (11/12)^40 = 3 %.
    everything = {row: {*corpus.samples[row].captions, recaption(row), *map(str.strip, several(row))} for row in seen}
    assert all(seen[row] <= everything[row] for row in seen)
    assert sum(map(len, seen.values())) > 0.95 * sum(map(len, everything.values()))


@pytest.mark.parametrize("changes", [{}, {"text_buckets": [32]}, {"select": "key < '00031'"}])
def test_the_planned_length_is_that_of_the_text(corpus: Corpus, mixed: dict[str, Any], changes: dict[str, Any]):
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    with corpus.loader(**mixed, **changes) as loader:
        plan = loader.plan
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            for batch, step in zip(loader, plan.steps(epoch), strict=True):
                counts = [min(count, 32) for count in tokenizer.count(batch["captions"])]
                real = [count for count, row in zip(counts, batch["rows"].tolist(), strict=True) if row >= 0]
                masks = batch["attention_mask"].sum(dim=1)[batch["rows"] >= 0].tolist()
                assert masks == real
                assert batch["valid"].tolist() == [row >= 0 for row in batch["rows"].tolist()]
                if not changes:
                    planned = plan.rows.shapes(step.rows[step.rows >= 0], epoch).length
                    assert np.minimum(planned, 32).tolist() == real


def test_counts_of_buckets_are_those_of_the_drawn_captions(corpus: Corpus, mixed: dict[str, Any]):
    with corpus.loader(**mixed) as loader:
        lengths = [sorted({batch["input_ids"].shape[1] for batch in loader}) for _ in range(3)]
        assert len(lengths[0]) > 1
        assert all(set(one) <= {bucket.length for bucket in loader.plan.policy.buckets} for one in lengths)


def test_rows_without_a_recaption_keep_their_own(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    join = write_table(corpus, tmp_path / "recaps.parquet", ORDER[:30])
    with corpus.loader(join=join, captions={"shards": 0.0, "join:recap": 1.0}) as loader:
        found = texts_of(loader)
    for row in range(50):
        assert found[row, 0] in ([recaption(row)] if row in ORDER[:30] else corpus.samples[row].captions)
    assert caplog.messages[-1] == (
        "data.captions: 20 of 50 rows have no caption in join:recap, and draw from the other sources"
    )


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_images_alone_get_captions_from_a_table(corpus: Corpus, tmp_path: Path, num_processes: int):
    samples = [replace(one, captions=[], label=row % 3) for row, one in enumerate(corpus.samples)]
    corpus.write_beside(tmp_path / "images", samples)
    settings: dict[str, Any] = {
        "shards": str(tmp_path / "images"),
        "join": write_table(corpus, tmp_path / "recaps.parquet"),
        "num_processes": num_processes,
    }
    with corpus.loader(**settings, captions={"join:recap": 1.0}) as loader:
        assert texts_of(loader) == {(row, 0): recaption(row) for row in range(50)}
        batch = next(iter(loader))
        assert batch["valid"].all()
        assert len(set(batch["caption_hash"].tolist())) == len(batch["captions"])
        assert len(loader.all_captions(np.arange(50)).rows) == 0
    with pytest.raises(ConfigError, match=r"data.captions: shards '.*images' hold labels and no captions: leave 'shar"):
        corpus.loader(**settings, captions={"shards": 0.5, "join:recap": 0.5})


def test_an_evaluation_has_the_captions_of_the_shards(corpus: Corpus, mixed: dict[str, Any]):
    settings = {**corpus.settings, **mixed, "val": {"share": 0.5}}
    with load(evaluation_data(DataConfig.model_validate(settings))) as loader:
        found = texts_of(loader)
        assert all(text in corpus.samples[row].captions for (row, _), text in found.items())
        rows = np.array(sorted({row for row, _ in found}))
        many = [row for row in rows.tolist() if len(corpus.samples[row].captions) > 1]
        assert sorted(set(loader.all_captions(rows).rows.tolist())) == many
    settings = {**settings, "captions": {"join:recap": 1.0}}
    with load(evaluation_data(DataConfig.model_validate(settings))) as loader:
        assert all(text == recaption(row) for (row, _), text in texts_of(loader).items())
    other = {**settings, "val": {"shards": settings["shards"]}}
    assert evaluation_data(DataConfig.model_validate(other)).captions == "one"


def test_rows_of_weights_have_drawn_captions(corpus: Corpus, mixed: dict[str, Any]):
    with corpus.loader(**{**mixed, "captions": {"join:recap": 1.0}, "row_weights": "captions"}) as loader:
        assert set(texts_of(loader).values()) == {recaption(row) for row in range(50)}


def test_the_plan_of_a_config_knows_the_sources(corpus: Corpus, mixed: dict[str, Any]):
    data = DataConfig.model_validate({**corpus.settings, **mixed})
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer", max_length=32)
    with corpus.loader(**mixed) as loader:
        alone = build_plan(data, corpus.index, tokenizer, count_lengths=True)
        assert loader.plan.identity() == alone.identity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"captions": {"shard": 1.0}},
            r"^data.captions: no source 'shard' .did you mean 'shards'..; there are sh",
        ),
        ({"captions": {"join:recaps": 1.0}}, r"no source 'join:recaps' .did you mean 'join:recap'.."),
        ({"captions": {"recap": 1.0}}, r"no source 'recap' .did you mean 'join:recap'.."),
        ({"captions": {"shards": 0.5, "join:recap": 0.6}}, "the probabilities of the sources must sum to 1: got 1.1"),
        (
            {"captions": {"shards": -0.5, "join:recap": 1.5}},
            "'captions': expected one, every or {NAME: number from 0 to 1, …}; got -0.5, in entry shards",
        ),
        (
            {"captions": {"join:score": 1.0}},
            "data.captions join:score: values of type double; captions are a text, or a list of texts, a row",
        ),
        (
            {"captions": {"join:several": 1.0}},
            r"13 of 50 rows have no caption in join:several, such as row 0 \(key '00000'\): leave them out",
        ),
        ({"captions": {"join:long": 1.0}}, r"data.captions join:long: '.*' row 3: .*65537 characters; at most 65536"),
    ],
)
def test_wrong_sources_are_refused(corpus: Corpus, tmp_path: Path, changes: dict[str, Any], message: str):
    long = ["x" * 65_537 if number == 3 else "a dog" for number in range(50)]
    join = write_table(corpus, tmp_path / "recaps.parquet", long=long)
    with pytest.raises((ConfigError, DataError, ValueError), match=message):
        corpus.loader(join=join, **changes)


def test_rows_without_any_caption_may_be_left_out(corpus: Corpus, tmp_path: Path):
    join = write_table(corpus, tmp_path / "recaps.parquet", ORDER[:20])
    settings = {"join": [{**join[0], "missing": "mask"}], "captions": {"join:recap": 1.0}}
    with corpus.loader(**settings) as loader:
        assert texts_of(loader) == {(row, 0): recaption(row) for row in ORDER[:20]}


@pytest.mark.parametrize("changes", [{}, {"image_patches": [4, 9], "patch_size": 8}])
def test_a_long_caption_that_is_drawn_late_has_its_place(corpus: Corpus, tmp_path: Path, changes: dict[str, Any]):
    late = [["a"] * 7 + (["a dog near a tree " * 4] if row == 5 else []) for row in ORDER]
    join = write_table(corpus, tmp_path / "recaps.parquet", late=pa.array(late, pa.list_(pa.string())))
    if "image_patches" in changes:
        changes = {**changes, "image_buckets": None}
    sources = {"join:late": 1.0}
    with corpus.loader(join=join, captions=sources, **changes) as loader:
        found = texts_of(loader, epochs=16)
    assert any(len(text) > 60 for (_, epoch), text in found.items() if epoch > 0)


def test_a_plan_of_shards_alone_asks_for_a_tokenizer(corpus: Corpus, tmp_path: Path):
    join = write_table(corpus, tmp_path / "recaps.parquet")
    overrides = [f"data.join=[{{table: {join[0]['table']}}}]", "data.captions={join:recap: 1}"]
    with pytest.raises(ConfigError, match=r"data\.captions names tables, whose tokens no index has: give data\.tokeni"):
        plan_of(str(corpus.folder / "shards"), overrides)
    corpus.loader(join=join, captions={"join:recap": 1.0}).close()
    planned = plan_of(str(corpus.folder / "shards"), [*overrides, f"data.tokenizer={corpus.folder / 'tokenizer'}"])
    assert planned.plan.num_rows == 50


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.sweep
def test_a_column_of_more_than_2_gb_is_read(is_list: bool):
    text = pa.array(["x" * 60_000] * 1000)  # 60 MB, forty times
    column = pa.chunked_array(
        [pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), text) if is_list else text] * 40
    )
    found = take_rows(column, np.array([39_999, -1, 0]))
    value = ["x" * 60_000] if is_list else "x" * 60_000
    assert found.to_pylist() == [value, None, value]
