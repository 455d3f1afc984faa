"""EMA: the exponential moving average of a model's weights, to be evaluated, and as a teacher of false negatives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mmdata.config.train import AverageConfig, TeacherConfig
from mmdata.train import miners
from mmdata.train.memory.frozen import FrozenEncoder
from mmdata.train.models.dual_encoder import DualEncoderOutput


class EMA(FrozenEncoder):
    """A copy of a model whose weights are a moving average of the model's; the same on all ranks.

    Where the model is sharded (FSDP2), so is the copy, and each rank averages its shares.

    Args:
        model: not wrapped in DDP; the copy starts with its weights, in eval mode. It shares those that need
            no gradient, such as a frozen tower's: they take no memory twice, unless the model is sharded.
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
        shared: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        own = copy.deepcopy(model, shared)
        super().__init__(own, micro_batch_size=micro_batch_size, autocast_dtype=autocast_dtype)
        self.config = config

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """After an update of the model: average = decay · average + (1 - decay) · weights; buffers are copied."""
        get_ema_multi_avg_fn(self.config.decay)(_weights(self.model), _weights(model), 0)
        for ours, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            ours.copy_(theirs)

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


def _weights(model: nn.Module) -> list[Tensor]:
    """What this rank holds of the parameters; integers, which do not learn, have no average."""
    held = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return [each for each in held if each.is_floating_point() or each.is_complex()]
