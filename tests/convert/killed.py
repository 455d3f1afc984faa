"""Run by test_output: kills conversions, really, before every operation that makes something durable, and repeats them.

usage: killed.py TABLE FOLDER. Prints a JSON object: how many places there were, and what was wrong at each.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.engines import threads
from mmdata.shards.verify import verify

OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "timings.parquet"
    }


def make(table: Path, out: Path, **settings: Any) -> None:
    overwrite = settings.pop("overwrite", False)
    convert(table, out, ConvertConfig(shard_rows=2, **settings), engine=threads(1), overwrite=overwrite)


def in_child(action: Callable[[], None]) -> int:
    """Exit status of a forked process that ran `action`; 9 when it failed, negative when a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError:
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_before(number: int) -> None:
    """This process is killed before its `number`-th operation."""
    left = number

    def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return operation(*args, **options)

        return wrapped

    for name in OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))


def disturb(table: Path, out: Path, expected: dict[str, bytes], number: int, *, over: Path | None) -> tuple[int, str]:
    """Kill a conversion before operation `number`, run it again: (exit status, what is wrong)."""
    shutil.rmtree(out, ignore_errors=True)
    if over:
        shutil.copytree(over, out)
    allowed = [expected] + ([content(over)] if over else [])

    def killed() -> None:
        kill_before(number)
        make(table, out, overwrite=bool(over))

    status = in_child(killed)
    if (out / "__mmdata__/manifest.json").exists():
        if problems := verify(out):
            return status, f"published and broken: {problems[0]}"
        public = {name: data for name, data in content(out).items() if not name.startswith(".mmdata-convert/")}
        if public not in allowed:
            return status, f"published neither the old nor the new: {sorted(public)}"
    make(table, out, overwrite=bool(over))
    return status, "" if content(out) == expected else "the repeated run differs from the undisturbed one"


def main() -> None:
    table, folder = Path(sys.argv[1]), Path(sys.argv[2])
    make(table, folder / "undisturbed")
    make(table, folder / "old", min_side=21)
    expected = content(folder / "undisturbed")
    report: dict[str, Any] = {"wrong": []}
    for scenario, over in (("fresh", None), ("overwrite", folder / "old")):
        number, status = 0, -signal.SIGKILL
        while status == -signal.SIGKILL:
            status, wrong = disturb(table, folder / "out", expected, number, over=over)
            report["wrong"] += [f"{scenario}, operation {number}: {wrong}"] if wrong else []
            number += 1
        report[scenario] = number - 1
        report["wrong"] += [f"{scenario}: ended with {status}"] if status else []

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        make(table, folder / "full")

    report["full"] = in_child(full)
    report["after full"] = sorted(content(folder / "full"))
    make(table, folder / "full")
    report["wrong"] += [] if content(folder / "full") == expected else ["after a full disk: differs"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
