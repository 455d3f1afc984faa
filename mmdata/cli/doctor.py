"""mmdata doctor: is this machine fit? What needs doing, with remedies; exit code 1 where something does not work.

mmdata doctor
mmdata doctor -v
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmdata.inspect.doctor import Check

STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
NEEDS_DOING = ("fail", "warn")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="all findings, also what is as it should be")


def run(options: argparse.Namespace) -> int:
    """Print what needs doing, or all findings; 1 if something does not work, else 0."""
    from mmdata.inspect.doctor import examine

    checks = examine()
    console = Console(highlight=False, markup=False)
    faults = [check for check in checks if check.status in NEEDS_DOING]
    if options.verbose:
        console.print(table_of(checks))
    for check in [] if options.verbose else faults:
        console.print(
            Text.assemble((check.status, STYLES[check.status]), f"  {check.name}: {check.found}"), soft_wrap=True
        )
        console.print(f"      {check.remedy}", soft_wrap=True)
    print_summary(console, checks, faults)
    return 1 if any(check.status == "fail" for check in faults) else 0


def table_of(checks: list[Check]) -> Table:
    """All findings."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "remedy"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, STYLES[check.status]), Text(check.name), Text(check.found), Text(check.remedy))
    return table


def print_summary(console: Console, checks: list[Check], faults: list[Check]) -> None:
    """One line: that everything fits, or how much does not."""
    if not faults:
        console.print(f"everything fits ({len(checks)} checks; `mmdata doctor -v` shows them)")
        return
    failed = sum(check.status == "fail" for check in faults)
    console.print(
        f"\n{len(checks)} checks: {failed} failed (does not work), {len(faults) - failed} warnings (works, with a loss)"
    )
