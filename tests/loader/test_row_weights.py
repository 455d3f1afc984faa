"""Weights of rows from settings: a column, a file, the classes, or every caption once."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mmdata import Loader
from mmdata.errors import ConfigError, DataError
from tests.programs import run_program

from .conftest import Corpus

WEIGHTS = np.random.default_rng(3).uniform(0.2, 3.0, 50)


def rows_of(loader: Loader) -> list[list[int]]:
    """The rows of each batch of an epoch, padding left out."""
    length = len(loader)
    found = [[row for row in batch["rows"].tolist() if row >= 0] for batch in loader]
    assert len(found) == length
    assert all(len(set(rows)) == len(rows) for rows in found), "a row twice in a batch"
    return found


def counts_of(corpus: Corpus, *, epochs: int = 1, **changes: Any) -> np.ndarray:
    """How often each row comes in the first epochs."""
    counts = np.zeros(50, np.int64)
    with corpus.loader(**changes) as loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for rows in rows_of(loader):
                counts[rows] += 1
    return counts


def test_a_file_a_column_and_a_joined_column_weigh_rows(corpus: Corpus, tmp_path: Path):
    np.save(tmp_path / "weights.npy", WEIGHTS)
    of_file = counts_of(corpus, epochs=4, row_weights=str(tmp_path / "weights.npy"))
    assert (np.abs(of_file - 4 * WEIGHTS) < 1).all()
    order = np.random.default_rng(0).permutation(50).tolist()
    join = [{"table": corpus.table(tmp_path / "scores.parquet", order, weight=WEIGHTS[order])}]
    assert counts_of(corpus, epochs=4, join=join, row_weights="weight").tolist() == of_file.tolist()
    captions = [len(sample.captions) for sample in corpus.samples]
    assert counts_of(corpus, row_weights="captions").tolist() == captions


def test_weights_hold_for_the_selected_rows(corpus: Corpus, tmp_path: Path):
    np.save(tmp_path / "weights.npy", np.where(np.arange(50) < 20, WEIGHTS, np.nan))
    weights = str(tmp_path / "weights.npy")
    counts = counts_of(corpus, epochs=3, row_weights=weights, select="key < '00020'")
    assert (np.abs(counts[:20] - 3 * WEIGHTS[:20]) < 1).all()
    assert not counts[20:].any()
    share = counts_of(corpus, row_weights="captions", val={"share": 0.3})
    train = counts_of(corpus, val={"share": 0.3})
    captions = np.array([len(sample.captions) for sample in corpus.samples])
    assert share.tolist() == (captions * train).tolist()


def test_label_balanced_gives_each_class_as_many_rows(corpus: Corpus, tmp_path: Path):
    samples = [replace(sample, label=int(row >= 5)) for row, sample in enumerate(corpus.samples[:25])]
    corpus.write_beside(tmp_path / "shards", samples)
    counts = np.zeros(2, np.int64)
    settings = {"shards": str(tmp_path / "shards"), "row_weights": "label_balanced"}
    with corpus.loader(**settings) as loader:
        for epoch in range(8):
            loader.set_epoch(epoch)
            for batch in loader:
                counts += np.bincount(batch["labels"][batch["valid"]].numpy(), minlength=2)
    # 5 rows of weight 2.5 and 20 of 0.625: 8 epochs are 20 passes and 5 of each.
    assert counts.tolist() == [5 * 20, 20 * 5]


def test_every_gives_each_caption_once_and_never_two_in_a_batch(corpus: Corpus):
    with corpus.loader(captions="every") as loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            found: Counter[tuple[str, str]] = Counter()
            for batch in loader:
                keys = [key for key in batch["keys"] if key]
                assert len(set(keys)) == len(keys)
                found.update(zip(batch["keys"], batch["captions"], strict=True))
            del found["", ""]
            assert found == Counter((sample.key, text) for sample in corpus.samples for text in sample.captions)


def test_mmdata_plan_tells_the_weights_of_several_datasets(corpus: Corpus, tmp_path: Path):
    corpus.write_beside(tmp_path / "other", corpus.samples[20:])
    shards = [{"shards": corpus.settings["shards"]}, {"shards": str(tmp_path / "other")}]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": {**corpus.settings, "shards": shards}}))
    tool = [sys.executable, "-m", "mmdata", "plan", str(tmp_path / "c.yaml"), "data.captions=every"]
    said = run_program(tool, capture_output=True, text=True, check=True).stdout
    captions = [len(sample.captions) for sample in corpus.samples]
    total = sum(captions) + sum(captions[20:])
    assert re.search(
        r"^data.captions every \(\w{16}\): 80 rows with weights from 1 to 3, 3 parts an epoch$", said, re.M
    )
    assert f"epoch 0: {total} rows in " in said
    assert f"other': {sum(captions[20:])} rows, " in said


def test_larger_weights_are_cut_and_told(
    corpus: Corpus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmdata.plan.weights.MAX_REPEATS", 2)
    counts = counts_of(corpus, row_weights="captions")
    assert counts.tolist() == [min(2, len(sample.captions)) for sample in corpus.samples]
    above = sum(len(sample.captions) > 2 for sample in corpus.samples)
    assert caplog.messages == [
        f"data.row_weights: {above} of 50 rows have a weight above 2, up to 3: they come 2 times an epoch"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_weights": "captins"},
            r"^data.row_weights: no column 'captins' of numbers .did you mean 'captions'..; ",
        ),
        ({"row_weights": "key"}, "^data.row_weights: no column 'key' of numbers; there are caption_tok"),
        ({"row_weights": "FOLDER/none.npy"}, "^data.row_weights: '.*none.npy': no such file"),
        (
            {"row_weights": "FOLDER/short.npy"},
            "'.*short.npy' has 49 values, and the index has 50 rows: it was made for",
        ),
        ({"row_weights": "FOLDER/text.npy"}, "'.*text.npy' is an array of <U1; a weight is a number"),
        ({"row_weights": "FOLDER/zero.npy"}, "zero.npy: every row has the weight 0"),
        (
            {"row_weights": "FOLDER/nan.npy"},
            r"row 7 \(key '00007'\) has the weight nan; a weight is a number from 0 on$",
        ),
        (
            {"row_weights": "FOLDER/minus.npy"},
            r"row 3 \(key '00003'\) has the weight -1; a weight is a number from 0 on$",
        ),
        ({"row_weights": "FOLDER/few.npy"}, "the weights are so small that an epoch may have no row"),
        (
            {"row_weights": "label_balanced"},
            "label_balanced: 42 rows have no label; leave them out: data.select='label is",
        ),
        ({"row_weights": "width", "captions": "every"}, "row_weights does not go with captions every"),
        ({"captions": "every", "groups": {"size": 2}}, "captions every does not go with groups: leave one"),
        ({"row_weights": "width", "num_lanes": 2}, "row_weights does not go with num_lanes above 1"),
    ],
)
def test_wrong_weights_are_refused(corpus: Corpus, tmp_path: Path, changes: dict[str, Any], message: str):
    for name, values in {
        "short": np.ones(49),
        "text": np.array(["a"] * 50),
        "zero": np.zeros(50),
        "nan": np.where(np.arange(50) == 7, np.nan, 1.0),
        "minus": np.where(np.arange(50) == 3, -1.0, 1.0),
        "few": np.full(50, 0.01),
    }.items():
        np.save(tmp_path / f"{name}.npy", values)
    given = {n: v.replace("FOLDER", str(tmp_path)) if isinstance(v, str) else v for n, v in changes.items()}
    with pytest.raises((ConfigError, DataError, ValueError), match=message):
        corpus.loader(**given)


def test_shards_without_captions_cannot_give_every_caption(corpus: Corpus, tmp_path: Path):
    corpus.write_beside(tmp_path / "shards", [replace(sample, captions=[], label=1) for sample in corpus.samples[:9]])
    with pytest.raises(ConfigError, match=r"^data.captions every: the shards hold labels and no captions; leave it ou"):
        corpus.loader(shards=str(tmp_path / "shards"), captions="every", tokenizer=None)


def test_shards_without_labels_cannot_be_balanced(corpus: Corpus, tmp_path: Path):
    samples = [replace(sample, label=None) for sample in corpus.samples[:9]]
    corpus.write_beside(tmp_path / "shards", samples)
    with pytest.raises(ConfigError, match=r"^data.row_weights label_balanced: no row of the corpus has a label$"):
        corpus.loader(shards=str(tmp_path / "shards"), row_weights="label_balanced")


def test_parts_with_much_padding_are_told(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    np.save(tmp_path / "weights.npy", np.where(np.arange(50) == 0, 10.0, 1.0))
    with corpus.loader(row_weights=str(tmp_path / "weights.npy"), global_batch_size=4):
        (said,) = caplog.messages
    assert "an epoch has 10 parts of about 5.9 rows, and batches of 4: about 26 % of the places are masked; a " in said


def test_a_batch_may_have_all_rows_of_a_part_though_weights_are_rounded(corpus: Corpus, tmp_path: Path):
    labels = [0] + [1] * 2 + [2] * 12
    corpus.write_beside(
        tmp_path / "shards",
        [replace(sample, label=label) for sample, label in zip(corpus.samples, labels, strict=False)],
    )
    with corpus.loader(shards=str(tmp_path / "shards"), row_weights="label_balanced", global_batch_size=3) as loader:
        assert loader.plan.most_rows == 3  # 15 rows in 5 parts


def test_weights_whose_parts_are_smaller_than_a_batch_are_refused(corpus: Corpus, tmp_path: Path):
    np.save(tmp_path / "weights.npy", np.where(np.arange(50) == 0, 10.0, 1.0))
    settings: dict[str, Any] = {"row_weights": str(tmp_path / "weights.npy"), "global_batch_size": 8}
    message = (
        r"^data.global_batch_size 8: a batch has on average no more than 5 rows \(data.row_weights weights.npy "
        r"\(\w{16}\): an epoch has 10 parts, as many as the largest weight, so that no batch has a row twice\), "
        r"so few would be full; set it to 5 or less, or give smaller weights$"
    )
    with pytest.raises(ConfigError, match=message):
        corpus.loader(**settings)
    with corpus.loader(**{**settings, "global_batch_size": 5}) as loader:
        assert loader.plan.num_rows == 50


def test_a_row_of_many_captions_whose_parts_are_smaller_than_a_batch_is_refused(corpus: Corpus, tmp_path: Path):
    captions = [["a dog"], [f"dog {number}" for number in range(40)]]
    samples = [replace(sample, captions=captions[row == 7]) for row, sample in enumerate(corpus.samples[:20])]
    corpus.write_beside(tmp_path / "shards", samples)
    message = r"more than 1 rows \(data.captions every .*: an epoch has 40 parts, .*, or set data.captions to one$"
    with pytest.raises(ConfigError, match=message):
        corpus.loader(shards=str(tmp_path / "shards"), captions="every")


def test_a_column_with_missing_weights_names_the_condition_that_leaves_them_out(corpus: Corpus, tmp_path: Path):
    weights = [None if row in (7, 9) else 1.0 for row in range(50)]
    join = [{"table": corpus.table(tmp_path / "q.parquet", **{"q": weights, "my q": weights})}]
    for name, shown in (("q", "q"), ("my q", "`my q`")):
        message = (
            f"has the weight nan; a weight is a number from 0 on: leave out the rows without one .data.select='{shown}"
        )
        with pytest.raises(ConfigError, match=f"{message} is not None'.$"):
            corpus.loader(join=join, row_weights=name)
    assert corpus.loader(join=join, row_weights="q", select="q is not None").plan.num_rows == 48


def test_a_column_of_weights_that_the_index_has_too_is_told(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    corpus.loader(join=[{"table": corpus.table(tmp_path / "q.parquet", captions=[1] * 50)}], row_weights="captions")
    assert any("data.row_weights: 'captions' is the index's; the column" in message for message in caplog.messages)


def test_files_of_weights_and_rows_are_closed(corpus: Corpus, tmp_path: Path):
    np.save(tmp_path / "weights.npy", np.ones(50))
    np.save(tmp_path / "mask.npy", np.arange(50) < 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        corpus.loader(row_weights=str(tmp_path / "weights.npy"), select=str(tmp_path / "mask.npy"))
        gc.collect()
    assert not [one for one in caught if ".npy" in str(one.message) or "unclosed" in str(one.message)]
