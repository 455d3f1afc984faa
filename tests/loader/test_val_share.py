"""`data.val.share`: a share of the rows, by the hash of their images, is kept from training and evaluated on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata import Loader
from mmdata.cli.data.plan import plan_of
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.hashing import hash64, in_share
from mmdata.index import build_index
from mmdata.plan import CaptionSources, ShardCaptions
from mmdata.plan.choose import bucket_policy, caption_histogram
from mmdata.tables.select import select_rows

from .conftest import Corpus, rows_of

SHARE = 0.3


def data_of(corpus: Corpus, share: float | None = SHARE, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({**corpus.settings, "val": {"share": share}, **changes})


def expected(corpus: Corpus, share: float = SHARE) -> list[int]:
    """Rows to evaluate on, by the images' own bytes: without index and plan."""
    return [row for row, sample in enumerate(corpus.samples) if in_share(hash64(sample.image), share)]


def test_train_and_val_are_complementary_and_say_the_rows_of_the_index(corpus: Corpus):
    data = data_of(corpus)
    with Loader.from_config(data) as training, Loader.from_config(evaluation_data(data)) as validation:
        val = rows_of(validation)
        assert sorted(val) == expected(corpus)
        assert 5 < len(val) < 25
        assert validation.plan.num_rows == len(val)
        for _ in range(2):
            assert len(training) == -(-(50 - len(val)) // 8)
            assert sorted(rows_of(training) + val) == list(range(50))
        training.set_epoch(0)
        batch = next(iter(training))
        assert batch["keys"] == training.index.keys(batch["rows"].numpy())


def test_a_row_stays_on_its_side_when_shards_are_indexed_anew_and_the_share_grows(corpus: Corpus, tmp_path: Path):
    data = data_of(corpus)
    build_index(corpus.folder / "shards", out=tmp_path / "anew")  # without a tokenizer
    with Loader.from_config(data) as loader, Loader.from_config(data_of(corpus, shards=str(tmp_path / "anew"))) as anew:
        assert anew.index.fingerprint != loader.index.fingerprint
        assert sorted(rows_of(anew)) == sorted(rows_of(loader))  # captions are counted when the loader opens
    assert set(expected(corpus, 0.1)) < set(expected(corpus, 0.3)) < set(expected(corpus, 0.5))


def test_equal_images_are_on_one_side_in_all_datasets_of_a_mixture(corpus: Corpus, tmp_path: Path):
    copies = [replace(sample, key=f"again{sample.key}", captions=["the same image"]) for sample in corpus.samples[::2]]
    corpus.write_beside(tmp_path / "copies", copies)
    mixture = [{"shards": corpus.settings["shards"]}, {"shards": str(tmp_path / "copies"), "repeat": 2}]
    data = data_of(corpus, shards=mixture)
    val = expected(corpus)
    with Loader.from_config(evaluation_data(data)) as validation:
        assert sorted(rows_of(validation)) == sorted(val + [50 + row // 2 for row in val if row % 2 == 0])
    with Loader.from_config(data) as training:
        rows = rows_of(training)
        counts = np.bincount(rows, minlength=75)
        assert counts[:50].tolist() == [int(row not in val) for row in range(50)]
        assert counts[50:].tolist() == [2 * int(row not in val) for row in range(0, 50, 2)]


@pytest.mark.parametrize(
    "changes",
    [
        {"transform": "train", "crop_scale": [0.3, 0.9], "augment": {"horizontal_flip_prob": 0.5}},
        {"caption_dropout": 0.9, "text_transform": "module:function"},
        {"caption_hash": "width"},
        {"negative_captions": "wrong.parquet"},
        {"captions": "every"},
        {"row_weights": "width"},
        {"order": "order.npy", "shuffle": False},
        {"leftover": "pad", "groups": {"size": 2}},
        {"token_budget": 4000},
        {"join": [{"table": "scores.parquet"}], "fields": {"score": "join:score"}},
    ],
    ids=str,
)
def test_an_evaluation_has_nothing_of_what_a_training_alone_has(corpus: Corpus, changes: dict[str, Any]):
    plain, found = (evaluation_data(data).model_dump() for data in (data_of(corpus), data_of(corpus, **changes)))
    for settings in (plain, found):
        del settings["join"], settings["crop_scale"]  # which are not looked at
    assert found == plain


def test_shapes_are_chosen_for_the_selected_rows(corpus: Corpus):
    data = data_of(corpus, text_buckets=2, image_buckets=3, image_size=64, patch_size=8)
    index = corpus.index
    selection = select_rows(data, index)
    assert selection is not None
    rows = np.concatenate(list(selection.chunks(10)))
    offsets, tokens = index.lists("caption_tokens")
    own = np.concatenate([tokens[offsets[row] : offsets[row + 1]] for row in rows.tolist()])
    stored, counted, uncounted = (
        CaptionSources.in_turn(ShardCaptions(index, given)) for given in ("index", (offsets, tokens), None)
    )
    histogram = caption_histogram(index, stored, max_length=32, selection=selection)
    assert histogram.sum(axis=1).tolist() == np.bincount(np.minimum(own, 32), minlength=33).tolist()
    assert np.array_equal(caption_histogram(index, counted, max_length=32, selection=selection), histogram)
    captions = caption_histogram(index, uncounted, max_length=32, selection=selection)
    assert captions.sum(axis=0).tolist() == histogram.sum(axis=0).tolist()
    assert bucket_policy(data, index, stored, selection=selection).buckets


def test_labels_alone_are_split_and_planned_too(corpus: Corpus, tmp_path: Path):
    samples = [replace(sample, captions=[], label=row % 3) for row, sample in enumerate(corpus.samples)]
    corpus.write_beside(tmp_path / "labels", samples)
    settings = {**corpus.settings, "shards": str(tmp_path / "labels"), "tokenizer": None, "image_buckets": 3}
    data = DataConfig.model_validate({**settings, "image_size": 32, "patch_size": 8, "val": {"share": SHARE}})
    with Loader.from_config(data) as training, Loader.from_config(evaluation_data(data)) as validation:
        assert sorted(rows_of(validation)) == expected(corpus)
        assert sorted(rows_of(training) + expected(corpus)) == list(range(50))
    planned = plan_of(str(tmp_path / "labels"), ["data.val.share=0.3", "data.global_batch_size=10"])
    assert planned.plan.num_rows == 50 - len(expected(corpus))
    assert planned.assumed == ["data.image_size=224", "data.max_length=77"]


def test_select_comes_before_the_share(corpus: Corpus):
    data = data_of(corpus, select="key < '00020'")
    with Loader.from_config(data) as training, Loader.from_config(evaluation_data(data)) as validation:
        val = [row for row in expected(corpus) if row < 20]
        assert sorted(rows_of(validation)) == val
        assert sorted(rows_of(training) + val) == list(range(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"val": {"share": 1e-9}},
            r"data\.val\.share 1e-09 of 50 rows leaves 50 to train on and 0 to evaluate on; equal images stay "
            r"together, so set it to about 0\.16, or name other shards \(data\.val\.shards\)",
        ),
        (
            {"val": {"share": 0.999999999}},
            r"data\.val\.share 1 of 50 rows leaves 0 to train on and 50 to evaluate on",
        ),
        (
            {"global_batch_size": 48},
            r"data\.global_batch_size 48: .* more than \d\d rows of 50 \(data\.split train of data\.val\.share 0\.3\)",
        ),
    ],
)
def test_shares_that_leave_too_few_rows_are_refused(corpus: Corpus, changes: dict[str, Any], message: str):
    settings = {**corpus.settings, "val": {"share": SHARE}, **changes}
    with pytest.raises(ConfigError, match=message):
        Loader.from_config(settings)


def test_evaluation_on_a_share_of_no_row_is_refused(corpus: Corpus):
    with pytest.raises(ConfigError, match="leaves 50 to train on and 0 to evaluate on"):
        Loader.from_config(evaluation_data(data_of(corpus, 1e-9)))
