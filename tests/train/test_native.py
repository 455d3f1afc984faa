"""Native resolution: SigLIP 2 NaFlex on patches, with a random model of the library made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

from mmdata import Batch, Loader
from mmdata.config import DataConfig, ModelConfig, TrainConfig
from mmdata.config.data import evaluation_data
from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.train import DualEncoder, train_step
from mmdata.train.evaluation.evaluate import evaluate_retrieval
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.train.run.trainer import Trainer
from tests.rounding import rounding
from tests.shard_writer import ShardWriter

LAYERS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**LAYERS, "vocab_size": 400, "max_position_embeddings": 12, "pad_token_id": 1, "projection_size": 16}
NAFLEX = {
    "model_type": "siglip2",
    "text_config": TEXT,
    "vision_config": {**LAYERS, "patch_size": 8, "num_patches": 16},
}
CLIP = {
    "model_type": "clip",
    "projection_dim": 16,
    "text_config": {**LAYERS, "vocab_size": 400, "max_position_embeddings": 12},
    "vision_config": {**LAYERS, "image_size": 16, "patch_size": 8},
}
SIZES = [(40, 64), (64, 40), (30, 30), (8, 90), (48, 48)]  # of the images, (height, width)


def processed(**settings: bool) -> dict[str, Tensor]:
    """Images of `SIZES` as 24 patches each, by the library."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator) for size in SIZES]
    return Siglip2ImageProcessor(patch_size=8, max_num_patches=24, **settings)(images, return_tensors="pt")


def make_batch() -> Batch:
    """Those images, as a loader gives them."""
    inputs = processed(do_rescale=False, do_normalize=False)
    return {
        "pixel_values": inputs["pixel_values"].to(torch.uint8),
        "pixel_attention_mask": inputs["pixel_attention_mask"].long(),
        "spatial_shapes": torch.as_tensor(inputs["spatial_shapes"]).long(),
        "input_ids": torch.randint(3, 50, (5, 12), generator=torch.Generator().manual_seed(1)),
        "attention_mask": torch.ones(5, 12, dtype=torch.long),
        "valid": torch.ones(5, dtype=torch.bool),
        "rows": torch.arange(5),
        "keys": [""] * 5,
    }


def build(**settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    return DualEncoder.from_config(ModelConfig(name="pretrained", **settings))


def test_features_of_patches_are_those_of_transformers(tmp_path: Path):
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**NAFLEX)).eval()
    model.save_pretrained(tmp_path)
    encoder, batch = build(clip=str(tmp_path)).eval().double(), make_batch()
    theirs = processed()
    theirs["pixel_values"] = theirs["pixel_values"].double()
    with torch.no_grad():
        expected = model.double()(**theirs, input_ids=batch["input_ids"])
        output = encoder(batch)
    # Parts of unit vectors; the library normalises pixels in float32.
    torch.testing.assert_close(output.image_features, expected.image_embeds, rtol=0, atol=rounding(1.0, sums=100))
    torch.testing.assert_close(output.text_features, expected.text_embeds, rtol=0, atol=1e-10)


def test_features_do_not_depend_on_what_lies_behind_the_mask():
    encoder, batch = build(clip=NAFLEX).eval(), make_batch()
    features = encoder(batch).image_features
    batch["pixel_values"][batch["pixel_attention_mask"] == 0] = 255
    torch.testing.assert_close(encoder(batch).image_features, features)


def test_masked_row_of_one_patch_has_finite_features():
    encoder, batch = build(clip=NAFLEX).eval(), make_batch()
    batch["pixel_values"][1] = 0
    batch["pixel_attention_mask"][1] = torch.arange(24) == 0
    batch["spatial_shapes"][1] = 1
    assert encoder(batch).image_features.isfinite().all()


@pytest.mark.parametrize("towers", [{"clip": NAFLEX}, {"vision": NAFLEX, "text": CLIP, "embed_dim": 8}])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_micro_batches_of_patches_change_no_gradient(towers: dict[str, Any], gradient_checkpointing: bool):
    encoder = build(**towers, gradient_checkpointing=gradient_checkpointing, logit_bias_init=-1.0).train().double()
    batch, loss_function = make_batch(), ContrastiveLoss("siglip")
    expected = loss_function(encoder(batch), batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(encoder.parameters()))
    encoder.zero_grad()
    step = train_step(encoder, batch, loss_function, micro_batch_size=2)
    torch.testing.assert_close(step.loss, expected.detach())
    for name, parameter in encoder.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


def test_patches_train_and_embed_under_autocast():
    encoder, batch = build(clip=NAFLEX), make_batch()
    batch["pixel_attention_mask"][1] = torch.arange(24) == 0
    batch["spatial_shapes"][1] = 1
    loss_function = ContrastiveLoss("siglip")
    expected = loss_function(encoder(batch), batch)
    step = train_step(encoder.train(), batch, loss_function, micro_batch_size=2, autocast_dtype=torch.bfloat16)
    # Logits of 10 from features that are rounded to bfloat16.
    torch.testing.assert_close(step.loss, expected.detach(), rtol=0, atol=rounding(10.0, sums=2, dtype=torch.bfloat16))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert encoder.eval()(batch).image_features.isfinite().all()


def test_patches_for_a_model_of_whole_images_are_an_error():
    message = r"the batch has patches \(data.image_patches\), and the image tower takes whole images: set data.image_"
    with pytest.raises(ValueError, match=message):
        build(clip=CLIP)(make_batch())


def test_whole_images_that_do_not_fit_the_patches_are_an_error():
    message = r"images of 20 x 16 pixels: sides must be multiples of the patch size 8; set .* or data.image_patches for"
    with pytest.raises(ValueError, match=message):
        build(clip=NAFLEX).encode_image(torch.zeros(1, 3, 20, 16, dtype=torch.uint8))


def test_patches_of_another_size_are_an_error():
    batch = make_batch()
    batch["pixel_values"] = torch.zeros(5, 24, 16 * 16 * 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"patches of 16 x 16 pixels: the model's are 8 x 8; set data.patch_size"):
        build(clip=NAFLEX)(batch)


def make_shards(folder: Path, photo: Callable[..., bytes]) -> DataConfig:
    """23 images of five shapes in shards, one of them cut short, and the settings that load them."""
    captions = [f"picture {row} of a {['red', 'blue', 'green'][row % 3]} dog" for row in range(23)]
    train_tokenizer(captions, folder / "tokenizer", vocab_size=400)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    with ShardWriter(
        folder / "shards", shard_rows=10, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint
    ) as writer:
        for row, caption in enumerate(captions):
            image = photo(*SIZES[row % 5], seed=row)
            cut = image[: len(image) // 2] if row == 7 else image
            writer.write(Sample(f"{row:05d}", cut, probe(image), [caption]))
    return DataConfig(
        shards=str(folder / "shards"),
        val={"shards": str(folder / "shards")},
        tokenizer=str(folder / "tokenizer"),
        global_batch_size=6,
        image_patches=[16, 36],
        patch_size=8,
        max_length=12,
        text_buckets=1,
    )


def test_naflex_trains_and_is_evaluated_on_shards(tmp_path: Path, photo: Callable[..., bytes]):
    data = make_shards(tmp_path, photo)
    encoder = build(clip=NAFLEX)
    before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
    loader, validation = Loader.from_config(data), Loader.from_config(evaluation_data(data))
    assert {bucket.patches for bucket in loader.plan.policy.buckets} == {16, 36}

    def evaluate(model: Any) -> dict[str, float]:
        validation.set_epoch(0)
        return evaluate_retrieval(model, validation)

    config = TrainConfig(steps=2, warmup_steps=0, micro_batch_size=4, loss="siglip")
    trainer = Trainer(encoder, loader, config, output=tmp_path / "run", evaluate=evaluate)
    assert trainer.run() == 0
    assert trainer.step == 2
    assert all(p.isfinite().all() for p in encoder.parameters())
    weight = "image_tower.model.embeddings.patch_embedding.weight"
    assert not torch.equal(before[weight], encoder.get_parameter(weight))
    assert validation.ledger.masked == {"corrupt_image": 1}
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert scores["rows"] == 22
    assert 0 <= scores["image_to_text_r1"] <= scores["image_to_text_r10"] <= 1
