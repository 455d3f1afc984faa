"""Values of columns: what Arrow's types hold, dates and arithmetic, and columns as batches take them.

Null is a value that a row does not have.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mmdata.errors import ConfigError, excerpt
from mmdata.index.side import SideFile

compute: Any = pyarrow.compute  # pyarrow's functions have no types

Kind = Literal["number", "text", "bool", "list", "other", "date", "timestamp", "timestamp with a zone", "condition"]
"""Of a part of a condition; of a column all but condition."""
EXAMPLES: dict[Kind, str] = {
    "date": "'2024-01-05'",
    "timestamp": "'2024-01-05' or '2024-01-05T16:30:00'",
    "timestamp with a zone": "'2024-01-05', '2024-01-05T16:30:00Z' or '2024-01-05T16:30:00+01:00'",
}
"""Texts that columns of dates are compared with, by kind."""
DATES = tuple(EXAMPLES)
TIME = pa.timestamp("us")
"""In which dates and times are compared, as of UTC: it holds the years from 1 to 9999. A date is its midnight."""
_ZONE = re.compile(r"(?:Z|[+-]\d\d(?::?\d\d)?)$")
_DATE_CHARACTERS = 10  # 2024-01-05
_KNOWN = "numbers, vectors of floats, texts and dates"


def in_condition(name: str) -> str:
    """A column's name as a condition writes it: in backquotes if it is no name of Python's."""
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"`{name}`"


def kind_of(kind: Any) -> Kind:
    """What a column of an Arrow type holds."""
    types: Any = pa.types
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamp with a zone"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    if types.is_date(kind):
        return "date"
    return "bool" if types.is_boolean(kind) else "other"


def parse_date(text: str, kind: Any) -> Any:
    """A date, or a date and a time of day, in ISO 8601: a scalar of type `TIME`.

    A time without a zone is one of UTC.

    Args:
        text: such as 2024-01-05, 2024-01-05T16:30 or 2024-01-05 16:30:00.25+01:00.
        kind: Arrow's type of the column beside the text.

    Raises:
        ValueError: it is something else; says what.
    """
    zone = _ZONE.search(text, _DATE_CHARACTERS)
    if zone and kind_of(kind) != "timestamp with a zone":
        raise ValueError(f"the column's times have no zone, and this has '{zone[0]}': leave it out")
    try:
        return pa.scalar(text).cast(pa.timestamp("us", "UTC" if zone else None)).cast(TIME)
    except pa.ArrowInvalid:
        such = EXAMPLES[kind_of(kind)]
        raise ValueError(f"expected a date that exists, in ISO 8601, such as {such}") from None


def iso_texts(values: Any) -> Any:
    """Dates and times as texts, an Arrow array: 2024-01-07, 2024-01-07T16:00:00, 2024-01-07T16:00:00.250000Z.

    Times of a zone are those of UTC. A fraction of 0 is left out.
    """
    if kind_of(values.type) == "timestamp with a zone":
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    texts = compute.replace_substring_regex(values.cast(pa.string()), r"^([^ ]*) ", r"\1T", max_replacements=1)
    return compute.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1")


def plain_values(values: Any) -> Any:
    """A column as it is compared: whole numbers and floats of 64 bits, null for NaN, texts, times of UTC.

    A product of two int32 may need more than 32 bits.
    """
    if pa.types.is_floating(values.type):
        return without_nan(values.cast(pa.float64()))
    if (kind := kind_of(values.type)) == "number":
        return values.cast(pa.int64())
    if kind in DATES:
        if pa.types.is_timestamp(values.type) and values.type.unit == "ns":  # whose last digits are left out
            values = compute.floor_temporal(values.cast(pa.timestamp("ns", "UTC")), unit="microsecond")
        return values.cast(TIME)
    return values.cast(pa.large_string()) if kind == "text" else values


def without_nan(values: Any) -> Any:
    """Null for NaN."""
    if not pa.types.is_floating(values.type):
        return values
    return compute.if_else(compute.is_nan(values), pa.scalar(None, values.type), values)


def as_number(values: Any) -> Any:
    """Bool as 0 and 1; numbers as they are."""
    return compute.cast(values, pa.int64()) if pa.types.is_boolean(values.type) else values


def alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Two numbers of one type: a whole number beside a float is a float."""
    one, other = as_number(one), as_number(other)
    return (one, other) if one.type == other.type else (_as_float(one), _as_float(other))


def _quotient(one: Any, other: Any) -> Any:
    """A float; null where the divisor is 0."""
    return compute.divide(_as_float(one), _unless_zero(_as_float(other)))


def _remainder(one: Any, other: Any) -> Any:
    """It has the sign of the divisor, as in Python; null where the divisor is 0. Arrow 18 has no such function."""
    is_known = compute.and_(compute.is_valid(one), compute.is_valid(_unless_zero(other)))
    with np.errstate(all="ignore"):
        found = np.remainder(_as_numpy(one), _as_numpy(other))
    return compute.if_else(is_known, pa.array(found) if found.ndim else pa.scalar(found.item(), one.type), None)


CALCULATE: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: compute.add_checked,
    ast.Sub: compute.subtract_checked,
    ast.Mult: compute.multiply_checked,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}
"""Of two numbers of one type."""
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: compute.equal,
    ast.NotEq: compute.not_equal,
    ast.Lt: compute.less,
    ast.LtE: compute.less_equal,
    ast.Gt: compute.greater,
    ast.GtE: compute.greater_equal,
}


def rounded_to(value: int | float, kind: Any) -> int | float:
    """A number as a column of float16 or float32 holds it: 0.1 is then equal to 0.1 that was stored there.

    A number that is too large or too small for the column, and one beside a column of another type, stay as they are.
    """
    if kind is None or not pa.types.is_floating(kind):
        return value
    with np.errstate(all="ignore"):
        found = float(kind.to_pandas_dtype()(value))
    return value if math.isinf(found) or (found == 0 and value != 0) else found


def number_of(value: Any) -> int | float:
    """A whole number as it is: those above 2^53 are no floats.

    Raises:
        ValueError: a text that is no number.
        OverflowError: a number that neither 64 bits nor a float hold.
    """
    try:
        number = int(value) if isinstance(value, (str, int)) else float(value)
    except ValueError:  # "0.5", and thousands of digits
        number = float(value)
    is_infinite = isinstance(number, float) and math.isinf(number) and "inf" not in str(value).lower()
    if is_infinite or (isinstance(number, int) and not -(2**63) <= number < 2**63):
        raise OverflowError(excerpt(value))
    return number


def _as_float(values: Any) -> Any:
    return compute.cast(values, pa.float64(), safe=False)  # whole numbers beyond 2^53 are rounded


def _unless_zero(values: Any) -> Any:
    return compute.if_else(compute.equal(values, pa.scalar(0, values.type)), pa.scalar(None, values.type), values)


def _as_numpy(values: Any) -> Any:
    """Numbers of numpy's, 1 where they are null."""
    values = compute.fill_null(values, 1)
    if isinstance(values, pa.Scalar):
        return np.asarray(values.as_py(), values.type.to_pandas_dtype())
    return values.to_numpy(zero_copy_only=False)


class ColumnValues:
    """A joined column as batches take it: numbers, vectors of one length, or texts; dates are texts, see `iso_texts`.

    A row without a value has NaN in a column of floats (also in each place of a vector), and "" in one of texts. Whole
    numbers and bool have no such word, so all rows that are loaded must have one (`check`); padding is 0 or False.

    Args:
        side: has the column for each row of the index.
        name: of the column.
        of: name of the setting, for messages.

    Attributes:
        fingerprint: equal for equal values.

    Raises:
        ConfigError: values of another type, or vectors of different lengths.
    """

    def __init__(self, side: SideFile, name: str, *, of: str) -> None:
        self.fingerprint = side.fingerprint
        self._of, self._name = f"{of}: column '{name}'", name
        self._texts: Any = None
        self._numbers: NDArray[Any] = np.empty(0)
        self._lacks: Any = None  # which rows have no value, where there is no word for that
        column = side.array(name)
        kind = kind_of(column.type)
        if kind == "text" or kind in DATES:
            self._texts = (iso_texts(column) if kind in DATES else column).fill_null("")
        elif kind == "list":
            self._numbers = self._vectors(column)
        elif pa.types.is_floating(column.type):
            self._numbers = column.fill_null(np.nan).to_numpy(zero_copy_only=False)
        elif kind in ("number", "bool"):
            self._lacks = column.is_null().to_numpy(zero_copy_only=False)
            numbers = column.fill_null(False if kind == "bool" else 0).to_numpy(zero_copy_only=False)
            self._numbers = numbers if kind == "bool" else numbers.astype(np.int64)
        else:
            raise ConfigError(f"{self._of}: values of type {column.type}; known are {_KNOWN}")

    def check(self, rows: Iterable[NDArray[np.int64]]) -> None:
        """Check that rows of the index, some at a time, have a value, or that there is a word for none.

        Raises:
            ConfigError: whole numbers or bool, and a row without.
        """
        if self._lacks is None:
            return
        if missing := sum(int(self._lacks[some].sum()) for some in rows):
            raise ConfigError(
                f"{self._of}: {self._numbers.dtype} and {missing:,} rows without a value, for which whole numbers and "
                "bool have no word: leave those rows out (missing: mask in data.join those that the table does not "
                f"have, data.select='{in_condition(self._name)} is not None' all), or store floats, which have NaN"
            )

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any] | list[str]:
        """Values of n rows of the index, -1 for padding: numbers (n,) or (n, D), or n texts."""
        if self._texts is not None:
            return self._texts.take(pa.array(rows, mask=rows < 0)).fill_null("").to_pylist()
        result = self._numbers[rows]
        result[rows < 0] = np.nan if result.dtype.kind == "f" else 0
        return result

    def _vectors(self, column: Any) -> NDArray[Any]:
        if not pa.types.is_floating(column.type.value_type):
            raise ConfigError(
                f"{self._of}: lists of {column.type.value_type}; known are {_KNOWN}: store the lists as texts "
                "(JSON), or numbers as floats"
            )
        lengths = sorted(compute.list_value_length(column).drop_null().unique().to_pylist())
        if len(lengths) != 1:
            shown = " and ".join(map(str, lengths[:2]))
            raise ConfigError(f"{self._of}: vectors of different lengths, such as {shown}; a batch needs one length")
        numbers = column.drop_null().flatten()
        if numbers.null_count:
            raise ConfigError(f"{self._of}: {numbers.null_count:,} places of its vectors are null; store NaN there")
        vectors = np.full((len(column), lengths[0]), np.nan, numbers.type.to_pandas_dtype())
        vectors[column.is_valid().to_numpy(zero_copy_only=False)] = numbers.to_numpy().reshape(-1, lengths[0])
        return vectors
