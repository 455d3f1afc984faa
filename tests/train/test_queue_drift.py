"""The queue fed by the moving average, and how far its features drift from the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmdata.config import TrainConfig
from mmdata.train.log.advice import advise
from mmdata.train.memory.drift import QueueDrift
from mmdata.train.memory.ema import embed
from mmdata.train.run.trainer import Trainer
from tests.train import small_run as small
from tests.train.test_loop import last_state, make_trainer, read_metrics

TRAIN: dict[str, Any] = {"mask_false_negatives": True, "steps": 8}


QUEUE = 16
"""Rows."""


def teacher(decay: float) -> dict[str, Any]:
    return {"decay": decay, "margin": None}


def run(output: Path, **settings: Any) -> None:
    """Without dropout, which the teacher never has."""
    config = small.train_config(**TRAIN, **settings)
    assert Trainer(small.small_model(0.0), small.SmallBatches(), config, output=output).run() == 0


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


def test_queue_of_a_teacher_that_follows_at_once_is_that_of_the_model(tmp_path: Path):
    own, followed, slow = tmp_path / "own", tmp_path / "followed", tmp_path / "slow"
    run(own, queue=QUEUE)
    run(followed, queue=QUEUE, teacher=teacher(0.0))
    run(slow, queue=QUEUE, teacher=teacher(0.99))
    assert losses(followed) == pytest.approx(losses(own), rel=1e-4)
    assert losses(slow) != pytest.approx(losses(own), rel=1e-4)
    kept = {run: last_state(run)["memory"]["queue"]["kept"] for run in (own, followed, slow)}
    assert torch.equal(kept[slow]["keys"], kept[own]["keys"])
    torch.testing.assert_close(kept[followed]["images"], kept[own]["images"], rtol=1e-3, atol=1e-3)


def test_teacher_that_only_feeds_the_queue_leaves_no_negative_out(tmp_path: Path):
    alone, feeding = tmp_path / "alone", tmp_path / "feeding"
    assert make_trainer(alone, **TRAIN).run() == 0
    settings = {"queue": QUEUE, "mining_after_steps": 100, "teacher": teacher(0.9)}
    assert make_trainer(feeding, **TRAIN, **settings).run() == 0
    assert losses(feeding) == losses(alone)


def test_a_teacher_for_nothing_is_refused():
    with pytest.raises(ValueError, match=r"teacher\.margin null leaves no negative out: give a margin, or let the"):
        TrainConfig.model_validate({"steps": 1, "teacher": {"margin": None}})


def test_teacher_embeds_nothing_before_the_queue_begins(tmp_path: Path):
    settings = {"queue": QUEUE, "mining_after_steps": 5, "teacher": teacher(0.9)}
    trainer = make_trainer(tmp_path, **TRAIN, **settings)
    assert trainer.memory.teacher is not None
    calls: list[int] = []
    trainer.memory.teacher.model.register_forward_hook(lambda *_: calls.append(trainer.step))
    assert trainer.run() == 0
    assert calls == [5, 6, 7]


def test_drift_is_the_cosine_of_old_and_new_features():
    model, batches = small.small_model(), list(small.SmallBatches())
    drift = QueueDrift(rows=20, after_steps=1)  # three batches of eight
    taken = [embed(model, batch) for batch in batches]
    for step, (batch, features) in enumerate(zip(batches, taken, strict=True)):
        drift.keep(features, batch, step)  # that of step 3 alone: after `after_steps`, and a multiple of 3
    drift.measure(model, 5)
    assert drift.telemetry() == {}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) / 10)
    model.train()
    drift.measure(model, 6)
    found = drift.telemetry()
    assert model.training
    now = embed(model.eval(), batches[3])
    cosines = torch.stack([F.cosine_similarity(one, other) for one, other in zip(taken[3][:2], now[:2], strict=True)])
    assert found["oldest_age_steps"] == 3
    assert found["oldest_similarity"] == pytest.approx(float(cosines[:, batches[3]["valid"]].mean()), rel=1e-5)
    assert found["oldest_similarity"] < 0.99
    drift.measure(model, 7)
    assert drift.telemetry() == {}, "measured once"


def test_features_that_are_not_finite_are_not_counted():
    model, batch = small.small_model().eval(), next(iter(small.SmallBatches()))
    drift, features = QueueDrift(rows=8), embed(model, batch)
    features.image_features[0] = torch.nan
    drift.keep(features, batch, 0)
    drift.measure(model, 1)
    assert drift.telemetry()["oldest_similarity"] == pytest.approx(1.0, abs=1e-5)


def test_a_batch_is_measured_when_it_leaves_the_queue_however_rare_the_lines_are(tmp_path: Path):
    settings = {**TRAIN, "log_every_steps": 5, "steps": 10}
    assert make_trainer(tmp_path, **settings, queue=QUEUE).run() == 0
    lines = [line for line in read_metrics(tmp_path, "queue") if "oldest_similarity" in line]
    assert [line["oldest_age_steps"] for line in lines] == [2, 2]


@pytest.mark.parametrize(("similarity", "is_said"), [(0.95, False), (0.754, True)])
def test_advice_names_features_that_have_drifted(similarity: float, is_said: bool):
    lines = [
        {"kind": "queue", "step": 4, "oldest_age_steps": 3, "oldest_similarity": similarity},
        {"kind": "queue", "step": 5},
    ]
    said = advise(lines, {})
    assert said.startswith("the queue's oldest features had a cosine of 0.75 with those that the model made") == is_said
    assert bool(said) == is_said


def test_run_measures_and_says_the_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert make_trainer(tmp_path, **TRAIN, queue=QUEUE, lr=0.05, warmup_steps=0).run() == 0
    lines = [line for line in read_metrics(tmp_path, "queue") if "oldest_similarity" in line]
    # A batch is kept every second step, when the one before has been measured.
    assert [(line["step"], line["oldest_age_steps"]) for line in lines] == [(2, 2), (4, 2), (6, 2), (8, 2)]
    assert all(line["oldest_similarity"] < 0.9 for line in lines[:1])
    assert "; the queue's oldest features had a cosine of 0." in capsys.readouterr().out
