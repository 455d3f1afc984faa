from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmdata.train import losses
from tests.train.compare import assert_equal, features, scalar, value_and_gradients


def published(images: Tensor, texts: Tensor, scale: float, beta: float, share: float) -> Tensor:
    """Figure 3 of Robinson et al. 2021, line by line, of images against texts and of texts against images."""

    def direction(anchors: Tensor, others: Tensor) -> Tensor:
        similarities = (anchors @ others.T * scale).exp()
        count = len(anchors) - 1
        negatives = similarities[~torch.eye(len(anchors), dtype=torch.bool)].view(len(anchors), count)
        positives = similarities.diagonal()
        importance = (beta * negatives.log()).exp()
        reweighted = (importance * negatives).sum(-1) / importance.mean(-1)
        corrected = (-share * count * positives + reweighted) / (1 - share)
        corrected = corrected.clamp(min=count * math.e**-scale)
        return -(positives / (positives + corrected)).log().mean()

    return (direction(images, texts) + direction(texts, images)) / 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("beta", "share"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.1), (2.5, 0.3), (0.0, 0.1), (1.0, 0.9)])
def test_hard_negative_loss_equals_the_published_formula(
    beta: float, share: float, dtype: torch.dtype, tolerance: float
):
    images, texts = features(7, dtype=dtype)
    ours = losses.hard_negative_loss(images, texts, scalar(2.0, dtype), beta=beta, prior=share)
    exact = tuple(x.detach().double().requires_grad_() for x in (images, texts))
    expected = value_and_gradients(published(*exact, 2.0, beta, share), *exact)
    assert_equal([x.double() for x in value_and_gradients(ours, images, texts)], expected, tolerance)


def test_correction_reaches_its_least_value():
    """Partners so near that what is left of the negatives is below what the least similar ones would give."""
    images, texts = features(7)[0], features(7)[0]
    inputs = (images, texts)
    loss = losses.hard_negative_loss(*inputs, scalar(2.0), beta=0.5, prior=0.5)
    # log(1 + 6 e^-2 / e^2): 6 negatives at cosine -1 beside a partner at cosine 1.
    torch.testing.assert_close(loss.item(), math.log(1 + 6 * math.exp(-4)), rtol=1e-12, atol=0)
    assert_equal(value_and_gradients(loss, *inputs), value_and_gradients(published(*inputs, 2.0, 0.5, 0.5), *inputs))


def test_beta_0_without_correction_is_clip_loss():
    inputs = (*features(7), scalar(9.0))
    ours = losses.hard_negative_loss(*inputs, beta=0.0)
    assert_equal(value_and_gradients(ours, *inputs), value_and_gradients(losses.clip_loss(*inputs), *inputs))


@pytest.mark.parametrize(("beta", "share"), [(-1.0, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_settings_out_of_range_are_errors(beta: float, share: float):
    with pytest.raises(ValueError, match=f"prior 0 to below 1: got {beta} and {share}"):
        losses.hard_negative_loss(*features(3), scalar(2.0), beta=beta, prior=share)
