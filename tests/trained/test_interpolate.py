"""Weights between two models (WiSE-FT)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdata
from mmdata import cli
from mmdata.errors import ConfigError, DataError
from mmdata.trained import interpolate
from mmdata.trained.export import export_to_open_clip, export_to_transformers
from mmdata.trained.interpolate import interpolated
from tests.trained.conftest import MakeRun, write_run
from tests.trained.test_export import CLIP, TEXT, VISION, pretrained


@pytest.fixture(scope="module")
def runs(photos: Path, make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and one with other weights of the same architecture."""
    model = pretrained(clip=CLIP, logit_scale_init=20.0)
    return make_run(pretrained(clip=CLIP)), write_run(tmp_path_factory.mktemp("other"), photos, model, shuffle=False)


@pytest.mark.parametrize("kind", ["run", "transformers", "open_clip"])
def test_interpolated_weights_are_those_of_the_formula(runs: tuple[Path, Path], tmp_path: Path, kind: str):
    """θ = (1 − α) θ₀ + α θ₁, as in the loop of WiSE-FT's own code (src/wise_ft.py)."""
    run, other = (mmdata.load_run(path, "cpu") for path in runs)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if kind == "run":
        source: Path = runs[1]
        other = mmdata.load_run(source, "cpu")
    else:
        source = tmp_path / "out"
        (export_to_transformers if kind == "transformers" else export_to_open_clip)(other, source)
    theta_0, theta_1 = other.model.state_dict(), run.model.state_dict()
    for alpha in (0.0, 0.3, 1.0):
        mixed = interpolated(run, source, alpha)
        expected = {name: (1 - alpha) * theta_0[name] + alpha * theta_1[name] for name in theta_1}
        for name, value in mixed.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    assert (mixed.alpha, run.alpha) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vision_config": {**VISION, "num_hidden_layers": 3}}, r"image_tower: 16 unknown to the model \(.*layers.2"),
        (
            {"vision_config": {**VISION, "patch_size": 16}},
            r"image_tower: .*patch_embedding.weight is \[16, 3, 16, 16\], in the model \[",
        ),
        (
            {"text_config": {**TEXT, "hidden_act": "gelu"}},
            r"its .*activation_fn is GELUActivation, and in the run QuickGELUAct",
        ),
        (
            {"vision_config": {**VISION, "num_attention_heads": 1}},
            r"its image_tower.*self_attn is CLIPAttention of 1 heads, and in the run CLIPAttention of 2 heads",
        ),
    ],
)
def test_interpolated_says_which_part_differs(runs, make_run: MakeRun, model: dict[str, Any], message: str):
    other = make_run(pretrained(clip={**CLIP, **model}))
    with pytest.raises(ConfigError, match=rf"' is of another architecture than '.*': {message}"):
        interpolated(mmdata.load_run(runs[0], "cpu"), other, 0.5)


def test_interpolated_keeps_the_runs_own_counts_of_batches(photos: Path, make_run: MakeRun):
    """Integers, as `num_batches_tracked` of a batch norm, are no weights."""
    image = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    folder = make_run(pretrained(vision=image, text={"model_type": "bert", **TEXT}, embed_dim=16))
    run = mmdata.load_run(folder, "cpu")
    for value in run.model.buffers():
        value += value.dtype == torch.int64
    found, own = interpolated(run, folder, 0.5).model.state_dict(), run.model.state_dict()
    counts = [name for name in own if name.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(found[name], own[name]) for name in counts)


def test_interpolated_refuses_other_tokenizers_alphas_and_folders(runs, tmp_path: Path):
    run = mmdata.load_run(runs[0], "cpu")
    with pytest.raises(ConfigError, match=r"--alpha 1\.5: a number from 0, the other model, to 1, the run"):
        interpolated(run, runs[1], 1.5)
    with pytest.raises(DataError, match=rf"'{tmp_path}': "):
        interpolated(run, tmp_path, 0.5)
    clip = mmdata.text.tokenizer.Tokenizer.load("clip")
    with pytest.raises(ConfigError, match=r"was trained with another tokenizer than '.*step-"):
        interpolated(replace(run, tokenizer=clip), runs[1], 0.5)


def test_programs_evaluate_the_curve_and_export_a_point_of_it(runs, tmp_path: Path, capsys, monkeypatch):
    run, other = map(str, runs)
    loaded: list[Path] = []
    load = interpolate._load
    monkeypatch.setattr(interpolate, "_load", lambda path, of: (loaded.append(path), load(path, of))[1])
    scores_of = ["evaluate", run, "--device", "cpu", "--interpolate-with"]
    assert cli.main([*scores_of, other]) == 0
    assert "interpolated weights" in capsys.readouterr().out
    assert loaded == [runs[1]]
    scores = json.loads((runs[0] / "evaluation.json").read_text())
    curve = scores["interpolation"]
    assert [entry["alpha"] for entry in curve] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve[-1]["image_to_text_r5"] == scores["image_to_text_r5"]
    assert cli.main(["evaluate", other, "--device", "cpu", "--out", str(tmp_path / "other.json")]) == 0
    assert curve[0]["image_to_text_r5"] == json.loads((tmp_path / "other.json").read_text())["image_to_text_r5"]

    words = ["export", run, str(tmp_path / "out"), "--interpolate-with", other]
    assert cli.main([*words, "--alpha", "0.5"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "WiSE-FT (arXiv:2109.01903): 0.5 of the trained ones" in card
    assert f"| image to text r5 | {100 * curve[2]['image_to_text_r5']:.1f} % |" in card
    third = ["export", run, str(tmp_path / "third"), "--interpolate-with", run, "--alpha", "0.5"]
    assert cli.main(third) == 0  # the scores are not of these weights
    assert "## Scores" not in (tmp_path / "third" / "README.md").read_text()
    assert cli.main(words) == 2
    assert "--interpolate-with FOLDER and --alpha A, from 0 to 1, go together" in capsys.readouterr().err
    (runs[0] / "evaluation.json").unlink()
