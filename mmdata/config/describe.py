"""All settings in words, for `mmdata settings`, docs/settings.md and editors."""

from __future__ import annotations

from typing import Any

from mmdata.config.config import Config
from mmdata.config.convert import ConvertConfig
from mmdata.config.words import Section, describe, probably_meant
from mmdata.errors import ConfigError

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
MAY_BE_EMPTY = ("model", "train")
"""Sections whose settings may all be commented out, which makes the section null."""
PAGE = """\
# All settings

A config is a YAML file with the sections `data`, `model` and `train`. Each setting can be given on the command
line too, as in `mmdata train CONFIG data.seed=1`. `mmdata settings NAME` prints a part of this page:
`mmdata settings data.loading`, `mmdata settings num_workers`. The settings of `mmdata convert`, at the end, are the
keys of a recipe, and `key=value` on its command line.

↻ marks the settings that may change when a run is resumed. `N` stands for the number of an entry in a list,
`NAME` for a name that you choose.

An editor completes and checks settings with the JSON schema (`mmdata settings --schema > mmdata.schema.json`) and the
line `# yaml-language-server: $schema=mmdata.schema.json` at the top of a config, which VS Code and Neovim read.

This page is made by `mmdata settings --markdown > docs/settings.md`.
"""


def all_sections() -> list[Section]:
    """All sections of a config, each before the sections inside it; and the settings of a conversion."""
    return [*describe(Config)[1:], *describe(ConvertConfig, "convert")]


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
    found: list[Section] = []
    for section in sections:
        if fits := tuple(one for one in section.settings if f".{one.name}".endswith(f".{name}")):
            found.append(Section(section.name, section.title, section.meaning, fits))
    if found:
        return found
    known = [*(section.name for section in sections), *(one.name for section in sections for one in section.settings)]
    raise ConfigError(f"no setting or section '{name}'; {probably_meant(name, known)}")


def markdown() -> str:
    """docs/settings.md."""
    lines = [PAGE.rstrip()]
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
    for name in MAY_BE_EMPTY:
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    return {"$schema": SCHEMA, **schema, "title": "mmdata config"}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
