"""Recipes are closed to unknown keys, and every one that is shipped loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, load_recipe
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
    ("settings", "message"),
    [
        ({"image_colum": "x"}, "settings: unknown key 'image_colum'; did you mean 'image_column'"),
        ({"min_side": 0}, "'min_side': Input should be greater than or equal to 1; got 0"),
        ({"train_tokenizer": 100}, "'train_tokenizer': .* greater than or equal to 300; got 100"),
        ({"tokenizer": "x", "train_tokenizer": 500}, "give one of tokenizer and train_tokenizer, not both"),
        ({"keep": ["label"]}, r"keep cannot hold \['label'\]: a sample's JSON uses these names itself"),
        ({"caption_columns": []}, "caption_columns must name a column"),
    ],
)
def test_wrong_setting_is_an_error_that_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, settings)


def test_unknown_recipe_is_an_error_that_names_those_there() -> None:
    with pytest.raises(ConfigError, match=r"recipe 'nowhere': no such file, and datasets/ has only: .*emoji"):
        load_recipe("nowhere")


def test_recipe_that_is_misspelt_is_suggested():
    with pytest.raises(ConfigError, match=r"recipe 'emojis': no such file, .*; did you mean 'emoji'\?$"):
        load_recipe("emojis")
