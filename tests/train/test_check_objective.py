from __future__ import annotations

import pytest

from mmdata.config import ModelConfig, TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder
from mmdata.train.objective import check_objective


def model(bias: float | None = None) -> DualEncoder:
    return DualEncoder.from_config(ModelConfig(name="micro", logit_bias_init=bias), vocab_size=9)


@pytest.mark.parametrize(
    ("train", "negative_captions", "message"),
    [
        (
            {"loss": "siglip"},
            False,
            r"train.loss 'siglip' needs a bias: set model.logit_bias_init \(-10",
        ),
        (
            {"loss": "triplet"},
            True,
            "train.loss 'triplet' takes no negative captions: set it to clip, or leave",
        ),
        ({"miner": {"name": "user", "target": "none_such:A"}}, False, "train.miner.target 'none_such:A'"),
    ],
)
def test_what_the_first_update_would_say_is_said_before_the_run(train: dict, negative_captions: bool, message: str):
    with pytest.raises(ConfigError, match=message):
        check_objective(parse(TrainConfig, train, origin="train"), model(), negative_captions=negative_captions)


def test_what_goes_together_is_let_through():
    check_objective(TrainConfig(loss="siglip"), model(bias=-10.0), negative_captions=False)
    check_objective(parse(TrainConfig, {"miner": {"name": "top_k"}}, origin="train"), model(), negative_captions=True)
