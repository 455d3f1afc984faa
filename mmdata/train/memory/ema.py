"""EMA: the exponential moving average of a model's weights, to be evaluated, and as a teacher of false negatives."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mmdata.batch import Batch
from mmdata.config.train import AverageConfig, TeacherConfig
from mmdata.train import miners
from mmdata.train.batches import split
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import sharding


class EMA:
    """A copy of a model whose weights are a moving average of the model's; the same on all ranks.

    Where the model is sharded (FSDP2), so is the copy, and each rank averages its shares.

    Args:
        model: not wrapped in DDP; the copy starts with its weights, in eval mode.
        config: how fast it follows, and the margin of a teacher.
        micro_batch_size: rows per forward; None: all at once.
        autocast_dtype: of the forward; None: that of the weights.

    Source: Tarvainen and Valpola 2017, mean teacher (arXiv:1703.01780).
    """

    def __init__(
        self,
        model: nn.Module,
        config: AverageConfig,
        *,
        micro_batch_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.config = config
        self.micro_batch_size, self.autocast_dtype = micro_batch_size, autocast_dtype

    def shard(self, device: torch.device) -> None:
        """Share the weights out over the ranks (FSDP2), as `sharding.shard` does with the model's. A collective."""
        sharding.shard(self.model, device, autocast_dtype=self.autocast_dtype)
        cast(Any, self.model).set_reshard_after_forward(True)  # also the root's: `update` takes the shares

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After an update of the model: average = decay · average + (1 - decay) · weights; buffers are copied."""
        own, new = ([_local(parameter) for parameter in each.parameters()] for each in (self.model, model))
        get_ema_multi_avg_fn(self.config.decay)(own, new, 0)
        for ours, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def embed(self, batch: Batch) -> DualEncoderOutput:
        """The average's features of this rank's rows, at least float32, without the negative captions."""
        device = next(self.model.parameters()).device
        outputs: list[DualEncoderOutput] = []
        positives = {name: value for name, value in batch.items() if not name.startswith("negative_")}
        for part in split(positives, self.micro_batch_size or len(batch["valid"])):
            with torch.autocast(device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
                outputs.append(cast(DualEncoderOutput, self.model(part)))
        images = torch.cat([output.image_features for output in outputs])  # (B, D)
        texts = torch.cat([output.text_features for output in outputs])  # (B, D)
        precise = torch.promote_types(images.dtype, torch.float32)
        return DualEncoderOutput(images.to(precise), texts.to(precise))

    def teacher_mask(self, features: DualEncoderOutput) -> miners.TeacherMask | None:
        """The false negatives in the global batch, from what `embed` made of this rank's rows; None without a margin.

        A collective.
        """
        if not isinstance(self.config, TeacherConfig) or self.config.margin is None:
            return None
        return miners.TeacherMask.gather(features.image_features, features.text_features, self.config.margin)

    def state_dict(self) -> dict[str, Any]:
        """The average's weights."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state)


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
