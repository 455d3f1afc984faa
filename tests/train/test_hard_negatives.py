"""Negatives weighed by their hardness, with a miner of examples/own_miners.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_miners import Reweighted

from mmdata.train import losses
from tests.train.compare import assert_equal, features, scalar, value_and_gradients


def published(images: Tensor, texts: Tensor, scale: float, beta: float) -> Tensor:
    """Figure 3 of Robinson et al. 2021, line by line, of images against texts and of texts against images."""

    def direction(anchors: Tensor, others: Tensor) -> Tensor:
        similarities = (anchors @ others.T * scale).exp()
        count = len(anchors) - 1
        negatives = similarities[~torch.eye(len(anchors), dtype=torch.bool)].view(len(anchors), count)
        positives = similarities.diagonal()
        importance = (beta * negatives.log()).exp()
        reweighted = (importance * negatives).sum(-1) / importance.mean(-1)
        return -(positives / (positives + reweighted)).log().mean()

    return (direction(images, texts) + direction(texts, images)) / 2


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.5])
def test_reweighted_negatives_give_the_published_formula(beta: float):
    images, texts = features(7)
    ours = losses.clip_loss(images, texts, scalar(2.0), miner=Reweighted(2.0 * beta))
    expected = value_and_gradients(published(images, texts, 2.0, beta), images, texts)
    assert_equal(value_and_gradients(ours, images, texts), expected)


def test_rows_without_negatives_have_no_loss_and_no_gradient():
    images, texts = features(3)
    loss = losses.clip_loss(images, texts, scalar(2.0), miner=Reweighted(1.0), same=[torch.zeros(3).long()])
    assert [float(x.abs().sum()) for x in value_and_gradients(loss, images, texts)] == [0.0, 0.0, 0.0]
