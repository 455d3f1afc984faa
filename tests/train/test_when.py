"""Which updates are measured, and what begins only after the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmdata.train.log.when import is_measured
from tests.train.test_loop import make_trainer, read_metrics


def test_one_update_in_n_is_measured_each_time_another_one():
    measured = [step for step in range(1, 4001) if is_measured(step, 100)]
    assert [(step - 1) // 100 for step in measured] == list(range(40))
    places = {step % 50 for step in measured}  # of the steps of an epoch
    assert len(places) > 20
    assert sorted(step % 100 for step in measured)[::13] == pytest.approx([1, 33, 66, 98], abs=3)  # evenly
    assert [step for step in range(1, 25) if is_measured(step, 4)] == [3, 5, 12, 14, 17, 23]
    assert all(is_measured(step, 1) for step in range(1, 9))


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("miner", {"miner": {"name": "top_k", "k": 2}}),
        ("queue", {"queue": 8, "mask_false_negatives": True}),
        ("teacher", {"teacher": {}}),
    ],
)
def test_what_begins_after_the_end_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, settings: dict[str, Any]
):
    make_trainer(tmp_path / "short", steps=8, mining_after_steps=1000, **settings)
    said = capsys.readouterr().out
    assert (
        f"train.mining_after_steps is 1,000, and the run has 8 steps: the {part} does nothing in it; set "
        f"train.mining_after_steps lower, to 0 where the run begins with a trained model, or leave train.{part} out"
    ) in said
    make_trainer(tmp_path / "long", steps=1001, mining_after_steps=1000, **settings)
    assert "does nothing in it" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({}, [62]),
        ({"miner": {"name": "top_k", "k": 2}}, [1, 62]),
        ({"miner": {"name": "top_k", "k": 2}, "mining_after_steps": 3}, [4, 62]),
        ({"queue": 8, "mask_false_negatives": True, "mining_after_steps": 3}, [4, 62]),
    ],
)
def test_a_run_speaks_of_mining_only_if_it_mines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], measured: list[int]
):
    assert make_trainer(tmp_path, steps=62, **settings).run() == 0
    assert [line["step"] for line in read_metrics(tmp_path, "mining")] == measured
    said = capsys.readouterr().out.splitlines()
    told = [line for line in said if line.startswith("mining: step ")]
    assert len(told) == (len(measured) if settings else 0)
    assert len([line for line in said if line.startswith("in-batch accuracy ")]) == bool(settings)
