"""Miners that draw: their frequencies against exact probabilities, their gradients against finite differences."""

from __future__ import annotations

import math
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.miners import DistanceWeightedMiner
from pytorch_metric_learning.utils import loss_and_miner_utils
from scipy.stats import chisquare
from torch import Tensor
from torch.autograd import gradcheck

from mmdata.train import losses, miners
from mmdata.train.losses.rows import ChosenPairs
from mmdata.train.miners import relaxed_top_k

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from own_miners import DistanceWeighted

DRAWS = 20_000
UNLIKELY = 1e-3  # the seed is fixed: a right sampler passes always


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def features(rows: int, dim: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(rows, dim, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [F.normalize(draw, dim=-1) for draw in draws]


def drawn_sets(miner: miners.Miner, scores: Tensor) -> dict[tuple[int, ...], int]:
    """How often each set of columns is drawn for one anchor, whose positive is column 0."""
    rows = scores.expand(DRAWS, -1)
    positives = torch.zeros(rows.shape, dtype=torch.bool)
    positives[:, 0] = True
    sets, counts = miner(rows, positives, ~positives).unique(dim=0, return_counts=True)
    return {tuple(each.nonzero().flatten().tolist()): int(n) for each, n in zip(sets, counts, strict=True)}


def without_replacement(weights: list[float], k: int) -> dict[tuple[int, ...], float]:
    """Probability of each set of k columns, 1 … n, where draws go by weight (Plackett and Luce)."""
    sets: dict[tuple[int, ...], float] = {}
    for order in permutations(range(len(weights)), k):
        probability, left = 1.0, sum(weights)
        for i in order:
            probability, left = probability * weights[i] / left, left - weights[i]
        key = tuple(sorted(i + 1 for i in order))
        sets[key] = sets.get(key, 0.0) + probability
    return sets


def assert_drawn_with(found: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> None:
    assert found.keys() <= expected.keys()
    counts = [found.get(key, 0) for key in expected]
    assert chisquare(counts, [DRAWS * p for p in expected.values()]).pvalue > UNLIKELY


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gumbel_top_k_draws_without_replacement_from_the_softmax(k: int):
    scores = torch.tensor([0.9, 0.3, 0.25, 0.1, 0.2])
    weights = (scores[1:].double() / 0.1).exp().tolist()
    assert_drawn_with(drawn_sets(miners.GumbelTopK(k, temperature=0.1), scores), without_replacement(weights, k))


def test_gumbel_top_k_straight_through_draws_the_same():
    scores = torch.tensor([[0.9, 0.3, 0.25, 0.1, 0.2]]).expand(50, 5)
    positives = torch.zeros(50, 5).bool()
    positives[:, 0] = True
    torch.manual_seed(3)
    kept = miners.GumbelTopK(2)(scores, positives, ~positives)
    torch.manual_seed(3)
    weights = miners.GumbelTopK(2, gradient="straight_through")(scores, positives, ~positives)
    torch.testing.assert_close(weights, kept.float(), rtol=0, atol=1e-19)


def test_distance_weighted_draws_as_that_of_pytorch_metric_learning(monkeypatch: pytest.MonkeyPatch):
    images, texts = features(7, dim=6)
    texts[3] = -images[0]  # further than 1.4
    texts[2] = F.normalize(images[0] + 0.1 * texts[2], dim=0)  # nearer than the cutoff
    caught: dict[str, Tensor] = {}

    def catch(*args: Any, weights: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        caught["weights"] = weights
        return (torch.zeros(0, dtype=torch.long),) * 3

    monkeypatch.setattr(loss_and_miner_utils, "get_random_triplet_indices", catch)
    labels = torch.arange(7)
    DistanceWeightedMiner(cutoff=0.5, nonzero_loss_cutoff=1.4)(images, labels, texts, labels.clone())
    weights = caught["weights"][0, 1:].tolist()
    assert weights[2] == 0
    scores = images[0] @ texts.T
    positive = {(i + 1,): weight for i, weight in enumerate(weights) if weight > 0}
    assert_drawn_with(drawn_sets(DistanceWeighted(6), scores), positive)
    pairs = without_replacement(weights, 2)
    assert_drawn_with(drawn_sets(DistanceWeighted(6, k=2), scores), {key: p for key, p in pairs.items() if p > 0})


def test_distance_weighted_row_whose_negatives_are_all_far_keeps_none():
    scores, positives = torch.tensor([[0.9, -0.5, -0.9, -1.0]]), torch.tensor([[True, False, False, False]])
    assert not DistanceWeighted(16, k=3)(scores, positives, ~positives).any()
    everything = DistanceWeighted(16, k=3, farthest=2.0)(scores, positives, ~positives)
    assert everything.tolist() == [[False, True, True, False]]  # at 2.0 is not below 2.0


def test_relaxed_weights_add_up_to_k_and_keep_the_order():
    values = 30 * torch.randn(200, 12, dtype=torch.float64)
    among = torch.rand(200, 12) < 0.7
    weights = relaxed_top_k(values, among, 4)
    count = among.sum(1).double()
    torch.testing.assert_close(weights.sum(1), count.clamp(max=4), rtol=1e-9, atol=1e-9)
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights[~among] == 0).all()
    nearly_hard = relaxed_top_k(1000 * values, among, 4)
    masked = values.masked_fill(~among, -torch.inf)
    hard = torch.zeros_like(values).scatter(1, masked.topk(4).indices, 1.0) * among
    assert ((nearly_hard - hard).abs() < 1e-6).all(1).double().mean() > 0.99  # but for neighbours that nearly tie


def test_relaxed_weights_of_the_docstring():
    weights = relaxed_top_k(torch.tensor([[3.0, 3.0, 3.0, -20.0]], dtype=torch.float64), torch.ones(1, 4).bool(), 2)
    torch.testing.assert_close(
        weights, torch.tensor([[2 / 3, 2 / 3, 2 / 3, 0]], dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_relaxed_weights_pass_gradcheck():
    values = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    among = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 1]]).bool()
    assert gradcheck(lambda v: relaxed_top_k(v, among, 2), (values,))


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_relaxed_gumbel_passes_gradcheck_through_the_loss(loss: str):
    images, texts = (x.requires_grad_() for x in features(6))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    miner = miners.GumbelTopK(2, temperature=0.3, gradient="relaxed")

    def seeded(*inputs: Tensor) -> Tensor:
        torch.manual_seed(5)
        return losses.clip_loss(*inputs, miner=miner) if loss == "clip" else losses.siglip_loss(*inputs, miner=miner)

    assert gradcheck(seeded, (images, texts, scale) if loss == "clip" else (images, texts, scale, bias))


def test_straight_through_has_the_gradient_of_the_relaxed_weights_at_the_drawn_ones():
    images, texts = (x.requires_grad_() for x in features(6))
    scale = torch.tensor(5.0, dtype=torch.float64)
    drawn = miners.GumbelTopK(2, temperature=0.3, gradient="straight_through")
    relaxed = miners.GumbelTopK(2, temperature=0.3, gradient="relaxed")
    positives = torch.eye(6).bool()

    def one_direction(scores: Tensor) -> Tensor:
        """-log(p) with weights 0 and 1, written out as torch would have it with no care for logs of 0."""
        weights = relaxed(scores, positives, ~positives)
        hard = torch.zeros_like(weights).scatter(1, weights.topk(2).indices, 1.0)
        weights = hard + weights - weights.detach()
        exp = (scale * scores).exp()
        return (1 + (weights * exp).sum(1) / exp.diagonal()).log().mean()

    torch.manual_seed(5)
    expected = one_direction(images @ texts.T) / 2
    expected = expected + one_direction(texts @ images.T) / 2
    torch.manual_seed(5)
    found = losses.clip_loss(images, texts, scale, miner=drawn)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, (images, texts)) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["clip", "siglip", "triplet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_straight_through_adds_nothing_at_scale_100_and_keeps_the_gradient_finite(kind: str, dtype: torch.dtype):
    images = torch.eye(4)[:3].to(dtype)
    texts = torch.tensor([[0.0, 0, 0, 1], [0.6, 0.8, 0, 0], [0, 0, 1, 0]]).to(dtype)  # the first: 0, against 0.6 and 0

    def loss(gradient: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # draws the text at 0.6 not: 60 nats more than all that is drawn
        miner, own = miners.GumbelTopK(1, 10.0, gradient), images.clone().requires_grad_()
        scale, bias = torch.tensor(100.0), torch.tensor(-10.0)
        if kind == "clip":
            value = losses.clip_loss(own, texts, scale, miner=miner)
        elif kind == "siglip":
            value = losses.siglip_loss(own, texts, scale, bias, miner=miner)
        else:
            value = losses.triplet_loss(own, texts, miner=miner)
        return value.detach(), torch.autograd.grad(value, own)[0]

    (plain, _), (straight, grad) = loss("none"), loss("straight_through")
    assert straight == plain
    assert grad.isfinite().all()


def test_gradient_of_a_weight_of_0_is_the_share_in_the_softmax_up_to_its_bound():
    logits = torch.tensor([[0.0, 2.0, 1.0, 60.0]], dtype=torch.float64)
    positives, negatives = torch.tensor([[[True, False, False, False]], [[False, True, False, False]]])
    weights = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)  # 1 - 1 = 0 where it is not kept
    value = ChosenPairs(positives, negatives, weights).weighted_log_sum_exp(logits)
    total = 1 + math.e**2
    torch.testing.assert_close(value, torch.tensor([math.log(total)], dtype=torch.float64), rtol=1e-14, atol=0)
    (grad,) = torch.autograd.grad(value.sum(), weights)
    expected = torch.tensor([[1 / total, math.e**2 / total, math.e / total, math.e**10]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "miner",
    [miners.GumbelTopK(3), miners.GumbelTopK(3, gradient="relaxed"), DistanceWeighted(8, k=3)],
    ids=lambda miner: repr(miner),
)
def test_draws_are_those_of_the_default_generator(miner: miners.Miner):
    images, texts = features(9)
    scale = torch.tensor(5.0)
    state = torch.get_rng_state()
    first, second = (losses.clip_loss(images, texts, scale, miner=miner) for _ in range(2))
    torch.set_rng_state(state)
    assert losses.clip_loss(images, texts, scale, miner=miner) == first
    assert first != second


def test_samplers_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="GumbelTopK keeps at least one negative a row: got k=0"):
        miners.GumbelTopK(0)
    with pytest.raises(ValueError, match=r"GumbelTopK's temperature is above 0: got temperature=0"):
        miners.GumbelTopK(1, temperature=0)
    with pytest.raises(ValueError, match="gradient is 'none', 'straight_through' or 'relaxed': got gradient='hard'"):
        miners.GumbelTopK(1, gradient="hard")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"needs k >= 1, dimension >= 3 and 0 < cutoff < farthest <= 2: got k=1, dimension=2, cut"
    ):
        DistanceWeighted(2)
