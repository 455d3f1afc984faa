"""Recipes are closed to unknown keys, and every one that is shipped loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmdata.cli.data.convert import FLAGS, add
from mmdata.cli.flags import settings_given
from mmdata.cli.parser import Parser
from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.errors import ConfigError
from mmdata.files import shipped


@pytest.mark.parametrize("name", sorted(path.parent.name for path in shipped("datasets").glob("*/recipe.yaml")))
def test_shipped_recipe_loads(name: str) -> None:
    assert load_recipe(name) != ConvertConfig()
    assert (shipped("datasets", name) / "README.md").is_file()


def test_flags_replace_settings_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("table: t.csv\nmin_side: 64\n")
    config = load_recipe(str(tmp_path / "r.yaml"), {"min_side": 32})
    assert (config.table, config.min_side, config.max_bad_share) == ("t.csv", 32, 0.05)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--image-column", "1", "--caption-column", "a", "--caption-column", "b"], {"image_column": "1"}),
        (["--label-column", "", "--resize", "256", "--allow-private-addresses"], {"label_column": "", "resize": 256}),
        (["quality=90", "--resize", "9", "keep=[id, '*']"], {"resize": 9, "quality": 90, "keep": ("id", "*")}),
        (["--caption-template", "a {}: yes # no", "quotes=false"], {"caption_templates": ["a {}: yes # no"]}),
        (["delimiter=|"], {"delimiter": "|"}),
        (["delimiter=,", "encoding=latin-1"], {"delimiter": ",", "encoding": "latin-1"}),
        (["blur_boxes=boxes", "--val-share", "0.1"], {"blur_boxes": "boxes", "val_share": 0.1}),
    ],
)
def test_command_line_is_read_as_the_settings_are_meant(words: list[str], settings: dict[str, Any]) -> None:
    parser = Parser("convert", None)
    add(parser)
    options = parser.parse(["in", "out", *words])
    config = load_recipe(None, overrides=[*settings_given(options, ConvertConfig, FLAGS), *options.settings])
    assert config.model_dump(include=set(settings)) == settings


def test_flags_are_those_of_settings_and_have_their_help() -> None:
    parser = Parser("convert", None)
    add(parser)
    shown = " ".join(parser.format_help().split())
    assert "--shard-rows NUMBER Largest number of samples in a shard (default 10000)" in shown
    assert "--allow-private-addresses Fetches images behind URLs from this machine and from private networks" in shown
    flags = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    assert len(flags) <= 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_colum": "x"}, "settings: unknown key 'image_colum'; did you mean 'image_column'"),
        ({"min_side": 0}, "'min_side': expected integer ≥ 1; got 0"),
        ({"train_tokenizer": 100}, "'train_tokenizer': expected integer ≥ 300 or null; got 100"),
        ({"tokenizer": "x", "train_tokenizer": 500}, "give one of tokenizer and train_tokenizer, not both"),
        ({"keep": ["label"]}, r"keep cannot hold \['label'\]: a sample's JSON uses these names itself"),
        ({"caption_columns": []}, "caption_columns must name a column"),
    ],
)
def test_wrong_setting_is_an_error_that_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert([{"image": "a.jpg"}], "never made", settings)
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, settings)


def test_unknown_recipe_is_an_error_that_names_those_there() -> None:
    with pytest.raises(ConfigError, match=r"recipe 'nowhere': no such file, and datasets/ has only: .*emoji"):
        load_recipe("nowhere")


def test_recipe_that_is_misspelt_is_suggested():
    with pytest.raises(ConfigError, match=r"recipe 'emojis': no such file, .*; did you mean 'emoji'\?$"):
        load_recipe("emojis")
