"""Lists of captions that a table holds as text, as pandas, numpy and JSON write them into a CSV."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, cast

_LITERAL = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LIST = re.compile(rf"\[\s*(?:{_LITERAL}(?:[\s,]+{_LITERAL})*\s*(?:,\s*)?)?\]", re.DOTALL)
_LITERALS = re.compile(_LITERAL, re.DOTALL)


def as_list(text: str) -> list[str] | None:
    r"""The strings of a list that is written as text, or None if the text is something else. Nothing is executed.

    Example:
        `["a", "b"]` (JSON), `['a', "b's"]` (Python and pandas) and `['a' 'b']` (numpy) give two strings each;
        `[a photo]` gives None.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list):
        items = cast("list[Any]", found)
        return cast("list[str]", items) if all(isinstance(item, str) for item in items) else None
    # Not ast.literal_eval of the whole: it joins numpy's neighbouring strings without a word.
    if not _LIST.fullmatch(text):
        return None
    try:
        return [str(ast.literal_eval(literal)) for literal in _LITERALS.findall(text)]
    except (ValueError, SyntaxError):
        return None
