from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor

from mmdata.train import losses
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

LABELS = torch.tensor([4, 7, 4, 4, 9, 7])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_multi_positive_loss_equals_supcon_of_pytorch_metric_learning(dtype: torch.dtype, tolerance: float):
    raw = tuple(x.detach().mul(3).requires_grad_() for x in features(6, dtype=dtype))
    images, texts = (F.normalize(x, dim=-1) for x in raw)  # as the oracle does inside
    partners = LABELS.clone()  # another tensor: of one and the same it drops the diagonal
    oracle = SupConLoss(temperature=1 / 14.0)
    image_to_text = oracle(images, LABELS, ref_emb=texts, ref_labels=partners)
    text_to_image = oracle(texts, LABELS, ref_emb=images, ref_labels=partners)
    ours = losses.multi_positive_loss(images, texts, scalar(14.0, dtype), labels=LABELS)
    expected = (image_to_text + text_to_image) / 2
    assert_equal(value_and_gradients(ours, *raw), value_and_gradients(expected, *raw), tolerance)


def test_multi_positive_loss_equals_cross_entropy_with_soft_targets():
    """Equation 4 of UniCL is the cross entropy whose target is shared equally among the positives."""
    images, texts = features(6)
    scale = scalar(8.0)
    targets = (LABELS[:, None] == LABELS).double()
    targets /= targets.sum(1, keepdim=True)

    def soft(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    logits = scale * images @ texts.T
    expected = (soft(logits) + soft(logits.T)) / 2
    inputs = (images, texts, scale)
    ours = losses.multi_positive_loss(*inputs, labels=LABELS)
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(expected, *inputs))


def test_labels_of_their_own_give_clip_loss():
    inputs = (*features(6), scalar(8.0))
    ours = losses.multi_positive_loss(*inputs, labels=torch.arange(6))
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(losses.clip_loss(*inputs), *inputs))
