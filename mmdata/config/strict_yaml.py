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

from mmdata.config.explain import mistakes
from mmdata.config.settings import Settings
from mmdata.config.wrong_place import WRITES_ONE, find_shipped, not_a_config
from mmdata.errors import ConfigError, excerpt

YAML_SUFFIXES = (".yaml", ".yml", ".json", "")
PLAIN_TEXTS = ("`", "|", ">", "%", ",", ";")
"""What no YAML of one line begins with: a condition may (`clip score` > 0.28), and so may a delimiter."""
COMMAND_LINE = "on the command line"
MOST_MISTAKES = 5
"""Mistakes in one place that a message names."""

S = TypeVar("S", bound=Settings)


def read_yaml(path: str | os.PathLike[str], overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a YAML file, or a shipped config by its name, into nested dictionaries, and apply "a.b=value" overrides.

    Raises:
        ConfigError: it is something else; says what.
    """
    file = Path(path)
    if not file.exists():
        # A folder of the same name as a shipped config is what was meant: `mmdata plan scenes` names no config then.
        file = find_shipped(file) or file
    if not file.is_file() or file.suffix.lower() not in YAML_SUFFIXES:
        raise ConfigError(not_a_config(file))
    try:
        content = _parse_yaml(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"config '{file}': byte {error.start:,} is not UTF-8; save it as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"config '{file}': not valid YAML: {error}") from error
    if not isinstance(content, dict):
        got = "an empty file" if content is None else excerpt(content)
        raise ConfigError(
            f"config '{file}': expected the sections data, model, train, as `data: {{shards: …}}`; got {got}; "
            f"{WRITES_ONE}"
        )
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
        by_origin: dict[str, list[str]] = {origin: [], COMMAND_LINE: []}
        for mistake in mistakes(kind, content, error):
            by_origin[COMMAND_LINE if any(map(mistake.is_of, typed)) else origin].append(mistake.text)
        said = [f"{where}: {_listed(texts)}" for where, texts in by_origin.items() if texts]
        raise ConfigError("; ".join(said)) from error


def _parse_yaml(text: str) -> Any:
    """Content of strict YAML.

    Raises:
        ValueError: says what is wrong, and where: "line 2, column 1: key 'seed' stands twice".
    """
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ValueError("lists or sections inside each other, hundreds deep") from None
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or ""
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(where + ("a tab; indent with spaces" if r"'\t'" in problem else problem)) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error  # PyYAML's messages have several lines


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML that means no more than it says.

    A key that stands twice is an error; PyYAML alone would keep the last one in silence. So is an alias: with lists of
    aliases of lists of aliases, a few lines stand for more values than memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.get_event()
            problem = f"the alias *{alias.anchor}: write out what it stands for"
            raise yaml.constructor.ConstructorError(None, None, problem, alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, value in node.value:
            if node.flow_style and ":" in str(key.value) and value.value == "" and value.style is None:
                problem = f"'{key.value}': YAML needs a space after the colon, as in {{name: value}}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key '{key.value}' stands twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _listed(texts: list[str]) -> str:
    more = f"; and {len(texts) - MOST_MISTAKES} more" if len(texts) > MOST_MISTAKES else ""
    return "; ".join(texts[:MOST_MISTAKES]) + more


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
    except ValueError as error:
        raise ConfigError(f"override '{override}': value is not valid YAML: {error}") from error
