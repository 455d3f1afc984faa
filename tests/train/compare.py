"""For tests of losses: small batches, all losses under one signature, and comparison with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train import losses, miners
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.pairs import ExtraNegatives
from mmdata.train.losses.telemetry import mining_telemetry


def features(rows: int, width: int = 6, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """L2-normalised images and texts, (rows, width) each, that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    pair = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    images, texts = (F.normalize(x, dim=-1).to(dtype).requires_grad_() for x in pair)
    return images, texts


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def value_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """An input that the loss does not use has the gradient 0."""
    return [loss.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def weights_by_similarity(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    return (2 * scores).exp()


Loss = Callable[..., Tensor]
"""(images, texts, scale, bias, *, labels, **valid and same) to a scalar."""


def _clip(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, **rest: object) -> Tensor:
    return losses.clip_loss(i, t, s, **rest)  # type: ignore[arg-type]


def _clip_extra(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, **rest: object) -> Tensor:
    texts, images = (x.to(i.dtype) for x in features(3, i.shape[1], seed=9))
    extra = ExtraNegatives(texts, valid=torch.tensor([True, False, True])), ExtraNegatives(images)
    return losses.clip_loss(i, t, s, extra_texts=extra[0], extra_images=extra[1], **rest)  # type: ignore[arg-type]


def _siglip(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, **rest: object) -> Tensor:
    return losses.siglip_loss(i, t, s, b, **rest)  # type: ignore[arg-type]


def _multi_positive(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, **rest: object) -> Tensor:
    return losses.multi_positive_loss(i, t, s, labels=labels, **rest)  # type: ignore[arg-type]


def _triplet(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, **rest: object) -> Tensor:
    return losses.triplet_loss(i, t, **rest)  # type: ignore[arg-type]


def _distill(i: Tensor, t: Tensor, s: Tensor, b: Tensor, *, labels: Tensor, same: object = (), **rest: Any) -> Tensor:
    images, texts = (x[labels] for x in features(7, 4, seed=7))  # a row's own, whatever rows are beside it
    return losses.distill_loss(i, t, s, teacher=(images, texts, 8.0), **rest)


def _with(loss: Loss, **settings: object) -> Loss:
    return lambda *inputs, **rest: loss(*inputs, **settings, **rest)


LOSSES: dict[str, Loss] = {
    "clip": _clip,
    "clip_top_2": _with(_clip, miner=miners.TopK(2)),
    "clip_weighed": _with(_clip, miner=weights_by_similarity),
    "clip_extra": _clip_extra,
    "clip_extra_top_2": _with(_clip_extra, miner=miners.TopK(2)),
    "siglip": _siglip,
    "siglip_weighed": _with(_siglip, miner=weights_by_similarity),
    "multi_positive": _multi_positive,
    "multi_positive_top_2": _with(_multi_positive, miner=miners.TopK(2)),
    "distill": _distill,
    "triplet": _triplet,
    "triplet_hardest": _with(_triplet, miner=miners.TopK(1)),
}
"""All losses, and what changes their way through the code."""


def telemetry_of(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    *,
    miner: miners.AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> dict[str, float]:
    """What mining makes of this rank's rows."""
    batch = GlobalBatch.gather(images, texts, valid, same=same)
    return mining_telemetry(batch, batch.scalar("logit_scale", scale), miner)
