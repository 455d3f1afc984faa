"""The base of all settings: types of values, what a resumed run may change, and settings in words."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typing_extensions import Self

Integer = Annotated[int, Field(strict=True)]
"""Rejects bool, str and float."""
Positive = Annotated[int, Field(strict=True, ge=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Side = Annotated[int, Field(strict=True, ge=1, le=16384)]
"""Of an image, in pixels."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]

PATH = "path or name"
"""Marks a text that is a path, a URL or a name, in the metadata of its annotation."""


def _text_of_path(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


Location = Annotated[str, BeforeValidator(_text_of_path), PATH]
"""A path, a URL or a name; a pathlib.Path is taken as its text."""

_MAY_CHANGE = "may change when a run is resumed"

T = TypeVar("T")

MayChange = Annotated[T, _MAY_CHANGE]
"""A setting that a resumed run may give another value.

Such a setting changes where files lie, who does the work or what is logged, never which numbers come out.
"""

MAIN = "__main__:"
"""Begins the names of what is defined in the program itself: another process cannot import it."""
_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any value", dict: "mapping"}
SETTINGS_OF = "\n\nSettings:\n"
"""What a section's docstring has between its own text and the list of its settings."""


class _SectionType(type(BaseModel)):
    """The type of sections. `help` and `dir` show what mmdata defines, not the fifty methods of pydantic's
    BaseModel."""

    def __dir__(cls) -> list[str]:
        ours = {name for part in cls.__mro__ if part.__module__.startswith("mmdata.") for name in vars(part)}
        hidden = ("_", "model_c", "model_f")  # pydantic puts model_config, model_fields and the like into each class
        return sorted(name for name in ours if name == "__doc__" or not (name.startswith(hidden) or name.isupper()))


class Settings(BaseModel, metaclass=_SectionType):
    """Base of all sections: immutable, closed to unknown keys, to infinity and to NaN."""

    # The text below a field is its description: `mmdata settings`, docs/settings.md, editors and `help` show it.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    MAY_CHANGE: ClassVar[bool] = False
    """Whether a resumed run may change all settings of this section."""

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        """List the settings in the docstring, for `help`; and no types in the signature, where they take a page."""
        super().__pydantic_init_subclass__(**arguments)
        listed = ""
        for name, field in cls.model_fields.items():
            default = default_in_words(field)
            listed += f"    {name}: {type_in_words(field)}{default and '; '}{default}\n"
            listed += indent(fill(" ".join((field.description or "").split()), 100), " " * 8) + "\n"
        cls.__doc__ = f"{own_text(cls)}{SETTINGS_OF}{listed}"
        plain = [each.replace(annotation=Parameter.empty) for each in cls.__signature__.parameters.values()]
        cls.__signature__ = Signature(plain)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What differs from the defaults, so that a section is one line."""
        fields = type(self).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        return ((name, value) for name, value in super().__repr_args__() if value != defaults[name or ""])

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's `model_copy`, checked.

        Raises:
            ValueError: an unknown name, or a dictionary for a section: pydantic alone would take both unchecked.
        """
        changes = dict(update or {})
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise ValueError(f"{type(self).__name__} has no setting {', '.join(sorted(unknown))}")
        for name, value in changes.items():
            if isinstance(value, dict) and isinstance(getattr(self, name), Settings):
                raise ValueError(f"{name} is a section: give a {type(getattr(self, name)).__name__}, not a dictionary")
        return super().model_copy(update=changes, deep=deep)


def changeable_settings(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings that a resumed run may change, without positions in lists."""
    for name, field in kind.model_fields.items():
        if kind.MAY_CHANGE or _MAY_CHANGE in field.metadata:
            yield prefix + name
        for section in sections_of(field.annotation):
            yield from changeable_settings(section, f"{prefix}{name}.")


def own_text(kind: type[Settings]) -> str:
    """The docstring of a section without the list of its settings."""
    return inspect.cleandoc(kind.__doc__ or "").partition(SETTINGS_OF)[0]


def sections_of(annotation: Any) -> list[type[Settings]]:
    """The sections in an annotation: `GroupsConfig | None` and `str | list[SourceConfig]` have one each."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def by_name(value: object, *, words: str = "") -> str | Callable[..., Any]:
    """A callable as "module:name" if that name gives the same object, else the callable; a text as it is.

    Args:
        value: of the setting.
        words: that the setting may be instead, for the error: "train, eval, ".

    Raises:
        ValueError: neither a text nor callable.

    Example:
        A function `jitter` of transforms.py is "transforms:jitter", of the program itself "__main__:jitter". A lambda,
        a method and a function inside another function have no name to import.
    """
    if isinstance(value, str):
        return value
    if not callable(value):
        raise ValueError(f'expected {words}"module:callable" or a callable; got {value!r}')
    name = name_of(value)
    module, _, attribute = name.partition(":")
    return name if getattr(sys.modules.get(module), attribute, None) is value else value


def name_of(value: str | Callable[..., Any]) -> str:
    """The name "module:name" of a callable, for messages and states; for an object, the name of its class."""
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def is_importable(value: str | Callable[..., Any]) -> bool:
    """Whether another process can import it."""
    name = by_name(value)
    return isinstance(name, str) and not name.startswith(MAIN)


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
