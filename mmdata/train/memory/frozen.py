"""A frozen dual encoder beside the one that is trained: a teacher. It embeds each batch without gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from mmdata.batch import Batch
from mmdata.train.batches import split
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import sharding


class FrozenEncoder:
    """A model without gradient, in eval mode.

    Args:
        model: as `DualEncoder`, not wrapped in DDP; it is frozen in place.
        micro_batch_size: rows per forward; None: all at once.
        autocast_dtype: of the forward; None: that of the weights.
    """

    def __init__(
        self, model: nn.Module, *, micro_batch_size: int | None = None, autocast_dtype: torch.dtype | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.micro_batch_size, self.autocast_dtype = micro_batch_size, autocast_dtype

    def shard(self, device: torch.device) -> None:
        """Share the weights out over the ranks (FSDP2), as `sharding.shard` does with the model's. A collective."""
        sharding.shard(self.model, device, autocast_dtype=self.autocast_dtype)
        cast(Any, self.model).set_reshard_after_forward(True)  # also the root's: an average takes the shares

    @torch.no_grad()
    def embed(self, batch: Batch) -> DualEncoderOutput:
        """Its features of this rank's rows, at least float32, without negative captions and boxes; and its scale."""
        device = next(self.model.parameters()).device
        outputs: list[DualEncoderOutput] = []
        positives = {name: value for name, value in batch.items() if not name.startswith(("negative_", "box"))}
        for part in split(positives, self.micro_batch_size or len(batch["valid"])):
            with torch.autocast(device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
                outputs.append(cast(DualEncoderOutput, self.model(part)))
        images = torch.cat([output.image_features for output in outputs])  # (B, D)
        texts = torch.cat([output.text_features for output in outputs])  # (B, D)
        precise = torch.promote_types(images.dtype, torch.float32)
        return DualEncoderOutput(images.to(precise), texts.to(precise), outputs[0].logit_scale)
