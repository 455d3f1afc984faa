"""Weights of a miner that are none: they raise, where they were dropped and nothing was learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmdata.train import losses, miners
from mmdata.train.losses import tiles
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
    with pytest.raises(ValueError, match=REFUSED.format(5)):
        KINDS[kind](*features(6), everywhere)
    fine = KINDS[kind](*features(6), once(value))  # no block of six rows: only what is not admissible
    assert fine.isfinite()
    assert fine > 0


def test_only_the_last_miner_of_a_chain_may_weigh():
    with pytest.raises(ValueError, match=r"^miner once.* gave weights, and the miners after it in the Chain would"):
        KINDS["clip"](*features(6), miners.Chain([miners.All(), once(0.5), miners.TopK(2)]))
    with pytest.raises(ValueError, match="^miner once.*" + REFUSED.format(1).removeprefix("miner .*")):
        KINDS["clip"](*features(6), miners.Chain([miners.All(), once(float("nan"))]))


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU: torch sees none here")
def test_a_loss_on_a_gpu_waits_for_none_of_its_own_kernels():
    images, texts = (x.detach().float().cuda().requires_grad_() for x in features(6))
    scale, done = scalar(9.0).float().cuda(), torch.cuda.Event()
    teacher = miners.TeacherMask.gather(images.detach(), texts.detach(), 0.1)
    losses.clip_loss(images, texts, scale, miner=miners.Chain([teacher, lambda s, p, n: s.exp()]))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    losses.clip_loss(images, texts, scale, miner=miners.Chain([teacher, lambda s, p, n: s.exp()]))
    done.record()
    assert not done.query()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_loss_is_nan(kind: str, value: float, monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for the device. Here a CPU plays the GPU."""
    monkeypatch.setattr("mmdata.train.losses.global_batch.mine", lambda miner, side, rows, *masks: miner(*masks))
    images, texts = features(6)
    loss = KINDS[kind](images, texts, once(value))
    assert loss.isnan()
    assert all(gradient.isnan().any() for gradient in torch.autograd.grad(loss, (images, texts)))
