"""Which updates are measured, and what begins only after the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.test_loop import make_trainer, read_metrics


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
        ({}, [48]),
        ({"miner": {"name": "top_k", "k": 2}}, [1, 48]),
        ({"miner": {"name": "top_k", "k": 2}, "mining_after_steps": 3}, [4, 48]),
        ({"queue": 8, "mask_false_negatives": True, "mining_after_steps": 3}, [4, 48]),
    ],
)
def test_a_run_speaks_of_mining_only_if_it_mines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], measured: list[int]
):
    assert make_trainer(tmp_path, steps=48, **settings).run() == 0
    assert [line["step"] for line in read_metrics(tmp_path, "mining")] == measured
    said = capsys.readouterr().out.splitlines()
    told = [line for line in said if line.startswith("mining: step ")]
    assert len(told) == (len(measured) if settings else 0)
    assert len([line for line in said if line.startswith("in-batch accuracy ")]) == bool(settings)
