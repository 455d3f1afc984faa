"""The miner that settings name."""

from __future__ import annotations

import importlib
from functools import partial
from inspect import isfunction, signature
from typing import Any

from torch import Tensor

from mmdata.config.train import MinerConfig, NamedMinerConfig, UserConfig
from mmdata.errors import ConfigError, where_to_look
from mmdata.train import miners
from mmdata.train.miners import AnyMiner, BlockMiner, Miner, Side, for_block

BY_NAME = {
    "all": miners.All,
    "top_k": miners.TopK,
    "semi_hard": miners.SemiHard,
    "gumbel_top_k": miners.GumbelTopK,
    "same_group": miners.SameGroup,
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
            parts.append(miners.FalseNegativeMargin(config.false_negative_margin))
        if config.drop_hardest is not None:
            parts.append(miners.DropHardest(config.drop_hardest))
        if isinstance(config, UserConfig):
            parts.append(_of_user(config))
        else:
            parts.append(BY_NAME[config.name](**config.model_dump(exclude={"name", *MinerConfig.model_fields})))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"train.miner: {error}") from error
    return parts[0] if len(parts) == 1 else miners.Chain(tuple(parts))


def _of_user(config: UserConfig) -> AnyMiner:
    target, given = config.target, config.arguments
    module, colon, name = target.partition(":")
    if not colon or not module:
        written = ":".join(target.rsplit(".", 1))
        remedy = f"; write {written}" if written != target else ""
        raise ConfigError(f"train.miner.target '{target}': expected 'module:function' or 'module:Class'{remedy}")
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except ImportError as error:
        where = where_to_look(error, module)
        raise ConfigError(f"train.miner.target '{target}': cannot be imported: {error}{where}") from error
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"train.miner.target '{target}': expected 'module:function' or 'module:Class' ({error})"
        ) from error
    try:
        miner = kind if isfunction(kind) else kind(**given)
        if not isinstance(miner, BlockMiner):
            signature(miner).bind("scores", "positives", "negatives", **(given if miner is kind else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"train.miner.arguments {given} of '{target}': {error}; a miner is called with (scores, positives, "
            "negatives), and a function with the arguments too"
        ) from error
    return _UserMiner(target, partial(kind, **given) if miner is kind else miner)


class _UserMiner:
    """A user's miner, which messages call by its target. A ValueError in it ends the run with a traceback."""

    def __init__(self, target: str, miner: AnyMiner) -> None:
        self.__qualname__ = target
        self._miner = miner

    def block(self, side: Side, rows: slice) -> Miner:
        """The miner for these anchors; see `BlockMiner`."""

        def mine(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
            try:
                return for_block(self._miner, side, rows)(scores, positives, negatives)
            except ValueError as error:  # a command would show it in one line, without its place
                raise RuntimeError(f"train.miner.target '{self.__qualname__}': {error}") from error

        return mine
