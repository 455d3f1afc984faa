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
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmdata.errors import ConfigError, excerpt, meant
from mmdata.tables.table import read_lines
from mmdata.tables.values import (
    CALCULATE,
    COMPARE,
    DATES,
    EXAMPLES,
    TIME,
    Kind,
    alike,
    as_number,
    compute,
    in_condition,
    kind_of,
    number_of,
    parse_date,
    plain_values,
    rounded_to,
    without_nan,
)

MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
"""Parts within each other; far fewer than Python's stack holds."""

Columns = Mapping[str, Any]
"""Arrow arrays (n,) by name; null and NaN are missing."""

_NUMBERS: set[Kind] = {"number", "bool"}  # a bool counts as 0 or 1
_NONE = ("none", "null", "nil", "nan", "na")
"""What languages call a missing value, in lower case."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`")
_HINTS = {
    r"&&": "conditions are joined by and, not &&",
    r"\|\|": "conditions are joined by or, not ||",
    r"!(?!=)": "a condition is turned round by not, not !",
    r"(?<![=!<>])=(?!=)": "values are compared by ==, not =",
    r"<>": "values are compared by !=, not <>",
}
"""What other languages write, and what is written here."""


class _Part(NamedTuple):
    """A part of a condition.

    Attributes:
        node: of the tree.
        kind: of its values.
        values: an Arrow array of all rows, or a scalar for all of them.
        column: Arrow's type of a plain column; None of another part.
    """

    node: ast.expr
    kind: Kind
    values: Any
    column: Any = None


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
        self._sets: dict[ast.expr, Any] = {}  # what is looked among, by the part behind `in`
        self._tree = self._parse()
        self._check_depth(self._tree)
        self.names = frozenset(node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)) & types.keys()
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
        """Which rows a part selects: an Arrow array, or a scalar."""
        part = self._part(node, columns)
        if part.kind not in ("bool", "condition"):
            self._refuse(node, f"a condition is needed, such as width >= 256, and this is a {part.kind}")
        return part.values

    def _part(self, node: ast.expr, columns: Columns) -> _Part:
        match node:
            case ast.BoolOp():
                join = compute.and_kleene if isinstance(node.op, ast.And) else compute.or_kleene
                found = reduce(join, (self._condition(part, columns) for part in node.values))
                return _Part(node, "condition", found)
            case ast.UnaryOp(op=ast.Not()):
                return _Part(node, "condition", compute.invert(self._condition(node.operand, columns)))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                part = self._part(node.operand, columns)
                if part.kind not in _NUMBERS:
                    self._refuse(node, f"a sign before a {part.kind}")
                number = as_number(part.values)
                return _Part(
                    node, "number", compute.negate_checked(number) if isinstance(node.op, ast.USub) else number
                )
            case ast.UnaryOp():
                return self._refuse(node, "~ is not known; write not")
            case ast.BinOp():
                return self._calculated(node, columns)
            case ast.Compare():
                sides = zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
                found = (self._compared(left, how, right, columns) for (left, right), how in sides)
                return _Part(node, "condition", reduce(compute.and_kleene, found))
            case ast.Name(id=name):
                values = self._column(node, columns)
                if (kind := kind_of(self._types[name])) in ("list", "other"):
                    what = f"column '{name}' has values of type {self._types[name]}; conditions know"
                    self._refuse(node, f"{what} numbers, texts, dates and bool, and of others is None")
                return _Part(node, kind, values, self._types[name])
            case ast.Constant():
                return self._constant(node)
            case ast.Call():
                return self._refuse(node, "a function is known in one place only: key in lines('keys.txt')")
            case _:
                known = "columns, numbers, texts, comparisons, and, or, not and + - * / %"
                return self._refuse(node, f"only {known} are known")

    def _constant(self, node: ast.Constant) -> _Part:
        match node.value:
            case str():
                return _Part(node, "text", pa.scalar(node.value, pa.large_string()))
            case bool():
                return _Part(node, "bool", pa.scalar(node.value))
            case int() if node.value >= 2**63:
                remedy = "store the column as texts, and write the number in quotes"
                return self._refuse(node, f"whole numbers above 2^63 - 1 are not known: {remedy}")
            case int() | float():
                return _Part(node, "number", pa.scalar(node.value))
            case _:
                return self._refuse(node, f"{excerpt(node.value)} is neither a number nor a text")

    def _column(self, node: ast.Name, columns: Columns) -> Any:
        """The values of a column of any type."""
        if (name := node.id) not in self._types:
            if needs := self._unquoted():
                self._refuse(node, _in_backquotes(needs))
            listed = ", ".join(sorted(self._types))
            self._refuse(node, f"no column '{name}'{meant(name, self._types)}; there are {listed}")
        return columns[name]

    def _calculated(self, node: ast.BinOp, columns: Columns) -> _Part:
        if (operate := CALCULATE.get(type(node.op))) is None:
            self._refuse(node, "of operators + - * / % are known; conditions are joined by and, or")
        sides = [self._part(side, columns) for side in (node.left, node.right)]
        for side in sides:
            if side.kind not in _NUMBERS:
                self._refuse(side.node, f"a number is needed, and this is a {side.kind}")
        return _Part(node, "number", without_nan(operate(*alike(*(side.values for side in sides)))))

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr, columns: Columns) -> Any:
        if isinstance(how, (ast.In, ast.NotIn)):
            found = self._in(self._part(left, columns), right, columns)
            return compute.invert(found) if isinstance(how, ast.NotIn) else found
        if isinstance(how, (ast.Is, ast.IsNot)):
            value = self._column(left, columns) if isinstance(left, ast.Name) else self._part(left, columns).values
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._refuse(right, "`is` asks for None only, written so: score is None, score is not None")
            return compute.is_null(value) if isinstance(how, ast.Is) else compute.is_valid(value)
        for side in (left, right):
            self._refuse_none(side, left)
        one, other = self._part(left, columns), self._part(right, columns)
        kinds = {one.kind, other.kind}
        sides = self._beside(one, other), self._beside(other, one)
        if kinds <= _NUMBERS and not any(_is_literal(side, bool) for side in (left, right)):
            sides = alike(*sides)
        elif "condition" in kinds or (len(kinds) > 1 and kinds.isdisjoint(DATES)):
            remedy = "; a column of bool is a condition by itself" if "bool" in kinds else ""
            self._refuse(right, f"a {one.kind} is compared with a {other.kind}{remedy}")
        return COMPARE[type(how)](*sides)

    def _beside(self, part: _Part, other: _Part) -> Any:
        """One side of a comparison: beside dates a text is a date, beside a column a number has the column's type."""
        if other.kind in DATES and part.kind not in DATES:
            if isinstance(part.node, ast.Constant) and part.kind == "text":
                return self._date(part.node, part.values.as_py(), other.column)
            what = f"a {other.kind} is compared with a {part.kind}"
            self._refuse(part.node, f"{what}; write a text of ISO 8601, {EXAMPLES[other.kind]}")
        is_number = _is_literal(part.node) and part.kind == "number"
        return pa.scalar(rounded_to(part.values.as_py(), other.column)) if is_number else part.values

    def _date(self, node: ast.expr, text: str, column: Any) -> Any:
        try:
            return parse_date(text, column)
        except ValueError as error:
            return self._refuse(node, f"{excerpt(text)} is compared with a {kind_of(column)}: {error}")

    def _in(self, part: _Part, right: ast.expr, columns: Columns) -> Any:
        if isinstance(right, ast.Name):
            texts = self._part(right, columns)
            if not (isinstance(part.node, ast.Constant) and part.kind == texts.kind == "text"):
                self._refuse(right, "`in` a column looks for a text in quotes: 'flickr' in url")
            return compute.match_substring(texts.values, part.values.as_py())
        value = as_number(part.values)
        if right not in self._sets:
            self._sets[right] = self._value_set(part, right)
        found = compute.is_in(value, value_set=self._sets[right])
        return compute.if_else(compute.is_valid(value), found, pa.scalar(None, pa.bool_()))

    def _value_set(self, part: _Part, node: ast.expr) -> Any:
        """What the values of a part are looked among."""
        values = self._listed(node)
        are_texts = all(isinstance(value, str) for value in values)
        if part.kind in DATES:
            if not are_texts:
                self._refuse(node, f"a {part.kind} is looked for in a list of numbers; write {EXAMPLES[part.kind]}")
            return pa.array([self._date(node, value, part.column) for value in values], TIME)
        if part.kind == "text" and are_texts:
            return pa.array(values, pa.large_string())
        if part.kind not in _NUMBERS:
            self._refuse(node, f"a {part.kind} is looked for in a list of other values")
        try:
            numbers = [rounded_to(number_of(value), part.column) for value in values]
        except ValueError:
            self._refuse(node, "a number is looked for in a list of other values")
        except OverflowError as error:
            what = f"the number {error} is too large; whole numbers have 64 bits"
            self._refuse(node, f"{what}: store the column as texts, as the list has them")
        if pa.types.is_floating(part.values.type):
            return pa.array([float(number) for number in numbers], pa.float64())
        whole = [int(number) for number in numbers if number % 1 == 0 and -(2**63) <= number < 2**63]
        return pa.array(whole, pa.int64())

    def _listed(self, node: ast.expr) -> Sequence[Any]:
        """The values of a list, or of `lines(…)`."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            for one in node.elts:
                if not _is_literal(one):
                    self._refuse(one, "a list has numbers or texts")
            return [self._part(one, {}).values.as_py() for one in node.elts]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lines":
            given = [value.value for value in node.args if isinstance(value, ast.Constant)]
            if node.keywords or len(given) != len(node.args) or not 1 <= len(given) <= 2:
                self._refuse(node, "lines takes a file, and for a table a column: lines('good.parquet', 'key')")
            return read_lines(str(given[0]), str(given[1]) if len(given) == 2 else None, of=self._of)
        return self._refuse(node, "`in` takes a list, lines(FILE) or a text column")

    def _refuse_none(self, node: ast.expr, left: ast.expr) -> None:
        """Refuse a comparison with None, or with what other languages call it."""
        is_none = isinstance(node, ast.Constant) and node.value is None
        is_word = isinstance(node, ast.Name) and node.id.lower() in _NONE and node.id not in self._types
        if is_none or is_word:
            shown = in_condition(left.id) if isinstance(left, ast.Name) and left.id in self._types else "score"
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
        quoted: dict[str, str] = {}

        def stand_in(found: re.Match[str]) -> str:
            """A name of the same length for a column in backquotes, which may be no name of Python's."""
            if found[1] is None:
                return found[0]  # a text, which may hold backquotes
            name = f"_{len(quoted)}".ljust(len(found[0]), "_")
            quoted[name] = found[1]
            return name

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(_QUOTED.sub(stand_in, self._text.replace("\n", " ")), mode="eval").body
        except SyntaxError as error:
            self._refuse_text(error)
        except (ValueError, MemoryError, RecursionError) as error:  # a NUL; too many parentheses
            raise ConfigError(f"{self._of}: {excerpt(self._text)} is no condition: {error}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = quoted.get(node.id, node.id)
        return tree

    def _refuse_text(self, error: SyntaxError) -> NoReturn:
        """Refuse what Python's parser does not take."""
        for pattern, why in _HINTS.items():
            if found := re.search(pattern, self._bare):
                self._refuse_at(found.start() + 1, why)
        if name := self._unquoted():
            self._refuse_at(self._text.index(name) + 1, _in_backquotes(name))
        place = error.offset or len(self._text) + 1  # 0 is the end
        is_cut = error.msg == "invalid syntax" and place > len(self._text)
        self._refuse_at(place, "something is missing" if is_cut else error.msg)

    @property
    def _bare(self) -> str:
        """The condition with spaces in place of what is in quotes and backquotes."""
        return _QUOTED.sub(lambda found: " " * len(found[0]), self._text)

    def _unquoted(self) -> str | None:
        """A column that stands in the condition without the backquotes that its name needs."""
        return next((name for name in self._types if in_condition(name) != name and name in self._bare), None)

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
