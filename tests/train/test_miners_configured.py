from __future__ import annotations

from typing import Any

import pytest

from mmdata.config import TrainConfig
from mmdata.settings import parse
from mmdata.train import miners
from mmdata.train.objective import loss_at


@pytest.mark.parametrize(
    ("config", "miner"),
    [
        ({"name": "all"}, miners.All()),
        ({"name": "top_k"}, miners.TopK(64)),
        ({"name": "ratio", "share": 0.2}, miners.Ratio(0.2)),
        ({"name": "semi_hard"}, miners.SemiHard(0.2)),
        ({"name": "distance_weighted", "dimension": 9}, miners.DistanceWeighted(9, k=64)),
        ({"name": "gumbel_top_k", "gradient": "relaxed"}, miners.GumbelTopK(64, gradient="relaxed")),
        ({"name": "same_group", "size": 4, "k": 2}, miners.SameGroup(4, 2)),
        (
            {"name": "top_k", "k": 2, "skip_hottest": 0.01, "false_negative_margin": 0.05},
            miners.Chain((miners.FalseNegativeMargin(0.05), miners.SkipHottest(0.01), miners.TopK(2))),
        ),
    ],
)
def test_settings_name_each_miner(config: dict[str, Any], miner: miners.AnyMiner):
    assert loss_at(0, parse(TrainConfig, {"steps": 1, "miner": config}, origin="c")).miner == miner
