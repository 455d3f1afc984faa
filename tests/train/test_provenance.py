"""run.json says of each start of a run when, where, with which code and for how long; a resumed run adds an entry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from mmdata.errors import DataError
from mmdata.train.run.sessions import SESSIONS, SessionLog, git_commit, read_sessions


def start(folder: Path, step: int) -> SessionLog:
    return SessionLog(folder, step=step, ranks=1, device=torch.device("cpu"), speaks=True)


def steps(folder: Path) -> list[tuple[int, int]]:
    return [(session["first_step"], session["step"]) for session in read_sessions(folder / SESSIONS)]


def test_each_start_that_made_updates_has_an_entry(tmp_path: Path):
    start(tmp_path, 0).write(4)
    assert steps(tmp_path) == [(0, 4)]
    start(tmp_path, 4)  # killed before its first checkpoint: nothing of it is left
    assert steps(tmp_path) == [(0, 4), (4, 4)]
    start(tmp_path, 4).write(9)
    assert steps(tmp_path) == [(0, 4), (4, 9)]
    start(tmp_path, 0).write(2)  # the checkpoints were removed
    assert steps(tmp_path) == [(0, 2)]


def test_an_entry_names_machine_versions_and_time(tmp_path: Path):
    start(tmp_path, 0).write(3)
    (session,) = read_sessions(tmp_path / SESSIONS)
    assert (session["torch"], session["ranks"], session["gpus"]) == (torch.__version__, 1, [])
    assert session["cores"] >= 1
    assert session["cpu"]
    assert session["system"]
    assert session["wall_s"] >= 0
    assert session["started"].endswith("+00:00")


def test_other_ranks_write_nothing(tmp_path: Path):
    SessionLog(tmp_path, step=0, ranks=2, device=torch.device("cpu"), speaks=False).write(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"sessions": [{}]}', '{"sessions": [1]}'])
def test_a_damaged_record_says_what_to_do(content: str, tmp_path: Path):
    (tmp_path / SESSIONS).write_text(content)
    with pytest.raises(DataError, match=r"run\.json': not the record of a run that `mmdata train` writes .*; remove"):
        start(tmp_path, 1)


def test_commit_is_that_of_the_folder_and_only_of_tracked_files(tmp_path: Path):
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
    git_commit.cache_clear()
    commit = git("rev-parse", "--short=12", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "__init__.py").touch()
    assert git_commit(tmp_path / "installed", tracked="__init__.py") is None
    (tmp_path / "file").write_text("2")
    git_commit.cache_clear()
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_sessions_are_json_that_a_person_can_read(tmp_path: Path):
    start(tmp_path, 0)
    text = (tmp_path / SESSIONS).read_text()
    assert text.startswith('{\n  "sessions": [\n')
    assert list(json.loads(text)) == ["sessions"]
