"""Weights of a miner that are none: they raise, where they were dropped and nothing was learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmdata.train import losses, miners
from mmdata.train.losses import miner_weights, tiles
from mmdata.train.prefetch import HostCopy
from tests.train.compare import features, scalar

KINDS: dict[str, Callable[..., Tensor]] = {
    "clip": lambda i, t, miner: losses.clip_loss(i, t, scalar(9.0), miner=miner),
    "siglip": lambda i, t, miner: losses.siglip_loss(i, t, scalar(9.0), scalar(-4.0), miner=miner),
    "multi_positive": lambda i, t, miner: losses.multi_positive_loss(
        i, t, scalar(9.0), labels=torch.arange(6), miner=miner
    ),
    "triplet": lambda i, t, miner: losses.triplet_loss(i, t, margin=2.0, miner=miner),
}
REFUSED = r"miner .* gave {} negatives a weight that is NaN, infinite or below 0: a weight is a finite number from 0 on"


def once(value: float) -> miners.Miner:
    """Weighs one admissible negative with a value, in each direction, and all that are not admissible."""

    def miner(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        weights = torch.ones_like(scores).where(negatives, value)
        if scores.shape[0] == scores.shape[1]:
            weights[2, 4] = value
        return weights

    return miner


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e-30])
def test_a_weight_that_is_none_raises(kind: str, value: float, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=REFUSED.format(1)):
        KINDS[kind](*features(6), once(value))
    with pytest.raises(ValueError, match=REFUSED.format(1)), torch.no_grad():
        KINDS[kind](*features(6), once(value))
    everywhere = lambda scores, positives, negatives: torch.full_like(scores, value)  # noqa: E731
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 8)  # blocks of one row
    with pytest.raises(ValueError, match=REFUSED.format(30)):
        KINDS[kind](*features(6), everywhere)
    fine = KINDS[kind](*features(6), once(value))  # no block of six rows: only what is not admissible
    assert fine.isfinite()
    assert fine > 0


@pytest.mark.parametrize("after", [[miners.TopK(2)], [miners.All(), lambda s, p, n: s.exp()]])
def test_a_chain_passes_on_a_weight_that_is_none(after: list[miners.AnyMiner]):
    for value in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="Chain.*" + REFUSED.format(1).removeprefix("miner .*")):
            KINDS["clip"](*features(6), miners.Chain([miners.All(), once(value), *after]))
    fine = miners.Chain([lambda s, p, n: s.abs().where(n, float("nan")), *after])
    assert torch.equal(KINDS["clip"](*features(6), fine), KINDS["clip"](*features(6), miners.Chain(after)))


def test_a_part_of_a_chain_that_returns_another_shape_is_named():
    with pytest.raises(ValueError, match=r"miner .*<lambda> returned shape \(6, 1\), expected \(6, 6\)"):
        KINDS["clip"](*features(6), miners.Chain([lambda s, p, n: n[:, :1], miners.TopK(1)]))


def test_features_that_are_not_finite_are_no_fault_of_the_miner():
    """Under float16 the scaler leaves such an update out."""
    images, texts = features(6)
    spoiled = images.detach().clone()
    spoiled[3] = torch.nan
    loss = KINDS["clip"](spoiled.requires_grad_(), texts, miners.GumbelTopK(2, gradient="relaxed"))
    assert loss.isnan()


class Silent:
    """A miner with features, as a teacher: to print them is to wait for the device."""

    def __call__(self, scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return negatives

    def __repr__(self) -> str:
        raise AssertionError("printed")


@pytest.mark.parametrize("kind", KINDS)
def test_both_directions_are_judged_in_one_call_without_printing_a_miner(kind: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU a second call would wait for the counts of the first, which this step makes."""
    calls: list[int] = []

    def judge(given: list[miners.AnyMiner], counts: Tensor) -> None:
        calls.append(len(given))
        miner_weights.raise_if_flawed(given, counts)

    monkeypatch.setattr("mmdata.train.losses.global_batch.raise_if_flawed", judge)
    assert KINDS[kind](*features(6), miners.Chain([Silent(), miners.TopK(2)])).isfinite()
    assert calls == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU: torch sees none here")
def test_a_loss_on_a_gpu_waits_for_none_of_its_own_kernels():
    images, texts = (x.detach().float().cuda().requires_grad_() for x in features(6))
    scale, done = scalar(9.0).float().cuda(), torch.cuda.Event()
    for _ in range(2):  # the second one reads the counts of the first
        torch.cuda.synchronize()
        teacher = miners.TeacherMask.gather(images.detach(), texts.detach(), 0.1)
        losses.clip_loss(images, texts, scale, miner=miners.Chain([teacher, lambda s, p, n: s.exp()]))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    losses.clip_loss(images, texts, scale, miner=miners.Chain([teacher, lambda s, p, n: s.exp()]))
    done.record()
    assert not done.query()


def test_on_a_gpu_the_loss_is_nan_and_the_next_one_names_the_miner(monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for the device: the count is read when the next loss is computed. Here a CPU plays the GPU."""
    late = HostCopy(torch.tensor([0.0, 3.0]))
    monkeypatch.setattr(miner_weights, "_unread", [(["All", "Mine"], late)])
    with pytest.raises(ValueError, match=r"miner Mine gave 3 negatives"):
        KINDS["clip"](*features(6), miners.TopK(1))
    assert KINDS["clip"](*features(6), miners.TopK(1)).isfinite(), "it is told once"

    monkeypatch.setattr("mmdata.train.losses.global_batch.raise_if_flawed", lambda *_: None)
    images, texts = features(6)
    loss = KINDS["clip"](images, texts, once(float("nan")))
    gradients = torch.autograd.grad(loss, (images, texts))
    assert loss.isnan()
    assert all(gradient.isnan().any() for gradient in gradients)
