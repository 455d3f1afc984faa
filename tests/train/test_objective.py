from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdata.config import TrainConfig
from mmdata.train import losses, miners
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.run.objective import ContrastiveLoss, make_loss
from tests.train.compare import features, scalar


def test_contrastive_loss_of_an_unknown_kind_names_the_known_ones():
    kind: Any = "clipp"
    known = "clip, siglip, multi_positive or triplet"
    with pytest.raises(ValueError, match=rf"^ContrastiveLoss: 'loss': expected {known}; got 'clipp'; did you mean"):
        ContrastiveLoss(kind)
    with pytest.raises(ValueError, match=r"^ContrastiveLoss: unknown key 'beta'; did you mean 'betas'\?$"):
        ContrastiveLoss("clip", beta=2.0)


def test_contrastive_loss_reads_mask_and_hashes_from_the_batch():
    images, texts = features(4)
    batch = {
        "valid": torch.tensor([True, True, True, False]),
        "image_hash": torch.tensor([1, 1, 2, 3]),
        "caption_hash": torch.tensor([1, 2, 3, 3]),
    }
    output = DualEncoderOutput(images, texts, scalar(5.0), scalar(-2.0))
    same = (batch["image_hash"], batch["caption_hash"])
    clip = losses.clip_loss(*output[:3], valid=batch["valid"], same=same)
    siglip = losses.siglip_loss(*output[:4], valid=batch["valid"], same=same)
    assert ContrastiveLoss("clip")(output, batch) == clip
    assert ContrastiveLoss("siglip")(output, batch) == siglip
    unmasked = ContrastiveLoss("clip", mask_false_negatives=False)(output, batch)
    assert unmasked == losses.clip_loss(*output[:3], valid=batch["valid"])
    assert unmasked != clip


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_precision_of_the_settings_reaches_the_loss(kind: Any):
    images, texts = (x.detach().float() for x in features(8))
    output = DualEncoderOutput(images, texts, scalar(5.0), scalar(-2.0))
    batch: Any = {"valid": torch.ones(8, dtype=torch.bool)}
    function = losses.clip_loss if kind == "clip" else losses.siglip_loss
    inputs: Any = output[: 3 if kind == "clip" else 4]
    found = [ContrastiveLoss(kind, loss_precision=precision)(output, batch) for precision in ("bf16", "fp32", "auto")]
    assert found[0] == function(*inputs, precision="bf16") != found[1]
    assert found[1] == found[2] == function(*inputs)
    in_bf16 = ContrastiveLoss(TrainConfig(loss=kind, precision="bf16"))  # on a CPU the loss stays float32
    assert in_bf16(output, batch) == found[1]


def test_clip_loss_gives_a_bias_the_gradient_zero():
    images, texts = features(3)
    bias = scalar(-10.0)
    output = DualEncoderOutput(images, texts, scalar(5.0), bias)
    ContrastiveLoss("clip")(output, {"valid": torch.ones(3, dtype=torch.bool)}).backward()
    assert bias.grad == 0


def test_triplet_gives_scale_and_bias_the_gradient_zero():
    images, texts = features(4)
    scale, bias = scalar(5.0), scalar(-10.0)
    batch = negative_batch()
    found = ContrastiveLoss("triplet")(DualEncoderOutput(images, texts, scale, bias), batch)
    same = (batch["image_hash"], batch["caption_hash"])
    assert found == losses.triplet_loss(images, texts, valid=batch["valid"], same=same)
    found.backward()
    assert (scale.grad, bias.grad) == (0, 0)


def test_triplet_settings_reach_the_loss():
    images, texts = features(4)
    output, batch = DualEncoderOutput(images, texts, scalar(5.0), None), negative_batch()
    config = TrainConfig(loss="triplet", miner={"name": "top_k", "k": 1})
    expected = losses.triplet_loss(images, texts, miner=miners.TopK(1))
    assert make_loss(0, config)(output, batch) == expected


@pytest.mark.parametrize("positives", ["image_hash", "caption_hash"])
def test_multi_positive_by_hash(positives: str):
    images, texts = features(4)
    output, batch = DualEncoderOutput(images, texts, scalar(5.0), None), negative_batch()
    batch[positives] = torch.tensor([1, 2, 1, 2])
    config = TrainConfig(loss="multi_positive", positives=positives)  # type: ignore[arg-type]
    expected = losses.multi_positive_loss(*output[:3], labels=torch.tensor([1, 2, 1, 2]))
    assert make_loss(0, config)(output, batch) == expected


def test_multi_positive_by_label_leaves_rows_without_one_alone():
    images, texts = features(6)
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    batch = {
        "valid": torch.tensor([True, True, True, True, True, False]),
        "labels": torch.tensor([0, -1, 0, -1, 1, -1]),
        "rows": torch.tensor([7, 0, 9, 3, 1, -1]),
    }
    config = TrainConfig(loss="multi_positive", positives="labels")
    alone = torch.tensor([10, 11, 10, 12, 13, 14])
    expected = losses.multi_positive_loss(*output[:3], labels=alone, valid=batch["valid"])
    assert make_loss(0, config)(output, batch) == expected


def test_multi_positive_without_its_entry_is_an_error():
    images, texts = features(3)
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    message = "loss 'multi_positive': the batch has no 'labels'; convert the corpus with"
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss("multi_positive", positives="labels")(output, {"valid": torch.ones(3, dtype=torch.bool)})


def test_telemetry_of_multi_positive_counts_positives_as_no_negatives():
    images, texts = features(4)
    output, batch = DualEncoderOutput(images, texts, scalar(5.0), None), negative_batch()
    batch["caption_hash"] = torch.tensor([1, 1, 2, 3])
    loss = ContrastiveLoss("multi_positive", mask_false_negatives=False)
    assert loss.telemetry(output, batch)["known_false_negative_share"] == 2 / 12


def test_siglip_without_bias_is_an_error():
    images, texts = features(3)
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    with pytest.raises(ValueError, match=r"loss 'siglip' needs a bias: set model.logit_bias_init \(-10 in the paper\)"):
        ContrastiveLoss("siglip")(output, {"valid": torch.ones(3, dtype=torch.bool)})


def negative_batch() -> dict[str, torch.Tensor]:
    """Four rows with negative captions; that of row 0 is the caption of row 2, row 3 has none."""
    return {
        "valid": torch.tensor([True, True, True, True]),
        "image_hash": torch.tensor([1, 2, 3, 4]),
        "caption_hash": torch.tensor([5, 6, 7, 8]),
        "negative_caption_hash": torch.tensor([7, 9, 10, 0]),
        "negative_valid": torch.tensor([True, True, True, False]),
    }


def dense_with_extra(output: DualEncoderOutput, left_out: list[tuple[int, int]]) -> torch.Tensor:
    """InfoNCE whose image rows have the extra texts as further columns, but for some (row, extra), written out."""
    images, texts, scale, _, extra = output[:5]
    logits, further = scale * images @ texts.T, scale * images @ extra.T
    for row, column in left_out:
        further[row, column] = -torch.inf
    targets = torch.arange(len(images))
    of_images = torch.nn.functional.cross_entropy(torch.cat([logits, further], dim=1), targets)
    return (of_images + torch.nn.functional.cross_entropy(logits.T, targets)) / 2


@pytest.mark.parametrize("hashes", [True, False])
def test_extra_captions_are_negatives_of_the_images_they_are_false_of(hashes: bool):
    images, texts = features(4)
    _, extra = features(4, seed=1)
    output = DualEncoderOutput(images, texts, scalar(5.0), None, extra)
    batch = negative_batch()
    none_of_row_3 = [(row, 3) for row in range(4)]
    expected = dense_with_extra(output, [*none_of_row_3, *([(2, 0)] if hashes else [])])
    if not hashes:
        batch = {name: batch[name] for name in ("valid", "negative_valid")}
    torch.testing.assert_close(ContrastiveLoss("clip")(output, batch), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["siglip", "multi_positive", "triplet"])
def test_extra_captions_of_another_loss(kind: str):
    images, texts = features(4)
    output = DualEncoderOutput(images, texts, scalar(5.0), scalar(0.0), texts)
    message = f"loss '{kind}' takes no negative captions: set train.loss to clip, or leave data.negative_captions out"
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss(kind)(output, negative_batch())  # type: ignore[arg-type]


def test_loss_without_the_scale_that_it_needs_is_an_error():
    images, texts = features(3)
    output, batch = DualEncoderOutput(images, texts), {"valid": torch.ones(3, dtype=torch.bool)}
    assert ContrastiveLoss("triplet")(output, batch) == losses.triplet_loss(images, texts)
    with pytest.raises(
        ValueError, match=r"loss 'clip' needs a scale, and the model's output has none: return DualEnco"
    ):
        ContrastiveLoss("clip")(output, batch)


def test_an_output_that_is_none_is_refused_with_what_to_give():
    features = torch.eye(3)
    batch: Any = {"valid": torch.ones(3, dtype=torch.bool)}
    for given in ((features, features), {"image_features": features}):
        said = (
            rf"output is a {type(given).__name__}, expected a DualEncoderOutput: give DualEncoderOutput\(image_features"
        )
        with pytest.raises(TypeError, match=said):
            ContrastiveLoss("triplet")(given, batch)  # type: ignore[arg-type]


def test_telemetry_of_a_model_without_a_scale():
    found = ContrastiveLoss("triplet").telemetry(
        DualEncoderOutput(*features(4)),
        {"valid": torch.ones(4, dtype=torch.bool)},  # type: ignore[typeddict-item]
    )
    assert found["rows"] == 4
