"""Lists of captions that a table holds as text, as pandas, numpy and JSON write them into a CSV."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, cast

_LITERAL = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ITEM = rf"(?:{_LITERAL}|None|nan)"
_LIST = re.compile(rf"\[\s*(?:{_ITEM}(?:[\s,]+{_ITEM})*\s*(?:,\s*)?)?\]", re.DOTALL)
_ITEMS = re.compile(_ITEM, re.DOTALL)


def as_list(text: str) -> list[str | None] | None:
    r"""The strings and Nones of a list that is written as text, or None if it is something else. Nothing is executed.

    Example:
        `["a", "b"]` (JSON), `['a', "b's"]` (Python and pandas) and `['a' 'b']` (numpy) give two strings each;
        `['a', None]` gives one and None; `[a photo]` gives None.
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
        return items if all(item is None or isinstance(item, str) for item in items) else None
    # Not ast.literal_eval of the whole: it joins numpy's neighbouring strings without a word.
    if not _LIST.fullmatch(text):
        return None
    try:
        return [None if item in ("None", "nan") else str(ast.literal_eval(item)) for item in _ITEMS.findall(text)]
    except (ValueError, SyntaxError):
        return None
