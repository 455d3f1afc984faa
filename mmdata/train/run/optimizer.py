"""The optimizer and its learning rate. The rate is a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from mmdata.config import TrainConfig
from mmdata.errors import ConfigError
from mmdata.train.run.groups import parameter_groups


def learning_rate(step: int, config: TrainConfig, total_steps: int) -> float:
    """Linear warm-up to `config.lr`, then the schedule.

    Args:
        step: the update about to be made, from 0; update 0 already moves.
        config: lr, the rate of update `warmup_steps`; warmup_steps; and schedule. cosine: half a cosine that reaches 0
            where the run ends. constant: `lr` to the end. cooldown: `lr`, and over the last `cooldown_steps` updates a
            line that reaches 0 where the run ends.
        total_steps: updates of the whole run.

    Example:
        With lr 1.0, 2 of 6 steps for the warm-up: 0.5, 1.0, 1.0, 0.854, 0.5, 0.146; with a cooldown of 2 steps: 0.5,
        1.0, 1.0, 1.0, 1.0, 0.5.

    Source: open_clip's schedulers cosine, const and const-cooldown.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cooldown":
        return config.lr * min(1.0, (total_steps - step) / (config.cooldown_steps or 1))
    share = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def check_schedule(config: TrainConfig, total_steps: int) -> None:
    """Raise a ConfigError if warm-up and cooldown do not fit into the run."""
    if config.cooldown_steps is not None and config.warmup_steps + config.cooldown_steps > total_steps:
        raise ConfigError(
            f"train.warmup_steps ({config.warmup_steps}) and train.cooldown_steps ({config.cooldown_steps}) do not fit "
            f"into the {total_steps} steps of the run: set lower ones"
        )


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `config.optimizer` names, over the parameters that learn; weight decay on matrices only.

    Each group has its own rate, `config.lr` times its `lr_scale`: a scheduler of torch works on it.

    Biases, norms, logit_scale and logit_bias have no decay: it would pull a scale towards 0.

    Raises:
        ConfigError: `config.groups` do not fit the model, or muon finds no matrix in a tower's blocks.
    """
    groups, momentum = parameter_groups(model, config), config.betas[0]
    for group in groups:
        group["lr"] = config.lr * group["lr_scale"]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=momentum)
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    by_muon, others = ([group for group in groups if group["by_muon"] is kind] for kind in (True, False))
    if config.optimizer == "muon" and not by_muon:
        raise ConfigError("train.optimizer muon is for the matrices of the towers' blocks, and none learns: take adamw")
    parts: list[torch.optim.Optimizer] = []
    if by_muon:
        parts += [torch.optim.Muon(by_muon, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")]
    if others:  # fused: one pass over weights, gradients and averages in place of ten
        parts += [torch.optim.AdamW(others, lr=config.lr, betas=config.betas, fused=True)]
    return parts[0] if len(parts) == 1 else MuonAndAdamW(*parts)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for some parameter groups and AdamW for others, as one optimizer with one state.

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); match_rms_adamw: Liu et al. 2025 (arXiv:2502.16982).
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state of the whole."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups, part.state = list(islice(groups, len(part.param_groups))), self.state

    def step(self, closure: Any = None) -> Any:
        """Update the parameters of both."""
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Set the rate of all parameter groups, times the group's `lr_scale` if it has one; returns it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    return rate


def averages(model: nn.Module, optimizer: torch.optim.Optimizer, *, make: bool = False) -> dict[str, Any]:
    """What an optimizer keeps of each parameter, by the parameter's name.

    Args:
        model: whose parameters they are.
        optimizer: one that has made no update keeps nothing.
        make: give it averages to load into where it has none. Then `load_averages` must follow: torch makes them with
            an update of rate 0, which counts.

    Returns:
        A parameter that has had no gradient is left out.
    """
    if not (optimizer.state or make):
        return {}
    kept = cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer)["state"])
    return {name: values for name, values in kept.items() if values}


def load_averages(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore what `averages` gave; the optimizer's rates and groups stay those of the configuration."""
    groups: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
    state: Any = {name: saved.get(name, {}) for group in groups for name in group["params"]}
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups})
