"""The errors of validation in words: which key, what was expected, what was given, which name was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from mmdata.config.settings import NUMBERED, Settings
from mmdata.config.words import describe, probably_meant
from mmdata.errors import did_you_mean, excerpt

SELECTS = "; give a condition, or a file of keys or a mask"
HINTS = {
    "data.shards.N.weight": "; weights are whole numbers, as 7 and 3 for 70 % and 30 %",
    **dict.fromkeys(("data.select", "data.val.select", "data.shards.N.select"), SELECTS),
}
"""Ends of the messages for settings whose kind of value does not say what it may be."""


class Mistake(NamedTuple):
    """An error in words.

    Attributes:
        key: with its sections, as it was written: "data.shards.0.weight".
        text: what is wrong with it.
        is_unknown: no setting has this key.
    """

    key: str
    text: str
    is_unknown: bool = False

    def is_of(self, override: str) -> bool:
        """Whether the setting that an override names is at fault."""
        return f"{self.key}.".startswith(f"{override}.") or (self.is_unknown and override.startswith(f"{self.key}."))


def mistakes(kind: type[Settings], content: Mapping[str, Any], error: ValidationError) -> Iterator[Mistake]:
    """The errors of a validation, in words.

    Args:
        kind: what `content` was validated as.
        content: settings, with the overrides applied.
        error: of the validation.
    """
    values = {one.name: one.values for section in describe(kind) for one in section.settings}
    by_keys: dict[tuple[str, ...], Any] = {}
    told: set[str] = set()
    for one in error.errors():
        by_keys.setdefault(_keys_of(content, one), one)  # a value that may be of several types has an error of each
    for keys, one in by_keys.items():
        if not any(keys == other[: len(keys)] for other in by_keys if other != keys):  # what is wrong inside says more
            yield _in_words(keys, one, values, told)


def _keys_of(content: Any, error: Any) -> tuple[str, ...]:
    """The keys and positions that lead to an error, without the types and kinds that pydantic puts between them."""
    keys: list[str] = []
    for part in error["loc"]:
        is_list = isinstance(content, (list, tuple))
        if part in range(len(content)) if is_list else isinstance(content, Mapping) and part in content:
            content = content[part]
            keys.append(str(part))
    return (*keys, error["loc"][-1]) if _is_missing(error) else tuple(keys)


def _is_missing(error: Any) -> bool:
    """Whether a setting is missing, not one of the numbers of a setting."""
    return error["type"] == "missing" and isinstance(error["loc"][-1], str)


def _in_words(keys: tuple[str, ...], error: Any, values: dict[str, str], told: set[str]) -> Mistake:
    """What is wrong with a value; `values` says what each setting may be, `told` which sections were pointed to."""
    key = ".".join(keys)
    names = [".".join(NUMBERED if part.isdigit() else part for part in keys[: i + 1]) for i in range(len(keys))]
    if error["type"] == "extra_forbidden":
        end = probably_meant(names[-1], values)
        if end in told:
            return Mistake(key, f"unknown key '{key}'", is_unknown=True)
        if end.startswith("`"):
            told.add(end)
        # A setting of this entry of a list, not of any: data.join.0.table, not data.join.N.table.
        end = end.replace(f"'{'.'.join(names[-2:-1])}.", f"'{'.'.join(keys[:-1])}.")
        return Mistake(key, f"unknown key '{key}'; {end}", is_unknown=True)
    if _is_missing(error):
        return Mistake(key, f"'{key}' is required and missing")
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return Mistake(key, f"'{key}': {error['ctx']['error']}" if key else str(error["ctx"]["error"]))
    depth = max((i + 1 for i, name in enumerate(names) if name in values), default=0)
    setting = f"'{'.'.join(keys[:depth])}': " if depth else ""
    expected = values[names[depth - 1]] if depth else "settings by name"
    given = error["input"]
    got = repr(given) if len(repr(given)) <= 80 else excerpt(given)
    entry = f", in entry {'.'.join(keys[depth:])}" if depth < len(keys) else ""
    word = error.get("ctx", {}).get("tag", given)
    choices = re.findall(r"\w+", expected)
    near = did_you_mean(word, choices) if isinstance(word, str) and word not in choices else ""
    near = near or HINTS.get(names[depth - 1] if depth else "", "")
    if error["type"] == "finite_number":
        near = ", which is not finite"
    elif error["type"] == "union_tag_invalid":  # of a miner, the only section of several kinds
        near = f"{near}; for a miner of your own {{name: user, target: 'module:function'}}"
    elif expected.startswith("{name: ") and word in choices:
        near = f"; a mapping is expected, as {{name: {word}}}"
    return Mistake(key, f"{setting}expected {expected}; got {got}{entry}{near}")
