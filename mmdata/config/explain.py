"""The errors of validation in words: which key, what was expected, what was given, which name was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from mmdata.config.settings import Settings
from mmdata.config.words import describe, names_alike, rest_of
from mmdata.errors import did_you_mean, excerpt

OF_TYPES = ("_type", "_parsing", "literal_error", "union_tag_not_found")
"""Ends of pydantic's names for errors of the whole value: it is of none of the types that it may be."""
SIMPLE = ("int_type", "int_parsing", "float_type", "float_parsing", "string_type", "literal_error")
"""Those that pydantic tells as a person does; the others name a type of Python."""


class Told(NamedTuple):
    """An error in words, and the dotted key of the setting that it is about; "" if it is about several."""

    key: str
    text: str


def explain_errors(kind: type[Settings], content: Mapping[str, Any], error: ValidationError) -> Iterator[Told]:
    """Each error of a validation of `content` as settings of `kind`, in words."""
    values = {one.name: one.values for section in describe(kind) for one in section.settings}
    by_keys: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors():
        by_keys.setdefault(_keys_of(content, one), []).append(one)
    for keys, errors in by_keys.items():
        # Of a value that may be of several types, that it is none of one of them; what is wrong inside it says more.
        if not any(keys == other[: len(keys)] for other in by_keys if other != keys):
            yield Told(".".join(keys), _explain(list(keys), errors, values))


def _keys_of(content: Any, error: Any) -> tuple[str, ...]:
    """The keys and positions that lead to an error, without the types and kinds that pydantic puts between them."""
    keys: list[str] = []
    for part in error["loc"]:
        is_list = isinstance(content, (list, tuple))
        if part in range(len(content)) if is_list else isinstance(content, Mapping) and part in content:
            content = content[part]
            keys.append(str(part))
    return (*keys, str(error["loc"][-1])) if error["type"] == "missing" else tuple(keys)


def _explain(keys: list[str], errors: list[Any], values: dict[str, str]) -> str:
    """What is wrong with one value; `errors` has several where it may be of several types."""
    dotted = ".".join(keys)
    telling = [one for one in errors if not one["type"].endswith(OF_TYPES)]  # of the type that was meant
    error = (telling or errors)[0]
    if error["type"] == "extra_forbidden":
        return f"unknown key '{dotted}'; {_meant_by(keys, list(values))}"
    if error["type"] == "missing":
        return f"'{dotted}' is required and missing"
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return f"'{dotted}': {error['ctx']['error']}" if dotted else str(error["ctx"]["error"])
    got = _short(error["input"])
    if not telling and (len(errors) > 1 or error["type"] not in SIMPLE):
        for length in range(len(keys), 0, -1):
            if setting := next((name for name in values if rest_of(name, keys[:length]) == ""), None):
                entry = f", in entry {keys[length]}" if length < len(keys) else ""
                return f"'{'.'.join(keys[:length])}': expected {values[setting]}; got {got}{entry}"
    context = error.get("ctx", {})
    known = re.findall(r"'([^']*)'", str(context.get("expected", context.get("expected_tags", ""))))
    given = context.get("tag", error["input"])
    near = did_you_mean(given, known) if isinstance(given, str) else ""
    return f"'{dotted}': {error['msg']}; got {got}{near}"


def _meant_by(keys: list[str], known: list[str]) -> str:
    """Of an unknown key: which setting was probably meant, one of its own section first; else where all are listed."""
    *section, wrong = keys
    own = [".".join([*section, rest]) for name in known if (rest := rest_of(name, section))]
    if found := names_alike(wrong, [name for name in (*own, *known) if name != ".".join(keys)]):
        return f"did you mean '{found[0]}'?"
    place = ".".join(section)
    return f"`mmdata settings {place}` lists the settings of this section" if place else "`mmdata settings` lists all"


def _short(value: object) -> str:
    """A value for a message: as it is written in Python, or what it is if that is long."""
    text = repr(value)
    return text if len(text) <= 80 else excerpt(value)
