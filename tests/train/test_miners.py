from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.miners import BatchHardMiner, TripletMarginMiner

from mmdata.train import losses, miners
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.rows import ChosenPairs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from own_miners import DistanceWeighted, Ratio, Reweighted

T, N = True, False


def features(rows: int, dim: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(rows, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [F.normalize(draw, dim=-1) for draw in draws]


def test_top_k_keeps_the_hardest_admissible_negatives():
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.5], [0.2, 0.9, 0.3, 0.4]])
    positives = torch.tensor([[T, N, N, N], [N, T, N, N]])
    negatives = torch.tensor([[N, N, T, T], [T, N, T, T]])  # of row 0, column 1 is a known false negative
    assert miners.TopK(1)(scores, positives, negatives).tolist() == [[N, N, N, T], [N, N, N, T]]
    assert miners.TopK(2)(scores, positives, negatives).tolist() == [[N, N, T, T], [N, N, T, T]]


def test_top_k_beyond_the_negatives_keeps_exactly_them():
    negatives = torch.tensor([[N, T, T], [N, N, N], [T, N, T]])
    kept = miners.TopK(7)(torch.rand(3, 3), torch.eye(3).bool(), negatives)
    assert torch.equal(kept, negatives)


def test_top_k_of_none_is_an_error():
    with pytest.raises(ValueError, match="TopK keeps at least one negative a row: got k=0"):
        miners.TopK(0)


def test_top_k_mines_images_and_texts_each_for_themselves():
    # Cosines, images down, texts across. Hardest text of image 1 is text 2, hardest image of text 1 is image 0.
    cosines = torch.tensor([[0.9, 0.7, 0.1], [0.2, 0.8, 0.6], [0.5, 0.3, 0.7]])
    images, texts = torch.eye(3), cosines.T  # images @ texts.T == cosines
    targets = torch.zeros(3, dtype=torch.long)
    hardest_text = torch.stack([cosines.diagonal(), torch.tensor([0.7, 0.6, 0.5])], dim=1)
    hardest_image = torch.stack([cosines.diagonal(), torch.tensor([0.5, 0.7, 0.6])], dim=1)
    expected = (F.cross_entropy(4 * hardest_text, targets) + F.cross_entropy(4 * hardest_image, targets)) / 2
    loss = losses.clip_loss(images, texts, torch.tensor(4.0), miner=miners.TopK(1))
    torch.testing.assert_close(loss, expected)


def test_a_function_is_a_miner_and_cannot_admit_what_is_masked():
    def everything(scores: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(negatives)

    generator = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(5, 4, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2))
    valid = torch.tensor([T, T, N, T, T])
    same = [torch.tensor([1, 2, 3, 1, 4])]
    scale = torch.tensor(5.0)
    mined = losses.clip_loss(images, texts, scale, valid=valid, same=same, miner=everything)
    assert mined == losses.clip_loss(images, texts, scale, valid=valid, same=same, miner=miners.TopK(5))
    unmined = losses.clip_loss(images, texts, scale, valid=valid, same=same)  # another way of computing
    torch.testing.assert_close(mined, unmined, rtol=0, atol=1e-12)


def test_top_k_of_one_is_the_batch_hard_miner_of_pytorch_metric_learning():
    images, texts = features(12)
    labels = torch.arange(12)
    anchors, _, hardest = BatchHardMiner(distance=CosineSimilarity())(images, labels, texts, labels.clone())
    positives = torch.eye(12).bool()
    kept = miners.TopK(1)(images @ texts.T, positives, ~positives)
    assert torch.equal(kept.nonzero(), torch.stack([anchors, hardest], dim=1))


@pytest.mark.parametrize("margin", [0.02, 0.2, 0.7])
def test_semi_hard_and_hard_are_the_triplets_of_pytorch_metric_learning(margin: float):
    images, texts = features(12)
    labels, positives, scores = torch.arange(12), torch.eye(12).bool(), images @ texts.T

    def oracle(kind: str) -> torch.Tensor:
        miner = TripletMarginMiner(margin, type_of_triplets=kind, distance=CosineSimilarity())
        anchors, _, found = miner(images, labels, texts, labels.clone())
        expected = torch.zeros(12, 12).bool()
        expected[anchors, found] = True
        return expected

    semi_hard = miners.SemiHard(margin)(scores, positives, ~positives)
    assert torch.equal(semi_hard, oracle("semihard"))
    assert semi_hard.any()
    below = miners.FalseNegativeMargin(0.0)(scores, positives, ~positives)
    assert torch.equal(~positives & ~below, oracle("hard"))


def test_semi_hard_of_the_docstring_and_anchors_without_any():
    scores = torch.tensor([[0.7, 0.8, 0.7, 0.6, 0.3], [0.9, 0.1, 0.2, 0.3, 0.4]])
    positives = torch.tensor([[T, N, N, N, N]] * 2)
    kept = miners.SemiHard(0.2)(scores, positives, ~positives)
    assert kept.tolist() == [[N, N, N, T, N], [N, N, N, N, N]]
    images = torch.eye(2)
    solved = losses.clip_loss(images, images, torch.tensor(9.0), miner=miners.SemiHard(0.2))
    assert solved == 0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.34, 0.5, 1.0])
def test_ratio_keeps_the_hardest_share_as_numpy_sorts(share: float):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(6, 20, generator=generator)
    negatives = torch.rand(6, 20, generator=generator) < 0.8
    negatives[5] = False
    kept = Ratio(share)(scores, torch.zeros(6, 20).bool(), negatives)
    for row in range(6):
        values = np.sort(scores[row][negatives[row]].numpy())[::-1]
        count = max(1, round(share * len(values))) if len(values) else 0
        assert np.array_equal(np.sort(scores[row][kept[row]].numpy())[::-1], values[:count])


def test_drop_hardest_leaves_out_a_number_or_a_share():
    scores = torch.tensor([[1.0, 0.9, 0.6, 0.4, 0.2]])
    positives = torch.tensor([[T, N, N, N, N]])
    assert miners.DropHardest(1)(scores, positives, ~positives).tolist() == [[N, N, T, T, T]]
    assert miners.DropHardest(0.5)(scores, positives, ~positives).tolist() == [[N, N, N, T, T]]
    assert miners.DropHardest(0.1)(scores, positives, ~positives).tolist() == [[N, T, T, T, T]]
    assert miners.DropHardest(9)(scores, positives, ~positives).tolist() == [[N, N, N, N, N]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ratio(0), "Ratio keeps a share above 0, up to 1: got share=0"),
        (lambda: Ratio(1.5), "Ratio keeps a share above 0, up to 1: got share=1.5"),
        (lambda: Reweighted(-1.0), "Reweighted's beta is 0 or more: got beta=-1.0"),
        (lambda: miners.SemiHard(0), "SemiHard's margin is a difference of cosines above 0: got margin=0"),
        (lambda: miners.DropHardest(1.5), "leaves out a whole number, or a share below 1: got amount=1.5"),
        (lambda: miners.DropHardest(0), "leaves out a whole number, or a share below 1: got amount=0"),
    ],
)
def test_miners_refuse_what_they_cannot_do(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        make()


EVERY = [
    miners.All(),
    miners.TopK(3),
    miners.TopK(99),
    Ratio(0.3),
    miners.SemiHard(0.3),
    miners.DropHardest(2),
    miners.DropHardest(0.3),
    miners.GumbelTopK(3),
    miners.GumbelTopK(3, gradient="relaxed"),
    miners.GumbelTopK(3, gradient="straight_through"),
    miners.GumbelTopK(99, gradient="relaxed"),
    DistanceWeighted(4, k=3),
    miners.FalseNegativeMargin(0.1),
    miners.SameGroup(2, 1),
    miners.Chain([miners.FalseNegativeMargin(0.0), miners.DropHardest(1), miners.GumbelTopK(2, gradient="relaxed")]),
]


@pytest.mark.parametrize("miner", EVERY, ids=repr)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 7), kind=st.sampled_from(["clip", "siglip", "triplet", "multi"])
)
@pytest.mark.sweep(keep=6)
def test_no_miner_lets_in_what_is_masked_and_none_makes_nan(miner: miners.AnyMiner, seed: int, rows: int, kind: str):
    generator = torch.Generator().manual_seed(seed)
    images, texts = (F.normalize(torch.randn(rows, 4, generator=generator), dim=-1) for _ in range(2))
    valid = torch.rand(rows, generator=generator) < 0.7
    same = [torch.randint(0, 4, (rows,), generator=generator)]
    scale, bias = torch.tensor(20.0, requires_grad=True), torch.tensor(-2.0)

    def loss(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed % 1000)
        if kind == "clip":
            return losses.clip_loss(images, texts, scale, miner=miner, valid=valid, same=same)
        if kind == "siglip":
            return losses.siglip_loss(images, texts, scale, bias, miner=miner, valid=valid, same=same)
        if kind == "multi":
            return losses.multi_positive_loss(images, texts, scale, labels=same[0], miner=miner, valid=valid)
        return losses.triplet_loss(images, texts, miner=miner, valid=valid, same=same)

    inputs = [images.requires_grad_(), texts.requires_grad_()]
    value = loss(*inputs)
    assert value.isfinite()
    grads = torch.autograd.grad(value, inputs)
    assert all(grad.isfinite().all() and (grad[~valid] == 0).all() for grad in grads)

    admissible = valid[:, None] & valid & (same[0][:, None] != same[0]) & ~torch.eye(rows).bool()
    seen: list[torch.Tensor] = []

    def look(scores: torch.Tensor, chosen: ChosenPairs) -> torch.Tensor:
        seen.append(chosen.negatives)
        assert chosen.weights is None or (chosen.weights > 0).all()
        return scores.sum(1)

    GlobalBatch.gather(images, texts, valid, same=same).sum_over("text", look, miner=miner)
    assert not (torch.cat(seen) & ~admissible).any()
