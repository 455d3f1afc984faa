"""Conditions on columns: what they select, by SQLite's word, and what is refused with its place."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.errors import ConfigError
from mmdata.tables.condition import Condition

COLUMNS: dict[str, Any] = {
    "width": pa.array([100, 256, 300, 512], pa.int32()),
    "height": pa.array([100, 100, 300, 600], pa.int32()),
    "score": pa.array([0.1, float("nan"), 0.3, 0.5]),
    "key": pa.array(["000", "001", "a'b", "ü"]),
    "url": pa.array(["https://a.example/x", None, "https://b.example/y", ""]),
    "good": pa.array([True, False, None, True]),
    "clip score": pa.array([0.1, 0.2, 0.3, 0.4]),
    "is": pa.array([0, 1, 0, 1]),
    "caps": pa.array([["a"], None, [], None], pa.list_(pa.string())),
}
DATES: dict[str, Any] = {
    "day": pa.array(np.array(["2024-01-01", "2024-01-03", "NaT", "2024-03-31"], "datetime64[D]")),
    "time": pa.array(
        np.array(["2024-01-01", "2024-01-03T12:00", "NaT", "2024-01-03T12:00:00.000001"], "datetime64[us]")
    ),
    "far": pa.array(np.array(["0001-01-01", "2024-01-03T12:00", "NaT", "9999-12-31T23:59:59"], "datetime64[s]")),
    "fine": pa.array(np.array([0, 1000, 2001, 3000], "datetime64[ns]")),
}
COLUMNS |= {**DATES, "utc": DATES["time"].cast(pa.timestamp("us", "UTC"))}
TYPES = {name: values.type for name, values in COLUMNS.items()}
LARGE = 2**53


def rows_where(text: str, columns: dict[str, Any]) -> list[int]:
    types = {name: values.type for name, values in columns.items()}
    mask = Condition(text, types, of="data.select")(columns, 4)
    assert mask.dtype == np.bool_
    return np.flatnonzero(mask).tolist()


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of lines in the current folder."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "keys.txt").write_text("001\nü\n12\n")
    (folder / "ids.txt").write_text(f"{LARGE + 1}\n2.5\n")
    (folder / "days.txt").write_text("2024-01-03\n2024-03-31\n")
    (folder / "scores.txt").write_text("0.2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def chosen(text: str) -> list[int]:
    return rows_where(text, COLUMNS)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("width >= 256", [1, 2, 3]),
        ("256 <= width < 512", [1, 2]),
        ("width >= 256 and score > 0.28", [2, 3]),
        ("width < 256 or score > 0.4", [0, 3]),
        ("width / height > 2", [1]),
        ("width * height == 90000 or width % 100 == 12", [2, 3]),
        ("-width <= -300", [2, 3]),
        ("key == '001'", [1]),
        ("'a\\'b' == key", [2]),
        ("key in ['000', \"ü\"]", [0, 3]),
        ("key not in ('000', 'ü')", [1, 2]),
        ("width in [100, 512.0]", [0, 3]),
        ("key in lines('keys.txt')", [1, 3]),
        ("'b.example' in url", [2]),
        ("'example' not in url", [3]),  # the second has no url
        ("score is None", [1]),
        ("score is not None and not score > 0.28", [0]),
        ("not score > 0.28", [0]),
        ("not (score > 0.28 and width > 0)", [0]),
        ("score > 0.28 or width == 256", [1, 2, 3]),
        ("score != 0.5", [0, 2]),
        ("url == url", [0, 2, 3]),
        ("1 < 2", [0, 1, 2, 3]),
        ("'x' in ['y']", []),
        ("width\n  > 300\n", [3]),
        ("width > 3000000000", []),
        ("good", [0, 3]),
        ("not good", [1]),  # the third is neither
        ("good is None", [2]),
        ("good == True or width == 300", [0, 2, 3]),
        ("good != True", [1]),
        ("good == 1 and score > 0.3", [3]),
        ("good + good == 2", [0, 3]),
        ("`clip score` > 0.2 and `is` == 1", [3]),
        ("caps is not None", [0, 2]),
        ("caps is None and good", [3]),
        # what is divided by nothing has no value
        ("width / 0 > 3", []),
        ("not width / 0 > 3", []),
        ("width < 1 / 0", []),
        ("0 / 0 is None", [0, 1, 2, 3]),
        ("1 / 0.0 is None", [0, 1, 2, 3]),
        ("width / (height - 100) is not None", [2, 3]),
        ("width / (height - 100) > 1 or width == 100", [0, 2, 3]),
        ("-(1 / 0) is None", [0, 1, 2, 3]),
        ("(height - 100) / (height - 100) is None", [0, 1]),
        ("width % (height - 100) is None", [0, 1]),
        ("width % (height - 100) == 100", [2]),
        ("not width % 0 == 0", []),
        # dates are compared as dates
        ("day >= '2024-01-03'", [1, 3]),
        ("day == '2024-01-03'", [1]),
        ("not day == '2024-01-03'", [0, 3]),  # the third has none
        ("day is None", [2]),
        ("day is not None", [0, 1, 3]),
        ("'2024-01-02' < day <= '2024-03-31'", [1, 3]),
        ("day < '2024-01-03T12:00'", [0, 1]),  # a date is its midnight
        ("day in ['2024-01-01', '2024-03-31']", [0, 3]),
        ("day not in ['2024-01-01']", [1, 3]),
        ("day in lines('days.txt')", [1, 3]),
        ("time >= '2024-01-03T12:00'", [1, 3]),
        ("time == '2024-01-01 00:00:00'", [0]),
        ("time == '2024-01-01'", [0]),
        ("time > '2024-01-03 12:00:00'", [3]),
        ("time == '2024-01-03T12:00:00.000001'", [3]),
        ("time in ['2024-01-03T12:00:00.000001', '2024-01-01T00:00']", [0, 3]),
        ("utc == '2024-01-03T12:00'", [1]),  # without a zone: UTC
        ("utc == '2024-01-03T12:00Z'", [1]),
        ("utc == '2024-01-03T13:30:00+01:30'", [1]),
        ("utc == '2024-01-03 04:00:00-0800'", [1]),
        ("time > day", [1]),
        ("far < '2024-01-03T12:00:00.000001'", [0, 1]),
        ("far > time", [3]),
        ("utc > '2024-01-03T13+01'", [3]),
        ("fine == '1970-01-01T00:00:00.000002'", [2]),
        ("fine < '9999-12-31'", [0, 1, 2, 3]),  # nanoseconds end in 2262
        ("far < fine", [0]),
        ("fine > '0001-01-01'", [0, 1, 2, 3]),
    ],
)
def test_a_condition_selects_the_rows_for_which_it_is_true(text: str, rows: list[int]):
    assert chosen(text) == rows


NUMBERS = ["width", "height", "score", "1.0", "200.0", "0.0", "0.3", "-3.5"]  # floats, as SQLite divides whole ones
TEXTS = ["key", "url", "'001'", "'ü'", "''"]
ORDER = ["<", "<=", ">", ">=", "==", "!="]
SUMS = st.recursive(
    st.sampled_from(NUMBERS),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda three: f"({' '.join(three)})"),
    max_leaves=3,
)
COMPARISONS = st.one_of(
    st.tuples(SUMS, st.sampled_from(ORDER), SUMS).map(" ".join),
    st.tuples(st.sampled_from(TEXTS), st.sampled_from(ORDER), st.sampled_from(TEXTS)).map(" ".join),
    st.tuples(st.sampled_from(NUMBERS[:3]), st.sampled_from(["in (100, 0.5)", "not in (256, 100)"])).map(" ".join),
    st.tuples(st.sampled_from(TEXTS[:2]), st.sampled_from(["in ('001', 'x')", "not in ('ü', '')"])).map(" ".join),
    st.sampled_from(["good", "good == True", "good != False", "good == 1", "good + width > 256"]),
    st.tuples(
        st.sampled_from(["score", "url", "key", "good", "caps"]), st.sampled_from(["is None", "is not None"])
    ).map(" ".join),
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda three: f"({' '.join(three)})"),
        inner.map(lambda one: f"not ({one})"),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def table() -> sqlite3.Connection:
    """The columns as a table of SQLite, with NULL for what is missing."""
    connection = sqlite3.connect(":memory:")
    names = ["width", "height", "score", "key", "url", "good", "caps"]
    connection.execute(
        "create table rows (number, width real, height real, score real, key text, url text, good, caps)"
    )
    for number in range(4):
        values = [COLUMNS[name][number].as_py() for name in names]
        values = [None if value != value else str(value) if isinstance(value, list) else value for value in values]
        plain = [float(value) if isinstance(value, int) else value for value in values]
        connection.execute("insert into rows values (?, ?, ?, ?, ?, ?, ?, ?)", [number, *plain])
    return connection


@given(CONDITIONS)
def test_a_condition_selects_what_sqlite_selects(table: sqlite3.Connection, text: str):
    sql = text.replace("is not None", "is not null").replace("is None", "is null")
    expected = [row for (row,) in table.execute(f"select number from rows where {sql} order by number")]
    assert chosen(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "widht > 3",
            "no column 'widht' (did you mean 'width'?); there are caps, clip score, day, far, fine, good, height, is, "
            "key, score, time, url, utc, width; at character 1",
        ),
        ("width >= 256 and and", "invalid syntax; at character 18 of 'width >= 256 and and'"),
        ("width >=", "something is missing; at character 9"),
        ("width >= 3 and", "something is missing; at character 15"),
        ("width = 3", "values are compared by ==, not =; at character 7 of 'width = 3'"),
        ("url == 'a=b && c' && width >= 3", "conditions are joined by and, not &&; at character 19"),
        ("width > 3 || width < 2", r"conditions are joined by or, not \|\|; at character 11"),
        ("!(width > 3)", "a condition is turned round by not, not !; at character 1"),
        ("width <> 3", "values are compared by !=, not <>; at character 7"),
        ("", "; at character 1 of ''"),
        ("width", "a condition is needed, such as width >= 256, and this is a number; at character 1"),
        ("width and height > 3", "and this is a number; at character 1"),
        ("width > '3'", "a number is compared with a text; at character 9"),
        ("key + 'x' == 'y'", "a number is needed, and this is a text; at character 1"),
        ("-key == 'y'", "a sign before a text; at character 1"),
        ("(width > 1) == (height > 1)", "a condition is compared with a condition; at character 17"),
        ("width ** 2 > 3", "of operators \\+ - \\* / % are known; conditions are joined by and, or; at character 1"),
        ("(width > 3) & (height > 3)", "of operators"),
        ("~width > 3", "~ is not known; write not; at character 1"),
        ("abs(width) > 3", "a function is known in one place only: key in lines\\('keys.txt'\\); at character 1"),
        ("__import__('os').system('true')", "a function is known in one place only"),
        ("width.real > 3", "only columns, numbers, texts"),
        ("[w for w in key]", "only columns"),
        ("width > 3 if key else height", "only columns"),
        ("(width := 3) > 2", "only columns"),
        ("width in [key]", "a list has numbers or texts; at character 11"),
        ("width in ['a']", "a number is looked for in a list of other values"),
        ("key in [3]", "a text is looked for in a list of other values"),
        ("width in height", "`in` a column looks for a text in quotes"),
        ("key in keys('f')", "`in` takes a list, lines\\(FILE\\) or a text column"),
        ("key in lines()", "lines takes a file, and for a table a column"),
        ("key in lines(key)", "lines takes a file"),
        ("key is 'x'", "`is` asks for None only, written so: score is None"),
        ("width > True", "a number is compared with a bool"),
        ("good == 'true'", "a bool is compared with a text; a column of bool is a condition by itself"),
        ("clip score > 0.2", "the column 'clip score' is no plain name: write it in backquotes, `clip score`"),
        ("width > 3 and is == 1", "the column 'is' is no plain name: write it in backquotes, `is`; at character 15"),
        ("caps == 'x'", "column 'caps' has values of type list<item: string>; conditions know"),
        ("caps", "column 'caps' has values of type list<item: string>; conditions know"),
        ("width > None", "no value is equal to a missing one: ask for it by `is`, width is None; at character 9"),
        ("key == None", "ask for it by `is`, key is None"),
        ("None != key", "ask for it by `is`, score is None"),
        ("`clip score` == null", "ask for it by `is`, `clip score` is None"),
        ("url is null", "`is` asks for None only, written so: score is None, score is not None; at character 8"),
        ("width in [None]", "None is neither a number nor a text"),
        (
            "width > 99999999999999999999",
            "whole numbers above 2^63 - 1 are not known: store the column as texts, and write the number in quotes",
        ),
        ("ü > 3 and wdth > 1", "no column 'ü'"),
        ("'ü' == key and wdth > 1", "no column 'wdth' \\(did you mean 'width'\\?\\); .* at character 16"),
        ("width > 3 " + "and width > 3 " * 1000, "a condition of 14,009 characters"),
        ("not " * 60 + "width > 3", "more than 50 parts within each other"),
        ("(" * 300 + "width > 3" + ")" * 300, "too many nested parentheses|is no condition"),
        ("width > 3\0", "null byte|source code"),
        (
            "day == '2024-1-5'",
            "'2024-1-5' is compared with a date: expected a date that exists, in ISO 8601, such as '2024-01-05'; at "
            "character 8",
        ),
        ("day >= '2024'", "'2024' is compared with a date: expected a date that exists"),
        ("day == '2024-02-30'", "'2024-02-30' is compared with a date: expected a date that exists"),
        ("time >= '2024-01-05T25:00'", "'2024-01-05T25:00' is compared with a timestamp: expected a date that exists"),
        (
            "time >= '2024-01-05T1'",
            "with a timestamp: expected a date that exists, in ISO 8601, such as '2024-01-05' or '2024-01-05T16:30:00'",
        ),
        ("time >= '2024-01-05T16:00.5'", "with a timestamp: expected a date that exists"),
        ("time >= '2024-01-05T16:00Z'", "the column's times have no zone, and this has 'Z': leave it out"),
        ("utc >= '2024-01-05T16:00+30:00'", "expected a date that exists"),
        ("utc >= '2024-01-05Z'", "or '2024-01-05T16:30:00+01:00'"),
        ("day >= 2024", "a date is compared with a number; write a text of ISO 8601, '2024-01-05'; at character 8"),
        ("day == url", "a date is compared with a text; write a text of ISO 8601"),
        ("day in [2024]", "a date is looked for in a list of numbers; write '2024-01-05'"),
        ("day in ['x']", "'x' is compared with a date: expected a date that exists"),
        ("'2024' in day", "`in` a column looks for a text in quotes"),
        ("day + 1 > day", "a number is needed, and this is a date"),
        ("time > '2024-01-03T12:00:00.0000001'", "with a timestamp: expected a date that exists"),  # microseconds
        ("url in url", "`in` a column looks for a text in quotes"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_place(text: str, message: str):
    pattern = message if "\\" in message or "|" in message or ".*" in message else re.escape(message)
    with pytest.raises(ConfigError, match=pattern) as caught:
        Condition(text, TYPES, of="data.select")
    assert str(caught.value).startswith("data.select: ")


def test_whole_numbers_that_floats_do_not_hold_are_told_apart():
    def found(text: str) -> list[int]:
        columns = {"id": pa.array([LARGE, LARGE + 1, LARGE + 2, 2**62 + 1])}
        return rows_where(text, columns)

    assert found(f"id in [{LARGE + 1}]") == found("id in lines('ids.txt')") == found(f"id == {LARGE + 1}") == [1]
    assert found(f"id not in [{LARGE + 1}, {2**62 + 1}]") == [0, 2]
    assert found("id in [1.5]") == []


def test_columns_that_are_no_names_of_python_are_in_backquotes():
    columns = {
        "clip score (b/32)": pa.array([0.2, 0.4]),
        "class": pa.array(["a", "`b`"]),
        "width": pa.array([1, 2]),
    }
    types = {name: values.type for name, values in columns.items()}

    def parsed(text: str) -> Any:
        return Condition(text, types, of="select")

    condition = parsed("`clip score (b/32)` > 0.3 and `class` == '`b`'")
    assert condition.names == {"clip score (b/32)", "class"}
    assert condition(columns, 2).tolist() == [False, True]
    with pytest.raises(
        ConfigError, match=re.escape("no column 'clap' (did you mean 'class'?); there are class, clip ")
    ):
        parsed("`clap` > 0.3")
    with pytest.raises(ConfigError, match="at character 23 of"):
        parsed("`clip score (b/32)` > 'a'")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_are_rounded_to_the_type_of_the_column_beside_them(dtype: Any):
    columns = {
        "s": pa.array(np.array([0.1, 0.2, np.nan, -0.1], dtype)),
        "t t": pa.array(np.array([0.1, 0.2, 0.3, -0.1], dtype)),
    }

    def found(text: str) -> list[int]:
        return rows_where(text, columns)

    assert found("s == 0.1") == found("0.1 == s") == found("s in [0.1]") == found("`t t` == 0.1") == [0]
    assert found("s <= 0.1") == [0, 3]
    assert found("s > 0.1") == found("s in lines('scores.txt')") == [1]
    assert found("s == -0.1") == [3]
    assert found("0.1 <= s <= 0.2") == [0, 1]
    assert found("s < 1e300") == [0, 1, 3]
    assert found("s * 1 == 0.1") == ([0] if dtype is np.float64 else [])  # no plain column


def test_a_number_too_small_for_the_column_is_no_zero():
    columns = {"s": pa.array(np.array([0.0, 1.0, -1.0, 0.1], np.float16))}
    assert rows_where("s < 1e-8", columns) == [0, 2]
    assert rows_where("s == 1e-8", columns) == []


def test_times_before_1970_lose_their_nanoseconds_downwards():
    times = {"fine": pa.array(np.array([-1, 0, 1, -1000], "datetime64[ns]"))}
    parse = Condition("fine >= '1970-01-01'", {"fine": times["fine"].type}, of="data.select")
    assert parse(times, 4).tolist() == [False, True, True, False]


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_a_time_that_microseconds_do_not_hold_is_an_error_and_never_another_time(unit: str):
    times = {"time": pa.array([0, 2**62], pa.timestamp(unit))}
    parse = Condition("time > '2024-01-05'", {"time": times["time"].type}, of="data.select")
    with pytest.raises(ConfigError, match="a time of a year that microseconds do not hold"):
        parse(times, 2)
