from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder
from mmdata.train.losses import clip_loss
from mmdata.train.models.towers import PatchConv, patch_product
from mmdata.train.run.objective import ContrastiveLoss


def make_model(**settings: object) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(ModelConfig.model_validate(settings), vocab_size=40).eval()


def make_batch(height: int = 16, width: int = 16, length: int = 5, rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randint(0, 256, (rows, 3, height, width), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, 40, (rows, length), generator=generator),
        "attention_mask": torch.ones(rows, length, dtype=torch.long),
        "valid": torch.ones(rows, dtype=torch.bool),
        "rows": torch.arange(rows),
        "keys": [""] * rows,
    }


@pytest.mark.parametrize(("height", "width", "length"), [(64, 64, 24), (16, 48, 5), (96, 64, 77), (8, 8, 1)])
def test_model_takes_every_bucket_shape(height: int, width: int, length: int):
    output = make_model()(make_batch(height, width, length))
    for features in (output.image_features, output.text_features):
        assert features.shape == (3, 128)
        assert features.dtype == torch.float32
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(output.logit_scale, torch.tensor(1 / 0.07))
    assert output.logit_bias is None


def test_sizes_are_what_they_are_named_after():
    with torch.device("meta"):
        model = DualEncoder.from_config(ModelConfig(name="base"), vocab_size=49408)
    vision = sum(p.numel() for p in model.image_tower.parameters())
    assert vision == 85_798_656 - 198 * 768  # the usual ViT-B/16 without head, class token and position table
    small = make_model(name="small")(make_batch(32, 64))
    assert small.image_features.shape == small.text_features.shape == (3, 256)
    assert make_model(embed_dim=48)(make_batch()).text_features.shape == (3, 48)


def test_bytes_are_normalised_inside():
    model, batch = make_model().double(), make_batch()
    floats = (batch["pixel_values"].double() / 255 - 0.5) / 0.5
    torch.testing.assert_close(model.encode_image(batch["pixel_values"]), model.encode_image(floats))


def test_text_padding_changes_nothing():
    model, batch = make_model().double(), make_batch(length=5)
    longer = torch.cat([batch["input_ids"], torch.full((3, 7), 9)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.zeros(3, 7, dtype=torch.long)], dim=1)
    short = model.encode_text(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(model.encode_text(longer, mask), short, rtol=0, atol=1e-10)


def test_order_of_words_and_place_of_patches_matter():
    model, batch = make_model(), make_batch(length=4)
    ids, pixels = batch["input_ids"], batch["pixel_values"]
    swapped = ids[:, [1, 0, 2, 3]]
    text_change = model.encode_text(swapped, batch["attention_mask"]) - model.encode_text(ids, batch["attention_mask"])
    image_change = model.encode_image(pixels.roll(8, dims=3)) - model.encode_image(pixels)
    assert text_change.norm(dim=1).min() > 1e-3
    assert image_change.norm(dim=1).min() > 1e-3


def test_rows_that_are_not_valid_have_finite_features_and_gradients():
    model, batch = make_model(), make_batch()
    batch["valid"][1] = False
    batch["pixel_values"][1] = 0
    batch["input_ids"][1] = 0
    batch["attention_mask"][1] = 0  # the contract has a 1 first; a row without any must not spoil the others either
    output = model(batch)
    assert all(features.isfinite().all() for features in output[:2])
    ContrastiveLoss("clip")(output, batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_rows_do_not_see_each_other():
    model, batch = make_model().train().double(), make_batch(rows=4)
    whole = model(batch)
    one = model({key: value[2:3] for key, value in batch.items()})  # type: ignore[index]
    torch.testing.assert_close(whole.image_features[2:3], one.image_features)
    torch.testing.assert_close(whole.text_features[2:3], one.text_features)


def test_scale_is_clamped_at_100():
    model = make_model(logit_scale_init=100.0)
    assert 99.9 < model(make_batch()).logit_scale <= 100.0
    with torch.no_grad():
        model.logit_scale.fill_(20.0)
    assert 99.9 < model(make_batch()).logit_scale <= 100.0
    model.clamp_logit_scale_()
    assert model.logit_scale.exp() < 100.0


def test_bound_of_the_scale_is_that_of_models_without_bias_and_may_be_set():
    model = make_model(logit_scale_init=100.0, logit_bias_init=-10.0)
    assert model.max_logit_scale == math.inf
    with torch.no_grad():
        model.logit_scale.fill_(math.log(150.0))
    model.clamp_logit_scale_()
    assert model(make_batch()).logit_scale.item() == pytest.approx(150.0)
    model.max_logit_scale = 50.0
    assert 49.9 < model(make_batch()).logit_scale <= 50.0
    model.clamp_logit_scale_()
    assert 49.9 < model.logit_scale.exp() < 50.0
    model(make_batch()).logit_scale.backward()
    assert model.logit_scale.grad is not None
    assert model.logit_scale.grad > 49.9, "there is a gradient where it was brought back to"


def test_scale_and_bias_start_where_the_config_says():
    model = make_model(logit_scale_init=10.0, logit_bias_init=-10.0)
    assert model.logit_scale.item() == pytest.approx(math.log(10.0))
    output = model(make_batch())
    assert output.logit_bias is not None
    assert output.logit_bias.item() == -10.0


def test_frozen_tower_stays_in_eval_mode_without_gradients():
    model = make_model(freeze=["text"], dropout=0.5).train()
    assert model.image_tower.training
    assert not model.text_tower.training
    frozen = {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"text_tower"}
    batch = make_batch()
    texts = [model.encode_text(batch["input_ids"], batch["attention_mask"]) for _ in range(2)]
    assert torch.equal(texts[0], texts[1])


def test_a_frozen_scale_has_no_gradient_and_the_towers_have():
    model, batch = make_model(freeze=["logit_scale"], logit_scale_init=10.0), make_batch()
    output = model(batch)
    loss = clip_loss(output.image_features, output.text_features, output.logit_scale, valid=batch["valid"])
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"logit_scale"}
    assert not model.logit_scale.requires_grad


def test_dropout_is_random_only_in_training():
    model, batch = make_model(dropout=0.5), make_batch()

    def images() -> Tensor:
        return model.encode_image(batch["pixel_values"])

    assert torch.equal(images(), images())
    model.train()
    assert not torch.equal(images(), images())


def test_weights_survive_a_state_dict():
    batch, model = make_batch(), make_model()
    other = DualEncoder.from_config(ModelConfig(), vocab_size=40).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch).image_features, model(batch).image_features)
    assert "pixel_mean" not in model.state_dict()  # a constant of the config


def test_vocabulary_is_that_of_the_tokenizer():
    assert make_model().text_tower.tokens.weight.shape[0] == 40
    with pytest.raises(ConfigError, match=r"vocab_size is missing: DualEncoder.from_config\(…, vocab_size="):
        DualEncoder.from_config(ModelConfig())


@pytest.mark.parametrize(("height", "width", "size"), [(12, 8, (4, 4)), (13, 11, (4, 2)), (5, 4, (1, 1))])
@pytest.mark.parametrize("bias", [False, True])
def test_product_of_patches_is_the_convolution(height: int, width: int, size: tuple[int, int], bias: bool):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 6, size, stride=size, bias=bias).double()
    own = PatchConv.of(conv)
    assert dict(own.named_parameters()) == dict(conv.named_parameters()), "the parameters themselves"
    x = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    found, expected = patch_product(x, own.weight, own.bias), conv(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(own(x), expected, rtol=0, atol=1e-12)
    weigh = torch.randn_like(expected)
    inputs = [x, *conv.parameters()]
    gradients = [torch.autograd.grad((y * weigh).sum(), inputs) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "is_cut"),
    [
        ({"kernel_size": 4, "stride": 4}, True),
        ({"kernel_size": 4, "stride": 4, "padding": "valid"}, True),  # SigLIP's
        ({"kernel_size": 1}, False),  # of a ResNet: the product would copy its input
        ({"kernel_size": 3, "stride": 2, "padding": 1}, False),
        ({"kernel_size": 4, "stride": 4, "groups": 3}, False),
    ],
)
def test_product_of_patches_is_for_convolutions_that_cut_images(settings: dict[str, Any], is_cut: bool):
    assert PatchConv.can_be(torch.nn.Conv2d(3, 6, **settings)) is is_cut


def test_product_of_patches_is_cast_as_the_convolution_is():
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(5, 3, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = patch_product(x, weight, None), torch.nn.functional.conv2d(x, weight, stride=4)
        assert patch_product(x.double(), weight.double(), None).dtype == torch.float64
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)


def test_image_sides_must_fit_the_patches():
    with pytest.raises(ValueError, match="images of 20 x 16 pixels: sides must be multiples of the patch size 8; set"):
        make_model()(make_batch(20, 16))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": "x"}, "name 'tiny' is built in: clip, vision, text and open_clip need name 'pretrained'"),
        ({"name": "pretrained"}, "give either model.clip, or both model.vision and model.text"),
        ({"name": "pretrained", "init_from": "x"}, "model.open_clip; model.clip=x takes the towers from there, too"),
        ({"name": "pretrained", "clip": "x", "text": "y"}, "give either model.clip, or both"),
        ({"name": "pretrained", "vision": "x"}, "give either model.clip, or both"),
        (
            {"name": "pretrained", "clip": "x", "embed_dim": 8},
            "embed_dim: the model in model.clip or model.open_clip brings",
        ),
        (
            {"name": "pretrained", "clip": "x", "dropout": 0.1},
            "dropout is for micro, tiny, small and base, and name is 'pretr",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_errors(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        DualEncoder.from_config(dict(settings), vocab_size=40)


@pytest.mark.parametrize(
    ("name", "image", "text", "whole"),
    [  # parameters of open_clip_torch 3.3.0: visual, the rest without logit_scale, all
        ("vit_b_32", 87_849_216, 63_428_096, 151_277_313),
        ("vit_b_16", 86_192_640, 63_428_096, 149_620_737),
        ("vit_l_14", 303_966_208, 123_650_304, 427_616_513),
    ],
)
def test_clip_sizes_have_the_parameters_of_open_clip(name: str, image: int, text: int, whole: int):
    with torch.device("meta"):
        model = DualEncoder.from_config(ModelConfig(name=name), vocab_size=49408)
    found = [sum(p.numel() for p in part.parameters()) for part in (model.image_tower, model.text_tower, model)]
    assert found == [image, text, whole]


def test_clip_sizes_take_another_dimension_and_no_dropout():
    with torch.device("meta"):
        model = DualEncoder.from_config(ModelConfig(name="vit_b_32", embed_dim=48), vocab_size=300)
    assert model.get_parameter("image_tower.projection.weight").shape == (48, 768)
    assert model.get_parameter("text_tower.projection.weight").shape == (48, 512)
    assert model.get_parameter("text_tower.model.embeddings.token_embedding.weight").shape == (300, 512)
    with pytest.raises(ConfigError, match="dropout is for micro, tiny, small and base, and name is 'vit_b_32': leave"):
        DualEncoder.from_config({"name": "vit_b_32", "dropout": 0.1}, vocab_size=300)
    with pytest.raises(ConfigError, match=r"vocab_size is missing: DualEncoder.from_config\(…, vocab_size="):
        DualEncoder.from_config(ModelConfig(name="vit_b_32"))


@pytest.mark.parametrize(("given", "example"), [("micro", "micro"), (None, "tiny")])
def test_model_of_something_else_than_settings_says_what_they_are(given: Any, example: str):
    said = re.escape(f"a model is a section of settings, such as {{'name': '{example}'}}: got {given!r}")
    with pytest.raises(ConfigError, match=f"^{said}$"):
        DualEncoder.from_config(given)
