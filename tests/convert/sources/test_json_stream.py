"""JSON that is read entry by entry gives what the json module gives, in bounded memory."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.convert.sources import json_tables
from mmdata.convert.sources.json_tables import stream_entries
from mmdata.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def put_together(path: Path) -> Any:
    """The document of the entries, without empty arrays of an object."""
    found: dict[str, Any] = {}
    for key, number, value in stream_entries(path):
        if number == 0:
            found[key] = value
        else:
            found.setdefault(key, []).append(value)
            assert len(found[key]) == number
    return found


@settings(max_examples=60, deadline=None)
@given(
    content=st.lists(VALUES, min_size=1) | st.dictionaries(st.text(min_size=1), VALUES, min_size=1),
    chunk=st.integers(1, 9),
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
)
def test_entries_are_those_of_the_json_module_wherever_a_chunk_ends(
    tmp_path_factory: pytest.TempPathFactory, content: Any, chunk: int, indent: int | None, ascii: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=ascii), "utf-8", errors="surrogatepass")
    expected = {"": content} if isinstance(content, list) else content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_tables, "CHUNK", chunk)
        assert put_together(path) == {key: value for key, value in expected.items() if value != []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "character 0: it begins with neither [ nor {"),
        ("7", "character 0: it begins with neither [ nor {"),
        ("[1, 2", "character 5: it ends too early"),
        ("[1 2]", "character 3: ',' is expected, got '2'"),
        ("[1, ]", "character 4: Expecting value"),
        ('{"a" 1}', "character 5: ':' is expected, got '1'"),
        ("{a: 1}", "character 1: a key is expected"),
        ('{"a": 1, "b": [2], "a": []}', "character 23: key 'a' is there twice"),
        ('[{"a": 1, "a": 2}]', "character 1: key 'a' is there twice"),
        ("[1] x", "character 4: there is more after its end"),
        ('[{"a": tru}]', "character 7: Expecting value"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_what_is_not_json_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    message = f"annotations '{tmp_path}/a.json': not JSON at character "
    with pytest.raises(DataError, match=re.escape(message) + r"\d+: .*is the file whole") as caught:
        list(stream_entries(tmp_path / "a.json"))
    assert said in str(caught.value)


def test_nan_is_a_number_and_costs_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("﻿[[NaN], [-Infinity], 1]", "utf-8")
    values = [value for _, _, value in stream_entries(tmp_path / "a.json")]
    assert repr(values) == "[[nan], [-inf], 1]"


def test_entry_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_tables, "MAX_ENTRY", 2**20)
    (tmp_path / "a.json").write_text('[{"a": 1}, "' + "x" * 2**22)
    with pytest.raises(DataError, match=r"a.json', at character 11: an entry of more than 1048576 characters"):
        list(stream_entries(tmp_path / "a.json"))


def test_memory_is_that_of_an_entry(tmp_path: Path) -> None:
    region = {"region_id": 1, "width": 82, "height": 139, "image_id": 1, "phrase": "the clock is green", "y": 57}
    entry = json.dumps({"regions": [region] * 50, "id": 1})
    with (tmp_path / "a.json").open("w") as file:
        file.write("[" + ", ".join([entry] * 1000) + "]")
    size = (tmp_path / "a.json").stat().st_size
    tracemalloc.start()
    assert sum(len(entry.value["regions"]) for entry in stream_entries(tmp_path / "a.json")) == 50_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 5_000_000 > 2 * peak
