"""Conditions on whole numbers of joined tables: exact at the ends of every type, also beside missing values."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata import Index
from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.tables.joined import Joined
from mmdata.tables.select import select_rows

from .conftest import Corpus

Value = int | float | None
LEAST, MOST = -(2**63), 2**63 - 1
VALUES: dict[str, list[Value]] = {
    "i8": [-128, -127, -7, -1, 0, None, 1, 7, 126, 127],
    "u8": [0, 1, 7, 127, 128, None, 200, 254, 255, 255],
    "i16": [-(2**15), -7, -1, 0, None, 1, 7, 255, 256, 2**15 - 1],
    "i32": [-(2**31), -7, -1, 0, None, 1, 7, 2**16, 2**16 + 1, 2**31 - 1],
    "u32": [0, 1, 7, 2**31, 2**31 + 1, None, 2**32 - 2, 2**32 - 1, 2**16, 2],
    "i64": [LEAST, LEAST + 1, -(2**53) - 1, 0, None, 1, 2**53, 2**53 + 1, MOST - 1, MOST],
    "f64": [-1.5, -0.5, 0.0, 0.5, None, 1.0, 2.0**53, 1e300, 7.0, 127.5],
    "full": [-128, -127, -7, -1, 0, 3, 1, 7, 126, 127],  # int8, and every row has a value
}
TYPES = {
    "i8": pa.int8(),
    "u8": pa.uint8(),
    "i16": pa.int16(),
    "i32": pa.int32(),
    "u32": pa.uint32(),
    "i64": pa.int64(),
    "f64": pa.float64(),
    "full": pa.int8(),
}
ROWS = range(10)


@dataclass(frozen=True)
class Selected:
    """Selects rows 0 to 9 of the corpus, whose columns are `VALUES`."""

    settings: dict[str, Any]
    index: Index
    joined: Joined

    def __call__(self, condition: str) -> list[int]:
        data = DataConfig.model_validate({**self.settings, "select": condition})
        try:
            selection = select_rows(data, self.index, self.joined)
        except ConfigError as error:
            if str(error) == f"data.select {condition}: selects no row":
                return []
            raise
        assert selection is not None
        return np.concatenate(list(selection.chunks(100))).tolist()


@pytest.fixture(scope="module")
def selected(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Selected:
    file = tmp_path_factory.mktemp("numbers") / "numbers.parquet"
    columns = {name: pa.array(values, TYPES[name]) for name, values in VALUES.items()}
    pyarrow.parquet.write_table(pa.table({"key": [corpus.samples[row].key for row in ROWS], **columns}), file)
    settings = {**corpus.settings, "global_batch_size": 1, "join": [{"table": str(file), "missing": "mask"}]}
    data, index = DataConfig.model_validate(settings), corpus.index
    return Selected(settings, index, Joined.from_config(data, index, writes=True))


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("i8 + 1 > 127", [9]),  # 128 is no int8
        ("i8 - 1 < -128", [0]),
        ("-i8 == 128", [0]),
        ("i8 < 300 and i8 > -300", [0, 1, 2, 3, 4, 6, 7, 8, 9]),  # a number that is no int8
        ("i8 == 3000000000 or i8 is None", [5]),
        ("i8 > 126.5", [9]),
        ("i8 in [127, 300, -128]", [0, 9]),
        ("i8 not in [127, 300, -128]", [1, 2, 3, 4, 6, 7, 8]),
        ("u8 - 1 < 0", [0]),  # below 0 there is a number, though none of this type
        ("-u8 < -254", [8, 9]),
        ("u8 > -1", [0, 1, 2, 3, 4, 6, 7, 8, 9]),
        ("i32 * i32 == 4611686018427387904", [0]),
        ("i64 == 9007199254740993", [7]),  # 2^53 + 1, which is no float
        ("i64 in [9007199254740993, -9007199254740993]", [2, 7]),
        ("i64 >= 9223372036854775807", [9]),
        ("i64 / 2 * 0 == 0", [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        ("i64 % i8 == 0 and i8 > 0", [6, 9]),  # i8 has a 0 and a missing value: the others stay whole numbers
        ("i8 / 2 == 3.5", [7]),  # no quotient is rounded
        ("i8 / 0 > 1 or i8 / 0 <= 1", []),
        ("i8 / 0 is None", list(ROWS)),
        ("i8 % -3 == -2", [0, 6, 7, 9]),
        ("i8 % 0 == 0 or not i8 % 0 == 0", []),
        ("not i8 > 0", [0, 1, 2, 3, 4]),
        ("i8 > 0 or i8 <= 0", [0, 1, 2, 3, 4, 6, 7, 8, 9]),
        ("not (i8 > 200 and full > 0)", [0, 1, 2, 3, 4, 6, 7, 8, 9]),
        ("i8 == full", [0, 1, 2, 3, 4, 6, 7, 8, 9]),
    ],
)
def test_whole_numbers_are_exact_at_the_ends_of_their_types(selected: Selected, condition: str, rows: list[int]):
    assert selected(condition) == rows


@pytest.mark.parametrize(
    ("condition", "in_floats"),
    [
        ("i64 + 1 > 0", "1.0 * i64 + 1 > 0"),
        ("i64 - 2 < 0", "1.0 * i64 - 2 < 0"),
        ("i64 * 2 > 0", "1.0 * i64 * 2 > 0"),
        ("-i64 > 0", "-(1.0 * i64) > 0"),
        ("i32 * i32 * 4 > 0", "1.0 * i32 * i32 * 4 > 0"),
        ("u32 * u32 > 0", "1.0 * u32 * u32 > 0"),
    ],
)
def test_a_whole_number_beyond_64_bits_is_an_error(selected: Selected, condition: str, in_floats: str):
    message = (
        f"data.select: a whole number beyond 64 bits in '{condition}'; multiply its values by 1.0 to calculate in "
        "floats"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        selected(condition)
    assert selected(in_floats)


class Beyond(Exception):
    """A whole number has more than 64 bits."""


def calculated(sign: str, one: Value, other: Value) -> Value:
    """By Python's numbers, as docs/index.md says."""
    if one is None or other is None or (sign in "/%" and other == 0):
        return None
    if sign == "/" or isinstance(one, float) or isinstance(other, float):
        one, other = float(one), float(other)
    result = CALCULATE[sign](one, other)
    if isinstance(result, int) and not LEAST <= result <= MOST:
        raise Beyond
    return None if math.isnan(result) else result


def compared(sign: str, one: Value, other: Value) -> bool:
    if one is None or other is None:
        return False
    if isinstance(one, float) or isinstance(other, float):
        one, other = float(one), float(other)
    return COMPARE[sign](one, other)


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
CALCULATE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
Tree = str | int | float | tuple[Any, str, Any]
LEAVES = st.sampled_from([*VALUES, 0, 1, 2, 7, 127, 128, 255, 2**31, 2**53 + 1, MOST, 0.5, 2.0])
TREES = st.recursive(LEAVES, lambda inner: st.tuples(inner, st.sampled_from("+-*/%"), inner), max_leaves=4)


def value(tree: Tree, row: int) -> Value:
    if isinstance(tree, tuple):
        return calculated(tree[1], value(tree[0], row), value(tree[2], row))
    return VALUES[tree][row] if isinstance(tree, str) else tree


def text(tree: Tree) -> str:
    return f"({text(tree[0])} {tree[1]} {text(tree[2])})" if isinstance(tree, tuple) else str(tree)


@given(TREES, st.sampled_from([*COMPARE]), TREES)
def test_conditions_on_whole_numbers_are_those_of_python(selected: Selected, left: Tree, sign: str, right: Tree):
    condition = f"{text(left)} {sign} {text(right)}"
    try:
        expected = [row for row in ROWS if compared(sign, value(left, row), value(right, row))]
    except Beyond:
        with pytest.raises(ConfigError, match="a whole number beyond 64 bits"):
            selected(condition)
    else:
        assert selected(condition) == expected
