"""mmdata doctor: is this machine fit? A table of findings with remedies; exit code 1 where something fails."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmdata.cli import Parser, run
from mmdata.inspect.doctor import examine

STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}


def main() -> int:
    """Print the table; 1 if a check fails, else 0."""
    Parser("doctor", __doc__).parse_args()
    checks = examine()
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "remedy"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, STYLES[check.status]), Text(check.name), Text(check.found), Text(check.remedy))
    console = Console()
    console.print(table)
    count = {status: sum(check.status == status for check in checks) for status in ("fail", "warn")}
    console.print(f"\n{len(checks)} checks: {count['fail']} failed, {count['warn']} warnings")
    return 1 if count["fail"] else 0


if __name__ == "__main__":
    run(main)
