"""clip-benchmark's own command, reader and metrics judge an exported model on the tars of `mmdata convert`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import clip_benchmark.cli
import clip_benchmark.models
import pytest
import timm.utils
import yaml
from clip_benchmark.metrics import zeroshot_classification
from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

import mmdata
from mmdata import cli
from mmdata.convert import ConvertConfig, convert
from mmdata.trained.export import export_to_transformers
from tests.conftest import make_photo
from tests.trained.test_export import CLIP, pretrained

CLASSES = ["cat", "clock", "dog", "flag", "hand", "moon"]
TEMPLATES = ["a photo of a {}.", "the {}"]


class Exported(nn.Module):
    """An exported folder, by the two methods that clip-benchmark calls."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        model = CLIPModel.from_pretrained(folder)
        tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
        self.model = model
        self.transform = lambda image: processor(image, return_tensors="pt")["pixel_values"][0]
        self.tokenizer = lambda texts: (
            tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        )

    def encode_image(self, pixels: Any) -> Any:
        output = self.model.get_image_features(pixel_values=pixels)
        return getattr(output, "pooler_output", output)  # since transformers 5

    def encode_text(self, ids: Any) -> Any:
        output = self.model.get_text_features(input_ids=ids)
        return getattr(output, "pooler_output", output)


def load(model_name: str, pretrained: str, cache_dir: str | None, device: str) -> tuple[Any, Any, Any]:
    model = Exported(model_name).to(device)
    return model, model.transform, model.tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """captioned/ and labelled/ (48 images of the model's own size, which nothing resizes), run/ and exported/."""
    folder = tmp_path_factory.mktemp("benchmark")
    lines: list[dict[str, str]] = []
    for i in range(48):
        name = CLASSES[i % 6]
        (folder / "raw" / name).mkdir(parents=True, exist_ok=True)
        (folder / "raw" / name / f"{i:02d}.png").write_bytes(make_photo(32, 32, seed=i, format="PNG"))
        lines.append({"path": f"{name}/{i:02d}.png", "caption": f"a {name} beside {CLASSES[i % 5]} number {i}"})
    convert(folder / "raw", folder / "labelled", ConvertConfig(shard_rows=20))
    (folder / "raw/captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    convert(folder / "raw/captions.jsonl", folder / "shards", ConvertConfig(shard_rows=20, train_tokenizer=300))
    shards = str(folder / "shards")
    data = {"shards": shards, "val": {"shards": shards}, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 24}
    data |= {"image_size": 32, "max_length": 16, "loading": {"num_workers": 0}}
    how = {"output": str(folder / "run"), "steps": 40, "lr": 3e-3, "warmup_steps": 4, "evaluate_every_epochs": 0}
    content = {"data": data, "model": pretrained(clip=CLIP), "train": how}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    assert cli.main(["train", str(folder / "small.yaml")]) == 0
    export_to_transformers(mmdata.load_run(folder / "run", device="cpu"), folder / "exported")
    return folder


def benchmark(folder: Path, task: str, shards: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The metrics that `clip_benchmark eval` writes; its layout is a folder of links to the tars."""
    root = folder / task
    (root / "test").mkdir(parents=True)
    tars = sorted(shards.glob("*.tar"))
    for number, path in enumerate(tars):
        (root / "test" / f"{number}.tar").symlink_to(path)
    (root / "test/nshards.txt").write_text(str(len(tars)))
    (root / "dataset_type.txt").write_text(task.removeprefix("zeroshot_"))
    (root / "classnames.txt").write_text("\n".join(CLASSES))
    templates = [template.replace("{}", "{c}") for template in TEMPLATES]
    (root / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    monkeypatch.setitem(clip_benchmark.models.TYPE2FUNC, "exported", load)
    monkeypatch.setattr(clip_benchmark.models, "MODEL_TYPES", ["exported"])
    monkeypatch.setattr(clip_benchmark.cli, "MODEL_TYPES", ["exported"])
    words = (
        f"eval --model_type exported --pretrained none --no_amp --num_workers 0 --quiet --batch_size 10 --task {task}"
    )
    places = [
        "--model",
        folder / "exported",
        "--dataset",
        "wds/own",
        "--dataset_root",
        root,
        "--output",
        root / "out.json",
    ]
    ks = ["--recall_k", 1, 5, 10]
    monkeypatch.setattr(sys, "argv", ["clip_benchmark", *words.split(), *map(str, [*places, *ks])])
    clip_benchmark.cli.main()
    return json.loads((root / "out.json").read_text())["metrics"]


def evaluated(folder: Path, *words: object) -> dict[str, Any]:
    out = folder / "scores.json"
    assert cli.main(["evaluate", str(folder / "run"), "--device", "cpu", "--out", str(out), *map(str, words)]) == 0
    return json.loads(out.read_text())


def test_clip_benchmarks_retrieval_of_an_exported_model_is_that_of_evaluate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    found, scores = benchmark(folder, "zeroshot_retrieval", folder / "shards", monkeypatch), evaluated(folder)
    for k in (1, 5, 10):
        assert found[f"text_retrieval_recall@{k}"] == pytest.approx(scores[f"image_to_text_r{k}"], abs=1e-6)
        assert found[f"image_retrieval_recall@{k}"] == pytest.approx(scores[f"text_to_image_r{k}"], abs=1e-6)
    assert 0 < scores["image_to_text_r10"] < 1


def test_clip_benchmarks_classification_of_an_exported_model_is_that_of_evaluate(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    # clip-benchmark 1.6.2 calls float() on an array of one number, which NumPy 2.4 refuses; timm has the same function.
    accuracy = lambda *given, topk: [float(share) / 100 for share in timm.utils.accuracy(*given, topk=topk)]  # noqa: E731
    monkeypatch.setattr(zeroshot_classification, "accuracy", accuracy)
    found = benchmark(folder, "zeroshot_classification", folder / "labelled", monkeypatch)
    (folder / "classes.json").write_text(json.dumps({"classes": CLASSES, "templates": TEMPLATES}))
    scores = evaluated(folder, "--shards", folder / "labelled", "--classes", folder / "classes.json")
    assert found["acc1"] == pytest.approx(scores["zero_shot_top1"], abs=1e-6)
    assert found["acc5"] == pytest.approx(scores["zero_shot_top5"], abs=1e-6)
    assert scores["zero_shot_top1"] != pytest.approx(1 / 6), "not one class for all images"
