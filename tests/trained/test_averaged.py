"""Runs with averaged weights (train.ema): what load_run, init_from, evaluate and export take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdata
from mmdata import cli
from mmdata.config import ModelConfig
from mmdata.errors import ConfigError
from mmdata.recognize import CHECKPOINTS
from mmdata.train import DualEncoder
from mmdata.train.run.checkpoint import Share, find_checkpoint, load_checkpoint, save_checkpoint
from tests.trained.conftest import MakeRun
from tests.trained.test_export import CLIP, pretrained


@pytest.fixture(scope="module")
def run(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose averaged weights are half of those that were trained."""
    folder = tmp_path_factory.mktemp("averaged")
    state = load_checkpoint(find_checkpoint(make_run(pretrained(clip=CLIP))))
    average = {name: value / 2 for name, value in state["model"].items()}
    queue = {"kept": {"features": torch.zeros(3)}}
    save_checkpoint(folder / CHECKPOINTS, Share.of({**state, "memory": {"ema": average, "queue": queue}}), keep=1)
    return folder


@pytest.mark.parametrize(("ema", "factor"), [(None, 0.5), (True, 0.5), (False, 1.0)])
def test_load_run_takes_the_weights_that_are_asked_for(run: Path, ema: bool | None, factor: float):
    trained, loaded = load_checkpoint(find_checkpoint(run))["model"], mmdata.load_run(run, "cpu", ema=ema)
    assert loaded.is_average == (factor < 1)
    assert all(torch.equal(value, trained[name] * factor) for name, value in loaded.model.state_dict().items())


def test_load_run_of_a_run_without_averages(make_run: MakeRun):
    assert not mmdata.load_run(make_run(), "cpu", ema=False).is_average
    with pytest.raises(
        ConfigError, match=r"^checkpoint '.*': has no averaged weights: the run was trained without tra"
    ):
        mmdata.load_run(make_run(), "cpu", ema=True)


def test_init_from_takes_the_averaged_weights(run: Path):
    config = ModelConfig.model_validate({**pretrained(clip=CLIP), "init_from": str(run)})
    weights = DualEncoder.from_config(config, vocab_size=300).state_dict()
    average = load_checkpoint(find_checkpoint(run), parts=("memory.ema",))["memory"]["ema"]
    assert all(torch.equal(weights[name], value) for name, value in average.items())


@pytest.mark.parametrize(("words", "factor"), [([], 0.5), (["--no-ema"], 1.0)])
def test_evaluate_and_export_take_the_averaged_weights_unless_told(
    run: Path, tmp_path: Path, words: list[str], factor: float
):
    assert cli.main(["evaluate", str(run), "--device", "cpu", *words]) == 0
    scores: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    assert scores.get("ema") == (True if factor < 1 else None)
    for same in (True, False):  # the card has the scores of the weights that are exported
        given = words if same else [word for word in ["--no-ema"] if word not in words]
        assert cli.main(["export", str(run), str(tmp_path / str(same)), *given]) == 0
        card = (tmp_path / str(same) / "README.md").read_text()
        assert ("## Scores" in card) == same
        assert ("the weights are a moving average" in card) == ("--no-ema" not in given)
    trained = load_checkpoint(find_checkpoint(run))["model"]["text_tower.projection.weight"]
    from transformers import CLIPModel

    exported = CLIPModel.from_pretrained(tmp_path / "True")
    torch.testing.assert_close(exported.text_projection.weight, trained * factor)
