"""The miner that settings name."""

from __future__ import annotations

import importlib
from functools import partial
from inspect import isfunction
from typing import Any

from mmdata.config.train import MinerConfig, NamedMinerConfig, UserConfig
from mmdata.errors import ConfigError, where_to_look
from mmdata.train.miners.hardness import All, DropHardest, SemiHard, TopK
from mmdata.train.miners.informed import Chain, FalseNegativeMargin, SameGroup
from mmdata.train.miners.protocol import AnyMiner
from mmdata.train.miners.sampling import GumbelTopK

BY_NAME = {
    "all": All,
    "top_k": TopK,
    "semi_hard": SemiHard,
    "gumbel_top_k": GumbelTopK,
    "same_group": SameGroup,
}
"""Miner classes by the setting `name`; the other settings of a miner are its arguments."""


def configured(config: NamedMinerConfig) -> AnyMiner:
    """The miner alone, or in a chain after the miners that leave out false negatives.

    Raises:
        ConfigError: a user's class that does not exist or does not take its arguments, or a value out of range.
    """
    try:
        parts: list[AnyMiner] = []
        if config.false_negative_margin is not None:
            parts.append(FalseNegativeMargin(config.false_negative_margin))
        if config.drop_hardest is not None:
            parts.append(DropHardest(config.drop_hardest))
        if isinstance(config, UserConfig):
            parts.append(_of_user(config))
        else:
            parts.append(BY_NAME[config.name](**config.model_dump(exclude={"name", *MinerConfig.model_fields})))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"train.miner: {error}") from error
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def _of_user(config: UserConfig) -> AnyMiner:
    module, _, name = config.target.partition(":")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except ImportError as error:
        where = where_to_look(error, module)
        raise ConfigError(f"train.miner.target '{config.target}': cannot be imported: {error}{where}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"train.miner.target '{config.target}': expected 'module:function' or 'module:Class' ({error})"
        ) from error
    if isfunction(kind):
        miner = partial(kind, **config.arguments)
        miner.__qualname__ = config.target  # type: ignore[attr-defined]  # by which messages call it
        return miner
    try:
        return kind(**config.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.miner.arguments {config.arguments} of '{config.target}': {error}") from error
