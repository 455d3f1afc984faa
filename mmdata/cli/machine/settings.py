"""mmdata settings: what each setting of a config means, what it may be, and its default.

mmdata settings                                    every setting in a line
mmdata settings data.loading                       a section; also one setting, as data.seed or num_workers
mmdata settings --schema > mmdata.schema.json      for editors: put this line at the top of a config
                                                   # yaml-language-server: $schema=mmdata.schema.json
mmdata settings --markdown                         the page docs/settings.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from typing import TYPE_CHECKING

from mmdata.errors import ConfigError

if TYPE_CHECKING:
    from mmdata.config.describe import Section


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a section or a setting; default: all, in a line each")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="all settings as a page in Markdown")
    form.add_argument("--schema", action="store_true", help="the JSON schema of a config, for editors")


def run(arguments: argparse.Namespace) -> int:
    """Print settings."""
    if arguments.name and (arguments.markdown or arguments.schema):
        raise ConfigError("--markdown and --schema are of all settings: leave NAME out")
    from mmdata.config.describe import find_sections, json_schema, markdown

    if arguments.markdown:
        print(markdown(), end="")
    elif arguments.schema:
        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    else:
        print_settings(find_sections(arguments.name), briefly=arguments.name is None)
    return 0


def print_settings(sections: list[Section], *, briefly: bool) -> None:
    """Print sections: briefly a line for each setting, otherwise all that is known of it."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 110)
    for section in sections:
        print(f"\n{section.title}")
        print(textwrap.fill(section.meaning, width, initial_indent="  ", subsequent_indent="  "))
        names = max((len(one.name) for one in section.settings), default=0)
        for one in section.settings:
            value = f"{one.values}; {one.default}" if one.default else one.values
            if briefly:
                line = textwrap.shorten(value, max(20, width - names - 4), placeholder=" …")
                print(f"{'↻' if one.may_change else ' '} {one.name:{names}}  {line}")
                continue
            changes = "; may change when a run is resumed" if one.may_change else ""
            print(f"\n  {one.name}: {value}{changes}")
            print(textwrap.fill(one.meaning, width, initial_indent="      ", subsequent_indent="      "))
    if briefly:
        print("\n↻ may change when a run is resumed")
        print("`mmdata settings NAME` says what a section or a setting means: mmdata settings data.loading")
