"""Strict YAML: what a few lines stand for is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdata.config.strict_yaml import MAX_VALUES, read_yaml
from mmdata.convert import load_recipe
from mmdata.errors import ConfigError

LEVELS = 9
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, LEVELS)
)
"""10⁹ values in nine lines."""
MERGED = "m0: &m0 {k: v}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join(10 * [f'*m{i - 1}'])}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, rf"not valid YAML, line 5, column 5: more than {MAX_VALUES:,} values, aliases written out$"),
        (MERGED, rf"not valid YAML, line 6, column 14: more than {MAX_VALUES:,} values, aliases written out$"),
        ("data: &a [1, *a]", "not valid YAML, line 1, column 7: an alias of what it is a part of$"),
        ("data: " + "[" * 20_000, "not valid YAML: lists or sections inside each other, hundreds deep"),
    ],
    ids=["aliases", "merges", "itself", "deep"],
)
def test_yaml_that_expands_beyond_a_bound_is_an_error(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"config '{path}': {message}"):
        read_yaml(path)
    with pytest.raises(ConfigError, match=rf"config '{path}': {message}"):
        load_recipe(str(path))


def test_an_override_that_expands_beyond_a_bound_is_an_error(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {}")
    bomb = "data.shards={" + LAUGHS.strip().replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match=rf"value is not valid YAML: more than {MAX_VALUES:,} values, aliases"):
        read_yaml(path, [bomb])


def test_aliases_within_the_bound_are_followed(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {crop_scale: &s [0.5, 1.0], again: *s}\ntrain: &t {lr: 1}\nmodel: {<<: *t, embed_dim: 8}")
    assert read_yaml(path) == {
        "data": {"crop_scale": [0.5, 1.0], "again": [0.5, 1.0]},
        "train": {"lr": 1},
        "model": {"lr": 1, "embed_dim": 8},
    }
