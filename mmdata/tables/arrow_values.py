"""Arrow's values in conditions: kinds of columns, dates, and operations.

A value is an array of n rows, or a scalar for all of them; null is unknown. A comparison with a missing value is
unknown. `and` is false where one side is, whatever the other; `or` likewise true; `not` of unknown stays unknown. It is
SQL's logic, and Arrow's under the name of Kleene.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mmdata.errors import excerpt

compute: Any = pyarrow.compute  # pyarrow's functions have no types

DateKind = Literal["date", "timestamp", "timestamp with a zone"]
DATES: tuple[DateKind, ...] = ("date", "timestamp", "timestamp with a zone")
_EXAMPLES = {
    "date": "'2024-01-05'",
    "timestamp": "'2024-01-05' or '2024-01-05T16:30:00'",
    "timestamp with a zone": "'2024-01-05', '2024-01-05T16:30:00Z' or '2024-01-05T16:30:00+01:00'",
}
Kind = Literal["number", "text", "bool", "other", "condition"] | DateKind
"""Of a part of a condition; of a column all but condition."""
_ZONE = re.compile(r"(?:Z|[+-]\d\d(?::?\d\d)?)$")
_DATE_CHARACTERS = 10  # 2024-01-05


def date_kind(kind: Any) -> DateKind | None:
    """What an Arrow type holds; None if it holds no dates."""
    if pa.types.is_date(kind):
        return "date"
    if not pa.types.is_timestamp(kind):
        return None
    return "timestamp" if kind.tz is None else "timestamp with a zone"


def examples_of(kind: Any) -> str:
    """Texts for a column of an Arrow type, for messages."""
    return _EXAMPLES[date_kind(kind) or "date"]


def compared_type(kind: Any) -> Any:
    """The type in which a column of dates is compared: times of UTC, in nanoseconds where the column has them.

    A date is its midnight. Microseconds hold all years from 1 to 9999, nanoseconds those from 1678 to 2261.
    """
    return pa.timestamp("ns" if pa.types.is_timestamp(kind) and kind.unit == "ns" else "us")


def parse_date(text: str, kind: Any) -> Any:
    """A date, or a date and a time of day, in ISO 8601: a scalar of `compared_type(kind)`.

    A time without a zone is one of UTC. Beside nanoseconds, a year that they do not hold is the nearest time they do.

    Args:
        text: such as 2024-01-05, 2024-01-05T16:30 or 2024-01-05 16:30:00.25+01:00.
        kind: Arrow's type of the column beside the text.

    Raises:
        ValueError: it is something else; says what.
    """
    zone = _ZONE.search(text, _DATE_CHARACTERS)
    if zone and date_kind(kind) != "timestamp with a zone":
        raise ValueError(f"the column's times have no zone, and this has '{zone[0]}': leave it out")
    wanted = compared_type(kind)
    try:
        return pa.scalar(text).cast(pa.timestamp(wanted.unit, "UTC" if zone else None)).cast(wanted)
    except pa.ArrowInvalid:
        if wanted.unit == "us":
            raise ValueError(f"expected a date that exists, in ISO 8601, such as {examples_of(kind)}") from None
    year = parse_date(text, pa.timestamp("us", kind.tz)).as_py().year
    return pa.scalar(2**63 - 1 if year > 1970 else 1 - 2**63, wanted)


def iso_texts(values: Any) -> Any:
    """Dates and times as texts, an Arrow array: 2024-01-07, 2024-01-07T16:00:00, 2024-01-07T16:00:00.250000Z.

    Times of a zone are those of UTC. A fraction of 0 is left out.
    """
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    texts = compute.replace_substring_regex(values.cast(pa.string()), r"^([^ ]*) ", r"\1T", max_replacements=1)
    return compute.replace_substring_regex(texts, r"\.0+(Z?)$", r"\1")


def kind_of(kind: Any) -> Kind:
    """What a condition may do with a column of an Arrow type; of "other" it may ask whether a row has a value."""
    if (dates := date_kind(kind)) is not None:
        return dates
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "other"


def plain_values(values: Any) -> Any:
    """A column as it is compared: whole numbers and floats of 64 bits, null for NaN, texts, times of UTC.

    A product of two int32 may need more than 32 bits.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        return _without_nan(values.cast(pa.float64()))
    if pa.types.is_integer(kind):
        return values.cast(pa.int64())
    if date_kind(kind):
        return values.cast(compared_type(kind))
    return values.cast(pa.large_string()) if pa.types.is_string(kind) else values


def compare_numbers(compare: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """A comparison of two numbers, or of bools, by a function of Arrow's."""
    return compare(*_alike(one, other))


def arithmetic(operate: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """A sum, a difference or a product by a function of Arrow's that checks whole numbers.

    Raises:
        pyarrow.ArrowInvalid: a whole number is beyond 64 bits.
    """
    return _without_nan(operate(*_alike(one, other)))


def negative(values: Any) -> Any:
    """The negative of each number; raises as `arithmetic`."""
    return compute.negate_checked(_as_number(values))


def divide(one: Any, other: Any) -> Any:
    """A float; unknown where the divisor is 0."""
    other = _as_float(_as_number(other))
    return _without_nan(_unless_zero(other, compute.divide(_as_float(_as_number(one)), other)))


def remainder(one: Any, other: Any) -> Any:
    """It has the sign of the divisor, as in Python; unknown where the divisor is 0. Arrow 18 has no such function."""
    one, other = _alike(one, other)
    with np.errstate(all="ignore"):
        found = np.remainder(_as_numpy(one), _as_numpy(other))
    result: Any = pa.array(found) if found.ndim else pa.scalar(found.item(), one.type)
    is_known = compute.and_(compute.is_valid(one), compute.is_valid(other))
    return _without_nan(_unless_zero(other, compute.if_else(is_known, result, pa.scalar(None, one.type))))


def contains(texts: Any, wanted: Any) -> Any:
    """Whether each text holds another one."""
    if isinstance(wanted, pa.Scalar):
        return compute.match_substring(texts, wanted.as_py())
    pairs = zip(texts.to_pylist(), wanted.to_pylist(), strict=True)
    return pa.array([None if text is None or part is None else part in text for text, part in pairs], pa.bool_())


def is_in(values: Any, value_set: Any) -> Any:
    """Whether each value is one of several; unknown where it is missing."""
    found = compute.is_in(values, value_set=value_set)
    return compute.if_else(compute.is_valid(values), found, pa.scalar(None, pa.bool_()))


def number_sets(numbers: Sequence[int | float]) -> tuple[Any, Any]:
    """The numbers of a list as Arrow arrays: the whole ones of 64 bits, and all as floats."""
    whole = [int(number) for number in numbers if isinstance(number, int) or number.is_integer()]
    integers: Any = pa.array([number for number in whole if -(2**63) <= number < 2**63], pa.int64())
    return integers, pa.array([float(number) for number in numbers], pa.float64())


def is_in_numbers(values: Any, integers: Any, floats: Any) -> Any:
    """Whether each number is one of several; whole numbers are compared as such."""
    values = _as_number(values)
    return is_in(values, floats if pa.types.is_floating(values.type) else integers)


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


def _as_number(values: Any) -> Any:
    """Bool as 0 and 1; numbers as they are."""
    return compute.cast(values, pa.int64()) if pa.types.is_boolean(values.type) else values


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Two numbers of one type: a whole number beside a float is a float."""
    one, other = _as_number(one), _as_number(other)
    return (one, other) if one.type == other.type else (_as_float(one), _as_float(other))


def _as_float(values: Any) -> Any:
    return compute.cast(values, pa.float64(), safe=False)  # whole numbers beyond 2^53 are rounded


def _unless_zero(divisor: Any, values: Any) -> Any:
    return compute.if_else(compute.equal(divisor, pa.scalar(0, divisor.type)), pa.scalar(None, values.type), values)


def _without_nan(values: Any) -> Any:
    if not pa.types.is_floating(values.type):
        return values
    return compute.if_else(compute.is_nan(values), pa.scalar(None, values.type), values)


def _as_numpy(values: Any) -> Any:
    """Numbers of numpy's, 1 where they are unknown."""
    values = compute.fill_null(values, 1)
    if isinstance(values, pa.Scalar):
        return np.asarray(values.as_py(), values.type.to_pandas_dtype())
    return values.to_numpy(zero_copy_only=False)
