"""Trainers that batch rows themselves get the loader's rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import mmdata
from mmdata.errors import ConfigError, DataError
from tests.integrations.test_two_ranks import damaged

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'mmdata[huggingface]'")

from mmdata.integrations.huggingface import as_dataset

QUIET: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


@pytest.mark.parametrize("epoch", [0, 1])
def test_as_dataset_gives_the_rows_of_the_loaders_batches(data: dict[str, Any], epoch: int):
    loader = mmdata.Loader.from_config(data)
    rows = as_dataset(loader)
    loader.set_epoch(epoch)
    assert len(rows) == 22
    batches = mmdata.Loader.from_config(data)
    batches.set_epoch(epoch)
    for batch in batches:
        for place in np.flatnonzero(batch["valid"]).tolist():
            row = rows[int(batch["rows"][place])]
            assert row["text"] == batch["captions"][place]
            np.testing.assert_array_equal(np.asarray(row["image"]), batch["pixel_values"][place].permute(1, 2, 0))


def test_as_dataset_gives_selected_rows_with_labels(labelled: dict[str, Any], tmp_path: Path):
    np.save(tmp_path / "mask.npy", np.arange(22) >= 20)
    settings = {"tokenizer": None, "global_batch_size": 2, "select": str(tmp_path / "mask.npy")}
    loader = mmdata.Loader.from_config(labelled | settings)
    assert as_dataset(loader)[:]["label"] == [0, 1]


def test_as_dataset_leaves_out_rows_that_cannot_be_used(data: dict[str, Any], tmp_path: Path):
    loader = mmdata.Loader.from_config(damaged(data, tmp_path / "shards", [0, 2, 4]))
    rows = as_dataset(loader)
    assert len(rows.__getitems__([1, 2, 3])) == 2
    assert {entry.row for entry in loader.ledger} == {0, 2, 4}
    with pytest.raises(
        DataError, match=r"none of the rows \[2, 4\] could be used; the last: shard '.*', sample '0004'"
    ):
        rows[[2, 4]]


@pytest.mark.parametrize("setting", [{"image_buckets": [[32, 32], [24, 40]]}, {"image_patches": [4], "patch_size": 16}])
def test_as_dataset_of_several_shapes_is_refused(data: dict[str, Any], setting: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"images of one shape, and this loader's are of .*: leave data\.image_bu"):
        as_dataset(mmdata.Loader.from_config(data | setting))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("row_weights", "{folder}/weights.npy"),
        ("captions", "every"),
        ("shards", [{"shards": "{shards}", "repeat": 2}]),
        ("fields", {"words": "txt"}),
    ],
)
def test_as_dataset_of_rows_with_weights_or_fields_is_refused(
    data: dict[str, Any], name: str, setting: Any, tmp_path: Path
):
    np.save(tmp_path / "weights.npy", np.linspace(0.5, 1.5, 22))
    text = json.dumps({name: setting}).replace("{folder}", str(tmp_path)).replace("{shards}", data["shards"])
    with pytest.raises(ConfigError, match=r"each row once, with its image .*: leave data\.row_weights, data\.capt"):
        as_dataset(mmdata.Loader.from_config(data | json.loads(text)))


def test_as_dataset_in_a_started_worker_is_the_same(data: dict[str, Any], caplog: pytest.LogCaptureFixture):
    loader = mmdata.Loader.from_config(data)
    loader.set_epoch(1)
    rows = as_dataset(loader)
    assert caplog.messages == []  # of datasets: that its reader cannot be hashed
    started = DataLoader(rows, 11, collate_fn=list, num_workers=1, multiprocessing_context="spawn")
    for mine, others in zip(DataLoader(rows, 11, collate_fn=list), started, strict=True):
        assert [row["text"] for row in mine] == [row["text"] for row in others]
        assert [row["image"].tobytes() for row in mine] == [row["image"].tobytes() for row in others]


def test_as_dataset_of_a_stream_is_refused(data: dict[str, Any]):
    with pytest.raises(TypeError, match=r"all rows, and a stream has no index: run `mmdata index`"):
        as_dataset(mmdata.stream(None, data))


def test_as_dataset_without_datasets_says_what_to_install(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="as_dataset needs datasets: pip install datasets"):
        as_dataset(mmdata.Loader.from_config(data))


def test_sentence_transformers_trains_a_clip(data: dict[str, Any], clip: Any, tmp_path: Path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPProcessor

    clip.save_pretrained(tmp_path / "model")
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, AutoTokenizer.from_pretrained(data["tokenizer"])).save_pretrained(tmp_path / "model")
    model = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    sizes = {"num_train_epochs": 4, "per_device_train_batch_size": 11, "learning_rate": 1e-2, "logging_steps": 2}
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=library.SentenceTransformerTrainingArguments(str(tmp_path), **sizes, **QUIET),
        train_dataset=as_dataset(mmdata.Loader.from_config(data)),
        loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]


def test_trl_fine_tunes_a_model_of_images_and_text(data: dict[str, Any], tmp_path: Path):
    pytest.importorskip("trl")
    from tests.integrations.vision_language import fine_tuner

    sizes = {"num_train_epochs": 3, "learning_rate": 1e-2, "logging_steps": 2, "bf16": False}
    trainer = fine_tuner(mmdata.Loader.from_config(data), data["tokenizer"], tmp_path, 11, sizes | QUIET)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
