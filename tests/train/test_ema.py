"""Averaged weights (train.ema): timm's ModelEmaV3 is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from mmdata.config.train import AverageConfig
from mmdata.train import EMA
from tests.train import small_run as small
from tests.train.test_checkpoint import equal
from tests.train.test_loop import last_state, make_trainer, read_metrics, run_two_ranks


@pytest.mark.parametrize("with_buffers", [False, True])
def test_average_is_that_of_timm(with_buffers: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4) if with_buffers else nn.LayerNorm(4))
    ours, theirs = EMA(model, AverageConfig(decay=0.8)), ModelEmaV3(model, decay=0.8, exclude_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
        ours.update(model)
        theirs.update(model)
    assert equal(ours.state_dict(), theirs.module.state_dict())
    assert not torch.equal(ours.model[0].weight, model[0].weight)
    model[0].register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    EMA(model, AverageConfig()).update(model)  # an integer has no average


@pytest.mark.parametrize("settings", [{"parallel": "ddp", "ema": {"decay": 0.5}}, {"parallel": "fsdp"}], ids=str)
def test_ranks_evaluate_batch_norms_with_the_statistics_of_the_checkpoint(tmp_path: Path, settings: dict[str, Any]):
    for code, error in run_two_ranks(tmp_path, batch_norm=True, train={**settings, "lr": 0.1, "steps": 8}):
        assert code == 0, error
    model, state = small.small_model(batch_norm=True), last_state(tmp_path)
    model.load_state_dict(state["memory"]["ema"] if "ema" in settings else state["model"])
    found = read_metrics(tmp_path, "evaluation")[-1]
    expected = small.evaluate(model.eval())
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_average_shares_weights_that_need_no_gradient():
    model = small.small_model()
    model.freeze("image")
    average = EMA(model, AverageConfig(decay=0.8))
    own, theirs = dict(average.model.named_parameters()), dict(model.named_parameters())
    assert {name for name in own if own[name] is theirs[name]} == {
        f"image_tower.{name}" for name in dict(model.image_tower.named_parameters())
    }


@pytest.mark.parametrize("groups", [[], [{"match": "image_tower.*", "freeze": True}]], ids=["all", "frozen"])
def test_average_is_evaluated_and_goes_on_after_a_resume_bit_for_bit(tmp_path: Path, groups: list[dict[str, Any]]):
    judged: list[nn.Module] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        judged.append(model)
        return small.evaluate(model)

    settings: dict[str, Any] = {"ema": {"decay": 0.7}, "teacher": {"decay": 0.9}, "groups": groups}
    whole = make_trainer(tmp_path, evaluate=evaluate, **settings)
    assert whole.run() == 0
    state, lines = last_state(tmp_path), read_metrics(tmp_path, "evaluation")
    assert whole.model.training
    assert {*map(id, judged)} == {id(whole.memory.ema.model)}
    assert [line["ema"] for line in lines] == [True] * 3
    small.go_back(tmp_path, 9)
    assert make_trainer(tmp_path, evaluate=evaluate, **settings).run() == 0
    resumed = last_state(tmp_path)
    assert state["memory"].keys() == {"ema", "teacher"}
    for part in ("model", "memory", "optimizer", "rng"):
        assert equal(state[part], resumed[part]), part
    assert not equal(state["memory"]["ema"], state["model"])
    assert not equal(state["memory"]["ema"], state["memory"]["teacher"])
    assert read_metrics(tmp_path, "evaluation") == lines


def test_teacher_of_the_same_decay_is_the_average(tmp_path: Path):
    one, two = {"decay": 0.7}, {"teacher": {"decay": 0.7}, "steps": 3}
    trainer = make_trainer(tmp_path / "one", ema=one, **two)
    assert trainer.memory.teacher is trainer.memory.ema
    assert trainer.run() == make_trainer(tmp_path / "other", **two).run() == 0
    shared, alone = last_state(tmp_path / "one"), last_state(tmp_path / "other")
    assert shared["memory"].keys() == {"ema"}
    assert equal(shared["memory"]["ema"], alone["memory"]["teacher"])
    assert equal(shared["model"], alone["model"])


def test_average_that_stays_near_the_start_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_trainer(tmp_path, steps=10, ema={"decay": 0.9})
    said = (
        "train.ema.decay is 0.9, and the run has 10 steps: 35% of the averaged weights will be those of the start; set"
    )
    assert said in capsys.readouterr().out
