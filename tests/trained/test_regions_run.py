"""Runs with `train.regions` on the scenes corpus: trained, resumed and evaluated by the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata import cli
from mmdata.convert import ConvertConfig, convert

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "datasets" / "scenes"))

import render  # noqa: E402


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of train and val with boxes, and of val without."""
    folder = tmp_path_factory.mktemp("scenes")
    render.render(folder / "raw", render.Settings(seed=0, train=40, val=12, pairs=1))
    table: dict[str, Any] = {"image_column": "image", "caption_columns": ("captions",), "label_column": "label"}
    for part, name in (("train", "train"), ("val", "val"), ("val", "without")):
        keep = () if name == "without" else ("boxes",)
        source = folder / "raw" / part / "captions.jsonl"
        convert(source, folder / name, ConvertConfig(**table, keep=keep, train_tokenizer=300))
    return folder


def settings(scenes: Path, output: Path, **train: Any) -> Path:
    """The shipped config with small numbers."""
    content = yaml.safe_load((ROOT / "configs" / "scenes-regions.yaml").read_text())
    content["data"] |= {"shards": str(scenes / "train"), "val": {"shards": str(scenes / "val")}}
    content["data"] |= {"tokenizer": str(scenes / "train" / "tokenizer"), "global_batch_size": 8}
    content["data"]["loading"] = {"num_workers": 0}
    content["train"] |= {"output": str(output), "steps": 4, "warmup_steps": 0, "log_every_steps": 1, **train}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_run_logs_the_loss_of_regions_and_evaluations_ground_phrases(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    run = tmp_path / "run"
    assert cli.main(["train", str(settings(scenes, run, ema={"decay": 0.5}, rehearse=True))]) == 0
    assert all(0 < line["region_loss"] < line["loss"] for line in lines(run, "train"))
    scores = json.loads((run / "evaluation.json").read_text())
    assert (scores["phrases"], scores["grounding_chance"]) == (24, 0.5)
    capsys.readouterr()
    assert cli.main(["evaluate", str(run), "--device", "cpu"]) == 0
    assert "24 phrases, each among the boxes of its image" in " ".join(capsys.readouterr().out.split())
    again = json.loads((run / "evaluation.json").read_text())
    assert again["grounding_accuracy"] == scores["grounding_accuracy"]
    assert cli.main(["evaluate", str(run), "--device", "cpu", "--shards", str(scenes / "without")]) == 0
    assert "grounding_accuracy" not in json.loads((run / "evaluation-without.json").read_text())
    assert "are evaluated without data.targets: data.targets.boxes" in caplog.text


def test_resumed_run_logs_what_an_undisturbed_one_does(scenes: Path, tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    spec: dict[str, Any] = {"schedule": "constant", "log_every_steps": 3, "precision": "fp32", "micro_batch_size": 3}
    assert cli.main(["train", str(settings(scenes, whole, **spec))]) == 0
    assert cli.main(["train", str(settings(scenes, cut, **spec | {"steps": 2})), "data.val=null"]) == 0
    assert cli.main(["train", str(settings(scenes, cut, **spec)), "data.val=null"]) == 0
    ours, theirs = (lines(run, "train")[-1]["region_loss"] for run in (cut, whole))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_run_without_regions_loads_no_boxes_to_evaluate(scenes: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert cli.main(["train", str(settings(scenes, run)), "train.regions=null"]) == 0
    assert "region_loss" not in lines(run, "train")[0]
    assert "phrases" not in json.loads((run / "evaluation.json").read_text())
