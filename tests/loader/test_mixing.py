"""Files of groups: what is read, and what is refused with a reason."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata.config.batches import GroupsConfig
from mmdata.errors import ConfigError
from mmdata.images import probe
from mmdata.plan.groups import groups_of, save_groups
from mmdata.tars.write import Sample


def saved(path: Path, values: Any, **settings: bool) -> Path:
    np.save(path, values, **settings)
    return path


def settings_for(path: Path, **settings: int) -> GroupsConfig:
    return GroupsConfig(source=str(path), **(settings or {"size": 2}))  # pyright: ignore[reportArgumentType]


def test_groups_are_read_whole(corpus, tmp_path: Path):
    expected = np.arange(50) // 4 - 1
    path = saved(tmp_path / "g.npy", expected)
    groups = groups_of(settings_for(path), corpus.index)
    os.truncate(path, 10)  # a mapped file would end the process now
    assert np.array_equal(groups.of_rows, expected)
    assert groups.source != groups_of(settings_for(saved(path, expected + 1)), corpus.index).source


def test_groups_of_a_missing_file(corpus, tmp_path: Path):
    path = tmp_path / "none.npy"
    with pytest.raises(ConfigError, match=f"^data.groups.source: '{path}': no such file"):
        corpus.loader(groups={"source": str(path), "size": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.arange(50.0), "is an array of float64; save the group of each row as int64, -1 for none"),
        (np.arange(50).reshape(25, 2), "is an array of int64 and shape (25, 2)"),
        (np.array([{}] * 50), "is an array of object"),
        (np.arange(49), "has 49 values, and the index has 50 rows: it was made for other shards"),
        (np.full(50, -1), "its largest group has 0 rows, and data.groups.size is 2: no 2 rows would stand together"),
    ],
    ids=str,
)
def test_groups_of_other_values_are_refused(corpus, tmp_path: Path, values: Any, message: str):
    path = saved(tmp_path / "g.npy", values, allow_pickle=True)
    with pytest.raises(ConfigError, match=rf"^data.groups.source: '{path}'.*{re.escape(message)}"):
        groups_of(settings_for(path), corpus.index)


def test_groups_that_were_saved_for_an_index_are_of_it_alone(corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index = corpus.index
    path, expected = tmp_path / "g.npy", np.arange(50) // 5
    save_groups(path, expected, index)
    assert np.array_equal(groups_of(settings_for(path), index).of_rows, expected)
    monkeypatch.setattr(index, "fingerprint", "of as many other rows")
    with pytest.raises(ConfigError, match=rf"^data.groups.source: '{path}' was made for another corpus; make it anew"):
        groups_of(settings_for(path), index)


def test_groups_smaller_than_asked_for(corpus, tmp_path: Path):
    path = saved(tmp_path / "g.npy", np.arange(50) // 5)
    corpus.loader(groups={"source": str(path), "size": 4}).close()
    for settings in ({"size": 6}, {"candidates": 5}):
        name, value = next(iter(settings.items()))
        message = f"its largest group has 5 rows, and data.groups.{name} is {value}: no 6 rows would stand together"
        with pytest.raises(ConfigError, match=re.escape(message)):
            groups_of(settings_for(path, **settings), corpus.index)


def test_groups_of_labels_where_the_corpus_has_none(corpus, photo, tmp_path: Path):
    image = photo(40, 40)
    corpus.write_beside(tmp_path / "bare", [Sample(str(i), image, probe(image), ["a dog"]) for i in range(8)])
    with pytest.raises(
        ConfigError,
        match=r"^data\.groups by label: no row of the corpus has a label; convert it with .*, or set source to a file",
    ):
        corpus.loader(shards=str(tmp_path / "bare"), groups={"size": 2})
