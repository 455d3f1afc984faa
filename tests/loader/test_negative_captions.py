"""Negative captions: what the batches hold of them, what identifies them, and which files are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.errors import ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.loader import Loader
from mmdata.plan import choose_captions
from mmdata.text.tokenizer import Tokenizer

REMEDY = "expected Parquet with the columns key (string) and captions (list of strings, null where one is missing)"


def write(path: Path, of_key: dict[str, list[str | None] | None], **columns: object) -> Path:
    table = {"key": list(of_key), "captions": list(of_key.values()), **columns}
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def file(corpus, tmp_path: Path) -> Path:
    """Rows 0, 2, 4, …: as many as they have captions, in capitals, the last one null where there are three."""
    of_key: dict[str, list[str | None] | None] = {}
    for sample in corpus.samples[::2]:
        texts: list[str | None] = [caption.upper() for caption in sample.captions]
        of_key[sample.key] = [*texts[:2], None] if len(texts) == 3 else texts
    of_key[corpus.samples[1].key] = []
    of_key[corpus.samples[3].key] = None
    return write(tmp_path / "extra.parquet", of_key)


def rows_of(loader: Loader, epoch: int) -> dict[int, dict[str, object]]:
    """What each row of an epoch has of its negative caption."""
    found: dict[int, dict[str, object]] = {}
    loader.set_epoch(epoch)
    for batch in loader:
        for i, row in enumerate(batch["rows"].tolist()):
            names = ("negative_input_ids", "negative_attention_mask", "negative_valid", "negative_caption_hash")
            found[row] = {name: batch[name][i].numpy() for name in names if name in batch}
    return found


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_extra_caption_of_each_row_goes_with_its_caption(corpus, file: Path, epoch: int):
    loader = corpus.loader(negative_captions=str(file), num_workers=0)
    tokenizer = Tokenizer.load(corpus.settings["tokenizer"], max_length=32)
    seen = rows_of(loader, epoch)
    for row, sample in enumerate(corpus.samples):
        count = len(sample.captions)
        place = int(choose_captions(np.array([row]), np.array([count]), epoch)[0])
        if row % 2 or (count == 3 and place == 2):
            assert not seen[row]["negative_valid"]
            assert seen[row]["negative_caption_hash"] == 0
            assert seen[row]["negative_attention_mask"].tolist() == [1] + [0] * (
                len(seen[row]["negative_input_ids"]) - 1
            )
            continue
        text = sample.captions[place].upper()
        ids, mask = tokenizer.encode([text], len(seen[row]["negative_input_ids"]))
        assert seen[row]["negative_valid"]
        assert np.array_equal(seen[row]["negative_input_ids"], ids[0])
        assert np.array_equal(seen[row]["negative_attention_mask"], mask[0])
        assert seen[row]["negative_caption_hash"] == hash64(text.encode())


def test_extra_captions_have_one_length_in_all_steps_and_change_nothing_else(corpus, tmp_path: Path):
    file = write(tmp_path / "extra.parquet", {corpus.samples[7].key: ["a dog", "a dog near a tree"]})
    plain, loader = corpus.loader(), corpus.loader(negative_captions=str(file))
    length = max(Tokenizer.load(corpus.settings["tokenizer"]).count(["a dog", "a dog near a tree"]))
    for before, batch in zip(plain, loader, strict=True):
        assert batch["negative_input_ids"].shape == (8, length)
        assert before["input_ids"].tolist() == batch["input_ids"].tolist()
        assert before["attention_mask"].tolist() == batch["attention_mask"].tolist()
        assert before["keys"] == batch["keys"]


def test_extra_captions_longer_than_max_length_are_cut(corpus, tmp_path: Path):
    file = write(tmp_path / "extra.parquet", {corpus.samples[0].key: ["a dog near a tree " * 30]})
    batch = next(iter(corpus.loader(negative_captions=str(file))))
    assert batch["negative_input_ids"].shape == (8, 32)


def test_extra_caption_of_a_masked_row_is_not_valid(corpus, tmp_path: Path):
    damaged = corpus.copy(tmp_path / "damaged")
    damaged.overwrite(0, "image", b"not an image")
    file = write(tmp_path / "extra.parquet", {sample.key: ["a dog"] for sample in corpus.samples})
    loader = damaged.loader(negative_captions=str(file), max_bad_share=1.0)
    valid = {row: bool(values["negative_valid"]) for row, values in rows_of(loader, 0).items() if row >= 0}
    assert valid == {row: row != 0 for row in range(50)}


def refused(corpus, path: Path, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        corpus.loader(negative_captions=str(path))


def test_extra_captions_of_unknown_keys(corpus, tmp_path: Path):
    path = write(tmp_path / "e.parquet", {corpus.samples[0].key: ["a"], "no such": ["b"], "nor this": ["c"]})
    message = (
        f"data.negative_captions '{path}': 2 of 3 keys are not in data.shards, the first 'no such': the file is of "
        "another corpus, or the rows were left out by the conversion; make it of the keys of these shards"
    )
    refused(corpus, path, ConfigError, message)


def test_extra_captions_that_stand_twice(corpus, tmp_path: Path):
    key = corpus.samples[4].key
    path = tmp_path / "e.parquet"
    pq.write_table(pa.table({"key": [key, key], "captions": [["a"], ["b"]]}), path)
    message = f"negative captions '{path}': key '{key}' occurs twice in the file: give a row's captions in one list"
    refused(corpus, path, DataError, message)


@pytest.mark.parametrize(("text", "found"), [(" \n", "empty_caption"), ("a" * 70_000, "caption_too_long")])
def test_extra_captions_that_are_none(corpus, tmp_path: Path, text: str, found: str):
    key = corpus.samples[4].key
    path = write(tmp_path / "e.parquet", {key: ["a dog", text]})
    pattern = rf"^negative captions '{path}', key '{key}': {found}: .*; remove it, or put null$"
    with pytest.raises(DataError, match=pattern):
        corpus.loader(negative_captions=str(path))


@pytest.mark.parametrize("lists", [[None], [[]], [[None]]])
def test_extra_captions_without_any(corpus, tmp_path: Path, lists: list[list[str | None] | None]):
    path = tmp_path / "e.parquet"
    table = pa.table({"key": [corpus.samples[0].key], "captions": pa.array(lists, pa.list_(pa.string()))})
    pq.write_table(table, path)
    refused(corpus, path, DataError, f"negative captions '{path}': the file has no caption; {REMEDY}")


def test_extra_captions_of_a_missing_file(corpus, tmp_path: Path):
    path = tmp_path / "none.parquet"
    refused(corpus, path, ConfigError, f"data.negative_captions '{path}': no such file; {REMEDY}")


@pytest.mark.parametrize("kind", ["bytes", "columns", "types"])
def test_extra_captions_that_cannot_be_read(corpus, tmp_path: Path, kind: str):
    path = tmp_path / "e.parquet"
    if kind == "bytes":
        path.write_bytes(b"PAR1 and so on")
    elif kind == "columns":
        pq.write_table(pa.table({"key": ["a"], "caption": ["b"]}), path)
    else:
        pq.write_table(pa.table({"key": ["a"], "captions": ["b"]}), path)
    with pytest.raises(DataError, match=rf"^negative captions '{path}': cannot be read: (.|\n)*; {re.escape(REMEDY)}$"):
        corpus.loader(negative_captions=str(path))


def test_extra_captions_of_several_datasets(corpus, file: Path):
    shards = [{"shards": corpus.settings["shards"]}, {"shards": "others"}]
    message = r"negative_captions does not go with several datasets: their keys are those of one dataset; convert them"
    with pytest.raises(ConfigError, match=message):
        corpus.loader(shards=shards, negative_captions=str(file))
