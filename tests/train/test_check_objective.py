from __future__ import annotations

from pathlib import Path

import pytest

from mmdata.config import TrainConfig
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError
from mmdata.train.run.objective import check_loss
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small


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
            "train.loss 'triplet' takes no negative captions: set train.loss to clip, or leave data.negative_cap",
        ),
        (
            {"queue": 8},
            False,
            "train.queue: needs train.mask_false_negatives=true: without it",
        ),
        (
            {"queue": 8, "loss": "siglip", "mask_false_negatives": True},
            False,
            "train.queue: its rows are further negatives for loss 'clip' alone, got 'siglip': leave train.queue out$",
        ),
        (
            {"miner": {"name": "all", "drop_hardest": 1.5}},
            False,
            "train.miner: DropHardest leaves out a whole number, or a share below 1: got amount=1.5",
        ),
        ({"miner": {"name": "user", "target": "none_such:A"}}, False, "train.miner.target 'none_such:A'"),
    ],
)
def test_what_the_first_update_would_say_is_said_before_the_run(train: dict, negative_captions: bool, message: str):
    config = parse(TrainConfig, train, origin="train")
    with pytest.raises(ConfigError, match=message):
        check_loss(config, has_bias=False, has_negative_captions=negative_captions)


def test_a_trainer_refuses_a_loss_that_its_model_has_no_bias_for(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train.loss 'siglip' needs a bias: set model.logit_bias_init \(-10"):
        Trainer(small.small_model(), small.SmallBatches(), small.train_config(loss="siglip"), output=tmp_path)


def test_what_goes_together_is_let_through():
    check_loss(TrainConfig(loss="siglip"), has_bias=True)
    config = parse(TrainConfig, {"miner": {"name": "top_k"}}, origin="train")
    check_loss(config, has_bias=False, has_negative_captions=True)
