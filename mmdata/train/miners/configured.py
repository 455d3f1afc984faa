"""The miner that settings name."""

from __future__ import annotations

from mmdata.config import MinerConfig, NamedMinerConfig
from mmdata.train.miners.hardness import All, Ratio, SemiHard, SkipHottest, TopK
from mmdata.train.miners.known import Chain, FalseNegativeMargin, SameGroup
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
    """The miner itself, or a chain of it behind what leaves out false negatives."""
    arguments = config.model_dump(exclude={"name", *MinerConfig.model_fields})
    parts: list[AnyMiner] = [BY_NAME[config.name](**arguments)]
    if config.skip_hottest is not None:
        parts.insert(0, SkipHottest(config.skip_hottest))
    if config.false_negative_margin is not None:
        parts.insert(0, FalseNegativeMargin(config.false_negative_margin))
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))
