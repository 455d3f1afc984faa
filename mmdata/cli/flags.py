"""Flags of settings. Help, values and defaults are those of the settings, so a flag and its setting cannot differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mmdata.config import LoadingConfig
from mmdata.config.settings import Settings
from mmdata.config.strict_yaml import parse, with_overrides
from mmdata.config.words import TRUE_OR_FALSE, Setting, describe, names_alike

if TYPE_CHECKING:
    from mmdata.storage import ShardCache

CACHE = ("cache_dir", "cache_gb")
"""Settings of data.loading that a command without a config has as flags."""
TEXTS = ("text", "path", "[text")
"""How the values of a setting begin whose flag takes any text as it is; the values of others are YAML."""
NO_DEFAULT = "default null"


def add_flags(parser: argparse.ArgumentParser, kind: type[Settings], names: Iterable[str]) -> None:
    """Add the flags of some settings: `resize` is --resize, and the list `caption_columns` is --caption-column."""
    settings = _settings(kind)
    for setting in map(settings.__getitem__, names):
        sentence, _, _ = f"{setting.meaning} ".partition(". ")
        is_list = setting.values.startswith("[")
        flag = "--" + (setting.name.removesuffix("s") if is_list else setting.name).replace("_", "-")
        if setting.values == TRUE_OR_FALSE:
            parser.add_argument(flag, dest=setting.name, action="store_const", const="true", help=_escaped(sentence))
            continue
        more = "may be given more than once" if is_list else setting.default
        parser.add_argument(
            flag,
            dest=setting.name,
            action="append" if is_list else "store",
            metavar="TEXT" if setting.values.startswith(TEXTS) else "NUMBER",
            help=_escaped(sentence if more == NO_DEFAULT else f"{sentence} ({more})"),
        )


def settings_given(options: argparse.Namespace, kind: type[Settings], names: Iterable[str]) -> Iterator[str]:
    """The settings that a command line gives by flags, as they are written without them: "resize=256"."""
    settings = _settings(kind)
    for name in names:
        if (value := getattr(options, name)) is not None:
            is_text = settings[name].values.startswith(TEXTS)
            yield f"{name}={json.dumps(value, ensure_ascii=False) if is_text else value}"


def cache_of(options: argparse.Namespace) -> ShardCache:
    """The cache for shards behind URLs that the flags of `CACHE` name."""
    from mmdata.storage import ShardCache

    given = with_overrides({}, [*settings_given(options, LoadingConfig, CACHE)])
    return ShardCache.from_config(parse(LoadingConfig, given, origin="--cache-dir and --cache-gb"))


def name_of_flag(flag: str) -> str:
    """The setting that a flag is named after: "quality" of "--quality", "quotes" of "--no-quotes"."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


def as_settings(flag: str, value: str, settings: Iterable[Setting]) -> list[str]:
    """The settings that may be meant by a flag that a command does not have, written as it takes them.

    Example:
        "--quality", "90" is ["quality=90"], "--keep", "id" is ["keep=[id]"], "--no-quotes" is ["quotes=false"],
        "--train.lr", "1e-3" is ["train.lr=1e-3"].
    """
    known = {one.name: one for one in settings}
    found: list[str] = []
    wanted = name_of_flag(flag)
    for name in [wanted] if wanted in known else names_alike(wanted, known):
        if known[name].values == TRUE_OR_FALSE:
            value = "false" if flag.startswith("--no-") else "true"
        found.append(f"{name}=[{value}]" if known[name].values.startswith("[") else f"{name}={value}")
    return found


def _settings(kind: type[Settings]) -> dict[str, Setting]:
    return {one.name: one for section in describe(kind) for one in section.settings}


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
