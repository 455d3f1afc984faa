"""Weights of open_clip as towers: its own models are the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import CLIP, CustomTextCLIP
from safetensors.torch import save_file

from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.config.wrong_place import other_setting
from mmdata.errors import ConfigError
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import DualEncoder
from mmdata.train.models.expected_inputs import with_inputs_of_model
from mmdata.train.models.open_clip import TEXT_HEADS, VISION_HEADS
from tests.logs import of_mmdata

VISION = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8}
TEXT = {"context_length": 20, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 3}
CFG: dict[str, Any] = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
TEXTS = ["a round dog", "a cat on a very red chair"]


def make(cls: Any = CLIP, **changes: Any) -> Any:
    """A model of open_clip whose parameters all matter."""
    torch.manual_seed(0)
    model = cls(**{**CFG, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter) * (parameter.ndim > 0)
    return model


def save(model: Any, folder: Path, **changes: Any) -> Path:
    """A folder as it is on the hub."""
    folder.mkdir(exist_ok=True)
    pixels = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": {**CFG, **changes}, "preprocess_cfg": pixels})
    )
    return folder


def assert_same_features(theirs: Any, model: DualEncoder) -> None:
    """Of random pixels, and of texts as each library tokenizes them."""
    pixels = torch.randn(2, 3, 32, 32)
    ids, mask = map(torch.from_numpy, Tokenizer.load("clip").encode(TEXTS, 12))
    with torch.no_grad():
        images = theirs.encode_image(pixels, normalize=True)
        texts = theirs.encode_text(open_clip.SimpleTokenizer(context_length=20)(TEXTS), normalize=True)
        torch.testing.assert_close(model.eval().encode_image(pixels), images, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.encode_text(ids, mask), texts, rtol=0, atol=1e-5)
    assert (texts[0] - texts[1]).norm() > 0.1


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_open_clip_folder_has_open_clips_features(tmp_path: Path, quick_gelu: bool):
    theirs = make(quick_gelu=quick_gelu, vision_cfg={**VISION, "head_width": 16}, init_logit_bias=-3.0)
    folder = save(theirs, tmp_path / "a", quick_gelu=quick_gelu, vision_cfg={**VISION, "head_width": 16})
    model = DualEncoder.from_config({"open_clip": folder}, vocab_size=49408)
    assert_same_features(theirs, model)
    assert model.logit_scale.item() == pytest.approx(theirs.logit_scale.item())
    assert model.logit_bias is not None
    assert model.logit_bias.item() == -3.0
    assert (model.pixel_mean / 255).flatten().tolist() == pytest.approx([0.5, 0.4, 0.3])


@pytest.mark.parametrize("kind", ["safetensors", "checkpoint of a training", "custom text", "float16"])
def test_open_clip_file_has_open_clips_features(tmp_path: Path, kind: str):
    theirs = make(CustomTextCLIP if kind == "custom text" else CLIP)
    save(theirs, tmp_path)  # a file alone does not say the heads of towers of these sizes
    weights = theirs.half().state_dict() if kind == "float16" else theirs.state_dict()
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":
        save_file(weights, path)
    elif kind == "checkpoint of a training":
        names = {f"module.{name}": value for name, value in weights.items()}
        torch.save({"epoch": 3, "name": "run", "state_dict": names, "optimizer": {"step": 1}}, path)
    else:
        torch.save(weights, path)
    model = DualEncoder.from_config({"open_clip": path, "quick_gelu": False}, vocab_size=49408)
    assert_same_features(theirs.float(), model)


SMALL: dict[str, Any] = {
    "vision_cfg": {**VISION, "width": 384, "layers": 12},
    "text_cfg": {**TEXT, "width": 256, "layers": 10, "heads": 4},
}


def test_open_clip_file_alone_has_the_heads_of_the_named_model_of_its_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    theirs = make(**SMALL)  # towers of ViT-S-16 and ViT-S-16-alt
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    model = DualEncoder.from_config({"open_clip": tmp_path / "weights.pt", "quick_gelu": False}, vocab_size=49408)
    assert_same_features(theirs, model)
    (record,) = of_mmdata(caplog)
    assert "weights.pt': taken with 6 heads for images and 4 for texts, activation gelu" in record.getMessage()
    assert record.levelname == "WARNING", "the command prints it"


def test_heads_of_files_alone_are_those_of_open_clips_named_models():
    configs = [open_clip.get_model_config(name) for name in open_clip.list_models()]
    vision = [config["vision_cfg"] for config in configs]
    vits = [one for one in vision if isinstance(one.get("layers"), int) and "timm_model_name" not in one]
    found = {(one["width"], one["layers"]): one["width"] // one.get("head_width", 64) for one in vits}
    assert found == VISION_HEADS
    vits = [config["text_cfg"] for config in configs if config["vision_cfg"] in vits]
    found = {(one["width"], one.get("layers", 12)): one.get("heads", 8) for one in vits if "width" in one}
    assert found == TEXT_HEADS


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vision_cfg": VISION}, "no named model of open_clip has 2 layers of width 64 in its image tower"),
        ({"text_cfg": TEXT}, "no named model of open_clip has 3 layers of width 64 in its text tower"),
    ],
)
def test_open_clip_asks_for_the_heads_of_a_file_of_no_named_size(tmp_path: Path, changes: dict[str, Any], part: str):
    torch.save(make(**SMALL | changes).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ConfigError, match=rf"weights.pt': a file .* number of heads, and {part}: give the folder with open_clip_config"
    ):
        DualEncoder.from_config({"open_clip": tmp_path / "weights.pt", "quick_gelu": False})


@pytest.mark.parametrize(
    ("key", "there", "said"),
    [
        ("open_clip", "config.json", "this is a model of transformers; set model.name=pretrained model.clip=.*here in"),
        ("open_clip", "checkpoints", "this is the folder of a run; set model.init_from=.*here in its place, and mod"),
        ("clip", "checkpoints", "this is the folder of a run; set model.init_from=.*here in its place, and model.na"),
        (
            "clip",
            "open_clip_config.json",
            "this is a model of open_clip; set model.name=pretrained model.open_clip=.*h",
        ),
        ("init_from", "open_clip_config.json", "this is a model of open_clip; set model.name=pretrained model.open_c"),
    ],
)
def test_folder_of_a_model_for_another_setting_names_that_setting(tmp_path: Path, key: str, there: str, said: str):
    folder = tmp_path / "here"
    if there == "checkpoints":
        (folder / there).mkdir(parents=True)
    else:
        folder.mkdir()
        (folder / there).write_text("{}")
    name = "micro" if key == "init_from" else "pretrained"
    with pytest.raises(ConfigError, match=rf"model.{key} '.*here': {said}"):
        DualEncoder.from_config({"name": name, key: str(folder)}, vocab_size=300)


@pytest.mark.parametrize("key", ["model.clip", "model.vision", "model.open_clip"])
def test_folder_with_the_files_of_both_libraries_is_a_model_of_each(tmp_path: Path, key: str):
    for name in ("config.json", "open_clip_config.json"):
        (tmp_path / name).write_text("{}")
    assert not other_setting(tmp_path, key=key)


def test_file_of_weights_for_another_setting_names_that_setting(tmp_path: Path):
    path = tmp_path / "weights.pt"
    torch.save({"vision_model.embeddings.class_embedding": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"weights.pt': weights of transformers, and not of open_clip; set .*l.clip="):
        DualEncoder.from_config({"open_clip": path})
    with pytest.raises(ConfigError, match=r"l.init_from '.*weights.pt': this is a file of weights; set .*open_clip=/"):
        DualEncoder.from_config({"name": "micro", "init_from": path}, vocab_size=300)


def test_open_clip_sets_size_of_images_and_length_of_texts(tmp_path: Path):
    folder = save(make(), tmp_path / "a")
    data = {"shards": "x", "tokenizer": "clip", "global_batch_size": 4}
    config = with_inputs_of_model(parse(Config, {"data": data, "model": {"open_clip": folder}}, origin="test"))
    assert (config.data.image_size, config.data.max_length, config.model.name) == (32, 20, "pretrained")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_cfg": {**VISION, "width": 128}}, r"open_clip_config.json': vision_cfg.width is 128, and 64 in the w"),
        ({"vision_cfg": {**VISION, "patch_size": 16}}, r"vision_cfg.patch_size is 16, and 8 in the weights"),
        ({"vision_cfg": {**VISION, "mlp_ratio": 2.0}}, r"vision_cfg.mlp_ratio is 2.0, and 4.0 in the weights"),
        ({"text_cfg": {**TEXT, "layers": 4}}, r"text_cfg.layers is 4, and 3 in the weights"),
        ({"text_cfg": {**TEXT, "context_length": 77}}, r"text_cfg.context_length is 77, and 20 in the weights"),
        ({"text_cfg": {**TEXT, "vocab_size": 32000}}, r"text_cfg.vocab_size is 32000, and 49408 in the weights"),
        ({"embed_dim": 512}, r"embed_dim is 512, and 24 in the weights"),
        (
            {"text_cfg": {**TEXT, "no_causal_mask": True}},
            r"its text tower is not .*CLIP \(no_causal_mask is True\); model",
        ),
        ({"vision_cfg": {**VISION, "pool_type": "avg"}}, r"its image tower is not .*CLIP \(pool_type is 'avg'\)"),
        (
            {"text_cfg": {"hf_model_name": "roberta-base"}},
            r"its text tower is not .*\(hf_model_name is 'roberta-base'\)",
        ),
        (
            {"vision_cfg": None},
            r"open_clip_config.json': cannot be read as the config of open_clip \(.*; give a folder",
        ),
    ],
)
def test_open_clip_says_which_part_differs(tmp_path: Path, changes: dict[str, Any], message: str):
    folder = save(make(), tmp_path / "a", **changes)
    with pytest.raises(ConfigError, match=message):
        DualEncoder.from_config({"open_clip": folder})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("visual.conv1.weight", "visual.trunk.patch_embed.proj.weight"),
            r"image tower .*'visual.conv1.weight' is missing",
        ),
        (
            ("ln_final.bias", "transformer.embeddings.word.weight"),
            r"text tower .*\('ln_final.bias' is missing\); model.op",
        ),
        (
            ("", "visual.ln_mid.bias"),
            r"its image tower is not that of OpenAI's CLIP \('visual.ln_mid.bias' is one more\)",
        ),
    ],
)
def test_open_clip_refuses_towers_of_another_kind(tmp_path: Path, change: tuple[str, str], message: str):
    weights = make().state_dict()
    weights[change[1]] = weights.pop(change[0], torch.zeros(1))
    torch.save(weights, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=message):
        DualEncoder.from_config({"open_clip": tmp_path / "weights.pt", "quick_gelu": True})


def test_open_clip_asks_for_what_a_file_does_not_say_and_for_clips_tokenizer(tmp_path: Path):
    torch.save(make().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ConfigError, match=r"weights.pt': a file of weights does not say its activation: set model.quick_"
    ):
        DualEncoder.from_config({"open_clip": tmp_path / "weights.pt"})
    save(make(), tmp_path)
    settings = {"open_clip": tmp_path / "weights.pt", "quick_gelu": False}
    with pytest.raises(
        ConfigError, match=r"is that of CLIP's tokenizer, and the tokenizer has 300: set data.tokenizer=c"
    ):
        DualEncoder.from_config(settings, vocab_size=300)


def test_open_clip_reads_tensors_only(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model.open_clip '.*absent': no such file or folder; files on the hub are"):
        DualEncoder.from_config({"open_clip": tmp_path / "absent"})
    torch.save({"state_dict": {"a": Path("x")}}, tmp_path / "code.pt")
    torch.save({"state_dict": {"a": "x"}}, tmp_path / "text.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    for name in ("code.pt", "text.pt", "broken.safetensors"):
        with pytest.raises(ConfigError, match=rf"{name}': cannot be read as weights \(.*\); save the state dict of op"):
            DualEncoder.from_config({"open_clip": tmp_path / name, "quick_gelu": True})


def test_quick_gelu_is_for_open_clip():
    with pytest.raises(
        ConfigError, match=r"quick_gelu is for open_clip; other models have their activation in their c"
    ):
        DualEncoder.from_config({"quick_gelu": True}, vocab_size=40)
