"""Settings on the command line: what is wrong with one is said of the command line, not of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdata.config import load_config
from mmdata.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("data: {shards: a, tokenizer: b, global_batch_size: 8}\n")
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.loading.num_worker=4",
            r"unknown key 'data\.loading\.num_worker'; did you mean 'data\.loading\.num_work",
        ),
        ("trian.lr=3", r"unknown key 'trian'; did you mean 'train'\?$"),
        ("train.mine.size=3", r"unknown key 'train\.mine'; did you mean 'train\.miner'\?$"),
        ("train.lr=fast", r"'train\.lr': Input should be a valid number.*; got 'fast'"),
        ("train.miner={name: top_k, k: 0}", r"'train\.miner\.k': Input should be greater than or equal to 1; got 0"),
        (
            "data.decode=slow",
            r"'data\.decode': Input should be 'fast' or 'exact'; got 'slow'",
        ),
    ],
)
def test_override_that_is_wrong_is_reported_as_of_the_command_line(config: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=rf"^on the command line: {message}"):
        load_config(config, ["data.seed=1", override])


def test_override_and_file_that_are_wrong_are_reported_each_with_its_place(config: Path):
    config.write_text(config.read_text().replace("}", ", sede: 1}"))
    message = (
        rf"^{config}: unknown key 'data\.sede'; did you mean 'data\.seed'\?; on the command line: 'train\.lr': .* -1$"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(config, ["train.lr=-1"])


def test_unknown_keys_of_file_and_command_line_are_reported_each_with_its_place(config: Path):
    config.write_text(config.read_text().replace("}", ", xyz: 1}"))
    with pytest.raises(
        ConfigError, match=rf"^{config}: unknown key 'data\.xyz'; .*; on the command line: unknown key 'data\.zyx'; "
    ):
        load_config(config, ["data.zyx=1"])


def test_override_given_twice_counts_as_the_last_one(config: Path):
    assert load_config(config, ["data.seed=1", "data.seed=2"]).data.seed == 2


def test_override_without_a_value_shows_how_it_is_written(config: Path):
    with pytest.raises(ConfigError, match=r"^override 'train\.epochs': expected .*, as in train\.epochs=VALUE$"):
        load_config(config, ["train.epochs", "3"])
    with pytest.raises(ConfigError, match=r"^override '3': expected key=value$"):
        load_config(config, ["3"])


@pytest.mark.parametrize("value", ["`clip score` > 0.28", " `clip score` > 0.28 and class_name == 'a: b'"])
def test_override_that_begins_with_a_backquote_is_a_text(config: Path, value: str):
    assert load_config(config, [f"data.select={value}"]).data.select == value


@pytest.mark.parametrize("value", ["64", "True", "[a]", "{file: a.txt}"])
def test_override_that_is_no_selection_says_what_one_is(config: Path, value: str):
    message = (
        r"^on the command line: 'data\.select': expected a condition \(width >= 64, key in lines\('good.parquet', "
        r"'id'\)\), or a file of keys or a mask \(good.txt, mask.npy\); got "
    )
    with pytest.raises(ConfigError, match=message):
        load_config(config, [f"data.select={value}"])
