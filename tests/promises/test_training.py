"""Gradients over ranks are those of one process; a killed and resumed run has the weights of an unbroken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mmdata
from tests.programs import PATIENCE_S, Program

from .conftest import BAD_ROWS, ENVIRONMENT, Corpus, kill_when, loaders, run_mmdata

PROGRAM = Path(__file__).with_name("ranks.py")
ROOT = str(PROGRAM.parents[2])


def start_rank(folder: Path, rank: int, world_size: int) -> subprocess.Popen[Any]:
    command = [sys.executable, str(PROGRAM), str(folder), str(rank), str(world_size)]
    return Program(command, env={**ENVIRONMENT, "PYTHONPATH": ROOT})


def test_gradients_of_a_global_batch_on_two_ranks_are_those_of_one(corpus: Corpus, tmp_path: Path):
    """In float64, so that a term that is left out or counted twice is far from what rounding makes."""
    (loader,) = loaders(corpus.settings(global_batch_size=20))
    first = next(iter(loader))
    assert set(first["rows"].tolist()) & set(BAD_ROWS)  # so that ranks have unequal numbers of valid rows
    loader.close()
    (tmp_path / "settings.json").write_text(json.dumps(corpus.settings(global_batch_size=20)))
    programs = [start_rank(tmp_path, rank, world_size) for world_size in (1, 2) for rank in range(world_size)]
    try:
        assert [program.wait(PATIENCE_S) for program in programs] == [0, 0, 0]
    finally:
        for program in programs:
            program.kill()
    whole, *halves = (torch.load(tmp_path / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert torch.equal(torch.cat([half["valid"] for half in halves]), whole["valid"])
    for name, expected in whole["losses"].items():
        assert sum(bool((gradient != 0).any()) for gradient in expected.values()) > 10
        for half in halves:
            found = half["losses"][name]
            assert found.keys() == expected.keys()
            for parameter, gradient in expected.items():
                torch.testing.assert_close(found[parameter], gradient, rtol=1e-8, atol=1e-11)


HOLD = '''
import os, threading
from pathlib import Path

calls = 0


def text(caption, rng):
    """The caption as it is; where the environment says so, the 100th call and all later ones never end."""
    global calls
    calls += 1
    if "HOLD" in os.environ and calls > 100:
        Path(os.environ["HOLD"]).touch()
        threading.Event().wait()
    return caption
'''


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> Path:
    """A run of three epochs of three steps, with a checkpoint at each step."""
    (tmp_path / "held.py").write_text(HOLD)
    data = corpus.settings(global_batch_size=20, text_buckets=1, image_buckets=[[32, 32]], max_length=40)
    data["loading"] |= {"num_workers": 1, "num_processes": 0, "max_bad_share": 0.9}
    train = {"epochs": 3, "warmup_steps": 2, "log_every_steps": 1, "checkpoint_every_steps": 1}
    path = tmp_path / "config.yaml"
    model = {"name": "tiny", "dropout": 0.1}
    path.write_text(yaml.safe_dump({"data": {**data, "text_transform": "held:text"}, "model": model, "train": train}))
    return path


def test_run_that_is_killed_and_resumed_ends_with_the_weights_of_an_unbroken_one(config: Path, tmp_path: Path):
    search = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT])}
    run_mmdata("train", config, f"train.output={tmp_path / 'whole'}", **search)
    broken, hold = tmp_path / "broken", tmp_path / "hold"
    words = ["train", config, f"train.output={broken}"]
    killed = kill_when(lambda: hold.exists() and steps_of(broken) >= 2, words, **search, HOLD=str(hold))
    assert killed == -signal.SIGKILL
    assert steps_of(broken) < 9
    run_mmdata(*words, **search)
    whole, resumed = (mmdata.load_run(tmp_path / name) for name in ("whole", "broken"))
    assert (resumed.step, resumed.epoch) == (whole.step, whole.epoch) == (9, 3)
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def steps_of(run: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    try:
        return mmdata.load_run(run).step
    except (ValueError, OSError):
        return 0
