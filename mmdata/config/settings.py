"""The base of all settings: types of values, and what a resumed run may change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticKnownError
from typing_extensions import Self

Integer = Annotated[int, Field(strict=True)]
"""Rejects bool, str and float."""
Positive = Annotated[int, Field(strict=True, ge=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Side = Annotated[int, Field(strict=True, ge=1, le=16384)]
"""Of an image, in pixels."""


def _refuse_boolean(value: object) -> object:
    """Pydantic alone takes true as 1.0. A text is taken: 1e-3 without a point is one in YAML."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


NOT_BOOLEAN = BeforeValidator(_refuse_boolean)
"""Of each number with a fraction; it stands last, since the JSON schema has the bounds of what is before it."""
Share = Annotated[float, Field(ge=0.0, le=1.0), NOT_BOOLEAN]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0), NOT_BOOLEAN]


def _text_of_path(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


Location = Annotated[str, BeforeValidator(_text_of_path), Field(json_schema_extra={"format": "path"})]
"""A path, a URL or a name; a pathlib.Path is taken as its text."""


def _template(text: str) -> str:
    if text.count("{}") != 1 or {"{", "}"} & set(text.replace("{}", "")):
        raise ValueError(f"must hold {{}} once, and no other braces: got {text!r}")
    return text


Template = Annotated[str, AfterValidator(_template)]
"""A text around another one, which replaces {}."""

_MAY_CHANGE = "may change when a run is resumed"

T = TypeVar("T")

MayChange = Annotated[T, _MAY_CHANGE]
"""A setting that a resumed run may give another value.

Such a setting changes where files lie, who does the work or what is logged, never which numbers come out.
"""

NUMBERED, NAMED = "N", "NAME"
"""The number of an entry in a list, in the name of a setting; and a name that the user chooses, in a value."""

MAIN = "__main__:"
"""Begins the names of what is defined in the program itself: another process cannot import it."""


class Settings(BaseModel):
    """Base of all sections: immutable, closed to unknown keys, to infinity and to NaN."""

    # The text below a field is its description: `mmdata settings`, docs/settings.md and editors show it.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    MAY_CHANGE: ClassVar[bool] = False
    """Whether a resumed run may change all settings of this section."""

    @classmethod
    def may_change(cls, name: str) -> bool:
        """Whether a resumed run may change a setting of this section."""
        return cls.MAY_CHANGE or _MAY_CHANGE in cls.model_fields[name].metadata

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


def sections_within(kind: type[Settings], place: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """A section and those inside it, each with its place: "data.loading", and "data.shards.N" in a list of sections."""
    yield place, kind
    for name, field in kind.model_fields.items():
        for step, section in _sections_of(field.annotation):
            yield from sections_within(section, f"{place}.{name}{step}".removeprefix("."))


def changeable_settings(kind: type[Settings]) -> Iterator[str]:
    """Dotted names of the settings that a resumed run may change, without positions in lists."""
    for place, section in sections_within(kind):
        names = [part for part in place.split(".") if part not in ("", NUMBERED)]
        yield from (".".join([*names, name]) for name in section.model_fields if section.may_change(name))


def _sections_of(annotation: Any) -> Iterator[tuple[str, type[Settings]]]:
    """The sections that a setting may be, or may hold: `str | list[SourceConfig]` has (".N", SourceConfig)."""
    parts = get_args(annotation)
    if not parts and isinstance(annotation, type) and issubclass(annotation, Settings):
        yield "", annotation
    holder: Any = get_origin(annotation)
    step = f".{NUMBERED}" if holder is list else ""
    for part in parts:
        yield from ((step + inner, section) for inner, section in _sections_of(part))


def by_name(value: object) -> str | Callable[..., Any]:
    """A callable as "module:name" if that name gives the same object, else the callable; a text as it is.

    Raises:
        ValueError: neither a text nor callable.

    Example:
        A function `jitter` of transforms.py is "transforms:jitter", of the program itself "__main__:jitter". A lambda,
        a method and a function inside another function have no name to import.
    """
    if isinstance(value, str):
        return value
    if not callable(value):
        raise ValueError(f'expected a text, as "module:callable", or a callable; got {value!r}')
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


OwnFunction = Annotated[
    str | Callable[..., Any],
    PlainValidator(by_name, json_schema_input_type=str),
    PlainSerializer(name_of, return_type=str, when_used="json"),
]
"""A function of the user's, as "module:callable"; in Python also the callable itself."""
