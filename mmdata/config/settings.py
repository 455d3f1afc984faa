"""The base of all settings: types of values, and what a resumed run may change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import Self

from mmdata.config.words import PATH, default_in_words, type_in_words

Integer = Annotated[int, Field(strict=True)]
"""Rejects bool, str and float."""
Positive = Annotated[int, Field(strict=True, ge=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Side = Annotated[int, Field(strict=True, ge=1, le=16384)]
"""Of an image, in pixels."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


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
