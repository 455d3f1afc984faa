"""The errors of validation in words: which key, what was expected, what was given, which name was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from mmdata.config.settings import Settings
from mmdata.config.words import describe, names_alike, rest_of
from mmdata.errors import did_you_mean, excerpt

OF_TYPES = ("_type", "_parsing", "literal_error", "union_tag_not_found")
"""Ends of pydantic's names for errors of the whole value: it is of none of the types that it may be."""
SIMPLE = ("int_type", "int_parsing", "float_type", "float_parsing", "string_type", "literal_error")
"""Those that pydantic tells as a person does; the others name a type of Python."""
MOST_KEYS = 8
"""Unknown keys of one section that a message names."""


class Told(NamedTuple):
    """An error in words, and whether the command line has it, not the file."""

    from_override: bool
    text: str


def explain_errors(
    kind: type[Settings], content: Mapping[str, Any], error: ValidationError, typed: Sequence[str] = ()
) -> Iterator[Told]:
    """The errors of a validation, in words; those of several unknown keys in one section are one error.

    Args:
        kind: what `content` was validated as.
        content: settings, with the overrides applied.
        error: of the validation.
        typed: names of the settings that the command line overrides.
    """
    values = {one.name: one.values for section in describe(kind) for one in section.settings}
    by_keys: dict[tuple[str, ...], list[Any]] = {}
    for one in error.errors():
        by_keys.setdefault(_keys_of(content, one), []).append(one)
    unknown: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for keys, errors in by_keys.items():
        # Of a value that may be of several types, that it is none of one of them; what is wrong inside it says more.
        if any(keys == other[: len(keys)] for other in by_keys if other != keys):
            continue
        is_unknown = all(one["type"] == "extra_forbidden" for one in errors)
        from_override = any(_is_of(keys, name, is_unknown=is_unknown) for name in typed)
        if is_unknown:
            unknown.setdefault((from_override, keys[:-1]), []).append(keys[-1])
        else:
            yield Told(from_override, _explain(list(keys), errors, values))
    for (from_override, section), wrong in unknown.items():
        yield Told(from_override, _explain_unknown(list(section), wrong, list(values)))


def _is_of(keys: Sequence[str], name: str, *, is_unknown: bool) -> bool:
    """Whether an error at `keys` is one of the override of a setting."""
    wrong = ".".join(keys)
    return f"{wrong}.".startswith(f"{name}.") or (is_unknown and name.startswith(f"{wrong}."))


def _keys_of(content: Any, error: Any) -> tuple[str, ...]:
    """The keys and positions that lead to an error, without the types and kinds that pydantic puts between them."""
    keys: list[str] = []
    for part in error["loc"]:
        is_list = isinstance(content, (list, tuple))
        if part in range(len(content)) if is_list else isinstance(content, Mapping) and part in content:
            content = content[part]
            keys.append(str(part))
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        keys.append(error["loc"][-1])
    return tuple(keys)


def _explain(keys: list[str], errors: list[Any], values: dict[str, str]) -> str:
    """What is wrong with one value; `errors` has several where it may be of several types."""
    dotted = ".".join(keys)
    telling = [one for one in errors if not one["type"].endswith(OF_TYPES)]  # of the type that was meant
    error = (telling or errors)[0]
    has_too_few = error["type"] == "missing" and isinstance(error["loc"][-1], int)  # of [number, number]
    if error["type"] == "missing" and not has_too_few:
        return f"'{dotted}' is required and missing"
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return f"'{dotted}': {error['ctx']['error']}" if dotted else str(error["ctx"]["error"])
    got = _short(error["input"])
    if has_too_few or (not telling and (len(errors) > 1 or error["type"] not in SIMPLE)):
        for length in range(len(keys), 0, -1):
            if setting := next((name for name in values if rest_of(name, keys[:length]) == ""), None):
                entry = f", in entry {keys[length]}" if length < len(keys) else ""
                return f"'{'.'.join(keys[:length])}': expected {values[setting]}; got {got}{entry}"
    context = error.get("ctx", {})
    known = re.findall(r"'([^']*)'", str(context.get("expected", context.get("expected_tags", ""))))
    given = context.get("tag", error["input"])
    near = did_you_mean(given, known) if isinstance(given, str) else ""
    return f"'{dotted}': {error['msg']}; got {got}{near}"


def _explain_unknown(section: list[str], wrong: list[str], known: list[str]) -> str:
    """That keys of one section are unknown, which settings were probably meant, and else where all are listed."""
    place = ".".join(section)
    listed = f"`mmdata settings {place}` lists the settings of this section" if place else "`mmdata settings` lists all"
    named = [".".join([*section, key]) for key in wrong[:MOST_KEYS]]
    near = [_meant_by(section, key, known) for key in wrong[:MOST_KEYS]]
    if len(wrong) == 1:
        remedy = f"did you mean '{near[0]}'?" if near[0] else listed
        return f"unknown key '{named[0]}'; {remedy}"
    meant = [f" (did you mean '{one}'?)" if one else "" for one in near]
    shown = [f"'{name}'{hint}" for name, hint in zip(named, meant, strict=True)]
    if len(wrong) <= MOST_KEYS and all(near):
        return f"unknown keys {', '.join(shown)}"
    more = f" and {len(wrong) - MOST_KEYS} more" if len(wrong) > MOST_KEYS else ""
    return f"unknown keys {', '.join(shown)}{more}; {listed}"


def _meant_by(section: list[str], wrong: str, known: list[str]) -> str | None:
    """The setting that an unknown key of a section probably means, one of its own section first; None if none is."""
    own = [".".join([*section, rest]) for name in known if (rest := rest_of(name, section))]
    found = names_alike(wrong, [name for name in (*own, *known) if name != ".".join([*section, wrong])])
    return found[0] if found else None


def _short(value: object) -> str:
    """A value for a message: as it is written in Python, or what it is if that is long."""
    text = repr(value)
    return text if len(text) <= 80 else excerpt(value)
