"""The `mmdata` command. `mmdata convert …` and `python tools/convert.py …` run the same file of tools/."""

from __future__ import annotations

import argparse
import ast
import io
import os
import runpy
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mmdata.errors import ConfigError, did_you_mean, explain, printable
from mmdata.files import shipped
from mmdata.processes import ignore_warnings_of_pillow

LINE_END = "\n"
SETTING = "section.key=value"
"""How the help of a command shows the settings that it takes."""


def commands() -> list[str]:
    """Names of all programs in tools/."""
    return sorted(path.stem for path in shipped("tools").glob("*.py"))


def main() -> None:
    """Entry point of the console script: `mmdata COMMAND [ARGUMENT ...]`."""
    names = commands()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        run(partial(_describe, names))
    if sys.argv[1] == "--version":
        from importlib.metadata import version

        print(version("mmdata"))
        raise SystemExit(0)
    name = sys.argv.pop(1)
    if name not in names:
        meant = did_you_mean(name, names) or f"; the commands are {', '.join(names)}"
        print(f"error: no command '{printable(name)}'{meant}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[0] = f"mmdata {name}"
    try:
        runpy.run_path(str(shipped("tools", f"{name}.py")), run_name="__main__")
    except KeyboardInterrupt:  # during the program's imports; later `run` catches it
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _describe(names: list[str]) -> int:
    """Print all commands; returns 2 if none was given."""
    print("usage: mmdata COMMAND ...\n")
    for name in names:
        print(f"  {name:12}{_summary(name)}")
    print("\n'mmdata COMMAND --help' describes one command.")
    return 0 if len(sys.argv) > 1 else 2


def _summary(name: str) -> str:
    """First sentence of a program's docstring, without its name."""
    text = ast.get_docstring(ast.parse(shipped("tools", f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].removeprefix(f"mmdata {name}: ")


class Parser(argparse.ArgumentParser):
    """The arguments of a command: a mistake is one line, with the option or the spelling that was probably meant.

    Args:
        name: of the command: "train".
        description: the docstring of its file.

    Example:
        parser = Parser("train", __doc__)
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

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """As argparse's; a setting may have dashes, as Lightning and transformers write it: --train.lr=1e-3."""
        words, *others = given or [named.pop("args", None)]
        words = list(sys.argv[1:] if words is None else words)
        return super().parse_known_args(_without_dashes(words) if self._takes_settings() else words, *others, **named)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong in one line, and end with exit code 2."""
        word = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if word.startswith("-"):
            message = f"no option '{word}'{self._meant(word)}"
        elif word:
            message = f"unexpected '{word}'"
        more = "" if message.endswith("?") else f"; `{self.prog} --help` shows the arguments"
        print(f"error: {printable(message)}{more}", file=sys.stderr)
        raise SystemExit(2)

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


def _without_dashes(words: list[str]) -> list[str]:
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


def run(program: Callable[[], int | None], *, under_torchrun: bool = False) -> NoReturn:
    """Run a program of tools/: an expected error becomes one line on stderr and exit code 2.

    MMDATA_TRACEBACK=1 shows where it was raised.

    Args:
        program: the `main` of the file.
        under_torchrun: whether several ranks can share the work. If not, a start with torchrun is an error: each rank
            would do the whole work, and all would write the same files.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # file names may not be valid text
    ignore_warnings_of_pillow()
    try:
        if not under_torchrun:
            _check_alone()
        code = program() or 0
        sys.stdout.flush()  # `mmdata … > file` on a full disk fails in this line, not after the exit code was chosen
        raise SystemExit(code)
    except BrokenPipeError:  # `mmdata … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, ImportError, MemoryError) as error:
        if os.environ.get("MMDATA_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            _name_output(error)
        message = explain(error) if isinstance(error, OSError) else str(error)
        if isinstance(error, MemoryError):
            message = f"out of memory ({message or 'MemoryError'}); MMDATA_TRACEBACK=1 shows where"
        print(f"error: {printable(message, keep=LINE_END)}", file=sys.stderr)
        sys.last_value = error  # as the interpreter sets it: ranks look at it when they end
        raise SystemExit(2) from error


@contextmanager
def progress_in_bytes(title: str) -> Generator[Callable[[int, int], None], None, None]:
    """A progress bar on a terminal's stderr. The value is called with (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _name_output(error: OSError) -> None:
    """Name standard output in an error that names no file, if standard output cannot be written."""
    try:
        print(flush=True)  # an unbuffered stream does not remember a failed write; only another write tells
    except OSError:
        error.filename = "standard output"
        # Python flushes again at exit, and would then exit with code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_alone() -> None:
    """Raise a ConfigError if torchrun started this process as one of several ranks."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and "RANK" in os.environ:
        name = Path(sys.argv[0]).stem.removeprefix("mmdata ")
        raise ConfigError(
            f"mmdata {name} is one process, and torchrun started {ranks} of it (WORLD_SIZE): start it without "
            "torchrun, or unset WORLD_SIZE"
        )
