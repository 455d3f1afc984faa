"""The Python of docs/use.md, run in order."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from tests.trained.conftest import MakeRun

PAGE = (Path(__file__).parents[2] / "docs" / "use.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_page_of_use_runs(
    make_run: MakeRun,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(make_run(), tmp_path / "runs" / "photos")
    shutil.copytree(photos / "raw", tmp_path / "photos")
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    assert names["similarities"].shape == (1, len(names["photos"]))
    assert len(set(names["nearest"])) == 5
    assert len(re.findall(r"^\S+\.jpg: (dog|cat) \(\d+%\)$", capsys.readouterr().out, re.MULTILINE)) == len(
        names["photos"]
    )


def test_page_of_use_has_settings_that_exist():
    for block in blocks("yaml"):
        parse(Config, yaml.safe_load(block), origin="docs/use.md")
    settings = set(re.findall(r"train\.(\w+)=", "".join(blocks("sh"))))
    assert settings == {"epochs", "schedule", "cooldown_steps"}
