"""mmdata doctor: is this machine fit? Six checks, with remedies; exit code 1 where something does not work.

mmdata doctor
mmdata doctor -v                # also what torch says of the environment, for a report of a bug
"""

from __future__ import annotations

import argparse

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="also versions, system, processor and GPUs")


def run(options: argparse.Namespace) -> int:
    """Print all findings; 1 if something does not work, else 0."""
    from rich.console import Console
    from rich.text import Text

    from mmdata.inspect.doctor import environment, examine

    console = Console(highlight=False, markup=False)
    if options.verbose:
        console.print(environment(), soft_wrap=True)
    checks = examine()
    for check in checks:
        line = Text.assemble((f"{check.status:4}", STYLES[check.status]), f"  {check.name}: {check.found}")
        console.print(line, soft_wrap=True)
        if check.remedy:
            console.print(f"      {check.remedy}", soft_wrap=True)
    return 1 if any(check.status == "fail" for check in checks) else 0
