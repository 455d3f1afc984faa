"""A loader over a list of datasets: the rows of all, read from the folder that each lies in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmdata import Index
from mmdata.errors import DataError
from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer
from tests.shard_writer import ShardWriter


def write(folder: Path, corpus, photo: Callable[..., bytes], *, rows: int = 9, count: bool = True) -> Path:
    """Nine rows in two shards, without labels; `count`: indexed with the tokenizer of `corpus`."""
    tokenizer = Tokenizer.load(corpus.settings["tokenizer"])
    counting = {"count_tokens": tokenizer.count, "tokenizer": tokenizer.fingerprint} if count else {}
    with ShardWriter(folder, shard_rows=5, **counting) as writer:
        for i in range(rows):
            image = photo(48, 40 + i, seed=1000 + i)
            writer.write(Sample(f"second{i}", image, probe(image), [f"a red dog of number {i}"]))
    return folder


def mixed(corpus, *folders: Path) -> list[dict[str, str]]:
    return [{"shards": corpus.settings["shards"]}, *({"shards": str(folder)} for folder in folders)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_loader_of_two_datasets_gives_every_row_of_both_once(corpus, second: Path, shuffle: bool):
    loader = corpus.loader(shards=mixed(corpus, second), shuffle=shuffle)
    keys, labels = {}, {}
    for batch in loader:
        valid = batch["valid"]
        rows = batch["rows"][valid].tolist()
        assert not set(rows) & set(keys)
        keys |= zip(rows, [key for key, ok in zip(batch["keys"], valid, strict=True) if ok], strict=True)
        labels |= zip(rows, batch["labels"][valid].tolist(), strict=True)
    assert sorted(keys) == list(range(59))
    assert [keys[row] for row in range(59)] == [s.key for s in corpus.samples] + [f"second{i}" for i in range(9)]
    assert [labels[row] for row in range(50)] == [-1 if s.label is None else s.label for s in corpus.samples]
    assert [labels[row] for row in range(50, 59)] == [-1] * 9


def test_loader_of_a_list_of_one_dataset_is_that_of_its_folder(corpus, same):
    alone = list(corpus.loader(shards=mixed(corpus)))
    assert all(same(a, b) for a, b in zip(corpus.loader(), alone, strict=True))


def test_loader_names_the_dataset_that_is_empty(corpus, photo: Callable[..., bytes], tmp_path: Path):
    empty = write(tmp_path / "empty", corpus, photo, rows=0)
    with pytest.raises(DataError, match=rf"^shards '{empty}': no rows in the index; see __mmdata__/quarantine\.jsonl"):
        corpus.loader(shards=mixed(corpus, empty))


def test_loader_counts_lengths_and_names_the_datasets_without(
    corpus, photo: Callable[..., bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    uncounted = write(tmp_path / "uncounted", corpus, photo, count=False)
    with caplog.at_level(logging.WARNING, logger="mmdata"):
        loader = corpus.loader(shards=mixed(corpus, uncounted))
    warned = [record.message for record in caplog.records if "caption lengths" in record.message]
    assert len(warned) == 1
    assert warned[0].startswith(f"9 rows of '{uncounted}': caption lengths are not in the index")
    counted = corpus.loader(shards=mixed(corpus, write(tmp_path / "counted", corpus, photo)))
    rows = np.arange(59)
    assert np.array_equal(loader.plan.rows.shapes(rows, 0).length, counted.plan.rows.shapes(rows, 0).length)


def test_loader_ledger_names_a_shard_with_its_dataset(corpus, photo: Callable[..., bytes], tmp_path: Path):
    broken = write(tmp_path / "broken", corpus, photo)
    index = Index.open(broken)
    place = int(index.take(np.array([7]), ["image_offset"])["image_offset"][0])
    with index.shard_path(1).open("r+b") as tar:
        tar.seek(place)
        tar.write(b"no image at all")
    loader = corpus.loader(shards=mixed(corpus, broken))
    assert sum(int(batch["valid"].sum()) for batch in loader) == 58
    assert [(entry.row, entry.shard) for entry in loader.ledger] == [(57, str(broken / "000001.tar"))]
