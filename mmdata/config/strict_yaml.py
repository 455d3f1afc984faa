"""Validated settings, and the strict YAML that they are written in.

Nothing is ignored: an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mmdata.config.explain import explain_errors
from mmdata.config.settings import Settings
from mmdata.config.wrong_file import WRITES_ONE, not_a_config, shipped_configs
from mmdata.errors import ConfigError, excerpt

YAML_SUFFIXES = (".yaml", ".yml", ".json", "")
PLAIN_TEXTS = ("`", "|", ">", "%", ",", ";")
"""What no YAML of one line begins with: a condition may (`clip score` > 0.28), and so may a delimiter."""

S = TypeVar("S", bound=Settings)


def read_yaml(path: str | os.PathLike[str], overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a YAML file, or a shipped config by its name, into nested dictionaries, and apply "a.b=value" overrides."""
    file = Path(path)
    if not file.is_file():
        ours = shipped_configs()
        # A folder of the same name as a shipped config is what was meant: `mmdata plan scenes` names no config then.
        found = None if file.exists() else ours.get(file.name) or ours.get(f"{file.name}.yaml")
        if found is None:
            raise ConfigError(not_a_config(file))
        file = found
    content = _read_sections(file)
    # A section whose settings are all commented out is there, with nothing in it.
    sections: dict[str, Any] = {key: {} if value is None else value for key, value in content.items()}
    return with_overrides(sections, overrides or [])


def with_overrides(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Nested settings, not validated yet, with "a.b=value" overrides applied.

    Raises:
        ConfigError: an override that is not key=value, or whose value is not YAML.
    """
    changed = copy.deepcopy(content)
    for override in overrides:
        _override(changed, override)
    return changed


def parse(kind: type[S], content: dict[str, Any], *, origin: str, overrides: list[str] | None = None) -> S:
    """Validate a dictionary as settings of `kind`.

    Args:
        kind: of the settings.
        content: to validate, with the overrides applied.
        origin: opens each error message, such as the file's name.
        overrides: those of the command line: an error in one of them names the command line in place of `origin`.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        typed = [override.partition("=")[0] for override in overrides or []]
        by_origin: dict[str, list[str]] = {origin: [], "on the command line": []}
        for told in explain_errors(kind, content, error, typed):
            by_origin["on the command line" if told.from_override else origin].append(told.text)
        said = "; ".join(f"{where}: {'; '.join(texts)}" for where, texts in by_origin.items() if texts)
        raise ConfigError(said) from error


def _read_sections(file: Path) -> dict[Any, Any]:
    """Content of a YAML file.

    Raises:
        ConfigError: it is something else; says what.
    """
    looks_like_yaml = file.suffix.lower() in YAML_SUFFIXES
    try:
        content = _parse_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        if not looks_like_yaml:
            raise ConfigError(not_a_config(file)) from None
        raise ConfigError(f"config '{file}': not valid YAML{_mistake(error)}") from error
    if isinstance(content, dict):
        return content
    if not looks_like_yaml:
        raise ConfigError(not_a_config(file))
    got = "an empty file" if content is None else excerpt(content)
    raise ConfigError(
        f"config '{file}': expected the sections data, model, train, as `data: {{shards: …}}`; got {got}; {WRITES_ONE}"
    )


def _parse_yaml(text: str) -> Any:
    """Content of strict YAML; raises YAMLError or ValueError, as UnicodeDecodeError is."""
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ValueError("lists or sections inside each other, hundreds deep") from None


def _mistake(error: Exception) -> str:
    """What is wrong with YAML, and where: ", line 2, column 1: key 'seed' stands twice"."""
    if isinstance(error, UnicodeDecodeError):
        return f": byte {error.start:,} is not UTF-8; save it as UTF-8"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return f": {' '.join(str(error).split())}"  # PyYAML's messages have several lines
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    is_tab = r"'\t'" in error.problem
    return f"{where}: {'a tab; indent with spaces' if is_tab else error.problem}"


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML that means no more than it says.

    A key that stands twice is an error; PyYAML alone would keep the last one in silence. So is an alias: with lists of
    aliases of lists of aliases, a few lines stand for more values than memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.get_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"the alias *{alias.anchor}: write out what it stands for", alias.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
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
        wanted = f", as in {dotted}=VALUE" if all(key.isidentifier() for key in keys) else ""
        raise ConfigError(f"override '{override}': expected key=value{wanted}")
    node = content
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            kind = "a list, which is given whole" if isinstance(node, list) else "a value, not a section"
            raise ConfigError(f"override '{override}': '{key}' is {kind}")
    try:
        node[keys[-1]] = value if value.lstrip().startswith(PLAIN_TEXTS) else _parse_yaml(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"override '{override}': value is not valid YAML: {_mistake(error).partition(': ')[2]}"
        ) from error
