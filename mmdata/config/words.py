"""Types and defaults of settings as a person says them: "integer ≥ 1 or null", "auto, thread or process"."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

PATH = "path or name"
"""Marks a text that is a path, a URL or a name, in the metadata of its annotation."""

_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any value", dict: "mapping"}


def type_in_words(field: FieldInfo) -> str:
    """What values a setting takes.

    Example:
        `Annotated[int, Field(ge=1)] | None` is "integer ≥ 1 or null".
    """
    return _words(field.annotation, field.metadata)


def default_in_words(field: FieldInfo) -> str:
    """ "default 224", the value as YAML; "required" if there is no default, "" if it is a section."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    assert default is not PydanticUndefined
    if isinstance(default, BaseModel):
        return ""
    return (
        "default "
        + yaml.safe_dump(_plain(default), default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )


def _words(annotation: Any, metadata: Iterable[Any] = (), *, plural: bool = False) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0], parts[1:], plural=plural)
    if origin is Literal:
        return _joined([str(value) for value in parts])
    if origin in (Union, types.UnionType):
        # Sections of several kinds are one word; null comes last.
        given = [part for part in parts if part is not types.NoneType]
        listed = dict.fromkeys(word for part in given for word in _alternatives(part, plural=plural))
        return _joined([*listed, *(["null"] if types.NoneType in parts else [])])
    if origin is tuple and Ellipsis not in parts:
        return f"[{', '.join(_words(part) for part in parts)}]"
    if origin in (list, tuple):
        return f"{'lists' if plural else 'list'} of {_words(parts[0], plural=True)}"
    if origin is Callable:
        return "callable"
    if origin is dict:
        return "mapping" if parts[1] is Any else f"mapping of names to {_words(parts[1], plural=True)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections" if plural else "section"
    if PATH in metadata:
        return "paths or names" if plural else "path or name"
    name = _NAMES[annotation]
    bounds = _bounds(metadata)
    return f"{name}{'s' if plural and annotation in (int, float, str) else ''}{bounds and ' '}{bounds}"


def _alternatives(annotation: Any, *, plural: bool) -> list[str]:
    """The words of a part of a union: its values, if it has few."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    words = _words(annotation, plural=plural)
    return words.split(" or ") if words in (PATH, _NAMES[bool]) else [words]


def _bounds(metadata: Iterable[Any]) -> str:
    """ "≥ 1", "> 0", "from 0 to 1", "> 0 and < 2"; "" if a number has no bounds."""
    flat = [one for part in metadata for one in (part.metadata if isinstance(part, FieldInfo) else [part])]
    found = {name: getattr(one, name) for one in flat for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    if found.keys() == {"ge", "le"}:
        return f"from {found['ge']:g} to {found['le']:g}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " and ".join(f"{sign} {found[name]:g}" for name, sign in signs.items() if name in found)


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
