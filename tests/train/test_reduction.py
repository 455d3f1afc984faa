"""A run of three ranks that is stopped and resumed has the numbers of one that is not, bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.programs import PATIENCE_S, Program
from tests.train.resume_ranks import WAYS
from tests.train.test_loop import last_state, read_metrics

PROGRAM = Path(__file__).with_name("resume_ranks.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a whole run and a resumed one of each way to train; three processes make them all."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[2])}
    commands = [[sys.executable, PROGRAM, folder, str(rank), "3"] for rank in range(3)]
    processes = [Program(command, env=environment) for command in commands]
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0, 0]
        yield folder
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(keep=1)
def test_reduction_of_three_ranks_is_the_same_after_a_resume(runs: Path, way: str):
    whole, cut = runs / way / "whole", runs / way / "cut"
    assert len(read_metrics(whole)) == 12
    assert read_metrics(cut) == read_metrics(whole)
    before, after = last_state(whole), last_state(cut)
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
