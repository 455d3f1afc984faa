"""The arguments of a command: a mistake is one line, with the option or the spelling that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mmdata.errors import did_you_mean, printable

SETTING, PLAIN_SETTING = "section.key=value", "key=value"
"""How the help of a command shows the settings that it takes: those of a config, or those of a conversion."""


class Parser(argparse.ArgumentParser):
    """The arguments of one command.

    Args:
        name: of the command: "train".
        description: the docstring of its file.
    """

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(
            prog=f"mmdata {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse's; it would call an argument with nargs="*", which may be left out, required."""
        if settings.get("nargs") == "*" and not names[0].startswith("-"):
            settings.setdefault("default", [])
        return super().add_argument(*names, **settings)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options of a command line."""
        self._words = list(words)
        return self.parse_intermixed_args(self._words)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in one line, and end with exit code 2."""
        word = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if word.startswith("-"):
            message = f"no option '{word}'{self._meant(word)}"
        elif word:
            message = f"unexpected '{word}'"
        more = "" if message.endswith("?") else f"; `{self.prog} --help` shows the arguments"
        self.exit(2, f"error: {printable(message)}{more}\n")

    def _meant(self, word: str) -> str:
        """The end of a message for an unknown option."""
        known = [option for action in self._actions for option in action.option_strings]
        option, _, value = word.partition("=")
        near = did_you_mean(option, known)
        if not self._takes(PLAIN_SETTING):
            return near
        # Imported here: it takes a part of a second.
        from mmdata.cli.flags import as_settings, name_of_flag
        from mmdata.config.describe import all_sections

        in_sections = self._takes(SETTING)
        settings = [one for section in all_sections() for one in section.settings if ("." in one.name) == in_sections]
        is_one = any(one.name.rpartition(".")[2] == name_of_flag(option) for one in settings)
        if near and not is_one:
            return near
        after = self._words[self._words.index(word) + 1 :][:1]
        value = value or next((one for one in after if not one.startswith("-")), "VALUE")
        if found := as_settings(option, value, settings):
            return f"; write it as {' or '.join(found)}"
        return f"; settings are given as {SETTING if in_sections else PLAIN_SETTING}"

    def _takes(self, settings: str) -> bool:
        return any(settings in str(action.metavar) for action in self._actions)
