"""Strict YAML: a few lines stand for no more than they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdata.config.strict_yaml import read_yaml
from mmdata.convert import load_recipe
from mmdata.errors import ConfigError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, 9)
)
"""10⁹ values in nine lines."""
MERGED = "m0: &m0 {k: v}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join(10 * [f'*m{i - 1}'])}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, r"not valid YAML, line 2, column 10: the alias \*a0: write out what it stands for$"),
        (MERGED, r"not valid YAML, line 2, column 15: the alias \*m0: write out what it stands for$"),
        ("data: &a [1, *a]", r"not valid YAML, line 1, column 14: the alias \*a: write out what it stands for$"),
        ("data: " + "[" * 20_000, "not valid YAML: lists or sections inside each other, hundreds deep"),
    ],
    ids=["aliases", "merges", "itself", "deep"],
)
def test_yaml_that_stands_for_more_than_it_says_is_an_error(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"config '{path}': {message}"):
        read_yaml(path)
    with pytest.raises(ConfigError, match=rf"config '{path}': {message}"):
        load_recipe(str(path))


def test_an_override_with_an_alias_is_an_error(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {}")
    bomb = "data.shards={" + LAUGHS.strip().replace("\n", ", ") + "}"
    with pytest.raises(ConfigError, match=r"value is not valid YAML: the alias \*a0: write out what it stands for"):
        read_yaml(path, [bomb])
