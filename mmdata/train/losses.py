"""Contrastive losses over the global batch. Every rank returns the same value; the mean of the ranks' gradients, which
is what DDP and FSDP take, is the gradient of one process that holds the whole batch, scale and bias included.

How: each rank computes the rows it owns against all ranks' columns and divides by the global number of valid rows.
The returned loss has the global value, and W times the gradient of the local part; gathered features send their
gradient home by a reduce-scatter, so the sum over ranks, divided by W, is exact whatever the ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmdata.batch import Batch
from mmdata.train import distributed
from mmdata.train.miners import Miner
from mmdata.train.model import DualEncoderOutput

BLOCK_ELEMENTS = 1 << 24  # similarities in memory at once: 64 MiB of float32; rows of more are recomputed in backward


def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    *,
    miner: Miner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> Tensor:
    """Symmetric InfoNCE over the global batch.

    Args:
        image_features: (B, D), L2-normalised, this rank's rows; B equal on all ranks.
        text_features: (B, D); row i pairs with image row i.
        logit_scale: scalar multiplier, already exponentiated.
        miner: chooses and weighs negatives, in both directions; None keeps all.
        valid: bool (B,), False rows are neither positives nor negatives; None: all are valid. Ranks may differ in
            how many are.
        same: int64 (B,) each, such as image_hash and caption_hash: rows that are equal in any of them are not
            negatives of each other.

    Returns:
        Scalar, float32 (float64 for such features): mean of both directions over the valid rows of all ranks, in
        nats; 0 where no row is valid.

    Raises:
        ValueError: row counts differ.

    Source: Radford et al. 2021, figure 3 (arXiv:2103.00020).
    """
    image_features, text_features, pairs = _prepare(image_features, text_features, valid, same)
    with _full_precision(image_features):
        images, texts = distributed.gather_with_grad(image_features), distributed.gather_with_grad(text_features)

        def block_loss(anchors: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
            return _infonce(anchors, columns, rows, pairs, logit_scale, miner)

        total = _over_blocks(block_loss, image_features, texts, pairs) + _over_blocks(
            block_loss, text_features, images, pairs
        )
        return pairs.global_mean(total / 2)


def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    *,
    miner: Miner | None = None,
    valid: Tensor | None = None,
    same: Sequence[Tensor] = (),
) -> Tensor:
    """Sigmoid loss over all pairs of the global batch.

    With a miner, half of the loss weighs negatives as chosen for each image and half as chosen for each text, so that
    a miner that keeps all leaves the loss as it is.

    Args:
        image_features: (B, D), L2-normalised, this rank's rows; B equal on all ranks.
        text_features: (B, D); row i pairs with image row i.
        logit_scale: scalar multiplier, already exponentiated.
        logit_bias: scalar added to all logits.
        miner: chooses and weighs negatives, in both directions; None keeps all.
        valid: bool (B,), as in `clip_loss`.
        same: int64 (B,) each, as in `clip_loss`.

    Returns:
        Scalar, float32 (float64 for such features): sum over pairs / number of valid rows of all ranks, in nats;
        0 where no row is valid.

    Raises:
        ValueError: row counts differ.

    Source: Zhai et al. 2023, algorithm 1 (arXiv:2303.15343).
    """
    image_features, text_features, pairs = _prepare(image_features, text_features, valid, same)
    with _full_precision(image_features):

        def block_loss(anchors: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
            return _sigmoid(anchors, columns, rows, pairs, (logit_scale, logit_bias), miner)

        # Every pair stands in one image's row: without a miner the other direction would add the same sum again.
        total = _over_blocks(block_loss, image_features, distributed.gather_with_grad(text_features), pairs)
        if miner is not None:
            images = distributed.gather_with_grad(image_features)
            total = (total + _over_blocks(block_loss, text_features, images, pairs)) / 2
        return pairs.global_mean(total)


@dataclass(frozen=True)
class ContrastiveLoss:
    """A loss with its miner, as the training step takes it: `loss = ContrastiveLoss("clip")(output, batch)`.

    Args:
        kind: "clip" (InfoNCE) or "siglip" (sigmoid).
        miner: chooses negatives; None keeps all.
        mask_same: rows of equal image_hash or caption_hash are not negatives of each other, where the batch has them.
    """

    kind: Literal["clip", "siglip"] = "clip"
    miner: Miner | None = None
    mask_same: bool = True

    def __call__(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """Scalar loss of `output`, the model's features of `batch`."""
        hashes = (batch.get("image_hash"), batch.get("caption_hash"))
        same = [key for key in hashes if self.mask_same and key is not None]
        if self.kind == "siglip":
            if output.logit_bias is None:
                raise ValueError("loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
            return siglip_loss(*output, miner=self.miner, valid=batch["valid"], same=same)  # type: ignore[arg-type]
        image_features, text_features, logit_scale, logit_bias = output
        loss = clip_loss(image_features, text_features, logit_scale, miner=self.miner, valid=batch["valid"], same=same)
        # A softmax does not see a bias. Its gradient is 0, not absent: DDP waits for every parameter.
        return loss if logit_bias is None else loss + 0.0 * logit_bias


@dataclass(frozen=True)
class _Pairs:
    """Which rows of the global batch are valid, and which must not be contrasted."""

    valid: Tensor  # bool (N,)
    same: tuple[Tensor, ...]  # int64 (N,) each
    first: int  # global number of this rank's first row

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positives and admissible negatives, bool (b, N) each, of the anchors with global numbers `rows` (b,)."""
        columns = torch.arange(len(self.valid), device=rows.device)  # (N,)
        positives = rows[:, None] == columns[None, :]  # (b, N)
        negatives = ~positives & self.valid[rows][:, None] & self.valid[None, :]
        for key in self.same:
            negatives &= key[rows][:, None] != key[None, :]
        return positives, negatives

    def global_mean(self, local: Tensor) -> Tensor:
        """Sum over ranks / number of valid rows, with W times the gradient of this rank's part."""
        local = local / self.valid.sum().clamp(min=1)
        weighted = local * distributed.world_size()
        return distributed.all_reduce_sum(local) + (weighted - weighted.detach())


def _prepare(
    image_features: Tensor, text_features: Tensor, valid: Tensor | None, same: Sequence[Tensor]
) -> tuple[Tensor, Tensor, _Pairs]:
    rows = image_features.shape[0]
    if image_features.shape != text_features.shape or image_features.ndim != 2:
        raise ValueError(
            f"image_features {tuple(image_features.shape)} and text_features {tuple(text_features.shape)} "
            "must both be (B, D): row i of one pairs with row i of the other"
        )
    if valid is None:
        valid = torch.ones(rows, dtype=torch.bool, device=image_features.device)
    for name, column in (("valid", valid), *(("same", key) for key in same)):
        if column.shape != (rows,):
            raise ValueError(f"{name} has shape {tuple(column.shape)}, expected ({rows},): one entry a feature row")
    # Rows that do not count become zeros: whatever they held, NaN too, it cannot reach the loss or a gradient.
    keep = valid[:, None]
    image_features = image_features.float() if image_features.dtype in _HALF else image_features
    text_features = text_features.float() if text_features.dtype in _HALF else text_features
    columns = distributed.gather(torch.stack([valid.long(), *same], dim=1))  # (N, 1 + S), one collective
    pairs = _Pairs(columns[:, 0].bool(), tuple(columns[:, 1:].unbind(1)), distributed.rank() * rows)
    return image_features.where(keep, 0.0), text_features.where(keep, 0.0), pairs


_HALF = (torch.float16, torch.bfloat16)


def _full_precision(features: Tensor) -> torch.autocast:
    return torch.autocast(features.device.type, enabled=False)


def _over_blocks(
    block_loss: Callable[[Tensor, Tensor, Tensor], Tensor], anchors: Tensor, columns: Tensor, pairs: _Pairs
) -> Tensor:
    """Sum of `block_loss(anchors (b, D), columns (N, D), global row numbers (b,))` over this rank's anchors."""
    blocks = list(_blocks(anchors.shape[0], columns.shape[0]))
    total = anchors.new_zeros(())
    for block in blocks:
        rows = torch.arange(block.start, block.stop, device=anchors.device) + pairs.first  # (b,)
        if len(blocks) == 1:
            return block_loss(anchors, columns, rows)
        # Backward recomputes a block (the random state is replayed for the miner's sake): memory is one block's.
        total = total + checkpoint(block_loss, anchors[block], columns, rows, use_reentrant=False)
    return total


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _mined(scores: Tensor, positives: Tensor, negatives: Tensor, miner: Miner | None) -> tuple[Tensor, Tensor | None]:
    """The negatives kept, bool (b, N), and their weights (b, N) where the miner gives some."""
    if miner is None:
        return negatives, None
    chosen = miner(scores, positives, negatives)
    if chosen.shape != scores.shape:
        raise ValueError(f"miner {miner!r} returned shape {tuple(chosen.shape)}, expected {tuple(scores.shape)}")
    if chosen.dtype == torch.bool:
        return chosen & negatives, None
    kept = (chosen > 0) & negatives
    return kept, chosen.where(kept, 1.0)


def _infonce(
    anchors: Tensor, columns: Tensor, rows: Tensor, pairs: _Pairs, logit_scale: Tensor, miner: Miner | None
) -> Tensor:
    positives, negatives = pairs.masks(rows)
    scores = anchors @ columns.T  # (b, N)
    kept, weights = _mined(scores, positives, negatives, miner)
    logits = logit_scale * scores
    own = logits.where(positives, 0.0).sum(1)  # (b,)
    if weights is not None:
        logits = logits + weights.log().where(kept, 0.0)
    # Masked after scaling: -inf before it would make scale's gradient 0 * -inf. A row's own partner always stays.
    entropy = logits.where(kept | positives, -torch.inf).logsumexp(1)  # (b,)
    return (entropy - own).where(pairs.valid[rows], 0.0).sum()


def _sigmoid(
    anchors: Tensor,
    columns: Tensor,
    rows: Tensor,
    pairs: _Pairs,
    scale_and_bias: tuple[Tensor, Tensor],
    miner: Miner | None,
) -> Tensor:
    positives, negatives = pairs.masks(rows)
    scores = anchors @ columns.T  # (b, N)
    kept, weights = _mined(scores, positives, negatives, miner)
    logit_scale, logit_bias = scale_and_bias
    logits = logit_scale * scores + logit_bias
    losses = F.softplus(logits.where(~positives, -logits))  # -log sigmoid(z * logit), z = 1 for partners, else -1
    if weights is not None:
        losses = losses * weights.where(kept, 1.0)
    counted = kept | (positives & pairs.valid[rows][:, None])
    return losses.where(counted, 0.0).sum()
