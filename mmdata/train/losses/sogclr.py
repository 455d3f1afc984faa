"""The contrastive loss over the whole corpus, estimated from batches: what a small batch has in place of a large one.

InfoNCE contrasts a row with the rows of its batch: the smaller the batch, the further its gradient is from that of the
whole corpus, also on average. Here each row keeps a moving average of what its negatives add up to, over all batches
that it was in, and the gradient is divided by that average in place of the batch's own sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmdata.train.losses.global_batch import AnchorLoss, GlobalBatch, Pairs


class SogCLROutput(NamedTuple):
    """What `sogclr_loss` returns.

    Attributes:
        loss: scalar, float32 (float64 for such features).
        log_normalizers: (B, 2), the averages after this batch, without gradient; to be given with these rows next time.
    """

    loss: Tensor
    log_normalizers: Tensor


def sogclr_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    log_normalizers: Tensor,
    *,
    gamma: float,
    eps: float,
    rho: float | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> SogCLROutput:
    """The global contrastive loss, from a batch and what earlier batches have left for its rows.

    For row i, g is the mean over its negatives j of exp(logit_ij - logit_ii), and u the moving average of g. The loss
    is the mean of log(1 + u / eps), and its gradient that of g / (u + eps). With eps = 1 / (rows of the corpus - 1), it
    is an estimate of InfoNCE with the whole corpus as one batch, which it equals for such a batch and gamma 1.

    Args:
        image_features: (B, D), L2-normalised, this rank's rows; B equal on all ranks.
        text_features: (B, D); row i pairs with image row i.
        logit_scale: scalar multiplier, already exponentiated; a tensor gets a gradient.
        log_normalizers: float (B, 2), log u of each row as an image and as a text; -inf for a row that was in no batch.
        gamma: weight of this batch in u, above 0 to 1.
        eps: added to u, above 0. In the papers 1e-14: then rows that are told apart well have a gradient, too.
        rho: None: the scale gets InfoNCE's gradient. A number: the loss is the mean of (log(u + eps) + rho) /
            logit_scale, as in FastCLIP-v3's objective, and a larger rho makes the scale larger. The code that its
            authors published counts the term of the averages twice in the gradient of the scale, so its values of
            rho (6.5 to 11) are no guide here.
        valid: bool (B,), False rows are neither positives nor negatives, and keep their normalizers; None: all are
            valid.
        same: int64 (B,) each: rows that are equal in any of them are not negatives of each other.

    Returns:
        The loss, mean of both directions over the valid rows of all ranks, and the rows' new normalizers.

    Raises:
        ValueError: row counts differ, or a setting out of range.

    Source: Yuan et al. 2022, SogCLR, algorithm 1 (arXiv:2202.12387); Wei et al. 2024, FastCLIP, equation 6
    (arXiv:2407.01445).
    """
    if not (0 < gamma <= 1 and eps > 0):
        raise ValueError(f"gamma must be above 0 to 1, eps above 0: got {gamma} and {eps}")
    if log_normalizers.shape != (len(image_features), 2):
        raise ValueError(
            f"log_normalizers has shape {tuple(log_normalizers.shape)}, expected ({len(image_features)}, 2): of each "
            "row as an image and as a text"
        )
    batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
    logit_scale = batch.scalar("logit_scale", logit_scale)
    known = log_normalizers.to(batch.image_features.dtype)
    averages = known.clone()
    first = batch.own.start

    def estimate(side: int) -> AnchorLoss:
        def of_block(scores: Tensor, pairs: Pairs, scale: Tensor) -> Tensor:
            assert pairs.partners is not None, "there are no labels"
            rows = pairs.partners[:, 0] - first
            log_mean, some = _log_mean_of_negatives(scale * scores, pairs)
            now = log_mean.detach()
            average = _moving_average(known[rows, side], now, gamma)
            averages[rows, side] = average.where(some & now.isfinite(), known[rows, side])
            log_sum = _plus(average, eps)
            # The value of the average, the gradient of this batch's mean.
            return (log_sum + (now - log_sum).exp() * (log_mean - now) - math.log(eps)).where(some, 0.0)

        return of_block

    with torch.autocast(image_features.device.type, enabled=False):
        of_images = batch.sum_over("image", estimate(0), [logit_scale])
        of_texts = batch.sum_over("text", estimate(1), [logit_scale])
        loss = batch.global_mean((of_images + of_texts) / 2)
        if rho is not None:
            loss = (loss + math.log(eps) + rho) / logit_scale
    is_known = batch.valid[batch.own, None]
    return SogCLROutput(loss, averages.where(is_known, known).detach())


def _log_mean_of_negatives(logits: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """log g (b,) of each anchor, and which anchors have negatives; of the others it is 0 and to be left out."""
    own = pairs.of_positives(logits)
    count = pairs.negatives.sum(1, dtype=logits.dtype)
    some = count > 0
    # A logsumexp over nothing would be -inf, and its gradient NaN.
    usable = pairs.negatives | (pairs.positives & ~some[:, None])
    return logits.where(usable, -torch.inf).logsumexp(1) - own - count.clamp(min=1).log(), some


def _moving_average(before: Tensor, now: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) exp(before) + gamma exp(now)); `now` where there was nothing before."""
    if gamma == 1:
        return now
    mixed = torch.logaddexp(before + math.log1p(-gamma), now + math.log(gamma))
    return mixed.where(before > -torch.inf, now)


def _plus(log_value: Tensor, eps: float) -> Tensor:
    return torch.logaddexp(log_value, torch.full_like(log_value, math.log(eps)))
