"""A table that is joined to several datasets, whose keys may be the same numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.loader import Loader


@pytest.mark.parametrize(("folders", "warned"), [(["red", "blue"], True), (["red"], False)])
def test_rows_of_two_datasets_with_one_key_are_warned_of(
    tmp_path: Path,
    make_corpus: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    folders: list[str],
    warned: bool,
):
    for seed, name in enumerate(("red", "blue")):
        raw = make_corpus(tmp_path / f"raw-{name}", 8, seed=seed)
        convert(raw / "captions.jsonl", tmp_path / name, ConvertConfig(train_tokenizer=300))
    table = tmp_path / "red.csv"
    table.write_text("key,score\n" + "".join(f"{row:09d},{row}\n" for row in range(8)))
    with caplog.at_level(logging.WARNING, "mmdata"):
        loader = Loader.from_config(
            {
                "shards": [{"shards": str(tmp_path / name)} for name in folders],
                "tokenizer": str(tmp_path / "red" / "tokenizer"),
                "global_batch_size": 4,
                "join": [{"table": str(table)}],
                "fields": {"score": "join:score"},
            },
            rank=0,
            world_size=1,
        )
    assert len(loader.index) == 8 * len(folders)
    told = [record.getMessage() for record in caplog.records]
    said = [line for line in told if "have keys that rows of another dataset" in line]
    blue = tmp_path / "blue"
    expected = f"data.join.0: 8 rows of '{blue}' have keys that rows of another dataset have too, and get the same rows"
    assert len(said) == warned
    assert all(line.startswith(expected) for line in said)
