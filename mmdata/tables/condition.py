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
true nor false, as in SQL, and selects no row, also behind `not`: Arrow calls this logic Kleene's, and null is unknown.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError, excerpt, meant
from mmdata.tables.table import read_lines
from mmdata.tables.values import (
    DATES,
    EXAMPLES,
    TIME,
    Kind,
    alike,
    as_number,
    calculate,
    compute,
    divide,
    in_condition,
    kind_of,
    number_of,
    parse_date,
    plain_values,
    remainder,
    rounded_to,
    without_nan,
)

MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
"""Parts within each other; far fewer than Python's stack holds."""

Columns = Mapping[str, Any]
"""Arrow arrays (n,) by name; null and NaN are missing."""

_NUMBERS: tuple[Kind, ...] = ("number", "bool")  # a bool counts as 0 or 1
_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Eq: compute.equal,
    ast.NotEq: compute.not_equal,
    ast.Lt: compute.less,
    ast.LtE: compute.less_equal,
    ast.Gt: compute.greater,
    ast.GtE: compute.greater_equal,
}
_CALCULATE: dict[type[ast.operator], Any] = {
    ast.Add: partial(calculate, compute.add_checked),
    ast.Sub: partial(calculate, compute.subtract_checked),
    ast.Mult: partial(calculate, compute.multiply_checked),
    ast.Div: divide,
    ast.Mod: remainder,
}
_NONE = ("none", "null", "nil", "nan", "na")
"""What languages call a missing value, in lower case."""
_TEXTS = re.compile(r"'[^']*'|\"[^\"]*\"")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`")
_HINTS = {
    r"&&": "conditions are joined by and, not &&",
    r"\|\|": "conditions are joined by or, not ||",
    r"!(?!=)": "a condition is turned round by not, not !",
    r"(?<![=!<>])=(?!=)": "values are compared by ==, not =",
    r"<>": "values are compared by !=, not <>",
}
"""What other languages write, and what is written here."""


class Condition:
    """A condition on columns. What the grammar does not name is refused when it is made.

    Args:
        text: of the condition.
        types: Arrow's, of the columns that there are, by name.
        of: name of the setting, for messages.

    Attributes:
        names: of the columns in it.

    Raises:
        ConfigError: not a condition, an unknown column, values that cannot be compared; names the place.
    """

    def __init__(self, text: str, types: Mapping[str, Any], *, of: str) -> None:
        self._text, self._types, self._of = text.strip(), types, of
        self._quoted: dict[str, str] = {}  # columns in backquotes, by the names that stand for them
        self._sets: dict[ast.expr, Any] = {}  # what is looked among, by the part behind `in`
        self._tree = self._parse()
        self._check_depth(self._tree)
        written = {self._column_of(node) for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        self.names = frozenset(written & types.keys())
        self({name: pa.nulls(0, types[name]) for name in self.names}, 0)  # mistakes show without a row

    def __call__(self, columns: Columns, num_rows: int) -> NDArray[np.bool_]:
        """The rows for which the condition is true: bool (num_rows,).

        Raises:
            ConfigError: a sum, difference or product of whole numbers is beyond 64 bits, or a time beyond microseconds.
        """
        try:
            found = self._condition(self._tree, {name: plain_values(columns[name]) for name in self.names})
        except pa.ArrowInvalid as error:
            shown = excerpt(self._text, 200)
            if "timestamp" in str(error):
                what = f"a time of a year that microseconds do not hold (about 290,000 from 1970 they do) in {shown}"
            else:
                what = f"a whole number beyond 64 bits in {shown}; multiply its values by 1.0 to calculate in floats"
            raise ConfigError(f"{self._of}: {what}") from None
        if isinstance(found, pa.Scalar):
            return np.full(num_rows, found.as_py() is True)
        return found.fill_null(False).to_numpy(zero_copy_only=False)

    def _condition(self, node: ast.expr, columns: Columns) -> Any:
        found = self._value(node, columns)
        if self._kind(node) not in ("bool", "condition"):
            self._refuse(node, f"a condition is needed, such as width >= 256, and this is a {self._kind(node)}")
        return found

    def _value(self, node: ast.expr, columns: Columns) -> Any:
        """The values of a part: an Arrow array of all rows, or a scalar for all of them."""
        match node:
            case ast.BoolOp():
                join = compute.and_kleene if isinstance(node.op, ast.And) else compute.or_kleene
                return reduce(join, (self._condition(part, columns) for part in node.values))
            case ast.UnaryOp(op=ast.Not()):
                return compute.invert(self._condition(node.operand, columns))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                value = self._value(node.operand, columns)
                if (kind := self._kind(node.operand)) not in _NUMBERS:
                    self._refuse(node, f"a sign before a {kind}")
                return compute.negate_checked(as_number(value)) if isinstance(node.op, ast.USub) else value
            case ast.UnaryOp():
                return self._refuse(node, "~ is not known; write not")
            case ast.BinOp():
                return self._calculated(node, columns)
            case ast.Compare():
                sides = zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
                found = (self._compared(left, how, right, columns) for (left, right), how in sides)
                return reduce(compute.and_kleene, found)
            case ast.Name():
                name, values = self._column_of(node), self._column(node, columns)
                if self._kind(node) in ("list", "other"):
                    what = f"column '{name}' has values of type {self._types[name]}; conditions know"
                    self._refuse(node, f"{what} numbers, texts, dates and bool, and of others is None")
                return values
            case ast.Constant():
                return self._constant(node)
            case ast.Call():
                return self._refuse(node, "a function is known in one place only: key in lines('keys.txt')")
            case _:
                known = "columns, numbers, texts, comparisons, and, or, not and + - * / %"
                return self._refuse(node, f"only {known} are known")

    def _kind(self, node: ast.expr) -> Kind:
        """What a part is that has values."""
        match node:
            case ast.Name():
                return kind_of(self._types[self._column_of(node)])
            case ast.Constant(value=bool()):
                return "bool"
            case ast.Constant(value=str()):
                return "text"
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return "condition"
            case _:
                return "number"

    def _calculated(self, node: ast.BinOp, columns: Columns) -> Any:
        if (operate := _CALCULATE.get(type(node.op))) is None:
            self._refuse(node, "of operators + - * / % are known; conditions are joined by and, or")
        sides = [self._value(side, columns) for side in (node.left, node.right)]
        for side in (node.left, node.right):
            if (kind := self._kind(side)) not in _NUMBERS:
                self._refuse(side, f"a number is needed, and this is a {kind}")
        return without_nan(operate(*sides))

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr, columns: Columns) -> Any:
        if isinstance(how, (ast.In, ast.NotIn)):
            found = self._in(left, right, columns)
            return compute.invert(found) if isinstance(how, ast.NotIn) else found
        if isinstance(how, (ast.Is, ast.IsNot)):
            value = self._column(left, columns) if isinstance(left, ast.Name) else self._value(left, columns)
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._refuse(right, "`is` asks for None only, written so: score is None, score is not None")
            return compute.is_null(value) if isinstance(how, ast.Is) else compute.is_valid(value)
        for side in (left, right):
            self._refuse_none(side, left)
        sides = [self._value(side, columns) for side in (left, right)]
        kind, other = self._kind(left), self._kind(right)
        if kind in DATES or other in DATES:
            sides = [self._date(left, right, sides[0]), self._date(right, left, sides[1])]
        elif {kind, other} <= set(_NUMBERS) and not any(_is_literal(side, bool) for side in (left, right)):
            sides = alike(self._rounded(left, right, sides[0]), self._rounded(right, left, sides[1]))
        elif kind != other or kind == "condition":
            remedy = "; a column of bool is a condition by itself" if "bool" in (kind, other) else ""
            self._refuse(right, f"a {kind} is compared with a {other}{remedy}")
        return _COMPARE[type(how)](*sides)

    def _in(self, left: ast.expr, right: ast.expr, columns: Columns) -> Any:
        value, kind = self._value(left, columns), self._kind(left)
        if isinstance(right, ast.Name):
            texts = self._value(right, columns)
            if not (isinstance(left, ast.Constant) and kind == self._kind(right) == "text"):
                self._refuse(right, "`in` a column looks for a text in quotes: 'flickr' in url")
            return compute.match_substring(texts, value.as_py())
        if kind in _NUMBERS:
            value = as_number(value)
        if right not in self._sets:
            self._sets[right] = self._value_set(left, kind, right, pa.types.is_floating(value.type))
        found = compute.is_in(value, value_set=self._sets[right])
        return compute.if_else(compute.is_valid(value), found, pa.scalar(None, pa.bool_()))

    def _value_set(self, left: ast.expr, kind: Kind, node: ast.expr, in_floats: bool) -> Any:
        """What a value of some kind is looked among."""
        values = self._listed(node)
        are_texts = all(isinstance(value, str) for value in values)
        if kind in DATES:
            if not are_texts:
                self._refuse(node, f"a {kind} is looked for in a list of numbers; write {EXAMPLES[kind]}")
            dates = [self._parse_date(node, value, self._type_of(left)) for value in values]
            return pa.array(dates, TIME)
        if kind == "text" and are_texts:
            return pa.array(values, pa.large_string())
        if kind not in _NUMBERS:
            self._refuse(node, f"a {kind} is looked for in a list of other values")
        try:
            numbers = [rounded_to(number_of(value), self._type_of(left)) for value in values]
        except ValueError:
            self._refuse(node, "a number is looked for in a list of other values")
        except OverflowError as error:
            what = f"the number {error} is too large; whole numbers have 64 bits"
            self._refuse(node, f"{what}: store the column as texts, as the list has them")
        if in_floats:
            return pa.array([float(number) for number in numbers], pa.float64())
        whole = [int(number) for number in numbers if isinstance(number, int) or number.is_integer()]
        return pa.array([number for number in whole if -(2**63) <= number < 2**63], pa.int64())

    def _listed(self, node: ast.expr) -> Sequence[Any]:
        """The values of a list, or of `lines(…)`."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            for one in node.elts:
                if not _is_literal(one):
                    self._refuse(one, "a list has numbers or texts")
            return [self._value(one, {}).as_py() for one in node.elts]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lines":
            given = [value.value for value in node.args if isinstance(value, ast.Constant)]
            if node.keywords or len(given) != len(node.args) or not 1 <= len(given) <= 2:
                self._refuse(node, "lines takes a file, and for a table a column: lines('good.parquet', 'key')")
            return read_lines(str(given[0]), str(given[1]) if len(given) == 2 else None, of=self._of)
        return self._refuse(node, "`in` takes a list, lines(FILE) or a text column")

    def _date(self, node: ast.expr, other: ast.expr, value: Any) -> Any:
        """One side of a comparison with dates: a column of them, or a text beside one."""
        kind, wanted = self._kind(node), self._kind(other)
        if kind in DATES:
            return value
        if isinstance(node, ast.Constant) and kind == "text":
            return self._parse_date(node, value.as_py(), self._type_of(other))
        return self._refuse(node, f"a {wanted} is compared with a {kind}; write a text of ISO 8601, {EXAMPLES[wanted]}")

    def _parse_date(self, node: ast.expr, text: str, kind: Any) -> Any:
        try:
            return parse_date(text, kind)
        except ValueError as error:
            return self._refuse(node, f"{excerpt(text)} is compared with a {kind_of(kind)}: {error}")

    def _rounded(self, node: ast.expr, other: ast.expr, value: Any) -> Any:
        """A side of a comparison of numbers: a number beside a column is rounded to the column's type."""
        is_number = _is_literal(node) and self._kind(node) == "number"
        return pa.scalar(rounded_to(value.as_py(), self._type_of(other))) if is_number else value

    def _constant(self, node: ast.Constant) -> Any:
        value = node.value
        if isinstance(value, str):
            return pa.scalar(value, pa.large_string())
        if isinstance(value, int) and value >= 2**63:
            remedy = "store the column as texts, and write the number in quotes"
            self._refuse(node, f"whole numbers above 2^63 - 1 are not known: {remedy}")
        if not isinstance(value, (int, float)):
            self._refuse(node, f"{excerpt(value)} is neither a number nor a text")
        return pa.scalar(value)

    def _column(self, node: ast.Name, columns: Columns) -> Any:
        """The values of a column of any type."""
        if (name := self._column_of(node)) not in self._types:
            if needs := self._unquoted():
                self._refuse(node, _in_backquotes(needs))
            listed = ", ".join(sorted(self._types))
            self._refuse(node, f"no column '{name}'{meant(name, self._types)}; there are {listed}")
        return columns[name]

    def _column_of(self, node: ast.Name) -> str:
        return self._quoted.get(node.id, node.id)

    def _type_of(self, node: ast.expr) -> Any:
        """Arrow's type of a plain column; None of another part."""
        return self._types.get(self._column_of(node)) if isinstance(node, ast.Name) else None

    def _refuse_none(self, node: ast.expr, left: ast.expr) -> None:
        """Refuse a comparison with None, or with what other languages call it."""
        is_none = isinstance(node, ast.Constant) and node.value is None
        is_word = isinstance(node, ast.Name) and node.id.lower() in _NONE and self._type_of(node) is None
        if is_none or is_word:
            name = self._column_of(left) if isinstance(left, ast.Name) else ""
            shown = in_condition(name) if name in self._types else "score"
            self._refuse(node, f"no value is equal to a missing one: ask for it by `is`, {shown} is None")

    def _check_depth(self, node: ast.AST, depth: int = 1) -> None:
        if depth > MAX_DEPTH and isinstance(node, ast.expr):
            self._refuse(node, f"more than {MAX_DEPTH} parts within each other")
        for part in ast.iter_child_nodes(node):
            self._check_depth(part, depth + 1)

    def _parse(self) -> ast.expr:
        if len(self._text) > MAX_CHARACTERS:
            raise ConfigError(
                f"{self._of}: a condition of {len(self._text):,} characters, and at most {MAX_CHARACTERS:,} are read; "
                "put a list of values into a file: key in lines('keys.txt')"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(_QUOTED.sub(self._stand_in, self._text.replace("\n", " ")), mode="eval").body
        except SyntaxError as error:
            self._refuse_text(error)
        except (ValueError, MemoryError, RecursionError) as error:  # a NUL; too many parentheses
            raise ConfigError(f"{self._of}: {excerpt(self._text)} is no condition: {error}") from None

    def _stand_in(self, found: re.Match[str]) -> str:
        """A name of the same length for a column in backquotes, which may be no name of Python's."""
        if found[1] is None:
            return found[0]  # a text, which may hold backquotes
        name = f"_{len(self._quoted)}".ljust(len(found[0]), "_")
        self._quoted[name] = found[1]
        return name

    def _refuse_text(self, error: SyntaxError) -> NoReturn:
        """Refuse what Python's parser does not take."""
        for pattern, why in _HINTS.items():
            if found := re.search(pattern, _TEXTS.sub(lambda text: "_" * len(text[0]), self._text)):
                self._refuse_at(found.start() + 1, why)
        if name := self._unquoted():
            self._refuse_at(self._text.index(name) + 1, _in_backquotes(name))
        place = error.offset or len(self._text) + 1  # 0 is the end
        is_cut = error.msg == "invalid syntax" and place > len(self._text)
        self._refuse_at(place, "something is missing" if is_cut else error.msg)

    def _unquoted(self) -> str | None:
        """A column that stands in the condition without the backquotes that its name needs."""
        bare = _QUOTED.sub(lambda found: " " * len(found[0]), self._text)
        return next((name for name in self._types if in_condition(name) != name and name in bare), None)

    def _refuse(self, node: ast.expr, why: str) -> NoReturn:
        """Raise ConfigError for a part of the tree."""
        before = self._text.encode()[: node.col_offset]
        self._refuse_at(len(before.decode(errors="ignore")) + 1, why)

    def _refuse_at(self, place: int, why: str) -> NoReturn:
        raise ConfigError(f"{self._of}: {why}; at character {place} of {excerpt(self._text, 200)}")


def _in_backquotes(name: str) -> str:
    return f"the column '{name}' is no plain name: write it in backquotes, `{name}`"


def _is_literal(node: ast.expr, of_type: type = object) -> bool:
    """Whether a part is a value of some type as it stands, or a number with a sign."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not) and of_type is object:
        return _is_literal(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, of_type)
