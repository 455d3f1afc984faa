"""The base of all settings: types of values, old names, and what a resumed run may change."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_jsonable_python
from typing_extensions import Self

from mmdata.config.words import PATH, default_in_words, type_in_words

logger = logging.getLogger("mmdata")

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

_warned: set[str] = set()
"""Old names that this process has warned of."""


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

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Old key to new key, both with all sections: "data.workers" to "data.loading.worker_type".

    The old key is one of this section; the new one is of this section or of a group in it. The old key is accepted for
    one release.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Removed key, with its section, to what to do instead. It is ignored if it is off, so that settings which an
    earlier version has saved can still be read, and an error if it is on."""

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

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, content: Any) -> Any:
        return _own_current_names(cls, content) if isinstance(content, dict) else content

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What differs from the defaults, so that a section is one line."""
        fields = type(self).model_fields
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        return ((name, value) for name, value in super().__repr_args__() if value != defaults[name or ""])

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's `model_copy`, which also takes old names.

        Raises:
            ValueError: an unknown name, or a dictionary for a section: pydantic alone would take both unchecked.
        """
        changes = dict(update or {})
        for old, (name, *inner), _ in _renames(type(self), changes):
            value = changes.pop(old)
            if inner:  # only this value of the group changes
                value = changes.get(name, getattr(self, name)).model_copy(update={inner[0]: value})
            changes[name] = value
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise ValueError(f"{type(self).__name__} has no setting {', '.join(sorted(unknown))}")
        for name, value in changes.items():
            if isinstance(value, dict) and isinstance(getattr(self, name), Settings):
                raise ValueError(f"{name} is a section: give a {type(getattr(self, name)).__name__}, not a dictionary")
        return super().model_copy(update=changes, deep=deep)

    if not TYPE_CHECKING:  # or every misspelt attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            for _, path, told in _renames(type(self), [name], log=False):
                warnings.warn(f"{told}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
                value = self
                for part in path:
                    value = getattr(value, part)
                return value
            return super().__getattr__(name)


def current_names(kind: type[Settings], content: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, not validated yet, with old names replaced by new ones in all sections.

    Raises:
        ValueError: a setting is given under both its old and its new name.
    """
    current = _own_current_names(kind, content)
    for name in current.keys() & kind.model_fields.keys():
        for section in sections_of(kind.model_fields[name].annotation):
            if isinstance(current[name], dict):
                current[name] = current_names(section, current[name])
    return current


def without_removed(kind: type[Settings], content: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without removed keys, for a reader that only asks what the others were."""
    removed = {gone.rpartition(".")[2] for gone in kind.REMOVED}
    kept = {name: value for name, value in content.items() if name not in removed}
    for name in kept.keys() & kind.model_fields.keys():
        for section in sections_of(kind.model_fields[name].annotation):
            if isinstance(kept[name], dict):
                kept[name] = without_removed(section, kept[name])
    return kept


def with_defaults(kind: type[Settings], content: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with the defaults of those that are not given, as plain data. A section that is None stays so.

    An earlier version did not save the settings that it did not have: a run that it began went by their defaults.
    """
    full = dict(content)
    for name, field in kind.model_fields.items():
        if name not in full:
            if not field.is_required():
                full[name] = to_jsonable_python(field.get_default(call_default_factory=True))
            continue
        for section in sections_of(field.annotation):
            if isinstance(full[name], list):
                items = cast("list[Any]", full[name])
                full[name] = [with_defaults(section, item) if isinstance(item, dict) else item for item in items]
            elif isinstance(full[name], dict) and _is_of(section, full[name]):
                full[name] = with_defaults(section, full[name])
    return full


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


def _is_of(kind: type[Settings], content: Mapping[str, Any]) -> bool:
    """Whether values are of this section, where a setting takes several, as `train.miner` does: its name tells."""
    names = {name: field.annotation for name, field in kind.model_fields.items() if field.is_required()}
    literals = {name: get_args(kinds) for name, kinds in names.items() if get_origin(kinds) is Literal}
    return all(content.get(name) in values for name, values in literals.items())


def _own_current_names(kind: type[Settings], content: Mapping[str, Any]) -> dict[str, Any]:
    """As `current_names`, of this section's own keys."""
    current = dict(content)
    for gone, instead in kind.REMOVED.items():
        if current.pop(gone.rpartition(".")[2], None):
            raise ValueError(f"setting {gone} is gone: {instead}")
    for old, (*groups, name), told in _renames(kind, content):
        section = current
        for group in groups:
            inner = section.get(group)
            inner = inner.model_dump(exclude_unset=True) if isinstance(inner, Settings) else inner or {}
            if not isinstance(inner, dict):
                return current  # validation says what is wrong with it
            section[group] = dict(cast("dict[str, Any]", inner))
            section = section[group]
        if name in section:
            raise ValueError(f"{told}, and both are given: leave the old name out")
        section[name] = current.pop(old)
    return current


def _renames(kind: type[Settings], names: Any, *, log: bool = True) -> Iterator[tuple[str, list[str], str]]:
    """Of each of `names` that is old: the name, the keys from this section to the new one, and a sentence with both.

    Logs each once per process.
    """
    for old, new in kind.RENAMED.items():
        section, _, name = old.rpartition(".")
        if name not in names:
            continue
        told = f"setting {old} is now {new}"
        if log and old not in _warned:
            _warned.add(old)
            logger.warning("%s; the old name goes with the next release", told)
        yield name, new.removeprefix(f"{section}.").split("."), told
