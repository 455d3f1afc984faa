"""The queue fed by the moving average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.config import TrainConfig
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
