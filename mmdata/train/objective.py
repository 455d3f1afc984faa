"""A loss with its settings, as the training step takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mmdata.batch import Batch
from mmdata.train import losses
from mmdata.train.miners import AnyMiner
from mmdata.train.model import DualEncoderOutput


@dataclass(frozen=True)
class ContrastiveLoss:
    """A loss with its miner: `loss = ContrastiveLoss("clip")(output, batch)`.

    Args:
        kind: "clip" (InfoNCE) or "siglip" (sigmoid).
        miner: chooses negatives; None keeps all.
        mask_same: rows of equal image_hash or caption_hash are not negatives of each other, where the batch has them.
    """

    kind: Literal["clip", "siglip"] = "clip"
    miner: AnyMiner | None = None
    mask_same: bool = True

    def __call__(self, output: DualEncoderOutput, batch: Batch) -> Tensor:
        """Scalar loss of `output`, the model's features of `batch`."""
        hashes = (batch.get("image_hash"), batch.get("caption_hash"))
        same = [key for key in hashes if self.mask_same and key is not None]
        if self.kind == "siglip":
            if output.logit_bias is None:
                raise ValueError("loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)")
            return losses.siglip_loss(*output, miner=self.miner, valid=batch["valid"], same=same)  # type: ignore[arg-type]
        image_features, text_features, logit_scale, logit_bias = output
        loss = losses.clip_loss(
            image_features, text_features, logit_scale, miner=self.miner, valid=batch["valid"], same=same
        )
        # A softmax does not see a bias. Its gradient is 0, not absent: DDP waits for every parameter.
        return loss if logit_bias is None else loss + 0.0 * logit_bias
