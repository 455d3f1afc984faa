"""The arguments of a command: a mistake is one line, with the option or the spelling that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mmdata.errors import did_you_mean, printable

SETTING = "section.key=value"
"""How the help of a command shows the settings that it takes."""


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
        """The options of a command line; a setting may have dashes, as Lightning and transformers write it."""
        return self.parse_intermixed_args(_without_dashes(words) if self._takes_settings() else words)

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
        name, _, value = word.partition("=")
        near = did_you_mean(name, known)
        if near or not self._takes_settings():
            return near
        from mmdata.config.describe import settings_named

        if found := settings_named(name.lstrip("-").replace("-", "_")):
            lines = [f"{setting}={value or 'VALUE'}" for setting in found]
            return f"; write it as {' or '.join(lines)}"
        return "; settings are given with their section, as in train.lr=1e-3"

    def _takes_settings(self) -> bool:
        return any(SETTING in str(action.metavar) for action in self._actions)


def _without_dashes(words: Sequence[str]) -> list[str]:
    """The words of a command line, in which "--train.lr=1e-3" and "--train.lr", "1e-3" are "train.lr=1e-3".

    No option of a command has a dot, so these can only be settings.
    """
    plain: list[str] = []
    waits_for_value = False
    for word in words:
        name = word.removeprefix("--")
        if waits_for_value and name == word:
            plain[-1] += f"={word}"
            waits_for_value = False
        else:
            is_setting = name != word and "." in name.partition("=")[0]
            plain.append(name if is_setting else word)
            waits_for_value = is_setting and "=" not in name
    return plain
