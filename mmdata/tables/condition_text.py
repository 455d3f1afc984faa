"""The text of a condition: columns in backquotes, Python's syntax tree of it, and errors that name a place in it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import NoReturn

from mmdata.errors import ConfigError, excerpt
from mmdata.tables.table import in_condition

MAX_CHARACTERS = 10_000
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


class ConditionText:
    """A condition as it was written.

    Args:
        text: of the condition.
        columns: names that there are.
        of: name of the setting, for messages.

    Attributes:
        text, of: as given.
        tree: Python's syntax tree.

    Raises:
        ConfigError: Python's parser does not take it; names the place.
    """

    def __init__(self, text: str, columns: Sequence[str], *, of: str) -> None:
        self.text, self.of, self._columns = text, of, columns
        self._quoted: dict[str, str] = {}  # columns in backquotes, by the names that stand for them
        self.tree: ast.expr = self._parse()

    def column_of(self, name: str) -> str:
        """The column that a name in the tree means."""
        return self._quoted.get(name, name)

    def refuse(self, node: ast.expr, why: str) -> NoReturn:
        """Raise ConfigError for a part of the tree."""
        before = self.text.encode()[: node.col_offset]
        self._refuse_at(len(before.decode(errors="ignore")) + 1, why)

    def refuse_unquoted(self, node: ast.expr) -> None:
        """Raise ConfigError if a column stands in the text without the backquotes that its name needs."""
        if needs := self._unquoted():
            self.refuse(node, _in_backquotes(needs))

    def _parse(self) -> ast.expr:
        if len(self.text) > MAX_CHARACTERS:
            raise ConfigError(
                f"{self.of}: a condition of {len(self.text):,} characters, and at most {MAX_CHARACTERS:,} are read; "
                "put a list of values into a file: key in lines('keys.txt')"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(_QUOTED.sub(self._stand_in, self.text.replace("\n", " ")), mode="eval")
        except SyntaxError as error:
            self._refuse_text(error)
        except (ValueError, MemoryError, RecursionError) as error:  # a NUL; too many parentheses
            raise ConfigError(f"{self.of}: {excerpt(self.text)} is no condition: {error}") from None
        return tree.body

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
            if found := re.search(pattern, _TEXTS.sub(lambda text: "_" * len(text[0]), self.text)):
                self._refuse_at(found.start() + 1, why)
        if name := self._unquoted():
            self._refuse_at(self.text.index(name) + 1, _in_backquotes(name))
        place = error.offset or len(self.text) + 1  # 0 is the end
        self._refuse_at(
            place, "something is missing" if error.msg == "invalid syntax" and place > len(self.text) else error.msg
        )

    def _unquoted(self) -> str | None:
        """A column that stands in the condition without the backquotes that its name needs."""
        bare = _QUOTED.sub(lambda found: " " * len(found[0]), self.text)
        return next((name for name in self._columns if in_condition(name) != name and name in bare), None)

    def _refuse_at(self, place: int, why: str) -> NoReturn:
        raise ConfigError(f"{self.of}: {why}; at character {place} of {excerpt(self.text, 200)}")


def _in_backquotes(name: str) -> str:
    return f"the column '{name}' is no plain name: write it in backquotes, `{name}`"
