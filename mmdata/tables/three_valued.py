"""Operations on columns with missing values: true, false or unknown, as SQL has them.

A comparison with a missing value is unknown. `and` is false where one side is, whatever the other; `or` likewise true;
`not` of unknown stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[Any]]
"""Values of n rows by name. Missing are: NaN of floats, masked places of whole numbers (`numpy.ma`), NaT of datetime64,
None of an object array, which mostly holds texts."""


class Values(NamedTuple):
    """Values of n rows, or one for all of them; `known` is False where a row has none."""

    values: Any
    known: Any = True


Evaluate = Callable[[Columns], Values]
LEAST = -(2**63)


def constant(value: Any) -> Evaluate:
    """One value for all rows."""
    return lambda _: Values(value)


def texts_of(name: str) -> Evaluate:
    """A column of texts, or of values of another type."""

    def evaluate(columns: Columns) -> Values:
        values = columns[name]
        return Values(values, np.array([value is not None for value in values.tolist()], np.bool_))

    return evaluate


def dates_of(name: str) -> Evaluate:
    """A column of dates, or of dates and times."""

    def evaluate(columns: Columns) -> Values:
        values = columns[name]
        return Values(values, np.logical_not(np.isnat(values)))

    return evaluate


def numbers_of(name: str) -> Evaluate:
    """A column of numbers: int64 or float64, since a product of two int32 may need more."""

    def evaluate(columns: Columns) -> Values:
        values = columns[name]
        if values.dtype.kind == "f":
            return Values(values.astype(np.float64), ~np.isnan(values))
        return Values(np.ma.getdata(values).astype(np.int64), ~np.ma.getmaskarray(values))

    return evaluate


def is_true(evaluate: Evaluate) -> Evaluate:
    """A column of bool, which holds 0 and 1, as a condition."""

    def evaluate_as_condition(columns: Columns) -> Values:
        found = evaluate(columns)
        return Values(np.equal(found.values, 1), found.known)

    return evaluate_as_condition


def minus(evaluate: Evaluate) -> Evaluate:
    """The negative of a number."""

    def negative(columns: Columns) -> Values:
        found = evaluate(columns)
        if found.values.dtype.kind == "i":
            _check_size(found.values == LEAST, found.known)
        return Values(-found.values, found.known)

    return negative


def pairwise(operate: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    """An operation on two values of a row; unknown where one of them is."""

    def evaluate(columns: Columns) -> Values:
        one, other = left(columns), right(columns)
        is_known = np.logical_and(one.known, other.known)
        is_text = any(np.asarray(side.values).dtype.hasobject for side in (one, other))
        if not is_text or np.all(is_known):  # numbers pass with NaN; a missing text cannot be compared
            return Values(operate(one.values, other.values), is_known)
        result = np.zeros(len(is_known), np.bool_)
        sides = (np.broadcast_to(np.asarray(side.values), len(is_known))[is_known] for side in (one, other))
        result[is_known] = operate(*sides)
        return Values(result, is_known)

    return evaluate


def arithmetic(operate: np.ufunc, left: Evaluate, right: Evaluate) -> Evaluate:
    """A number made of two by a ufunc; unknown also where it is none, as 0 / 0 and x % 0.

    Whole numbers are int64, and a quotient is a float.
    """

    def evaluate(columns: Columns) -> Values:
        (one, one_known), (other, other_known) = left(columns), right(columns)
        is_known = np.logical_and(one_known, other_known)
        if operate in (np.true_divide, np.remainder):
            is_known, other = np.logical_and(is_known, other != 0), np.where(other == 0, 1, other)
        found = operate(one, other)
        if found.dtype.kind == "f":
            return Values(found, np.logical_and(is_known, np.logical_not(np.isnan(found))))
        if operate is not np.remainder:
            # A sum or product beyond 64 bits is off by a multiple of 2^64; as a float it is nearly right.
            _check_size(np.abs(operate(one, other, dtype=np.float64) - found) > 2.0**62, is_known)
        return Values(found, is_known)

    return evaluate


def _check_size(is_beyond: Any, is_known: Any) -> None:
    """Raise OverflowError if the number of a row is beyond 64 bits."""
    if np.any(np.logical_and(is_beyond, is_known)):
        raise OverflowError("a whole number beyond 64 bits")


def rounded_to(name: str, value: float) -> Evaluate:
    """A number as a column of float16 or float32 holds it: 0.1 is then equal to 0.1 that was stored there.

    A number that is too large or too small for the column, and one beside a column of another type, stay as they are.
    """

    def evaluate(columns: Columns) -> Values:
        return Values(_rounded(columns[name].dtype, np.array(value))[()])

    return evaluate


def _rounded(dtype: np.dtype[Any], numbers: NDArray[Any]) -> NDArray[Any]:
    if dtype.kind != "f" or dtype.itemsize >= 8:
        return numbers
    found = numbers.astype(dtype).astype(np.float64)
    return np.where(np.isinf(found) | ((found == 0) & (numbers != 0)), numbers, found)


def known(evaluate: Evaluate) -> Evaluate:
    """Whether a row has the value; never unknown itself."""

    def is_known(columns: Columns) -> Values:
        found = evaluate(columns)
        return Values(np.broadcast_to(found.known, np.shape(found.values)))

    return is_known


def contains(texts: Any, wanted: Any) -> Any:
    """Whether each text holds another one: bool (n,)."""
    pairs = np.broadcast_arrays(np.asarray(texts, object), np.asarray(wanted, object))
    return np.array([part in text for text, part in zip(*(side.ravel() for side in pairs), strict=True)], np.bool_)


def is_in_texts(evaluate: Evaluate, texts: frozenset[str]) -> Evaluate:
    """Whether a text is one of several."""

    def is_in(columns: Columns) -> Values:
        found = evaluate(columns)
        values = np.asarray(found.values, object).ravel()
        return Values(np.array([value in texts for value in values], np.bool_), found.known)

    return is_in


def is_in_numbers(evaluate: Evaluate, numbers: Sequence[int | float], column: str | None = None) -> Evaluate:
    """Whether a number is one of several; whole numbers are compared as such.

    Args:
        evaluate: gives the number.
        numbers: of the list.
        column: the number is this column's value, whose type the others are rounded to, see `rounded_to`.
    """
    floats = np.array([float(number) for number in numbers], np.float64)
    whole = [int(number) for number in numbers if isinstance(number, int) or number.is_integer()]
    integers = np.array([number for number in whole if -(2**63) <= number < 2**63], np.int64)

    def is_in(columns: Columns) -> Values:
        found = evaluate(columns)
        values = np.asarray(found.values)
        if values.dtype.kind == "i":
            return Values(np.isin(values, integers), found.known)
        return Values(
            np.isin(values, floats if column is None else _rounded(columns[column].dtype, floats)), found.known
        )

    return is_in


def negation(evaluate: Evaluate) -> Evaluate:
    """not."""

    def negated(columns: Columns) -> Values:
        found = evaluate(columns)
        return Values(np.logical_not(found.values), found.known)

    return negated


def all_of(parts: Sequence[Evaluate]) -> Evaluate:
    """and."""
    return lambda columns: reduce(_both, (part(columns) for part in parts))


def any_of(parts: Sequence[Evaluate]) -> Evaluate:
    """or."""
    return negation(all_of([negation(part) for part in parts]))


def _both(one: Values, other: Values) -> Values:
    sides = [(np.logical_and(side.values, side.known), side) for side in (one, other)]
    true = np.logical_and(sides[0][0], sides[1][0])
    false = np.logical_or(*(np.logical_and(side.known, np.logical_not(is_true)) for is_true, side in sides))
    return Values(true, np.logical_or(true, false))
