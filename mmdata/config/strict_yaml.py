"""Validated settings, and the strict YAML that they are written in.

Nothing is ignored: an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import copy
import difflib
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from mmdata.config.settings import Settings, current_names, sections_of
from mmdata.errors import ConfigError
from mmdata.shipped import shipped

MAX_VALUES = 100_000
"""Values in a YAML file, its aliases written out: a mixture of thousands of datasets has some ten thousand."""
_BEING_COUNTED = -1


S = TypeVar("S", bound=Settings)


def read_yaml(
    path: str | os.PathLike[str], overrides: list[str] | None = None, *, kind: type[Settings] = Settings
) -> dict[str, Any]:
    """Read a YAML file, or a shipped config by its name, into nested dictionaries, and apply "a.b=value" overrides.

    Old names of settings of `kind` get their new names first, so that an override replaces the file's value under
    either name.
    """
    file = Path(path)
    if not file.is_file():
        ours = {config.name: config for config in sorted(shipped("configs").glob("*.yaml"))}
        found = ours.get(file.name) or ours.get(f"{file.name}.yaml")
        if found is None:
            raise ConfigError(f"config '{file}': no such file; shipped with mmdata: {', '.join(ours)}")
        file = found
    try:
        content = _parse_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config '{file}': not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config '{file}': expected sections data, model, train; got {type(content).__name__}")
    # A section whose settings are all commented out is there, with nothing in it.
    sections: dict[str, Any] = {key: {} if value is None else value for key, value in content.items()}
    try:
        sections = current_names(kind, sections)
    except ValueError as error:
        raise ConfigError(f"config '{file}': {error}") from None
    return with_overrides(sections, overrides or [], kind=kind)


def with_overrides(content: dict[str, Any], overrides: list[str], *, kind: type[Settings]) -> dict[str, Any]:
    """Nested settings, not validated yet, with "a.b=value" overrides applied.

    Raises:
        ConfigError: an override that is not section.key=value, or whose value is not YAML.
    """
    changed = copy.deepcopy(content)
    for override in overrides:
        _override(changed, override, kind)
    return changed


def _parse_yaml(text: str) -> Any:
    """Content of strict YAML; raises YAMLError or ValueError."""
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ValueError("lists or sections inside each other, hundreds deep") from None


def _one_line(error: Exception) -> str:
    """PyYAML's messages have several lines, of which some begin with spaces."""
    return " ".join(str(error).split())


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML that means no more than it says.

    A key that stands twice is an error; PyYAML alone would keep the last one in silence. Aliases are followed, up to
    `MAX_VALUES`: lists of aliases of lists of aliases make a few lines stand for more values than memory holds.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

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


def _count_values(node: yaml.Node, counted: dict[int, int]) -> int:
    """How many values, keys, lists and sections a node has with its aliases written out; each node is visited once.

    Raises:
        ConstructorError: more than `MAX_VALUES`, or without end.
    """
    if (known := counted.get(id(node))) is not None:
        if known == _BEING_COUNTED:
            raise yaml.constructor.ConstructorError(None, None, "an alias of what it is a part of", node.start_mark)
        return known
    counted[id(node)] = _BEING_COUNTED
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    total = 1 + sum(_count_values(part, counted) for part in parts)
    if total > MAX_VALUES:
        raise yaml.constructor.ConstructorError(
            None, None, f"more than {MAX_VALUES:,} values, aliases written out", node.start_mark
        )
    counted[id(node)] = total
    return total


def _override(content: dict[str, Any], override: str, kind: type[Settings]) -> None:
    dotted, equals, value = override.partition("=")
    keys = dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override '{override}': expected section.key=value, as in data.loading.num_workers=4")
    keys = _current_keys(kind, keys)
    node = content
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if isinstance(node, list):
            raise ConfigError(f"override '{override}': '{key}' is a list, which is given whole, as in '{key}=[…]'")
        if not isinstance(node, dict):
            raise ConfigError(f"override '{override}': '{key}' is a value, not a section")
    try:
        node[keys[-1]] = _parse_yaml(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override '{override}': value is not valid YAML: {_one_line(error)}") from error


def _current_keys(kind: type[Settings], keys: list[str]) -> list[str]:
    """The keys on the way to a setting: ["data", "workers"] -> ["data", "loading", "worker_type"]."""
    nested: Any = None  # the value does not matter
    for key in reversed(keys):
        nested = {key: nested}
    nested, current = current_names(kind, nested), []
    while nested is not None:
        if not nested:  # a removed setting: validation drops it, or says that it is gone
            return keys
        ((key, nested),) = nested.items()
        current.append(key)
    return current


def parse(kind: type[S], content: dict[str, Any], *, origin: str) -> S:
    """Validate a dictionary as settings of `kind`; `origin` opens each error message."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        errors = [(_locate(kind, e), e) for e in error.errors()]
        # Of a value that may be of several types, that it is none of one of them; what is wrong inside it says more.
        telling = [(at, e) for at, e in errors if not any(_is_inside(other.keys, at.keys) for other, _ in errors)]
        raise ConfigError(f"{origin}: " + "; ".join(_explain(kind, *each) for each in telling)) from error


class _Place(NamedTuple):
    """Where an error is: keys and positions, the section that the last key is in, and those that its value may be."""

    keys: list[str]
    section: type[Settings]
    values: list[type[Settings]]


def _locate(kind: type[Settings], error: Any) -> _Place:
    place = _Place([], kind, [])
    for part in error["loc"]:
        # pydantic puts in the name of a type where there are several, as "list[SourceConfig]"
        if part in ("str", "constrained-int") or "[" in str(part):
            continue
        if isinstance(part, int):
            place.keys.append(str(part))
        elif len(place.values) > 1:  # and here the name of the one that was meant, as "top_k"
            place = _Place(place.keys, next(v for v in place.values if part in _names(v)), [])
        else:
            section = place.values[0] if place.values else place.section
            field = section.model_fields.get(part)
            place = _Place([*place.keys, part], section, [] if field is None else sections_of(field.annotation))
    return place


def _is_inside(place: list[str], other: list[str]) -> bool:
    return len(place) > len(other) and place[: len(other)] == other


def _explain(kind: type[Settings], place: _Place, error: Any) -> str:
    dotted = ".".join(place.keys)
    if error["type"] == "extra_forbidden":
        wrong, own = place.keys[-1], list(place.section.model_fields)
        if _names(place.section) and not difflib.get_close_matches(wrong, own):  # of another kind, perhaps
            return f"unknown key '{dotted}': {_names(place.section)[0]} has {', '.join(own)}"
        return f"unknown key '{dotted}'; did you mean '{_nearest(kind, place)}'?"
    if error["type"] == "missing":
        return f"'{dotted}' is required and missing"
    if error["type"] == "union_tag_not_found":
        names = ", ".join(name for value in place.values for name in _names(value))
        return f"'{dotted}.name' is required and missing; known: {names}"
    if error["type"] == "union_tag_invalid":
        names = ", ".join(name for value in place.values for name in _names(value))
        return f"'{dotted}.name': known are {names}; got {error['ctx']['tag']!r}"
    if error["type"] == "value_error":  # from a validator of ours, which says what it got
        return f"'{dotted}': {error['ctx']['error']}" if dotted else str(error["ctx"]["error"])
    if error["type"] in ("model_type", "model_attributes_type"):
        fields = (place.values or [place.section])[0].model_fields
        needed = [name for name, field in fields.items() if field.is_required()] or list(fields)[:3]
        keys = ", ".join(f"{name}: …" for name in needed)
        return f"'{dotted}': expected {{{keys}}}; got {error['input']!r}"
    return f"'{dotted}': {error['msg']}; got {error['input']!r}"


def _nearest(kind: type[Settings], place: _Place) -> str:
    """The known key that is nearest to the last of `place`: in its section, in a group of that, or in another section.

    A key of another section must have the very same name: data.lr is train.lr.
    """
    wrong, section = place.keys[-1], _keys_of(place.section)
    if wrong not in section and wrong in (everywhere := _keys_of(kind)):
        return everywhere[wrong]
    longer = [name for name in section if wrong in name]  # batch_size: global_batch_size, not patch_size
    (near,) = difflib.get_close_matches(wrong, longer or section, n=1, cutoff=0.0)
    return ".".join([*place.keys[:-1], section[near]])


def _keys_of(kind: type[Settings], prefix: str = "") -> dict[str, str]:
    """Name to dotted key of all settings of a section and of the groups in it; the outermost of equal names."""
    keys: dict[str, str] = {}
    for name, field in kind.model_fields.items():
        several = get_origin(field.annotation) in (list, dict)
        for part in () if several else (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Settings):
                keys = _keys_of(part, f"{prefix}{name}.") | keys
    return keys | {name: prefix + name for name in kind.model_fields}


def _names(section: type[Settings]) -> tuple[str, ...]:
    """Of a section of which there are several kinds: what its key `name` may be."""
    field = section.model_fields.get("name")
    return get_args(field.annotation) if field is not None and field.is_required() else ()
