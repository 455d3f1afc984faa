from __future__ import annotations

import pytest
import torch

from mmdata.train import losses
from mmdata.train.model import DualEncoderOutput
from mmdata.train.objective import ContrastiveLoss
from tests.train.compare import features, scalar


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
    unmasked = ContrastiveLoss("clip", mask_same=False)(output, batch)
    assert unmasked == losses.clip_loss(*output[:3], valid=batch["valid"])
    assert unmasked != clip


def test_clip_loss_gives_a_bias_the_gradient_zero():
    images, texts = features(3)
    bias = scalar(-10.0)
    output = DualEncoderOutput(images, texts, scalar(5.0), bias)
    ContrastiveLoss("clip")(output, {"valid": torch.ones(3, dtype=torch.bool)}).backward()
    assert bias.grad == 0


def test_siglip_without_bias_is_an_error():
    images, texts = features(3)
    output = DualEncoderOutput(images, texts, scalar(5.0), None)
    with pytest.raises(ValueError, match=r"loss 'siglip' needs a bias: set model.logit_bias_init \(-10 in the paper\)"):
        ContrastiveLoss("siglip")(output, {"valid": torch.ones(3, dtype=torch.bool)})
