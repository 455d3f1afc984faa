"""Validated settings, and the strict YAML that they are written in.

Nothing is ignored: an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mmdata.cli import shipped
from mmdata.errors import ConfigError

Integer = Annotated[int, Field(strict=True)]
"""true is none, nor is "8" or 8.0."""
Positive = Annotated[int, Field(strict=True, ge=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]


def _text_of_path(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


Location = Annotated[str, BeforeValidator(_text_of_path)]
"""A folder or a name; a pathlib.Path is taken as its text."""


class Settings(BaseModel):
    """Base of all sections: immutable, closed to unknown keys, to infinity and to NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Settings)


def read_yaml(path: str | os.PathLike[str], overrides: list[str] | None = None) -> dict[str, Any]:
    """A YAML file, or a shipped config by its name, as nested dictionaries with "a.b=value" overrides applied."""
    file = Path(path)
    if not file.is_file():
        ours = {config.name: config for config in sorted(shipped("configs").glob("*.yaml"))}
        found = ours.get(file.name) or ours.get(f"{file.name}.yaml")
        if found is None:
            raise ConfigError(f"config '{file}': no such file; shipped with mmdata: {', '.join(ours)}")
        file = found
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config '{file}': not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config '{file}': expected sections data, model, train; got {type(content).__name__}")
    # A section whose settings are all commented out is there, with nothing in it.
    sections: dict[str, Any] = {key: {} if value is None else value for key, value in content.items()}
    for override in overrides or []:
        _override(sections, override)
    return sections


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML in which a key that stands twice is an error; PyYAML alone would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _override(content: dict[str, Any], override: str) -> None:
    dotted, equals, value = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override '{override}': expected section.key=value, as in data.num_workers=4")
    node = content
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if isinstance(node, list):
            raise ConfigError(f"override '{override}': '{key}' is a list, which is given whole, as in '{key}=[…]'")
        if not isinstance(node, dict):
            raise ConfigError(f"override '{override}': '{key}' is a value, not a section")
    try:
        node[keys[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{override}': value is not valid YAML: {error}") from error


def parse(kind: type[S], content: dict[str, Any], *, origin: str) -> S:
    """Validate a dictionary as settings of `kind`; `origin` opens each error message."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        errors = [(_place(e), e) for e in error.errors()]
        # Of a value that may be of several types, that it is none of one of them; what is wrong inside it says more.
        telling = [(place, e) for place, e in errors if not any(_is_inside(other, place) for other, _ in errors)]
        raise ConfigError(f"{origin}: " + "; ".join(_explain(kind, *each) for each in telling)) from error


TYPES = ("str", "constrained-int")


def _place(error: Any) -> list[str]:
    """Keys and positions; pydantic puts in the name of a type where there are several, as "list[SourceConfig]"."""
    return [str(part) for part in error["loc"] if isinstance(part, int) or not (part in TYPES or "[" in part)]


def _is_inside(place: list[str], other: list[str]) -> bool:
    return len(place) > len(other) and place[: len(other)] == other


def _explain(kind: type[Settings], location: list[str], error: Any) -> str:
    dotted = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = list(_section(kind, location[:-1]).model_fields)
        longer = [name for name in known if location[-1] in name]  # batch_size: global_batch_size, not patch_size
        near = difflib.get_close_matches(location[-1], longer or known, n=1, cutoff=0.0)
        return f"unknown key '{dotted}'; did you mean '{'.'.join([*location[:-1], *near])}'?"
    if error["type"] == "missing":
        return f"'{dotted}' is required and missing"
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return f"'{dotted}': {error['ctx']['error']}" if dotted else str(error["ctx"]["error"])
    if error["type"] == "model_type":
        fields = _section(kind, location).model_fields
        needed = [name for name, field in fields.items() if field.is_required()] or list(fields)[:3]
        keys = ", ".join(f"{name}: …" for name in needed)
        return f"'{dotted}': expected {{{keys}}}; got {error['input']!r}"
    return f"'{dotted}': {error['msg']}; got {error['input']!r}"


def _section(kind: type[Settings], path: list[str]) -> type[Settings]:
    for name in path:
        if not name.isdecimal():  # a position in a list: the section is that of its items
            kind = _settings_in(kind.model_fields[name].annotation) or kind
    return kind


def _settings_in(annotation: Any) -> type[Settings] | None:
    """The section that an annotation speaks of: of `MinerConfig | None` or `str | list[SourceConfig]` the first."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next(filter(None, map(_settings_in, get_args(annotation))), None)
