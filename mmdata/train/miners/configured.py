"""The miner that settings name."""

from __future__ import annotations

import importlib
from functools import partial
from inspect import isfunction
from typing import Any

from mmdata.config.train import MinerConfig, NamedMinerConfig, UserConfig
from mmdata.errors import ConfigError, where_to_look
from mmdata.train.miners.hardness import All, DropHardest, Ratio, SemiHard, TopK
from mmdata.train.miners.informed import Chain, FalseNegativeMargin, SameGroup
from mmdata.train.miners.protocol import AnyMiner
from mmdata.train.miners.sampling import DistanceWeighted, GumbelTopK

BY_NAME = {
    "all": All,
    "top_k": TopK,
    "ratio": Ratio,
    "semi_hard": SemiHard,
    "distance_weighted": DistanceWeighted,
    "gumbel_top_k": GumbelTopK,
    "same_group": SameGroup,
}
"""Miners by the `name` of their settings, whose other keys are their arguments."""


def configured(config: NamedMinerConfig) -> AnyMiner:
    """The miner itself, or a chain of it behind what leaves out false negatives.

    Raises:
        ConfigError: a user's class that is not there, or does not take its arguments.
    """
    if isinstance(config, UserConfig):
        miner = _of_user(config)
    else:
        miner = BY_NAME[config.name](**config.model_dump(exclude={"name", *MinerConfig.model_fields}))
    parts: list[AnyMiner] = [miner]
    if config.skip_hottest is not None:
        parts.insert(0, DropHardest(config.skip_hottest))
    if config.false_negative_margin is not None:
        parts.insert(0, FalseNegativeMargin(config.false_negative_margin))
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def _of_user(config: UserConfig) -> AnyMiner:
    module, _, name = config.target.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        where = where_to_look(error, module)
        raise ConfigError(f"train.miner.target '{config.target}': expected 'module:Class' ({error}){where}") from error
    if isfunction(kind):
        return partial(kind, **config.arguments)
    try:
        return kind(**config.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.miner.arguments {config.arguments} of '{config.target}': {error}") from error
