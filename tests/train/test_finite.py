"""Runs that diverge under fp16: real scaler, real checkpoints. The loop's tests have fp32."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.errors import TrainingError
from mmdata.train.run.checkpoint import load_checkpoint
from mmdata.train.run.trainer import Trainer
from tests.train.test_loop import last_state, make_trainer, read_metrics, run_small, spoiled_from


def overflowing(output: Path, when: range, **changes: Any) -> Trainer:
    """A run under fp16 in which a gradient overflows in the steps `when`, at any scale; the loss stays finite."""
    trainer = make_trainer(output, **{"precision": "fp16", "checkpoint_every_steps": 1, **changes})

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (math.inf if trainer.step in when else 1.0)

    trainer.model.logit_scale.register_hook(overflow)
    if trainer.step == 0:  # low enough that nothing overflows by itself
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 1024.0})
    return trainer


def kept(output: Path) -> list[int]:
    return sorted(load_checkpoint(path)["step"] for path in (output / "checkpoints").glob("step-*"))


def test_fp16_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_is_written(tmp_path: Path):
    said = (
        r"step 4: loss is nan and its gradient's norm nan, on rank 0 with rows .*; checkpoints up to step 3 are sound"
    )
    with pytest.raises(TrainingError, match=said):
        make_trainer(tmp_path, spoiled_from(4), precision="fp16", checkpoint_every_steps=1).run()
    assert kept(tmp_path) == [3, 4]


def test_fp16_gradient_that_overflows_at_every_scale_ends_the_run_and_keeps_a_sound_checkpoint(tmp_path: Path):
    said = (
        r"step 14: loss is \d.* norm (inf|nan) at every loss scale down to 1, on rank 0 .*; checkpoints up to step 3 "
    )
    with pytest.raises(TrainingError, match=said):
        overflowing(tmp_path, range(4, 1000), epochs=20).run()
    assert kept(tmp_path) == [3, 13, 14], "step 3 is the last whose weights are known to give a finite gradient"
    lines = read_metrics(tmp_path)
    assert (lines[-1]["step"], lines[-1]["skipped_updates"], lines[-1]["loss_scale"]) == (14, 10, 1.0)
    assert lines[-1]["grad_norm"] is None


def test_fp16_run_that_ends_with_updates_left_out_has_not_ended_well(tmp_path: Path):
    said = r"step 11: .* at the end of the run, and the last 8 updates were left out, .* checkpoints up to step 3 "
    with pytest.raises(TrainingError, match=said):
        overflowing(tmp_path / "some", range(4, 12)).run()
    assert kept(tmp_path / "some") == [3, 10, 11]
    with pytest.raises(TrainingError, match=r"step 2: .* the last 3 updates were left out"):
        overflowing(tmp_path / "all", range(3), steps=3).run()


def test_fp16_overflow_that_a_lower_scale_mends_is_no_error(tmp_path: Path):
    assert overflowing(tmp_path, range(8, 12)).run() == 0
    assert read_metrics(tmp_path)[-1]["skipped_updates"] == 4
    assert overflowing(tmp_path / "once", range(5, 9), keep_checkpoints=1).run() == 0
    assert kept(tmp_path / "once") == [12], "what was kept while updates were left out goes with the next sound one"


def test_fp16_resumed_run_still_knows_how_long_nothing_was_learned(tmp_path: Path):
    trainer = overflowing(tmp_path, range(4, 1000))
    trainer.source.before = lambda batch, rows: signal.raise_signal(signal.SIGTERM) if batch == 6 else None
    assert trainer.run() == 128 + signal.SIGTERM
    assert (last_state(tmp_path)["step"], last_state(tmp_path)["bad_in_a_row"]) == (7, 3)
    with pytest.raises(TrainingError, match="the last 8 updates were left out"):
        overflowing(tmp_path, range(4, 1000)).run()
    assert kept(tmp_path) == [3, 10, 11]


def test_run_that_diverges_exits_with_an_error(tmp_path: Path):
    done = run_small(tmp_path, train={"precision": "fp16", "lr": 1e30, "warmup_steps": 0, "checkpoint_every_steps": 1})
    assert done.returncode == 1, done.stderr
    assert "checkpoints up to step" in done.stderr
