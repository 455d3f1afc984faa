"""Parameter groups: how fast each parameter learns, by patterns over their names (`train.groups`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mmdata.config import TrainConfig
from mmdata.config.train import ParameterGroupConfig
from mmdata.errors import ConfigError
from mmdata.train.models.weights import nearest_patterns
from mmdata.train.ranks.sharding import blocks_of

REST = ParameterGroupConfig.model_construct(match="all others")
"""The group of all parameters that are in no other."""


def freeze_groups(model: nn.Module, groups: Sequence[ParameterGroupConfig]) -> dict[str, ParameterGroupConfig]:
    """Freeze what some groups freeze; DDP and FSDP2 must come after it.

    Returns:
        The group of each parameter that is in one, by the parameter's name.

    Raises:
        ConfigError: a pattern that no parameter matches, or a parameter that two patterns match.
    """
    found: dict[str, ParameterGroupConfig] = {}
    names = [name for name, _ in model.named_parameters()]
    for group in groups:
        matching = [name for name in names if fnmatchcase(name, group.match)]
        if not matching:
            parts = [f"{name}.*" for name, _ in model.named_modules() if name]
            near = nearest_patterns(group.match, [*parts, *names])
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            raise ConfigError(
                f"train.groups: no parameter matches '{group.match}'; the nearest are {near}; names begin "
                f"with {', '.join(tops)}"
            )
        if twice := next((name for name in matching if name in found), None):
            both = f"'{found[twice].match}' and '{group.match}'"
            raise ConfigError(f"train.groups: '{twice}' matches both {both}; a parameter has one group at most")
        found |= dict.fromkeys(matching, group)
    for name, group in found.items():
        if group.freeze:
            model.get_parameter(name).requires_grad_(False)
    return found


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """The parameters that learn, in groups as torch.optim takes them: matrices first.

    Returns:
        Besides `params` and `weight_decay`, which is 0 for biases, norms, logit_scale and logit_bias: `lr_scale`, for
        `set_learning_rate`; `match`, the pattern; `by_muon`, whether these are matrices (2-D) of the towers' blocks,
            and the optimizer is muon.

    Raises:
        ConfigError: see `freeze_groups`; no parameter learns, or a group has nothing that one of its settings acts on.

    Source: layer_decay as in timm's param_groups_layer_decay.
    """
    owners, layers = freeze_groups(model, config.groups), _layers(model)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group, (above, in_block) = owners.get(name, REST), layers.get(name, (0, False))
        # torch updates the tensors of a group together, and takes no mix of shares and whole tensors: `sharding.shard`
        # leaves just those whole that are no matrices.
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        learns = {
            "match": group.match,
            "lr_scale": group.lr_scale * (1.0 if group.layer_decay is None else group.layer_decay**above),
            "weight_decay": decay if is_matrix else 0.0,
            "by_muon": config.optimizer == "muon" and in_block and is_matrix and parameter.ndim == 2,
        }
        found.setdefault((not is_matrix, *learns.values()), {"params": [], **learns})["params"].append(parameter)
    if not found:
        raise ConfigError("train.groups and model.freeze leave no parameter that learns: freeze less")
    for group in config.groups:
        decays = {made["weight_decay"] for made in found.values() if made["match"] == group.match}
        if not (decays or group.freeze):
            raise ConfigError(
                f"train.groups: nothing that '{group.match}' matches learns: model.freeze or model.lora keeps it as it "
                "is; leave the group out"
            )
        if group.layer_decay is not None and not any(owners.get(name) is group for name in layers):
            raise ConfigError(f"train.groups: layer_decay of '{group.match}': no tower with numbered blocks is in it")
        if group.weight_decay and not any(decays):
            raise ConfigError(f"train.groups: weight_decay of '{group.match}' acts on matrices, and none learns there")
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def describe_groups(model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> Iterator[str]:
    """How many parameters learn, where some do not; then a line for each group of `train.groups` and for the rest.

    Example:
        "294,913 of 151,572,226 parameters learn: logit_scale 1, image_tower 0, text_tower 294,912";
        "group image_*: 86,192,640 parameters, lr 2.4e-07 to 1e-05 (14 rates), weight decay 0.2".
    """
    learning = Counter[str]()
    for name, parameter in model.named_parameters():
        learning[name.partition(".")[0]] += parameter.numel() * parameter.requires_grad
    total = sum(parameter.numel() for parameter in model.parameters())
    if learning.total() < total:
        parts = ", ".join(f"{part} {size:,}" for part, size in learning.items())
        yield f"{learning.total():,} of {total:,} parameters learn: {parts}"
    owners = freeze_groups(model, config.groups)
    for group in [*config.groups, REST] if config.groups else []:
        made = [one for one in optimizer.param_groups if one["match"] == group.match]
        size = sum(parameter.numel() for one in made for parameter in one["params"])
        frozen = sum(p.numel() for name, p in model.named_parameters() if owners.get(name, REST) is group) - size
        parts = [f"{frozen:,} parameters frozen"] if frozen else []
        if size:
            rates = sorted({config.lr * one["lr_scale"] for one in made})
            several = f" to {rates[-1]:.3g} ({len(rates)} rates)" if len(rates) > 1 else ""
            decay = max(one["weight_decay"] for one in made)
            parts.insert(0, f"{size:,} parameters, lr {rates[0]:.3g}{several}, weight decay {decay:g}")
        yield f"group {group.match}: {'; '.join(parts) or '0 parameters'}"


def _layers(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """Of each parameter of a tower with blocks: the layers above it, and whether it is in a block.

    The layers of n blocks: 0 are the embeddings, 1 to n the blocks, n + 1 what comes after them. As in timm, a norm
    right after the last block counts as part of it. Tables of positions beside the blocks are embeddings, too.
    """
    found: dict[str, tuple[int, bool]] = {}
    for tower_name, tower in model.named_children():
        numbers = {id(part.weight): 0 for part in tower.modules() if isinstance(part, nn.Embedding)}
        numbers |= {id(p): number for number, block in enumerate(blocks_of(tower), 1) for p in block.parameters()}
        depth, layer = max(numbers.values(), default=0), 0
        for name, parameter in tower.named_parameters() if depth else ():
            own = numbers.get(id(parameter))
            layer = max(layer, own or 0)
            if own is None and layer == depth and parameter.ndim > 1:
                layer += 1
            found[f"{tower_name}.{name}"] = depth + 1 - (layer if own is None else own), bool(own)
    return found
