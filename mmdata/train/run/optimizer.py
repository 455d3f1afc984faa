"""The optimizer and its learning rate. The rate is a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math

import torch
from torch import nn

from mmdata.config import TrainConfig
from mmdata.config.train import Schedule
from mmdata.errors import ConfigError


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule = "cosine",
    cooldown_steps: int = 0,
) -> float:
    """Linear warm-up to `peak`, then the schedule.

    Args:
        step: the update about to be made, from 0.
        peak: rate of update `warmup_steps`.
        warmup_steps: updates on the rise; update 0 already moves.
        total_steps: updates of the whole run.
        schedule: cosine: half a cosine that reaches 0 where the run ends. constant: `peak` to the end. cooldown:
            `peak`, and over the last `cooldown_steps` updates a line that reaches 0 where the run ends.
        cooldown_steps: for the schedule cooldown.

    Example:
        With peak 1.0, 2 of 6 steps for the warm-up: 0.5, 1.0, 1.0, 0.854, 0.5, 0.146; with a cooldown of 2 steps: 0.5,
        1.0, 1.0, 1.0, 1.0, 0.5.

    Source: open_clip's schedulers cosine, const and const-cooldown.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "cooldown":
        return peak * min(1.0, (total_steps - step) / cooldown_steps)
    share = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def scheduled_rate(step: int, config: TrainConfig, total_steps: int) -> float:
    """The learning rate of an update under the settings of a run; see `learning_rate`."""
    return learning_rate(
        step,
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
        schedule=config.schedule,
        cooldown_steps=config.cooldown_steps or 0,
    )


def check_schedule(config: TrainConfig, total_steps: int) -> None:
    """Raise a ConfigError if warm-up and cooldown do not fit into the run."""
    if config.cooldown_steps is not None and config.warmup_steps + config.cooldown_steps > total_steps:
        raise ConfigError(
            f"train.warmup_steps ({config.warmup_steps}) and train.cooldown_steps ({config.cooldown_steps}) do not fit "
            f"into the {total_steps} steps of the run: set lower ones"
        )


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that learn; weight decay on matrices only.

    Biases, norms, logit_scale and logit_bias have no decay: it would pull a scale towards 0.
    """
    learning = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in learning if p.ndim >= 2 and not name.endswith("bias")]
    others = [p for name, p in learning if p.ndim < 2 or name.endswith("bias")]
    # torch updates the tensors of a group together, and takes no mix of shares and whole tensors: `sharding.shard`
    # leaves just the second group whole.
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    # Fused: one pass over weights, gradients and averages in place of ten.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """One rate for all parameter groups; returns it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
