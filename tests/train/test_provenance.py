"""A run's log says of each start where and with which code it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from mmdata.train.log.provenance import git_commit
from tests.train.test_loop import make_trainer, read_metrics


def test_log_names_machine_versions_and_time_of_each_start(tmp_path: Path):
    for steps in (2, 2, 4):  # the second start has nothing to do
        assert make_trainer(tmp_path, steps=steps, schedule="constant").run() == 0
    first, later = read_metrics(tmp_path, "start")
    assert (first["step"], later["step"]) == (0, 2)
    assert (first["torch"], first["ranks"], first["gpus"]) == (torch.__version__, 1, [])
    assert first["cores"] >= 1
    assert first["cpu"]
    assert first["system"]


def test_commit_is_that_of_the_folder(tmp_path: Path):
    assert git_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"
