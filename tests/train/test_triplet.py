from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import SumReducer
from torch import Tensor

from mmdata.train import losses, miners
from tests.train.compare import assert_equal, features, value_and_gradients


def of_library(images: Tensor, texts: Tensor, margin: float, *, hardest: bool) -> Tensor:
    """Sum over the triplets of both directions / rows."""
    labels, partners = torch.arange(len(images)), torch.arange(len(images))
    oracle = TripletMarginLoss(margin=margin, distance=CosineSimilarity(), reducer=SumReducer())
    miner = BatchHardMiner(distance=CosineSimilarity())

    def of(anchors: Tensor, others: Tensor) -> Tensor:
        chosen = miner(anchors, labels, others, partners) if hardest else None
        return oracle(anchors, labels, chosen, ref_emb=others, ref_labels=partners)

    return (of(images, texts) + of(texts, images)) / len(images)


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.2, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_triplet_loss_equals_that_of_pytorch_metric_learning(
    hardest: bool, margin: float, dtype: torch.dtype, tolerance: float
):
    raw = tuple(x.detach().mul(3).requires_grad_() for x in features(7, dtype=dtype))
    images, texts = (F.normalize(x, dim=-1) for x in raw)  # as the oracle does inside
    ours = losses.triplet_loss(images, texts, margin=margin, miner=miners.TopK(1) if hardest else None)
    expected = of_library(images, texts, margin, hardest=hardest)
    assert_equal(value_and_gradients(ours, *raw), value_and_gradients(expected, *raw), tolerance)


@pytest.mark.parametrize("margin", [-0.1, 2.5])
def test_margin_out_of_range_is_an_error(margin: float):
    with pytest.raises(ValueError, match=f"margin is a difference of cosines, 0 to 2: got {margin}"):
        losses.triplet_loss(*features(3), margin=margin)
