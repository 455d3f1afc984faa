"""CONFIG_OR_SHARDS of plan, replay, neighbours and join: a config, its name, a run, shards, and their train part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from mmdata import cli
from mmdata.cli.paths import load_settings
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError

ROWS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """shards/, split/ with train and val, and run/, a run of a config of shards/; features.npy of its rows."""
    folder = tmp_path_factory.mktemp("places")
    raw = make_corpus(folder / "raw", ROWS)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300, shard_rows=5))
    for part in ("train", "val"):
        shutil.copytree(folder / "shards", folder / "split" / part)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    shards = str(folder / "shards")
    data = {"shards": shards, "tokenizer": f"{shards}/tokenizer", "global_batch_size": 3}
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    np.save(folder / "features.npy", np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32))
    return folder


def run(capsys: pytest.CaptureFixture[str], name: str, place: Path | str, folder: Path) -> tuple[int, str]:
    """Run a command on a place: exit code, and what it prints."""
    words = {
        "plan": [],
        "replay": ["0", f"data.tokenizer={folder}/shards/tokenizer"],
        "neighbours": ["--features", folder / "features.npy", "--size", 2, "--out", folder / "groups.npy"],
        "join": [],
    }
    code = cli.main([name, str(place), *map(str, words[name])])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("plan", place) for place in ("run", "split", "shards", "run/config.yaml")),
        ("replay", "run"),
        ("neighbours", "split"),
    ],
)
def test_a_command_takes_each_place(capsys: pytest.CaptureFixture[str], folder: Path, name: str, place: str):
    code, printed = run(capsys, name, folder / place, folder)
    assert code == 0, printed


@pytest.mark.parametrize("place", ["run", "run/config.yaml"])
def test_join_takes_a_run_as_its_config(capsys: pytest.CaptureFixture[str], folder: Path, place: str):
    code, printed = run(capsys, "join", folder / place, folder)
    assert code != 0
    assert f"no table to join: the config '{folder / place}' has no data.join" in printed


@pytest.mark.parametrize("name", ["plan", "replay", "neighbours", "join"])
def test_a_command_takes_the_name_of_a_shipped_config(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    code, printed = run(capsys, name, "demo.yaml", folder)
    assert code != 0
    assert "data.shards: folder '" in printed, printed  # the config was found and read; its shards are not made
    assert "no such folder" in printed


def test_settings_of_shards_are_those_assumed_where_none_is_given(folder: Path):
    split = str(folder / "split")
    data = load_settings(split, ["data.seed=3"], {"global_batch_size": 7, "seed": 1}).data
    assert (data.shards, data.global_batch_size, data.seed) == (f"{split}/train", 7, 3)
    run = load_settings(str(folder / "run"), [], {"global_batch_size": 7}).data
    assert (run.shards, run.global_batch_size) == (str(folder / "shards"), 3)


def test_settings_of_a_place_that_is_not_there_are_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^config '.*/nothing': no such file"):
        load_settings(str(tmp_path / "nothing"), [])
    with pytest.raises(ConfigError, match=r"^on the command line: unknown key 'data\.sede'; did you mean 'data\.seed'"):
        load_settings(str(tmp_path), ["data.sede=1", "data.global_batch_size=2"])
