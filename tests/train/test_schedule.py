from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip_train import scheduler
from pydantic import ValidationError

from mmdata.config import TrainConfig
from mmdata.errors import ConfigError
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint
from mmdata.train.run.optimizer import averages, learning_rate, load_averages, make_optimizer
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "cosine_lr"),
        ({"schedule": "constant"}, "const_lr"),
        ({"schedule": "cooldown", "cooldown_steps": 4}, "const_lr_cooldown"),
    ],
)
def test_schedule_is_that_of_open_clip(settings: dict[str, Any], name: str):
    config = small.train_config(lr=0.3, warmup_steps=2, **settings)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    more = [settings["cooldown_steps"]] if "cooldown_steps" in settings else []
    theirs = getattr(scheduler, name)(optimizer, 0.3, 2, 9, *more)
    assert [learning_rate(step, config, 9) for step in range(9)] == pytest.approx([theirs(step) for step in range(9)])


def test_optimizer_goes_on_with_its_averages_and_keeps_its_own_groups():
    model, config = small.small_model(), small.train_config(weight_decay=0.3)
    one, other = make_optimizer(model, config), make_optimizer(model, small.train_config(weight_decay=0.7))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.logit_scale.grad = None
    one.step()
    for parameter in model.parameters():
        parameter.grad = None
    saved = averages(model, one)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    load_averages(model, other, saved)
    assert [group["weight_decay"] for group in other.param_groups] == [0.7, 0.0]
    assert averages(model, other).keys() == saved.keys() == dict(model.named_parameters()).keys() - {"logit_scale"}
    for name, values in averages(model, other).items():
        assert all(torch.equal(value, saved[name][kind]) for kind, value in values.items())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_optimizer_without_an_update_has_no_averages_and_gets_none():
    model, config = small.small_model(), small.train_config()
    one, other = make_optimizer(model, config), make_optimizer(model, config)
    assert averages(model, one) == {}
    assert not one.state
    assert {float(made["step"]) for made in averages(model, other, make=True).values()} == {1.0}
    load_averages(model, other, {})
    assert not any(other.state.values())


def train(output: Path, **changes: Any) -> dict[str, Any]:
    """Run to the end; the checkpoint. Four steps an epoch."""
    config = small.train_config(**changes)
    trainer = Trainer(small.small_model(), small.SmallBatches(), config, output=output, evaluate=small.evaluate)
    assert trainer.run() == 0
    path = latest_checkpoint(output / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


def assert_equal_runs(one: Path, other: Path, **changes: Any) -> None:
    """Train both to the end with the same settings; one of them may have begun with others."""
    states = train(one, **changes), train(other, **changes)
    assert all(torch.equal(value, states[1]["model"][name]) for name, value in states[0]["model"].items())
    kept = ("loss", "lr", "step", "epoch")
    both = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    lines = [[{k: line[k] for k in kept} for line in run if line["kind"] == "train"] for run in both]
    assert lines[0] == lines[1], "but for the evaluation where one of them ended"
    assert states[0]["total_steps"] == states[1]["total_steps"]


def test_finished_run_of_constant_rate_goes_on_as_if_it_had_been_longer(tmp_path: Path):
    assert train(tmp_path / "a", epochs=1, schedule="constant")["step"] == 4
    assert_equal_runs(tmp_path / "a", tmp_path / "b", epochs=3, schedule="constant")


def test_finished_run_of_constant_rate_ends_in_a_cooldown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path / "a", epochs=1, schedule="constant")
    capsys.readouterr()
    assert_equal_runs(tmp_path / "a", tmp_path / "b", epochs=2, schedule="cooldown", cooldown_steps=3)
    assert "step-0000000004: step 4 of 8" in capsys.readouterr().out


def test_run_goes_on_in_steps_where_it_ended_within_an_epoch(tmp_path: Path):
    train(tmp_path / "a", steps=6, schedule="constant")
    assert_equal_runs(tmp_path / "a", tmp_path / "b", steps=9, schedule="constant", evaluate_every_epochs=0)


def test_run_whose_rate_has_fallen_says_how_to_go_on(tmp_path: Path):
    train(tmp_path / "run", epochs=1)
    said = (
        rf"cannot resume from {tmp_path}/run/checkpoints/step-0000000004: train.epochs was 1, is 2. With that "
        r"the 4 updates that were made would have had other learning rates: cosine to step 4. To train on from the "
        rf"weights, begin a run: model.init_from={tmp_path}/run "
        r"train.output=ANOTHER_FOLDER. A run with train.schedule=constant can be extended at any time$"
    )
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "run", epochs=2)
    with pytest.raises(ConfigError, match=r"train.schedule was cosine, is constant. With that"):
        train(tmp_path / "run", epochs=1, schedule="constant")
    train(tmp_path / "cool", epochs=1, schedule="cooldown", cooldown_steps=2, checkpoint_every_steps=2)
    with pytest.raises(ConfigError, match=r"train.epochs was 1, is 2. With that the 4 updates"):
        train(tmp_path / "cool", epochs=2, schedule="cooldown", cooldown_steps=2)
    small.go_back(tmp_path / "cool", 2)  # before the cooldown
    longer = {"epochs": 2, "schedule": "cooldown", "cooldown_steps": 2}
    assert_equal_runs(tmp_path / "cool", tmp_path / "whole", **longer)


def test_run_cannot_end_before_where_it_is(tmp_path: Path):
    train(tmp_path, epochs=2, schedule="constant")
    with pytest.raises(
        ConfigError, match=r"train.epochs was 2, is 1. That makes 4 steps, and the run has made 8: give"
    ):
        train(tmp_path, epochs=1, schedule="constant")


def test_cooldown_that_does_not_fit_is_an_error(tmp_path: Path):
    for given, said in (
        ({"schedule": "cooldown"}, "belong together: got schedule 'cooldown' and cooldown_steps None"),
        ({"cooldown_steps": 3}, "belong together: got schedule 'cosine' and cooldown_steps 3"),
    ):
        with pytest.raises(ValidationError, match=said):
            TrainConfig.model_validate(given)
    said = r"train.warmup_steps \(2\) and train.cooldown_steps \(3\) do not fit into the 4 steps of the run: set lower"
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, epochs=1, schedule="cooldown", cooldown_steps=3)


def test_warm_up_longer_than_the_run_is_said_with_a_value_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = small.train_config(epochs=None, steps=40, warmup_steps=40)
    Trainer(small.small_model(), small.SmallBatches(), config, output=tmp_path)
    said = "train.warmup_steps is 40, and the run has 40 steps: the learning rate will not reach its peak"
    assert f"{said}; a tenth of the run is usual, train.warmup_steps=4\n" in capsys.readouterr().out
