"""Patch dropout in each image tower that has it; open_clip's and timm's are the oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from open_clip.transformer import PatchDropout
from timm.layers.patch_dropout import PatchDropout as TimmPatchDropout

from mmdata.errors import ConfigError
from mmdata.train import DualEncoder, train_step
from mmdata.train.models.towers import drop_patches
from mmdata.train.run.objective import ContrastiveLoss
from tests.train.test_native import NAFLEX
from tests.train.test_native import make_batch as make_native_batch
from tests.train.test_pretrained import LAYERS, TEXT, config_of
from tests.train.test_pretrained import make_batch as make_small_batch

TOWERS: dict[str, dict[str, Any]] = {
    "own": {"name": "micro"},
    "clip": {"name": "pretrained", "clip": config_of("clip")},
    "siglip": {"name": "pretrained", "clip": config_of("siglip")},
    "siglip2": {"name": "pretrained", "clip": config_of("siglip2")},
    "vision of clip": {
        "name": "pretrained",
        "vision": {"model_type": "clip_vision_model", **LAYERS, "image_size": 16, "patch_size": 8},
        "text": {"model_type": "clip_text_model", **TEXT},
    },
}


def build(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(settings, vocab_size=60)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.9])
@pytest.mark.parametrize("prefix", [0, 1])
def test_patches_that_stay_are_those_of_open_clip_and_as_many_as_timms(share: float, prefix: int):
    x = torch.randn(4, prefix + 10, 6)
    theirs = PatchDropout(share, exclude_first_token=bool(prefix)).train()
    torch.manual_seed(3)
    expected = theirs(x)
    torch.manual_seed(3)
    torch.testing.assert_close(drop_patches(x, share, prefix=prefix), expected, rtol=0, atol=0)
    assert TimmPatchDropout(share, num_prefix_tokens=prefix).train()(x).shape == expected.shape


@pytest.mark.parametrize("kind", TOWERS)
def test_training_drops_half_of_the_patches_and_evaluation_none(kind: str):
    model, plain = build(**TOWERS[kind], patch_dropout=0.5), build(**TOWERS[kind])
    seen: list[int] = []
    blocks = next(part for part in model.image_tower.modules() if isinstance(part, torch.nn.ModuleList))
    blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].shape[1]))
    pixels = make_small_batch()["pixel_values"].repeat(1, 1, 2, 2)  # 16 patches
    features = model.train().encode_image(pixels), model.encode_image(pixels), model.eval().encode_image(pixels)
    tokens = int("clip" in kind and "sig" not in kind)
    assert seen == [tokens + 8, tokens + 8, tokens + 16]
    assert not torch.equal(features[0], features[1])
    torch.testing.assert_close(features[2], plain.eval().encode_image(pixels), rtol=0, atol=0)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_an_image_of_patches_keeps_the_share_of_those_that_it_has():
    model, batch = build(name="pretrained", clip=NAFLEX, patch_dropout=0.5).train().double(), make_native_batch()
    inputs: list[Any] = [batch.get(name) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")]
    lengths: list[int] = []
    model.image_tower.model.encoder.layers[0].register_forward_pre_hook(  # type: ignore[union-attr]
        lambda layer, args: lengths.append(args[0].shape[1])
    )
    torch.manual_seed(3)
    features = model.encode_image(*inputs)
    assert lengths == [12]  # of 24 places
    torch.manual_seed(3)
    order, counts = torch.randn(5, 24), inputs[1].sum(1).tolist()
    assert len(set(counts)) > 1
    for row, count in enumerate(counts):
        # The oracle: in eval mode, attention that sees these patches alone. Those that stay keep their positions.
        alone = torch.zeros(1, 24, dtype=torch.long)
        alone[0, order[row, :count].topk(count // 2).indices] = 1
        one = model.eval().encode_image(inputs[0][row : row + 1], alone, inputs[2][row : row + 1])
        torch.testing.assert_close(features[row : row + 1], one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["own", "clip", "siglip2"])
def test_micro_batches_see_the_same_patches_in_both_passes(kind: str):
    model, batch = build(**TOWERS[kind], patch_dropout=0.5).double().train(), make_small_batch()
    batch["pixel_values"] = batch["pixel_values"].repeat(1, 1, 2, 2)
    loss_function = ContrastiveLoss("clip")
    torch.manual_seed(5)
    parts = [model({name: value[start : start + 2] for name, value in batch.items()}) for start in (0, 2)]  # type: ignore[index]
    images, texts = (torch.cat([part[i] for part in parts]) for i in range(2))
    loss_function(parts[0]._replace(image_features=images, text_features=texts), batch).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(5)
    train_step(model, batch, loss_function, micro_batch_size=2)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "vision": {"model_type": "vit", **LAYERS, "image_size": 16, "patch_size": 8},
                "text": {"model_type": "clip_text_model", **TEXT},
            },
            "patch_dropout 0.5: ViTModel, which model.vision names, has none; .* that has: CLIP, SigLIP, SigLIP 2, or",
        ),
        ({"clip": config_of("clip"), "freeze": ["image"]}, "patch_dropout 0.5: a frozen image tower drops no patches"),
    ],
)
def test_towers_without_patch_dropout_are_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(name="pretrained", patch_dropout=0.5, **settings)
