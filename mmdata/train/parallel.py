"""How a run's model is made ready for training: compiled, in DDP, or sharded (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdata.train import compiling, distributed, sharding
from mmdata.train_config import TrainConfig


def prepare(
    model: nn.Module, config: TrainConfig, device: torch.device, *, autocast_dtype: torch.dtype | None
) -> nn.Module:
    """What `train_step` takes; an optimizer is to be made after it, a copy of the model before it.

    Args:
        model: changed in place where it is compiled or sharded.
        config: how to train; alone, there is nothing to share out.
        device: where the model is.
        autocast_dtype: of the towers.

    Raises:
        ConfigError: `train.compile` without what torch.compile needs.
    """
    if config.compile:
        compiling.compile_towers(model, device)
    if config.parallel == "fsdp" and distributed.world_size() > 1:
        sharding.shard(model, device, autocast_dtype=autocast_dtype)
        return model
    return distributed.wrap(model, device)


def adds_up(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around one of several backward passes: ranks average what has been added up, once, in the last of them."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else cast("AbstractContextManager[Any]", model.no_sync())
    if sharding.is_sharded(model):
        cast(Any, model).set_requires_gradient_sync(last)
    return nullcontext()
