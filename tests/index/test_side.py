"""Side files: columns that were written once, bound to what they were made of; damage is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmdata import Index
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.index.side import SideFile, SideFiles

COLUMNS = pa.table(
    {
        "score": [0.5, None, 2.0],
        "texts": pa.array([["a"], [], None], pa.large_list(pa.large_string())),
        "row": [0, 1, 2],
    }
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, make_corpus: Any) -> Index:
    folder = tmp_path_factory.mktemp("side")
    raw = make_corpus(folder / "raw", 3)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig())
    return Index.open(folder / "shards")


def no_columns() -> Any:
    raise AssertionError("columns were made")


def read(index: Index, made_of: dict[str, Any], *, name: str = "side") -> SideFile:
    return SideFiles(index).get(name, made_of, no_columns, what="data.join.0: 'scores.csv'")


def write(index: Index, made_of: dict[str, Any], columns: Any = COLUMNS, *, name: str = "side") -> SideFile:
    return SideFiles(index, writes=True).get(name, made_of, lambda: columns, what="data.join.0: 'scores.csv'")


def test_columns_are_those_that_were_written(index: Index):
    written, found = write(index, {"files": [["scores.csv", 9, 10]]}), read(index, {"files": [["scores.csv", 9, 10]]})
    assert found.columns.equals(COLUMNS)
    assert found.array("row").to_numpy().tolist() == [0, 1, 2]
    assert found.path == written.path == Path(str(index.sources[0].folder)) / "__mmdata__" / "joins" / "side.arrow"


def test_a_fingerprint_is_that_of_the_columns_alone(index: Index):
    first = write(index, {"files": [1]}).fingerprint
    assert write(index, {"files": [2]}, name="other").fingerprint == first
    changed = COLUMNS.set_column(0, "score", pa.array([0.5, None, 2.5]))
    assert write(index, {"files": [1]}, changed).fingerprint != first


def test_columns_are_made_once_by_what_writes(index: Index):
    files = SideFiles(index, writes=True)
    files.get("once", {}, lambda: COLUMNS, what="x")
    assert files.get("once", {}, no_columns, what="x").columns.equals(COLUMNS)


@pytest.mark.parametrize(
    ("made_of", "name", "why"),
    [
        ({}, "none", "it does not exist"),
        ({"files": [2]}, "side", "made of another table or index, or of one that changed"),
    ],
)
def test_what_is_not_there_is_an_error_with_the_command(index: Index, made_of: dict[str, Any], name: str, why: str):
    write(index, {"files": [1]})
    message = (
        rf"^data\.join\.0: 'scores\.csv' is not joined with the index \('.*{name}\.arrow': .*{why}.*\); "
        r"run `mmdata join CONFIG`$"
    )
    with pytest.raises(ConfigError, match=message):
        read(index, made_of, name=name)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
def test_a_file_that_was_changed_or_cut_is_refused(index: Index, data: Any):
    path = write(index, {"files": [1]}, name="flipped").path
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run `mmdata join CONFIG`$"):
        read(index, {"files": [1]}, name="flipped")


@pytest.mark.parametrize("head", [b"[1, 2]", b"3", b'"made_of"', b"null"])
def test_a_head_that_is_no_object_is_refused(index: Index, head: bytes):
    path = write(index, {"files": [1]}, name="head").path
    path.write_bytes(head + path.read_bytes()[path.read_bytes().index(b"\n") :])
    with pytest.raises(ConfigError, match=r"run `mmdata join CONFIG`$"):
        read(index, {"files": [1]}, name="head")


def test_a_head_may_be_long(index: Index):
    made_of = {"names": ["x" * 2**21]}
    write(index, made_of, name="long")
    assert read(index, made_of, name="long").columns.equals(COLUMNS)


def made(index: Index, made_of: dict[str, Any], make: Any = no_columns, *, name: str = "made") -> Any:
    return SideFiles(index).made(name, made_of, make, what="boxes")


def test_columns_that_are_not_there_are_made_once_and_kept(index: Index):
    assert made(index, {"from": 1}, lambda: COLUMNS).equals(COLUMNS)
    assert made(index, {"from": 1}).equals(COLUMNS)
    assert read(index, {"from": 1}, name="made").columns.equals(COLUMNS)


def test_columns_of_something_else_and_damaged_ones_are_made_again(index: Index):
    made(index, {"from": 2}, lambda: COLUMNS, name="again")
    assert made(index, {"from": 3}, lambda: COLUMNS.slice(1), name="again").equals(COLUMNS.slice(1))
    path = read(index, {"from": 3}, name="again").path
    path.write_bytes(path.read_bytes()[:-1])
    assert made(index, {"from": 3}, lambda: COLUMNS.slice(2), name="again").equals(COLUMNS.slice(2))


def test_a_command_makes_columns_anew(index: Index):
    made(index, {}, lambda: COLUMNS, name="anew")
    files = SideFiles(index, writes=True)
    assert files.made("anew", {}, lambda: COLUMNS.slice(1), what="boxes").equals(COLUMNS.slice(1))


def test_an_error_in_making_columns_leaves_no_file_and_no_lock(index: Index):
    with pytest.raises(AssertionError, match="columns were made"):
        made(index, {}, name="failed")
    assert made(index, {}, lambda: COLUMNS, name="failed").equals(COLUMNS)
