"""Tables that are joined to several datasets, whose keys may be the same numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from tests.joins import load

ROWS = 8


@pytest.fixture
def settings(tmp_path: Path, make_corpus: Callable[..., Path]) -> dict[str, Any]:
    """Two datasets of the keys 0 to 7, and tables of their scores: red has 0 to 7, blue 10 to 16, and the last none."""
    for seed, name in enumerate(("red", "blue")):
        raw = make_corpus(tmp_path / f"raw-{name}", ROWS, seed=seed)
        convert(raw / "captions.jsonl", tmp_path / name, ConvertConfig(train_tokenizer=300))
    write_scores(tmp_path / "red.csv", range(ROWS))
    write_scores(tmp_path / "blue.csv", range(10, 9 + ROWS))
    return {
        "shards": [{"shards": str(tmp_path / name)} for name in ("red", "blue")],
        "tokenizer": str(tmp_path / "red" / "tokenizer"),
        "global_batch_size": 4,
        "fields": {"score": "join:score"},
    }


def write_scores(file: Path, scores: range) -> None:
    file.write_text("key,score,note\n" + "".join(f"{row:09d},{score}.0,n{score}\n" for row, score in enumerate(scores)))


def scores(settings: dict[str, Any]) -> dict[int, float]:
    with load(settings, rank=0, world_size=1) as loader:
        batches: list[dict[str, Any]] = [dict(batch) for batch in loader]
    pairs = [(r, s) for one in batches for r, s in zip(one["rows"].tolist(), one["score"].tolist(), strict=True)]
    return {row: score for row, score in sorted(pairs) if row >= 0}


@pytest.mark.parametrize(("count", "warned"), [(2, True), (1, False)])
def test_rows_of_two_datasets_with_one_key_are_warned_of(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture, count: int, warned: bool
):
    join = [{"table": str(tmp_path / "red.csv")}]
    with caplog.at_level(logging.WARNING, "mmdata"):
        found = scores({**settings, "shards": settings["shards"][:count], "join": join})
    assert list(found.values()) == [*range(ROWS)] * count
    said = [record.getMessage() for record in caplog.records if "rows of another dataset" in record.getMessage()]
    blue = tmp_path / "blue"
    expected = f"data.join.0: 8 rows of '{blue}' have keys that rows of another dataset have too, and get the same rows"
    assert len(said) == warned
    assert all(line.startswith(expected) for line in said)


def test_each_dataset_may_have_a_table_of_its_own(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    tables = {str(tmp_path / name): str(tmp_path / f"{name}.csv") for name in ("blue", "red")}
    given = {**settings, "join": [{"table": tables}]}
    found = scores(given)
    assert list(found)[-1] == 15
    assert list(found.values())[:15] == [*range(ROWS), *range(10, 17)]
    assert found[15] != found[15]  # NaN
    assert (
        caplog.messages.count(f"data.join.0: 1 of 16 rows have no row in '{tables[str(tmp_path / 'blue')]}' and 1 more")
        == 2  # by the join, and by the start
    )
    assert not [line for line in caplog.messages if "rows of another dataset" in line]
    assert scores({**given, "select": "score > 5"}) == {6: 6.0, 7: 7.0, **{row: row + 2.0 for row in range(8, 15)}}
    assert list(scores({**given, "row_weights": "score", "select": "5 < score < 12", "global_batch_size": 1})) == [
        6,
        7,
        8,
        9,
    ]


def test_missing_is_about_the_rows_of_the_datasets_that_are_named(tmp_path: Path, settings: dict[str, Any]):
    join = {"table": {str(tmp_path / "blue"): [str(tmp_path / "blue.csv")]}, "missing": "mask"}
    found = scores({**settings, "join": [join]})
    assert list(found) == [*range(15)]  # the last row of blue has no row in the table; red has no table
    assert list(found.values())[8:] == [*range(10, 17)]
    assert all(score != score for score in list(found.values())[:8])
    with pytest.raises(ConfigError, match=r"1 of 8 rows have no row in '.*blue.csv', such as '000000007'"):
        scores({**settings, "join": [{**join, "missing": "error"}]})


def test_a_table_of_a_dataset_is_known_by_it(tmp_path: Path, settings: dict[str, Any]):
    red, blue = (str(tmp_path / name) for name in ("red", "blue"))
    first = scores({**settings, "join": [{"table": {red: f"{red}.csv", blue: f"{blue}.csv"}}]})
    second = scores({**settings, "join": [{"table": {red: f"{blue}.csv", blue: f"{red}.csv"}}]})  # not the stored join
    assert (first[0], first[8], second[0], second[8]) == (0, 10, 10, 0)


def test_a_dataset_that_there_is_not_and_a_key_that_comes_twice_are_refused(tmp_path: Path, settings: dict[str, Any]):
    table = str(tmp_path / "red.csv")
    with pytest.raises(
        ConfigError, match=r"data.join.0: no dataset '.*rad' \(did you mean '.*red'\?\); data.shards has .*"
    ):
        scores({**settings, "join": [{"table": {str(tmp_path / "rad"): table}}]})
    blue = tmp_path / "blue.csv"
    blue.write_text(blue.read_text() + "000000003,5.0,n\n")
    both = {str(tmp_path / "red"): table, str(tmp_path / "blue"): str(blue)}
    with pytest.raises(
        ConfigError, match=r"the key '000000003' comes twice: in '.*blue.csv' row 3 and '.*blue.csv' row 7"
    ):
        scores({**settings, "join": [{"table": both}]})
