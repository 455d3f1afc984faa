"""Runs exported to open_clip and to ONNX, loaded by open_clip and by onnxruntime."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import open_clip
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

import mmdata
from mmdata import cli
from mmdata.config import ModelConfig
from mmdata.errors import ConfigError
from mmdata.trained import TrainedRun
from mmdata.trained.carried import keep_model
from mmdata.trained.export import export_to_open_clip
from mmdata.trained.onnx import export_to_onnx
from tests.trained.conftest import MakeRun, write_run
from tests.trained.test_export import AT_24, CLIP, LAYERS, SIGLIP, TEXT, TEXTS, VISION, pretrained
from tests.trained.test_load_run import PATCHES

GELU = {f"{part}_config": {**sizes, "hidden_act": "gelu"} for part, sizes in (("text", TEXT), ("vision", VISION))}
PAIR = pretrained(vision={"model_type": "vit", **VISION}, text={"model_type": "bert", **TEXT})


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A PNG of the size that all runs here take, so that no library resizes it."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def load(make_run: MakeRun, model: dict[str, Any], **data: Any) -> TrainedRun:
    return mmdata.load_run(make_run(model, **data), device="cpu")


def assert_equal(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        pretrained(clip=CLIP),
        pretrained(clip={**CLIP, **GELU}, logit_bias_init=-5.0),
        pretrained(clip={**CLIP, **AT_24}),
    ],
    ids=["quick_gelu", "gelu with a bias", "at another size"],
)
def test_export_is_loaded_by_open_clip(make_run: MakeRun, photo: Path, tmp_path: Path, model: dict[str, Any]):
    run = load(make_run, model)
    export_to_open_clip(run, tmp_path / "out")
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(TEXTS)
    with torch.no_grad():
        theirs.eval()
        assert_equal(
            theirs.encode_image(preprocess(Image.open(photo))[None], normalize=True), run.embed_images([photo])
        )
        assert_equal(theirs.encode_text(tokens, normalize=True), run.embed_texts(TEXTS))
    assert theirs.logit_scale.exp().item() == pytest.approx(run.logit_scale)
    assert (None if theirs.logit_bias is None else theirs.logit_bias.item()) == run.logit_bias


def test_export_is_weights_for_a_model_that_open_clip_knows_by_name(
    make_run: MakeRun, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With CLIP's tokenizer, as `create_model("ViT-B-32", pretrained=FILE)`; that of 151 M parameters is too large."""
    text = {**TEXT, "vocab_size": 49408, "max_position_embeddings": 77}
    run = load(
        make_run, pretrained(clip={**CLIP, **GELU, "text_config": {**text, "hidden_act": "gelu"}}), tokenizer="clip"
    )
    export_to_open_clip(run, tmp_path / "out")
    named = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "patch_size": 8, "head_width": 8, "mlp_ratio": 2},
        "text_cfg": {"vocab_size": 49408, "width": 16, "heads": 2, "layers": 2, "mlp_ratio": 2},
    }
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-tiny", named)
    theirs = open_clip.create_model("ViT-tiny", pretrained=str(tmp_path / "out" / "open_clip_model.safetensors"))
    pixels = (run.preprocess(photo)[None].float() - run.model.pixel_mean) / run.model.pixel_std
    texts = ["a cat", "Salt &amp; pepper", "x " * 14]
    with torch.no_grad():
        assert_equal(theirs.eval().encode_image(pixels, normalize=True), run.embed_images([photo]))
        assert_equal(
            theirs.encode_text(open_clip.get_tokenizer("ViT-tiny")(texts), normalize=True), run.embed_texts(texts)
        )
    assert "Texts were cut to 16 tokens in training" in (tmp_path / "out" / "README.md").read_text()


def test_export_to_open_clip_begins_a_run_whose_folder_can_be_moved(make_run: MakeRun, photos: Path, tmp_path: Path):
    first = load(make_run, pretrained(clip={**CLIP, **GELU}, logit_bias_init=-5.0))
    export_to_open_clip(first, tmp_path / "out")
    folder = write_run(tmp_path / "run", photos, {"open_clip": str(tmp_path / "out")})
    config = ModelConfig(open_clip=str(tmp_path / "out"))
    before = mmdata.load_run(folder, device="cpu")
    model = type(before.model).from_config(config)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in first.model.state_dict().items())
    keep_model(folder, config, before.model)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    (folder / "config.yaml").write_text(json.dumps(before.config.model_dump(mode="json")))
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    moved = mmdata.load_run(folder, device="cpu")
    assert torch.equal(moved.embed_texts(TEXTS), before.embed_texts(TEXTS))
    export_to_open_clip(moved, tmp_path / "again")
    assert str(tmp_path) not in (tmp_path / "again" / "README.md").read_text()


def test_export_to_open_clip_says_why_a_model_is_none(make_run: MakeRun, tmp_path: Path):
    mixed = {**CLIP, "text_config": {**TEXT, "hidden_act": "gelu"}}
    for model, message in (
        (
            {"name": "micro"},
            r"\(ImageTower, TextTower\) cannot be exported to open_clip, whose CLIP is .*--to onnx takes al",
        ),
        (
            pretrained(clip=mixed),
            r"hidden_act \['gelu', 'quick_gelu'\] and layer_norm_eps \[1e-05\]: the towers of open_",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            export_to_open_clip(load(make_run, model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "model",
    [{"name": "micro"}, pretrained(clip=CLIP), PAIR, pretrained(clip=SIGLIP), pretrained(clip={**CLIP, **AT_24})],
    ids=["micro", "clip", "a pair", "siglip", "at another size"],
)
@pytest.mark.sweep(keep=3)
def test_export_to_onnx_has_the_runs_features(
    make_run: MakeRun, photos: Path, photo: Path, tmp_path: Path, model: dict[str, Any]
):
    run = load(make_run, model)
    export_to_onnx(run, tmp_path / "out")
    image, text = (onnxruntime.InferenceSession(tmp_path / "out" / f"{name}.onnx") for name in ("image", "text"))
    paths = sorted((photos / "raw").glob("*.png"))
    pixels = torch.stack([run.preprocess(path) for path in paths])
    normalised = ((pixels - run.model.pixel_mean) / run.model.pixel_std).numpy()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for rows in (1, len(paths)):
        assert_equal(
            image.run(["image_embeds"], {"pixel_values": normalised[:rows]})[0], run.embed_images(paths[:rows])
        )
        tokens = tokenizer(TEXTS[:rows], padding=True, truncation=True, return_tensors="np")
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        assert_equal(text.run(["text_embeds"], inputs)[0], run.embed_texts(TEXTS[:rows]))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    of_file = processor(Image.open(photo), return_tensors="np")["pixel_values"]
    assert_equal(image.run(None, {"pixel_values": of_file})[0], run.embed_images([photo]))
    bias = "" if run.logit_bias is None else f", to which {run.logit_bias:.6g} is added,"
    told = f"products times {run.logit_scale:.6g}{bias} are the logits."
    assert told in (tmp_path / "out" / "README.md").read_text()


def test_export_to_onnx_says_what_it_needs(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = load(make_run, pretrained(clip=PATCHES), image_patches=[9, 25], patch_size=8, max_length=16)
    with pytest.raises(
        ConfigError, match=r"is a SigLIP 2 NaFlex, whose patches of any shape torch.onnx does not export; u"
    ):
        export_to_onnx(run, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"--to onnx needs onnxscript: pip install 'mmdata\[onnx\]'"):
        export_to_onnx(run, tmp_path / "out")


@pytest.mark.parametrize("target", ["open_clip", "onnx"])
def test_export_program_says_how_to_load_the_folder(
    make_run: MakeRun, photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
):
    run = make_run(pretrained(clip=CLIP))
    monkeypatch.chdir(photo.parent)
    photo.rename("photo.jpg")
    assert cli.main(["export", str(run), "out", "--to", target]) == 0
    said, _, code = capsys.readouterr().out.partition("\n\n")
    assert f"→ out ({target}, " in said
    assert code.replace("out", "FOLDER") in Path("out/README.md").read_text()
    exec(code, {})
    cosines = capsys.readouterr().out
    assert cosines.startswith("[[" if target == "onnx" else "tensor([[")
    assert json.loads(Path("out/tokenizer_config.json").read_text())["model_max_length"] == LAYERS["hidden_size"]
