"""Conditions on columns, such as `width >= 256 and label in [3, 5]`: parsed by a strict grammar, never run as Python.

    condition   and, or, not, parentheses
    comparison  == != < <= > >=, also in a chain (256 <= width <= 1024); in, not in; is None, is not None
    value       a column (`in backquotes` if it is no name of Python's), a number, a text in quotes, True, False;
                + - * / % and parentheses; x / 0 and x % 0 have no value. Whole numbers have 64 bits, and a result
                beyond is an error; / gives floats; % has the sign of the divisor

A column of bool is a condition by itself. Of a column of another type, such as of lists, `is None` can be asked. `in`
takes a list (`label in [3, 5]`), the lines of a file (`key in lines("keys.txt")`), or a text column
(`"shutterstock" in url`). A column of dates or times is compared with texts of ISO 8601, as values. A number beside a
plain column of float32 or float16 is rounded to its type. A comparison with a value that a row does not have is neither
true nor false, as in SQL, and selects no row, also behind `not`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError, excerpt, meant
from mmdata.tables.arrow_values import (
    DATES,
    Kind,
    arithmetic,
    compare_numbers,
    compared_type,
    compute,
    contains,
    date_kind,
    divide,
    examples_of,
    is_in,
    is_in_numbers,
    kind_of,
    negative,
    number_of,
    number_sets,
    parse_date,
    plain_values,
    remainder,
    rounded_to,
)
from mmdata.tables.condition_text import ConditionText
from mmdata.tables.table import in_condition

MAX_DEPTH = 50
"""Parts within each other; far fewer than Python's stack holds."""

Columns = Mapping[str, Any]
"""Arrow arrays (n,) by name; null and NaN are missing."""
Evaluate = Callable[[Columns], Any]
"""An Arrow array of n rows, or a scalar for all of them."""
ReadsLines = Callable[[str, str | None], Iterable[str]]
"""Gives the lines of a file, or the values of a column of a table."""
Bools = NDArray[np.bool_]

_NUMBERS = ("number", "bool")  # a bool counts as 0 or 1

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: compute.equal,
    ast.NotEq: compute.not_equal,
    ast.Lt: compute.less,
    ast.LtE: compute.less_equal,
    ast.Gt: compute.greater,
    ast.GtE: compute.greater_equal,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: partial(arithmetic, compute.add_checked),
    ast.Sub: partial(arithmetic, compute.subtract_checked),
    ast.Mult: partial(arithmetic, compute.multiply_checked),
    ast.Div: divide,
    ast.Mod: remainder,
}
_NONE = ("none", "null", "nil", "nan", "na")
"""What languages call a missing value, in lower case."""


class _Operand(NamedTuple):
    """A part of a condition."""

    kind: Kind
    evaluate: Evaluate


@dataclass(frozen=True)
class Condition:
    """A condition on columns.

    Attributes:
        text: as given.
        names: of the columns in it.
    """

    text: str
    names: frozenset[str]
    _of: str
    _evaluate: Evaluate

    def __call__(self, columns: Columns, num_rows: int) -> Bools:
        """The rows for which the condition is true: bool (num_rows,).

        Raises:
            ConfigError: a sum, difference or product of whole numbers is beyond 64 bits, or a time beyond the years
                that the nanoseconds of a column beside it hold.
        """
        try:
            found = self._evaluate(columns)
        except pa.ArrowInvalid as error:
            shown = excerpt(self.text, 200)
            if "timestamp" in str(error):
                what = f"a time of a year that nanoseconds do not hold (1678 to 2261 they do) in {shown}"
            else:
                what = f"a whole number beyond 64 bits in {shown}; multiply its values by 1.0 to calculate in floats"
            raise ConfigError(f"{self._of}: {what}") from None
        if isinstance(found, pa.Scalar):
            return np.full(num_rows, found.as_py() is True)
        return found.fill_null(False).to_numpy(zero_copy_only=False)


def parse_condition(text: str, types: Mapping[str, Any], *, of: str, lines: ReadsLines) -> Condition:
    """Parse a condition.

    Args:
        text: of the condition.
        types: of the columns that there are, Arrow's, by name.
        of: name of the setting, for messages.
        lines: gives the lines of a file, or the values of a column of a table, for `lines(FILE)` and
            `lines(FILE, COLUMN)`.

    Raises:
        ConfigError: not a condition, an unknown column, values that cannot be compared; names the place.
    """
    return _Parser(ConditionText(text.strip(), list(types), of=of), types, lines).parse()


class _Parser:
    """Turns Python's syntax tree of a condition into functions; what is not named here is refused."""

    def __init__(self, text: ConditionText, types: Mapping[str, Any], lines: ReadsLines) -> None:
        self._text, self._types, self._lines = text, types, lines
        self._refuse, self._column_of = text.refuse, text.column_of
        self._names: set[str] = set()

    def parse(self) -> Condition:
        condition = self._condition(self._text.tree, 1)
        return Condition(self._text.text, frozenset(self._names), self._text.of, condition)

    def _part(self, node: ast.expr, depth: int) -> _Operand:
        if depth > MAX_DEPTH:
            self._refuse(node, f"more than {MAX_DEPTH} parts within each other")
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(value, depth + 1) for value in node.values]
            return _Operand("condition", _all_of(parts) if isinstance(node.op, ast.And) else _any_of(parts))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, depth)
        if isinstance(node, ast.BinOp):
            return self._binary(node, depth)
        if isinstance(node, ast.Compare):
            return self._compare(node, depth)
        if isinstance(node, ast.Name):
            return self._column(node)
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Call):
            self._refuse(node, "a function is known in one place only: key in lines('keys.txt')")
        return self._refuse(node, "only columns, numbers, texts, comparisons, and, or, not and + - * / % are known")

    def _condition(self, node: ast.expr, depth: int) -> Evaluate:
        part = self._part(node, depth)
        if part.kind not in ("bool", "condition"):
            self._refuse(node, f"a condition is needed, such as width >= 256, and this is a {part.kind}")
        return part.evaluate

    def _unary(self, node: ast.UnaryOp, depth: int) -> _Operand:
        if isinstance(node.op, ast.Not):
            return _Operand("condition", _not(self._condition(node.operand, depth + 1)))
        if not isinstance(node.op, (ast.USub, ast.UAdd)):
            self._refuse(node, "~ is not known; write not")
        part = self._part(node.operand, depth + 1)
        if part.kind not in _NUMBERS:
            self._refuse(node, f"a sign before a {part.kind}")
        if isinstance(node.op, ast.UAdd):
            return part
        return _Operand("number", _apply(negative, part.evaluate))

    def _binary(self, node: ast.BinOp, depth: int) -> _Operand:
        if (operate := _ARITHMETIC.get(type(node.op))) is None:
            self._refuse(node, "of operators + - * / % are known; conditions are joined by and, or")
        sides = [self._part(side, depth + 1) for side in (node.left, node.right)]
        for side, part in zip((node.left, node.right), sides, strict=True):
            if part.kind not in _NUMBERS:
                self._refuse(side, f"a number is needed, and this is a {part.kind}")
        return _Operand("number", _pairwise(operate, sides[0].evaluate, sides[1].evaluate))

    def _compare(self, node: ast.Compare, depth: int) -> _Operand:
        found: list[Evaluate] = []
        left = node.left
        for operation, right in zip(node.ops, node.comparators, strict=True):
            found.append(self._compared(left, operation, right, depth + 1))
            left = right
        return _Operand("condition", _all_of(found))

    def _compared(self, left: ast.expr, operation: ast.cmpop, right: ast.expr, depth: int) -> Evaluate:
        if isinstance(operation, (ast.In, ast.NotIn)):
            found = self._in(left, right, depth)
            return _not(found) if isinstance(operation, ast.NotIn) else found
        asks_for_none = isinstance(operation, (ast.Is, ast.IsNot))
        for side in () if asks_for_none else (left, right):
            self._refuse_none(side, left)
        part = self._column(left, any_type=True) if asks_for_none and isinstance(left, ast.Name) else None
        part = part or self._part(left, depth)
        if asks_for_none:
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._refuse(right, "`is` asks for None only, written so: score is None, score is not None")
            ask = compute.is_null if isinstance(operation, ast.Is) else compute.is_valid
            return _apply(ask, part.evaluate)
        other = self._part(right, depth)
        compare = _COMPARE[type(operation)]
        kinds = {part.kind, other.kind}
        if kinds & set(DATES):
            return _pairwise(compare, self._date(left, part, right), self._date(right, other, left))
        are_numbers = kinds <= set(_NUMBERS) and not any(_is_true_or_false(side) for side in (left, right))
        if not are_numbers and (len(kinds) > 1 or "condition" in kinds):
            how = "; a column of bool is a condition by itself" if "bool" in kinds else ""
            self._refuse(right, f"a {part.kind} is compared with a {other.kind}{how}")
        if not are_numbers:
            return _pairwise(compare, part.evaluate, other.evaluate)
        sides = self._beside(left, right, part), self._beside(right, left, other)
        return _pairwise(partial(compare_numbers, compare), *sides)

    def _refuse_none(self, node: ast.expr, left: ast.expr) -> None:
        """Refuse a comparison with None, or with what other languages call it."""
        is_none = isinstance(node, ast.Constant) and node.value is None
        if not is_none and not (
            isinstance(node, ast.Name) and node.id.lower() in _NONE and self._column_of(node.id) not in self._types
        ):
            return
        name = self._column_of(left.id) if isinstance(left, ast.Name) else "score"
        shown = in_condition(name) if name in self._types else "score"
        self._refuse(node, f"no value is equal to a missing one: ask for it by `is`, {shown} is None")

    def _date(self, node: ast.expr, part: _Operand, other: ast.expr) -> Evaluate:
        """One side of a comparison with dates: a column of them, or a text beside one."""
        if part.kind in DATES:
            return part.evaluate
        kind = self._type_of(other)
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            such = f"write a text of ISO 8601, {examples_of(kind)}"
            self._refuse(node, f"a {date_kind(kind)} is compared with a {part.kind}; {such}")
        return _constant(self._parse_date(node, node.value, kind))

    def _parse_date(self, node: ast.expr, text: str, kind: Any) -> Any:
        try:
            return parse_date(text, kind)
        except ValueError as error:
            return self._refuse(node, f"{excerpt(text)} is compared with a {date_kind(kind)}: {error}")

    def _type_of(self, node: ast.expr) -> Any:
        """Arrow's type of a plain column; None of another part."""
        return self._types.get(self._column_of(node.id)) if isinstance(node, ast.Name) else None

    def _beside(self, node: ast.expr, other: ast.expr, part: _Operand) -> Evaluate:
        """A side of a comparison of numbers: a number beside a column is rounded to the column's type."""
        if not _is_literal(node) or part.kind != "number":
            return part.evaluate
        return _constant(pa.scalar(rounded_to(part.evaluate({}).as_py(), self._type_of(other))))

    def _in(self, left: ast.expr, right: ast.expr, depth: int) -> Evaluate:
        part = self._part(left, depth)
        if isinstance(right, ast.Name):
            column = self._column(right)
            if column.kind != "text" or part.kind != "text":
                self._refuse(right, "`in` a column looks for a text in a text: 'flickr' in url")
            return _pairwise(contains, column.evaluate, part.evaluate)
        values = self._values(right)
        if part.kind in DATES:
            kind = self._type_of(left)
            if not all(isinstance(value, str) for value in values):
                self._refuse(right, f"a {part.kind} is looked for in a list of numbers; write {examples_of(kind)}")
            dates = pa.array([self._parse_date(right, value, kind).value for value in sorted(values)], pa.int64())
            return _apply(partial(is_in, value_set=dates.cast(compared_type(kind))), part.evaluate)
        if part.kind == "text" and all(isinstance(value, str) for value in values):
            return _apply(partial(is_in, value_set=pa.array(values, pa.large_string())), part.evaluate)
        if part.kind in _NUMBERS:
            return self._in_numbers(part, left, right, values)
        return self._refuse(right, f"a {part.kind} is looked for in a list of other values")

    def _in_numbers(self, part: _Operand, left: ast.expr, node: ast.expr, values: Sequence[Any]) -> Evaluate:
        try:
            numbers = [number_of(value) for value in values]
        except ValueError:
            return self._refuse(node, "a number is looked for in a list of other values")
        except OverflowError as error:
            return self._refuse(
                node,
                f"the number {error} is too large; whole numbers have 64 bits: store the column as texts, as the "
                "list has them",
            )
        integers, floats = number_sets([rounded_to(number, self._type_of(left)) for number in numbers])
        return _apply(partial(is_in_numbers, integers=integers, floats=floats), part.evaluate)

    def _values(self, node: ast.expr) -> list[Any]:
        """The values of a list, or of `lines(…)`."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            parts = [self._part(value, 1) for value in node.elts]
            for part, value in zip(parts, node.elts, strict=True):
                if not isinstance(value, (ast.Constant, ast.UnaryOp)) or part.kind == "condition":
                    self._refuse(value, "a list has numbers or texts")
            return [part.evaluate({}).as_py() for part in parts]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lines":
            given = [value.value for value in node.args if isinstance(value, ast.Constant)]
            if node.keywords or len(given) != len(node.args) or not 1 <= len(given) <= 2:
                self._refuse(node, "lines takes a file, and for a table a column: lines('good.parquet', 'key')")
            file, column = str(given[0]), str(given[1]) if len(given) == 2 else None
            return list(self._lines(file, column))
        return self._refuse(node, "`in` takes a list, lines(FILE) or a text column")

    def _column(self, node: ast.Name, *, any_type: bool = False) -> _Operand:
        name = self._column_of(node.id)
        if name not in self._types:
            self._text.refuse_unquoted(node)
            listed = ", ".join(sorted(self._types))
            self._refuse(node, f"no column '{name}'{meant(name, self._types)}; there are {listed}")
        kind = kind_of(self._types[name])
        if kind == "other" and not any_type:
            self._refuse(
                node,
                f"column '{name}' has values of type {self._types[name]}; conditions know numbers, texts, dates and "
                "bool, and of others is None",
            )
        self._names.add(name)
        return _Operand(kind, _apply(plain_values, itemgetter(name)))

    def _constant(self, node: ast.Constant) -> _Operand:
        value = node.value
        if isinstance(value, str):
            return _Operand("text", _constant(pa.scalar(value, pa.large_string())))
        if isinstance(value, bool):
            return _Operand("bool", _constant(pa.scalar(value)))
        if isinstance(value, int) and value >= 2**63:
            self._refuse(
                node,
                "whole numbers above 2^63 - 1 are not known: store the column as texts, and write the number in quotes",
            )
        if not isinstance(value, (int, float)):
            self._refuse(node, f"{excerpt(value)} is neither a number nor a text")
        return _Operand("number", _constant(pa.scalar(value)))


def _constant(value: Any) -> Evaluate:
    return lambda _: value


def _pairwise(operate: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda columns: operate(left(columns), right(columns))


def _all_of(parts: Sequence[Evaluate]) -> Evaluate:
    return lambda columns: reduce(compute.and_kleene, (part(columns) for part in parts))


def _any_of(parts: Sequence[Evaluate]) -> Evaluate:
    return lambda columns: reduce(compute.or_kleene, (part(columns) for part in parts))


def _apply(operate: Callable[[Any], Any], part: Evaluate) -> Evaluate:
    return lambda columns: operate(part(columns))


def _not(part: Evaluate) -> Evaluate:
    return _apply(compute.invert, part)


def _is_literal(node: ast.expr) -> bool:
    """Whether a part is a number as it stands, maybe with a sign."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_literal(node.operand))


def _is_true_or_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)
