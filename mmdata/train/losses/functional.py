"""Contrastive losses over the global batch. Every rank returns the same value; the mean of the ranks' gradients, which
is what DDP and FSDP take, is the gradient of one process that holds the whole batch, scale and bias included.

How: each rank computes the rows it owns against all ranks' columns and divides by the global number of valid rows.
The returned loss has the global value, and W times the gradient of the local part. The backward pass of the gathered
features is a reduce-scatter, which returns to each rank the gradient of its own rows; so the sum over the W ranks,
divided by W, is exact whatever each rank holds. Similarities are computed in tiles (`tiles`) or in blocks of whole rows
(`rows`), and never stored whole: memory is O(B·D).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.config.train import LossPrecision
from mmdata.train.losses.global_batch import GlobalBatch
from mmdata.train.losses.pairs import ExtraNegatives, Pairs
from mmdata.train.losses.rows import ChosenPairs, rowwise_sum
from mmdata.train.losses.tiles import log_sum_exps, on_device, softplus_sums
from mmdata.train.miners import AnyMiner, Side
from mmdata.train.ranks import collectives


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    miner: AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
    extra_texts: ExtraNegatives | None = None,
    extra_images: ExtraNegatives | None = None,
    precision: LossPrecision = "auto",
) -> Tensor:
    """Symmetric InfoNCE over the global batch.

    Args:
        image_features: (B, D), L2-normalised, this rank's rows; B equal on all ranks.
        text_features: (B, D); row i pairs with image row i.
        logit_scale: scalar multiplier, already exponentiated; a tensor gets a gradient.
        miner: chooses and weighs negatives, in both directions; None keeps all.
        valid: bool (B,), False rows are neither positives nor negatives; None: all are valid. Ranks may differ in
            how many are.
        same: int64 (B,) each, such as image_hash and caption_hash: rows that are equal in any of them are not
            negatives of each other.
        extra_texts: further negatives of the images, such as captions with two words swapped (NegCLIP).
        extra_images: further negatives of the texts.
        precision: of products without a miner: bf16, tf32 or fp32, as `train.loss_precision`; auto: as torch's settings
            say.

    Returns:
        Scalar, float32 (float64 for such features): mean of both directions over the valid rows of all ranks, in
        nats; 0 where no row is valid.

    Raises:
        ValueError: row counts differ.

    Source: Radford et al. 2021, figure 3 (arXiv:2103.00020); negative captions: Yuksekgonul et al. 2023
    (arXiv:2210.01936).
    """
    batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
    logit_scale = batch.scalar("logit_scale", logit_scale)
    if miner is not None:
        of_images = batch.sum_over("image", _infonce, [logit_scale], miner=miner, extra=extra_texts)
        of_texts = batch.sum_over("text", _infonce, [logit_scale], miner=miner, extra=extra_images)
        return batch.global_mean((of_images + of_texts) / 2)
    own = logit_scale * (batch.images * batch.texts).sum(1)  # (B,)
    texts = collectives.gather_with_grad(batch.texts)
    # Each similarity is computed once, and used for both directions.
    over_texts, over_images = log_sum_exps(batch.images, texts, batch.pairs, scale=logit_scale, precision=precision)
    assert over_images is not None, "both"
    over_images = collectives.log_sum_exp(over_images)[batch.own]
    total = torch.zeros_like(own)
    for sums, anchors, extra in ((over_texts, batch.images, extra_texts), (over_images, batch.texts, extra_images)):
        # log(1 + the sum over negatives of exp(logit - own)). A row that is not valid has none: 0, with the gradient 0.
        terms = [torch.zeros_like(own), sums - own]
        if extra is not None:
            columns, pairs = extra.columns(anchors.dtype), batch.pairs_with(extra)
            outside, _ = log_sum_exps(anchors, columns, pairs, scale=logit_scale, both=False, precision=precision)
            terms.append(outside - own)
        total = total + torch.stack(terms).logsumexp(0)
    return batch.global_mean(total.sum() / 2)


def multi_positive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    labels: Tensor,
    miner: AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> Tensor:
    """Symmetric InfoNCE where all rows of a label are positives of each other, each counting the same.

    Args:
        image_features: (B, D), as in `clip_loss`.
        text_features: (B, D).
        logit_scale: scalar multiplier, already exponentiated; a tensor gets a gradient.
        labels: int64 (B,), any numbers: classes, or hashes of captions or images. A row without further positives needs
            a label of its own.
        miner: chooses among the rows of other labels; None keeps all.
        valid: bool (B,), as in `clip_loss`.
        same: int64 (B,) each, as in `clip_loss`; does not touch positives.

    Returns:
        Scalar: the mean over positives of -log p, over the valid rows and both directions, in nats.

    Raises:
        ValueError: row counts differ.

    Source: Yang et al. 2022, UniCL, equations 3 to 5 (arXiv:2204.03610).
    """
    batch = GlobalBatch.gather(image_features, text_features, valid, same=same, labels=labels)
    logit_scale = batch.scalar("logit_scale", logit_scale)
    return batch.global_mean(batch.sum_over_both(_infonce, [logit_scale], miner=miner) / 2)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    miner: AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
    precision: LossPrecision = "auto",
) -> Tensor:
    """Sigmoid loss over all pairs of the global batch.

    With a miner, half of the loss weighs negatives as chosen for each image and half as chosen for each text, so that
    a miner that keeps all leaves the loss as it is.

    Args:
        image_features: (B, D), as in `clip_loss`.
        text_features: (B, D).
        logit_scale: scalar multiplier, already exponentiated; a tensor gets a gradient.
        logit_bias: scalar added to all logits; a tensor gets a gradient.
        miner: chooses and weighs negatives, in both directions; None keeps all.
        valid: bool (B,), as in `clip_loss`.
        same: int64 (B,) each, as in `clip_loss`.
        precision: as in `clip_loss`.

    Returns:
        Scalar: sum over pairs / number of valid rows of all ranks, in nats; 0 where no row is valid.

    Raises:
        ValueError: row counts differ.

    Source: Zhai et al. 2023, algorithm 1 (arXiv:2303.15343).
    """
    batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
    scale, bias = batch.scalar("logit_scale", logit_scale), batch.scalar("logit_bias", logit_bias)
    if miner is None:
        # Each pair is in the row of one image: the other direction would add the same sum again.
        own = scale * (batch.images * batch.texts).sum(1) + bias  # (B,)
        texts = collectives.gather_with_grad(batch.texts)
        of_negatives = softplus_sums(batch.images, texts, batch.pairs, scale=scale, bias=bias, precision=precision)
        of_rows, valid = of_negatives - F.logsigmoid(own), batch.pairs.valid_rows
        return batch.global_mean((of_rows if valid is None else of_rows.where(valid, 0.0)).sum())
    return batch.global_mean(batch.sum_over_both(_sigmoid, [scale, bias], miner=miner) / 2)


def triplet_loss(
    image_features: Tensor,
    text_features: Tensor,
    *,
    margin: float = 0.2,
    miner: AnyMiner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> Tensor:
    """Hinge loss: a negative's cosine is to be `margin` below the positive's.

    Args:
        image_features: (B, D), as in `clip_loss`.
        text_features: (B, D).
        margin: in cosine, 0 to 2.
        miner: chooses and weighs negatives; `miners.TopK(1)` is the loss of VSE++, None the sum over all (VSE0).
        valid: bool (B,), as in `clip_loss`.
        same: int64 (B,) each, as in `clip_loss`.

    Returns:
        Scalar: sum over the chosen negatives, mean over the valid rows of all ranks, sum of both directions.

    Raises:
        ValueError: row counts differ, or a margin out of range.

    Source: Faghri et al. 2018, VSE++, equations 5 and 6 (arXiv:1707.05612).
    """
    if not 0 <= margin <= 2:
        raise ValueError(f"margin is a difference of cosines, 0 to 2: got {margin}")

    batch = GlobalBatch.gather(image_features, text_features, valid, same=same)
    return batch.global_mean(batch.sum_over_both(_hinge, miner=miner, margin=margin))


def distill_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    teacher: tuple[Tensor, Tensor, Tensor | float],
    valid: Tensor | None = None,
) -> Tensor:
    """Cross entropy of the logits against the softmax of a teacher's logits, over the global batch.

    Args:
        image_features: (B, D), as in `clip_loss`.
        text_features: (B, D).
        logit_scale: scalar multiplier, already exponentiated; a tensor gets a gradient.
        teacher: features of the images (B, E) and the texts (B, E) of these rows, L2-normalised, and the multiplier of
            their cosines; they get no gradient. Rows with features that are not finite are left out.
        valid: bool (B,), as in `clip_loss`.

    Returns:
        Scalar: mean of both directions over the rows of all ranks that are not left out, in nats; 0 without any.

    Raises:
        ValueError: row counts differ.

    Source: open_clip's DistillClipLoss; Vasu et al. 2024, MobileCLIP (arXiv:2311.17049).
    """
    images, texts, teacher_scale = teacher
    there = torch.cat([images, texts], dim=1).isfinite().all(1)
    batch = GlobalBatch.gather(image_features, text_features, there if valid is None else valid & there)
    taught = GlobalBatch.gather(images.detach(), texts.detach(), there)
    scale = batch.scalar("logit_scale", logit_scale)
    teacher_scale = taught.scalar("the teacher's logit_scale", teacher_scale).detach()

    def of_side(side: Side) -> Tensor:
        anchors, columns = batch.sides(side)
        taught_by, with_columns = taught.sides(side)

        def of_block(scores: Tensor, rows: slice, student_scale: Tensor) -> Tensor:
            targets = teacher_scale * (taught_by[rows] @ with_columns.T)  # (b, N)
            pairs = batch.pairs.block(rows, slice(0, len(columns)))
            return on_device(_cross_entropy, scores.device)(student_scale * scores, targets, pairs)

        return rowwise_sum(of_block, anchors, columns, [scale])

    return batch.global_mean((of_side("image") + of_side("text")) / 2)


def _cross_entropy(logits: Tensor, targets: Tensor, pairs: Pairs) -> Tensor:
    """(b,): of the softmax of logits (b, N) against that of targets; 0 in rows that are not valid."""
    kept = logits
    if pairs.valid_columns is not None:  # a finite number: softmax of -inf alone is NaN
        kept, targets = (x.masked_fill(~pairs.valid_columns, torch.finfo(x.dtype).min) for x in (logits, targets))
    losses = kept.logsumexp(1) - (targets.softmax(1) * logits).sum(1)
    return losses if pairs.valid_rows is None else losses.where(pairs.valid_rows, 0.0)


def _infonce(scores: Tensor, chosen: ChosenPairs, scale: Tensor) -> Tensor:
    logits = scale * scores
    return chosen.weighted_log_sum_exp(logits) - chosen.of_positives(logits)


def _sigmoid(scores: Tensor, chosen: ChosenPairs, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * scores + bias
    # logsigmoid is exact at both ends; softplus loses a term below e^-20 when it adds 1.
    losses = -F.logsigmoid(logits.where(chosen.positives, -logits))
    return chosen.weighted_sum(losses, chosen.negatives | chosen.positives)


def _hinge(scores: Tensor, chosen: ChosenPairs, *, margin: float) -> Tensor:
    own = chosen.of_positives(scores)[:, None]  # (b, 1)
    return chosen.weighted_sum(F.relu(margin + scores - own), chosen.negatives)
