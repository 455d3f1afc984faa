"""The `mmdata` command. Each command is a file of data/, model/ or machine/, imported only when the command runs.

Such a file has `add(parser)`, which says what the command takes, and `run(options)`, which does it and returns the exit
code. What is slow to import is imported in `run`, after paths have been looked at: a wrong one is told at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from mmdata.errors import ConfigError, did_you_mean, explain, printable
from mmdata.version import VERSION

GROUPS = {
    "From images and captions to a model": {
        "data/init": "write a config that trains, from images and captions",
        "data/convert": "make shards with an index from a raw corpus, or from shards",
        "data/index": "index WebDataset tars; no tar is changed",
        "model/train": "train a dual encoder on shards; the same command resumes a run",
        "model/report": "write an HTML page about a corpus, about runs, and about what a model finds",
        "model/export": "save a trained model for transformers, open_clip or ONNX",
    },
    "Data": {
        "data/plan": "show steps, shapes and padding of an epoch; no image is read",
        "data/verify": "hash every shard, and compare it with its index and the manifest",
        "data/join": "match tables with an index by key, once",
        "data/duplicates": "find near copies, and leaks into other shards",
        "data/push": "share a folder of shards, on the Hugging Face hub or on S3",
        "data/replay": "make one row as the loader does, stage by stage",
    },
    "Models": {
        "model/evaluate": "score a trained model on pairs, classes and compositional tests",
        "model/neighbours": "groups of near neighbours, which data.groups makes batches of",
    },
    "This machine and mmdata": {
        "machine/doctor": "check this machine, and say what to fix",
        "machine/bench": "measure a config's loader, and what would make it faster",
        "machine/settings": "show what each setting of a config means, and its default",
        "machine/demo": "run the whole way once: render, convert, train, evaluate, report",
    },
}
"""All commands by purpose, each with its summary: `mmdata init` runs data/init.py."""
COMMANDS = {file.partition("/")[2]: file for group in GROUPS.values() for file in group}
"""The file of each command in this folder."""
UNDER_TORCHRUN = ("evaluate", "train")
"""Commands whose work several ranks share."""
COUNTS_CAPTIONS = ("convert", "index", "init", "plan", "report")
"""Commands that tokenize in one process alone, and so with all cores."""
LINE_END = "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        words: its name and its arguments; None takes those of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: the arguments are wrong (2), or only help was asked for (0).
    """
    return exit_code(partial(_dispatch, list(sys.argv[1:] if words is None else words)))


def exit_code(program: Callable[[], int | None]) -> int:
    """Run a program: an expected error becomes one line on stderr, and the code 2.

    MMDATA_TRACEBACK=1 shows where it was raised.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # file names may not be valid text
    try:
        code = program() or 0
        sys.stdout.flush()  # `mmdata … > file` on a full disk fails in this line, not after the code was chosen
        return code
    except BrokenPipeError:  # `mmdata … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
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
        return 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(VERSION)
        return 0
    name = words[0]
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"no command '{name}'{meant}")
    if name not in UNDER_TORCHRUN:
        _check_alone(name)
    if name not in COUNTS_CAPTIONS:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mmdata.processes import ignore_warnings_of_pillow

    ignore_warnings_of_pillow()
    command, options = parsed(words)
    return command.run(options)


def parsed(words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The file of a command, and its options; a mistake in them ends the program."""
    from mmdata.cli.parser import Parser

    command = import_module(f"mmdata.cli.{COMMANDS[words[0]].replace('/', '.')}")
    parser = Parser(words[0], command.__doc__)
    command.add(parser)
    options = parser.parse(words[1:])
    return command, options


def _help() -> str:
    lines = ["usage: mmdata COMMAND ..."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {file.partition('/')[2]:12}{said}" for file, said in group.items())]
    return LINE_END.join([*lines, "", "'mmdata COMMAND --help' describes one command.", ""])


def _check_alone(name: str) -> None:
    """Raise a ConfigError if torchrun started this process as one of several ranks.

    Each rank would do the whole work, and all would write the same files.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and "RANK" in os.environ:
        raise ConfigError(
            f"mmdata {name} is one process, and torchrun started {ranks} of it (WORLD_SIZE): start it without "
            "torchrun, or unset WORLD_SIZE"
        )


def _name_output(error: OSError) -> None:
    """Name standard output in an error that names no file, if standard output cannot be written."""
    try:
        print(flush=True)  # an unbuffered stream does not remember a failed write; only another write tells
    except OSError:
        error.filename = "standard output"
        # Python flushes again at exit, and would then exit with code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
