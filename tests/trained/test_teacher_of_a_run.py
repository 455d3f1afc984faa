"""`train.distill.teacher` by its folder: a run, or a CLIP of transformers."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel

from mmdata import Index, Loader, load_run
from mmdata.cli import main
from mmdata.config.corpus import ValConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import ConfigError
from mmdata.text.tokenizer import Tokenizer
from mmdata.train.evaluation.embedding import embed
from mmdata.train.evaluation.evaluate import score_retrieval
from mmdata.trained.training import load_teacher
from tests.trained.conftest import MakeRun

LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": 400, "max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2}
CLIP = {"projection_dim": 24, "text_config": TEXT, "vision_config": {**LAYERS, "image_size": 32, "patch_size": 8}}


def save_clip(folder: Path) -> None:
    AutoModel.from_config(AutoConfig.for_model("clip", **CLIP)).save_pretrained(folder)


def tokenizer_of(photos: Path) -> Tokenizer:
    return Tokenizer.load(photos / "shards" / "tokenizer")


def test_teacher_is_loaded_from_a_run_and_from_a_model_of_transformers(make_run: MakeRun, photos: Path, tmp_path: Path):
    run = make_run()
    teacher = load_teacher(str(run), tokenizer_of(photos), torch.device("cpu"))
    assert teacher.embed_dim == teacher.encode_text(torch.ones(1, 4).long(), torch.ones(1, 4).long()).shape[1]
    save_clip(tmp_path)
    assert load_teacher(str(tmp_path), tokenizer_of(photos), torch.device("cpu")).embed_dim == 24


def test_teacher_that_does_not_fit_is_refused(photos: Path, tmp_path: Path):
    message = r"train.distill.teacher 'none': no run is there, and as a model of transformers: model.clip: cannot load"
    with pytest.raises(ConfigError, match=message):
        load_teacher("none", tokenizer_of(photos), torch.device("cpu"))
    save_clip(tmp_path)
    shutil.copytree(photos / "shards" / "tokenizer", tmp_path, dirs_exist_ok=True)
    load_teacher(str(tmp_path), tokenizer_of(photos), torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"other token numbers than data.tokenizer 'clip' \('Two dogs, 3 cats': \[.*teach"
    ):
        load_teacher(str(tmp_path), _small(Tokenizer.load("clip")), torch.device("cpu"))


def _small(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.vocab_size = 400  # the vocabulary is checked before the numbers
    return tokenizer


def train(photos: Path, output: Path, data: dict[str, Any] | None = None, **settings: Any) -> int:
    shards = str(photos / "shards")
    which = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 4, "image_size": 32}
    config: dict[str, Any] = {
        "data": {**which, **(data or {})},
        "model": {"name": "micro"},
        "train": {"steps": 2, "output": str(output)} | settings,
    }
    output.mkdir()
    (output / "run.yaml").write_text(json.dumps(config))
    if data is not None:
        assert main(["join", str(output / "run.yaml")]) == 0
    return main(["train", str(output / "run.yaml"), "data.loading.num_workers=1"])


def test_train_distills_a_folder_and_evaluate_scores_each_length(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save_clip(tmp_path / "clip")
    assert train(photos, tmp_path / "run", distill={"teacher": str(tmp_path / "clip")}, matryoshka=[3]) == 0
    shards = str(photos / "shards")
    assert main(["evaluate", str(tmp_path / "run"), "--shards", shards, "--device", "cpu"]) == 0
    assert "matryoshka 3 image to text" in capsys.readouterr().out
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    run = load_run(tmp_path / "run", "cpu")
    data = run.config.data.model_copy(update={"val": ValConfig(shards=shards)})
    features = embed(run.model, Loader.from_config(evaluation_data(data), rank=0, world_size=1))
    assert features.text is not None
    short = [normalize(each[:, :3], dim=1) for each in (features.image, features.text)]
    wanted = score_retrieval(replace(features, image=short[0], text=short[1]))
    wanted = {f"matryoshka_3_{name}": value for name, value in wanted.items() if "_to_" in name}
    assert wanted == pytest.approx({name: value for name, value in scores.items() if name.startswith("matryoshka")})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "onnx"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| matryoshka 3 image to text r5 |" in card
    assert str(tmp_path) not in card
    shutil.move(tmp_path / "clip", tmp_path / "moved")
    again = ["train", str(tmp_path / "run" / "run.yaml"), "data.loading.num_workers=1"]
    assert main(again) == 0  # it is finished, and needs no teacher
    assert main([*again, "train.steps=3", "train.schedule=constant"]) == 2
    assert "train.distill.teacher" in capsys.readouterr().err


def test_fields_that_the_batches_do_not_have_are_named_before_a_run(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fields = {"fields": {"image": "image_emb", "text": "text_emb"}}
    assert train(photos, tmp_path / "without", distill=fields, teacher=fields) == 2
    said = capsys.readouterr().err
    assert "train.distill.fields: data.fields has no image_emb and no text_emb; add what brings such features" in said
    assert "train.teacher.fields: data.fields has no image_emb" in said


def test_train_takes_a_teachers_features_from_a_joined_table(photos: Path, tmp_path: Path):
    shards = shutil.copytree(photos / "shards", tmp_path / "corpus" / "shards")
    keys = [str(key) for key in Index.open(shards).keys(np.arange(12))]
    columns = {name: [[float(i), 1.0, 2.0] for i in range(11)] for name in ("image_emb", "text_emb")}
    pq.write_table(pa.table({"key": keys[:11], **columns}), tmp_path / "t.parquet")  # a row has none
    data = {
        "join": [{"table": str(tmp_path / "t.parquet"), "missing": "keep"}],
        "fields": {"image_emb": "join:image_emb", "text_emb": "join:text_emb"},
    }
    given = {"fields": {"image": "image_emb", "text": "text_emb"}}
    settings = {"distill": given, "teacher": {**given, "margin": 0.1}, "rehearse": True, "log_every_steps": 1}
    assert train(tmp_path / "corpus", tmp_path / "run", data, steps=3, **settings) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines if line["kind"] == "train")
