"""Towers of transformers, from tiny random models made here: no download."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers import AutoConfig, AutoModel, CLIPImageProcessor
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from mmdata.batch import Batch
from mmdata.config import Config, DataConfig, ModelConfig
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder, train_step
from mmdata.train.models import transformers_towers
from mmdata.train.models.expected_inputs import with_inputs_of_model
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.trained.carried import keep_model, kept_model

LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": 60, "max_position_embeddings": 12, "bos_token_id": 57, "eos_token_id": 58}
VISION = {**LAYERS, "image_size": 16, "patch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"projection_dim": 24, "text_config": TEXT, "vision_config": VISION},
    "siglip": {"text_config": {**TEXT, "pad_token_id": 1, "projection_size": 16}, "vision_config": VISION},
    "siglip2": {
        "text_config": {**TEXT, "pad_token_id": 1, "projection_size": 16},
        "vision_config": {**LAYERS, "patch_size": 8, "num_patches": 4},
    },
}


def config_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, **CONFIGS[kind]}


def save(folder: Path, kind: str) -> Any:
    """A random model of the library, saved as its users have it."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **CONFIGS[kind])).eval()
    with torch.no_grad():  # away from their starts, to see that they are read
        model.logit_scale.fill_(1.5)
        if kind != "clip":
            model.logit_bias.fill_(-3.0)
    model.save_pretrained(folder)
    return model


def make_batch(length: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([length, 4, 2])
    ids = torch.randint(3, 50, (3, length), generator=generator)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = ids.where(mask.bool(), 1)
    ids[torch.arange(3), lengths - 1] = 58  # end of text
    return {
        "pixel_values": torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=generator),
        "input_ids": ids,
        "attention_mask": mask,
        "valid": torch.ones(3, dtype=torch.bool),
        "rows": torch.arange(3),
        "keys": [""] * 3,
    }


def build(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(ModelConfig(name="pretrained", **settings)).eval()


def library_output(model: Any, batch: Batch, encoder: DualEncoder) -> Any:
    """What the library computes from the same pixels, texts padded as its tokenizer pads them."""
    pixels = (batch["pixel_values"] - encoder.pixel_mean) / encoder.pixel_std
    inputs: dict[str, Tensor] = {"input_ids": batch["input_ids"], "pixel_values": pixels}
    if model.config.model_type == "clip":
        inputs["attention_mask"] = batch["attention_mask"]
    else:
        inputs["input_ids"] = torch.nn.functional.pad(batch["input_ids"], (0, 5), value=1)
    if model.config.model_type == "siglip2":
        patches = pixels.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, 3, 2, 2, 8, 8)
        inputs["pixel_values"] = patches.permute(0, 2, 3, 4, 5, 1).reshape(3, 4, -1)
        inputs["pixel_attention_mask"] = torch.ones(3, 4, dtype=torch.long)
        inputs["spatial_shapes"] = torch.full((3, 2), 2)
    return model(**inputs, return_loss=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_features_scale_and_loss_are_those_of_transformers(tmp_path: Path, kind: str):
    model = save(tmp_path, kind).double()
    encoder, batch = build(clip=str(tmp_path)).double(), make_batch()
    with torch.no_grad():
        expected, output = library_output(model, batch, encoder), encoder(batch)
    torch.testing.assert_close(output.image_features, expected.image_embeds, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.text_features, expected.text_embeds, rtol=0, atol=1e-10)
    assert output.logit_scale.item() == pytest.approx(model.logit_scale.exp().item())
    loss = ContrastiveLoss("clip" if kind == "clip" else "siglip")(output, batch)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
def test_scale_of_a_siglip_is_not_bounded(tmp_path: Path, kind: str):
    """That of SigLIP base is 117.33: CLIP's bound made 100 of it, and another loss of every batch."""
    model = save(tmp_path, kind)
    with torch.no_grad():
        model.logit_scale.fill_(math.log(117.33))
        model.logit_bias.fill_(-12.93)
    model.save_pretrained(tmp_path)
    encoder, batch = build(clip=str(tmp_path)).double(), make_batch()
    expected = library_output(model.double(), batch, encoder)
    loss_function = ContrastiveLoss("siglip")
    torch.testing.assert_close(loss_function(encoder(batch), batch), expected.loss, rtol=0, atol=1e-9)
    step = train_step(encoder, batch, loss_function)
    torch.testing.assert_close(step.loss, expected.loss.detach(), rtol=0, atol=1e-9)
    assert encoder.logit_scale.item() == model.logit_scale.item()
    assert encoder.logit_scale.grad is not None
    expected.loss.backward()
    torch.testing.assert_close(encoder.logit_scale.grad, model.logit_scale.grad.reshape(()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [100.0, 117.33])
def test_scale_of_a_clip_begins_at_its_bound_where_it_is_above(tmp_path: Path, scale: float):
    model = save(tmp_path, "clip")
    with torch.no_grad():
        model.logit_scale.fill_(math.log(scale))
    model.save_pretrained(tmp_path)
    assert build(clip=str(tmp_path))(make_batch()).logit_scale.item() == pytest.approx(100.0, rel=1e-4)
    assert build(clip=str(tmp_path), logit_bias_init=-10.0)(make_batch()).logit_scale.item() == pytest.approx(scale)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.sweep(keep=2)
def test_model_from_a_config_trains_on_every_bucket_shape(kind: str):
    encoder = build(clip=config_of(kind), gradient_checkpointing=True).train()
    loss_function = ContrastiveLoss("clip" if kind == "clip" else "siglip")
    for height, width, length in ((16, 16, 7), (24, 16, 12), (8, 32, 4)):
        batch = make_batch(length)
        batch["pixel_values"] = batch["pixel_values"].repeat(1, 1, 2, 2)[:, :, :height, :width]
        encoder.zero_grad()
        step = train_step(encoder, batch, loss_function, micro_batch_size=2)
        assert step.loss.isfinite()
        # Under DDP a parameter without a gradient is an error.
        assert [name for name, p in encoder.named_parameters() if p.grad is None] == []
    expected_scale, expected_bias = (1 / 0.07, None) if kind == "clip" else (10.0, -10.0)
    assert encoder.logit_scale.exp().item() == pytest.approx(expected_scale, rel=1e-3)
    assert (None if encoder.logit_bias is None else encoder.logit_bias.item()) == expected_bias


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_whose_weights_are_cast_together_are_those_of_transformers_under_autocast(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    encoder, batch = build(clip=config_of(kind)), make_batch()
    if kind == "siglip2":  # patches that are padding need a mask
        batch |= {
            "pixel_values": torch.randn(3, 4, 192, generator=torch.Generator().manual_seed(0)),
            "pixel_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]),
            "spatial_shapes": torch.tensor([[2, 2], [1, 2], [2, 2]]),
        }
    cast, calls = transformers_towers.cast_together, list[torch.dtype]()

    def counted(groups: Any, dtype: torch.dtype) -> Any:
        calls.append(dtype)
        return cast(groups, dtype)

    monkeypatch.setattr(transformers_towers, "cast_together", counted)

    def features_and_gradients() -> list[Tensor]:
        encoder.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = encoder(batch)
        (output.image_features[:, :3].sum() + output.text_features[:, :3].sum()).backward()
        gradients = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
        return [output.image_features, output.text_features, *gradients]

    found = features_and_gradients()
    assert calls == 4 * [torch.bfloat16], "one cast a layer"
    monkeypatch.setattr(transformers_towers.Layer, "forward", CLIPEncoderLayer.forward)
    expected = features_and_gradients()
    assert len(calls) == 4
    assert len(found) == len(expected) > 50
    whole = torch.cat([gradient.flatten() for gradient in expected[2:]]).norm()
    for one, other in zip(found, expected, strict=True):  # bfloat16 has 8 bits, and that of a key's bias is 0
        assert (one - other).norm() <= 0.02 * other.norm() + 0.002 * whole


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_under_autocast_is_one_graph(kind: str, monkeypatch: pytest.MonkeyPatch):
    # torch.compile of some versions of torch cannot trace it.
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch.compiler.disable(torch.amp.is_autocast_available))
    layers = [part for part in build(clip=config_of(kind)).modules() if isinstance(part, transformers_towers.Layer)]
    for layer in layers:
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        x = torch.randn(2, 5, layer.layer_norm1.normalized_shape[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(compiled(x, None), layer(x, None))


def test_maps_that_are_cast_together_are_the_maps():
    torch.manual_seed(0)
    groups = [[torch.nn.Linear(3, 2), torch.nn.Linear(3, 4)], [torch.nn.Linear(5, 1)]]
    (both, bias), (alone, _) = transformers_towers.cast_together(groups, torch.float64)
    x = torch.randn(7, 3, dtype=torch.float64)
    expected = torch.cat([part.double()(x) for part in groups[0]], 1)
    torch.testing.assert_close(torch.nn.functional.linear(x, both, bias), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(alone, groups[1][0].weight.double(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_features_do_not_depend_on_the_bucket(kind: str):
    encoder = build(clip=config_of(kind)).double()
    batch = make_batch(7)
    ids = torch.nn.functional.pad(batch["input_ids"], (0, 3), value=30)  # whatever a tokenizer pads with
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 3))
    short = encoder.encode_text(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(encoder.encode_text(ids, mask), short, rtol=0, atol=1e-10)


def test_clip_reads_the_last_token_of_any_tokenizer():
    """The library looks for eos_token_id, and reads the first position where there is none."""
    encoder, batch = build(clip=config_of("clip")), make_batch()
    other = batch["input_ids"].clone()
    other[other == 58] = 7
    other[:, 1] = 8
    changed = other.clone()
    changed[:, 1] = 9
    features = [encoder.encode_text(ids, batch["attention_mask"]) for ids in (other, changed)]
    assert (features[0] - features[1]).norm(dim=1).min() > 1e-3


PAIRS = {
    "vit_bert": ({"model_type": "vit", **VISION}, {"model_type": "bert", **TEXT}),
    "dinov2_distilbert": (
        {"model_type": "dinov2", **VISION},
        {"model_type": "distilbert", "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 60},
    ),
    "convnext_modernbert": (
        {"model_type": "convnext", "hidden_sizes": [4, 4, 8, 8], "depths": [1, 1, 1, 1]},
        {"model_type": "modernbert", **TEXT, "pad_token_id": 0, "cls_token_id": 57, "sep_token_id": 58},
    ),
    "clip_clip": (config_of("clip"), config_of("clip")),
    "siglip2_siglip": (config_of("siglip2"), config_of("siglip")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_any_vision_and_text_model_make_a_pair(pair: str):
    vision, text = PAIRS[pair]
    encoder, batch = build(vision=vision, text=text, embed_dim=20), make_batch()
    batch["pixel_values"] = batch["pixel_values"].repeat(1, 1, 2, 3)  # (3, 3, 32, 48)
    step = train_step(encoder.train(), batch, ContrastiveLoss("clip"))
    assert step.output.image_features.shape == step.output.text_features.shape == (3, 20)
    unused = {name for name, p in encoder.named_parameters() if p.grad is None}
    assert {name for name in unused if "mask_token" not in name} == set()


def test_pair_from_folders_with_a_frozen_image_tower(tmp_path: Path):
    vision, text = (AutoModel.from_config(AutoConfig.for_model(**config)) for config in PAIRS["vit_bert"])
    vision.half().save_pretrained(tmp_path / "vision")
    text.save_pretrained(tmp_path / "text")
    (tmp_path / "vision" / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]})
    )
    encoder = build(vision=str(tmp_path / "vision"), text=str(tmp_path / "text"), freeze=["image"]).train()
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    torch.testing.assert_close(encoder.pixel_mean.flatten(), torch.tensor([25.5, 51.0, 76.5]))
    torch.testing.assert_close(encoder.pixel_std.flatten(), torch.tensor([102.0, 127.5, 153.0]))
    weight = dict(vision.named_parameters())["embeddings.patch_embeddings.projection.weight"].float()
    loaded = dict(encoder.image_tower.named_parameters())["model.embeddings.patch_embeddings.projection.weight"]
    assert torch.equal(loaded, weight)
    train_step(encoder, make_batch(), ContrastiveLoss("clip"))
    trained = {name.split(".")[0] for name, p in encoder.named_parameters() if p.grad is not None}
    assert trained == {"text_tower", "image_projection", "text_projection", "logit_scale"}


@pytest.mark.parametrize("way", ["mean", "cls"])
def test_text_tower_pools_as_sentence_transformers_does(tmp_path: Path, way: str):
    vision, text = PAIRS["vit_bert"]
    AutoModel.from_config(AutoConfig.for_model(**text)).save_pretrained(tmp_path)
    theirs = Pooling(16, pooling_mode=way)
    (tmp_path / "1_Pooling").mkdir()
    theirs.save(str(tmp_path / "1_Pooling"))
    encoder, batch = build(vision=vision, text=str(tmp_path)), make_batch()
    tower: Any = encoder.text_tower
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        tokens = AutoModel.from_pretrained(tmp_path).eval()(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = theirs({"token_embeddings": tokens, "attention_mask": mask})["sentence_embedding"]
        torch.testing.assert_close(tower(ids, mask), expected)
    assert not [name for name, _ in encoder.named_parameters() if "pooler" in name and "text_tower" in name]
    # A run keeps the towers' configs, not their folders.
    config = ModelConfig(name="pretrained", vision=vision, text=str(tmp_path))
    keep_model(tmp_path, config, encoder)
    (tmp_path / "1_Pooling/config.json").unlink()
    kept: Any = kept_model(tmp_path / "checkpoints/step-1", config, vocab_size=60)
    kept.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(kept.text_tower.eval()(ids, mask), expected)


def test_text_tower_of_sentence_transformers_with_another_pooling_is_refused(tmp_path: Path):
    vision, text = PAIRS["vit_bert"]
    AutoModel.from_config(AutoConfig.for_model(**text)).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    old = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(old))
    with pytest.raises(
        ConfigError, match=r"tokens are pooled by \['pooling_mode_mean_tokens', 'pooling_mode_max_tok.*ch"
    ):
        build(vision=vision, text=str(tmp_path))


def test_pixels_are_normalised_as_the_model_was_trained(tmp_path: Path):
    save(tmp_path, "clip")
    encoder = build(clip=str(tmp_path))
    torch.testing.assert_close(encoder.pixel_mean.flatten() / 255, torch.tensor([0.48145466, 0.4578275, 0.40821073]))
    assert build(clip=config_of("siglip")).pixel_mean.flatten().tolist() == [127.5] * 3
    vision, text = PAIRS["vit_bert"]
    assert build(vision=vision, text=text).pixel_mean.flatten().tolist() == [127.5] * 3


def test_pixels_of_a_folder_without_an_image_processor_are_told_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    vision, text = PAIRS["vit_bert"]
    for kind, mean in (("vit", [0.5, 0.5, 0.5]), ("dinov2", [0.485, 0.456, 0.406])):
        AutoModel.from_config(AutoConfig.for_model(**{**vision, "model_type": kind})).save_pretrained(tmp_path / kind)
        encoder = build(vision=str(tmp_path / kind), text=text)
        torch.testing.assert_close(encoder.pixel_mean.flatten() / 255, torch.tensor(mean))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"'{tmp_path}/dinov2': no preprocessor_config.json, so that pixels get ImageNet's mean and deviation; if the "
        "model expects others, save its image processor into the folder"
    )


def test_settings_that_are_not_given_are_those_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path / "siglip", "siglip")
    CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 24, "width": 24}).save_pretrained(
        tmp_path / "siglip"
    )
    model = ModelConfig(name="pretrained", clip=str(tmp_path / "siglip"))
    unset = Config(data=DataConfig(shards="s", tokenizer="clip", global_batch_size=2), model=model)
    data = with_inputs_of_model(unset).data
    assert (data.image_size, data.max_length) == (24, 12)
    assert caplog.records == []
    given = DataConfig(shards="s", tokenizer="clip", global_batch_size=2, image_size=16, max_length=8)
    assert with_inputs_of_model(Config(data=given, model=model)).data == given
    assert [record.getMessage() for record in caplog.records] == [
        "data.image_size is 16, and the folder of the model says 24: leave it out, unless you mean it",
        "data.max_length is 8, and the folder of the model says 12: leave it out, unless you mean it",
    ]
    shapes = DataConfig(shards="s", tokenizer="clip", global_batch_size=2, image_buckets=[(16, 32)], text_buckets=[77])
    assert with_inputs_of_model(Config(data=shapes, model=model)).data == shapes
    assert with_inputs_of_model(Config(data=unset.data)).data == unset.data  # built-in towers


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "/no/such/folder",
            "model.clip: cannot load '/no/such/folder': give a folder with config.json",
        ),
        ({"hidden_size": 3}, "model.clip: a config needs a model_type, such as clip; got {'hidden_size': 3}"),
        ({"model_type": "nope"}, "model.clip: cannot load .* a config with a known model_type"),
        ({"model_type": "clip", "projection_dim": "many"}, "model.clip: cannot load .*projection_dim"),
        ({"model_type": "bert", **TEXT}, "model.clip: model_type 'bert'; expected clip, siglip, siglip2"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_error(source: str | dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        build(clip=source)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 32},
            r"visual_projection: 1 of another shape \(.* is \[24, 16\], in the model \[24, 32\]\); use",
        ),
        (
            {"num_hidden_layers": 3},
            r"vision_model: 16 missing \(vision_model\.encoder\.layers\.2\..*\); use the folder",
        ),
    ],
)
def test_folder_with_weights_of_another_architecture_names_the_part(
    tmp_path: Path, changes: dict[str, int], message: str
):
    save(tmp_path, "clip")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"^model\.clip '.*': its weights are not those of its config\.json: .*" + message
    ):
        build(clip=str(tmp_path))


def test_weights_as_pickle_are_refused(tmp_path: Path):
    model = save(tmp_path, "clip")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model.clip: cannot load .*model.safetensors"):
        build(clip=str(tmp_path))


def test_tokenizer_larger_than_the_model_is_an_error():
    with pytest.raises(ConfigError, match="the text tower's vocabulary has 60 entries, the tokenizer 61: use the"):
        DualEncoder.from_config(ModelConfig(name="pretrained", clip=config_of("clip")), vocab_size=61)


def test_text_longer_than_the_model_is_an_error():
    encoder = build(clip=config_of("clip"))
    with pytest.raises(ValueError, match=r"texts of 13 tokens: the text tower has 12 positions; set data.max_length"):
        encoder.encode_text(torch.ones(1, 13, dtype=torch.long), torch.ones(1, 13, dtype=torch.long))
