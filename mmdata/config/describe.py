"""All settings in words, for `mmdata settings`, docs/settings.md and editors. Nothing here is written by hand.

Names, types and defaults are those of the classes, and the meaning is the text below each field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from mmdata.config.config import Config
from mmdata.config.explain import OTHER_NAMES, names_alike
from mmdata.config.settings import Settings, changeable_settings, default_in_words, own_text, sections_of, type_in_words
from mmdata.errors import ConfigError
from mmdata.nearest import did_you_mean

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
MOST_NAMES = 4
"""Names that an error suggests at most."""


@dataclass(frozen=True)
class Setting:
    """A setting in words.

    Attributes:
        name: with its sections, as on the command line: "data.loading.num_workers". N stands for the number of an
            entry in a list, NAME for a name that the user chooses.
        values: what it may be: "integer ≥ 0 or auto".
        default: "default auto", "required", or "" if it is a section.
        meaning: the text below the field, in one line.
        may_change: whether a resumed run may give it another value.
    """

    name: str
    values: str
    default: str
    meaning: str
    may_change: bool


@dataclass(frozen=True)
class Section:
    """A section and its own settings; sections inside it are listed by themselves.

    Attributes:
        name: "data", "data.loading", …
        title: the name; of a section that has several kinds also the kind, as "train.miner, name: top_k".
        meaning: what it is for.
    """

    name: str
    title: str
    meaning: str
    settings: tuple[Setting, ...]


def all_sections() -> list[Section]:
    """All sections of a config, each before the sections inside it."""
    changeable = set(changeable_settings(Config))
    return [
        section
        for name, field in Config.model_fields.items()
        for kind in sections_of(field.annotation)
        for section in _sections(kind, name, name, changeable)
    ]


def find_sections(name: str | None) -> list[Section]:
    """The sections that a name means, with the settings that it means.

    Args:
        name: of a section ("data.loading", with the sections inside it), of a setting ("data.seed"), or the last part
            of names of settings ("num_workers"); None: everything.

    Raises:
        ConfigError: nothing has this name; names what is near.
    """
    sections = all_sections()
    if name is None:
        return sections
    if inside := [section for section in sections if f"{section.name}.".startswith(f"{name}.")]:
        return inside
    for exact in (True, False):
        found: list[Section] = []
        for section in sections:
            fits = tuple(s for s in section.settings if s.name == name or (not exact and s.name.endswith(f".{name}")))
            found += [Section(section.name, section.title, section.meaning, fits)] if fits else []
        if found:
            return found
    raise ConfigError(f"no setting or section '{name}'{_probably_meant(name, sections)}")


def settings_named(name: str) -> list[str]:
    """The settings that a name without sections may mean, with their sections, the likeliest first.

    Those of the same name, of the name that mmdata has for what other programs call so, of a longer name that holds
    it, or of a near name; the first of these ways that finds any decides.

    Example:
        "learning_rate" is ["train.lr"], "batch_size" is ["data.global_batch_size", "train.micro_batch_size"].
    """
    return _named(name, [one.name for section in all_sections() for one in section.settings])


def markdown() -> str:
    """docs/settings.md."""
    lines = [
        "# All settings",
        "",
        "A config is a YAML file with the sections `data`, `model`, `train` and, for `mmdata compare`, `compare`. Each",
        "setting can be given on the command line too, as in `mmdata train CONFIG data.seed=1`. `mmdata settings NAME`",
        "prints a part of this page: `mmdata settings data.loading`, `mmdata settings num_workers`.",
        "",
        "↻ marks the settings that may change when a run is resumed. `N` stands for the number of an entry in a list,",
        "`NAME` for a name that you choose. An editor completes and checks settings with the JSON schema:",
        "",
        "```sh",
        "mmdata settings --schema > mmdata.schema.json",
        "```",
        "",
        "and this line at the top of a config, which VS Code (YAML extension), Neovim and others read:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=mmdata.schema.json",
        "```",
        "",
        "This page is made by `mmdata settings --markdown > docs/settings.md`.",
    ]
    for section in all_sections():
        depth = "##" if "." not in section.name else "###"
        lines += ["", f"{depth} {section.title}", "", section.meaning, ""]
        if section.settings:
            lines += ["| setting | values | meaning |", "|---|---|---|"]
        for one in section.settings:
            name = one.name.removeprefix(f"{section.name}.")
            values = f"{one.values}; {one.default}" if one.default else one.values
            changes = " ↻" if one.may_change else ""
            lines.append(f"| `{name}`{changes} | {_cell(values)} | {_cell(one.meaning)} |")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config, for editors."""
    schema = Config.model_json_schema()
    for name, kind in _kinds(Config).items():
        found = schema["$defs"].get(name)
        if found is not None:
            found["description"] = own_text(kind)
    schema["description"] = own_text(Config)
    _join_lines(schema)
    for name, section in schema["properties"].items():  # a section whose settings are all commented out is null
        reference = section.pop("$ref", None)
        if reference is not None and name != "data":
            section["anyOf"] = [{"$ref": reference}, {"type": "null"}]
        elif reference is not None:
            section["$ref"] = reference
    return {"$schema": SCHEMA, "title": "mmdata config", **{k: v for k, v in schema.items() if k != "title"}}


def _probably_meant(name: str, sections: list[Section]) -> str:
    """The end of a message for a name that nothing has: names that are near, or where it is mentioned."""
    settings = [one for section in sections for one in section.settings]
    section, _, last = name.rpartition(".")
    inside = [one.name for one in settings if section and one.name.startswith(f"{section}.")]
    if found := _named(last, inside) or _named(last, [one.name for one in settings]):
        return f"; did you mean {_or(found)}?"
    if not inside and (near := did_you_mean(name, [section.name for section in sections])):
        return near
    word = re.compile(rf"\b{re.escape(last.replace('_', ' '))}", re.IGNORECASE)
    if mentions := list(dict.fromkeys(one.name for one in settings if word.search(one.meaning))):
        return f"; settings that mention it: {', '.join(mentions[:MOST_NAMES])}"
    return f"; `mmdata settings {section}` lists this section" if inside else "; `mmdata settings` lists all"


def _named(name: str, known: list[str]) -> list[str]:
    """Of known settings those that a name without sections may mean; see `settings_named`."""
    lasts = {one: one.rpartition(".")[2] for one in known}
    if found := [one for one, last in lasts.items() if last == name]:
        return found[:MOST_NAMES]
    alike = dict.fromkeys([OTHER_NAMES.get(name), *names_alike(name, dict.fromkeys(lasts.values()))])
    return [one for last in alike for one in lasts if lasts[one] == last][:MOST_NAMES]


def _or(names: list[str]) -> str:
    """Names for a question: 'a', 'b' or 'c'."""
    quoted = [f"'{name}'" for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _sections(kind: type[Settings], name: str, title: str, changeable: set[str]) -> Iterator[Section]:
    yield Section(name, title, _line(own_text(kind)), _settings(kind, list(kind.model_fields), name, changeable))
    for field_name, field in kind.model_fields.items():
        inside, full = sections_of(field.annotation), f"{name}.{field_name}"
        if len(inside) > 1:
            yield from _kinds_of_one(inside, full, field, changeable)
        elif inside:
            full += {list: ".N", dict: ".NAME"}.get(_container(field.annotation), "")
            yield from _sections(inside[0], full, full, changeable)


def _kinds_of_one(kinds: list[type[Settings]], name: str, field: FieldInfo, changeable: set[str]) -> Iterator[Section]:
    """A section of several kinds, such as the miners: what all kinds have, then each kind with what it has alone."""
    common = [each for each in kinds[0].model_fields if all(each in kind.model_fields for kind in kinds)]
    names = {kind: get_args(kind.model_fields["name"].annotation)[0] for kind in kinds}
    which = Setting(f"{name}.name", ", ".join(names.values()), "required", "The kind.", False)
    settings = _settings(kinds[0], [each for each in common if each != "name"], name, changeable)
    yield Section(name, name, _line(field.description or ""), (which, *settings))
    for kind, own_name in names.items():
        own = [each for each in kind.model_fields if each not in common]
        meaning = _line(own_text(kind)).removeprefix(f"{own_name}: ")
        meaning = meaning[0].upper() + meaning[1:]
        yield Section(name, f"{name}, name: {own_name}", meaning, _settings(kind, own, name, changeable))


def _settings(kind: type[Settings], names: list[str], section: str, changeable: set[str]) -> tuple[Setting, ...]:
    described: list[Setting] = []
    for name in names:
        field, full = kind.model_fields[name], f"{section}.{name}"
        # `changeable_settings` names settings without positions in lists.
        whole = any(inner.MAY_CHANGE for inner in sections_of(field.annotation))
        may_change = whole or full.replace(".N.", ".").replace(".NAME.", ".") in changeable
        meaning = _line(field.description or "")
        described.append(Setting(full, type_in_words(field), default_in_words(field), meaning, may_change))
    return tuple(described)


def _container(annotation: Any) -> Any:
    """The list or the dict that holds the sections of an annotation; None if it is one section."""
    if get_origin(annotation) in (list, dict):
        return get_origin(annotation)
    return next(filter(None, (_container(part) for part in get_args(annotation))), None)


def _kinds(kind: type[Settings]) -> dict[str, type[Settings]]:
    found = {kind.__name__: kind}
    for field in kind.model_fields.values():
        for section in sections_of(field.annotation):
            found |= _kinds(section)
    return found


def _join_lines(schema: Any) -> None:
    """Put each description into one line: it has the line breaks of the source."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "description" and isinstance(value, str):
            schema[key] = _line(value)
        elif isinstance(value, (dict, list)):
            _join_lines(value)


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
