"""Run by test_output: disturbs conversions at every operation that makes something durable, and repeats them.

They are killed, really, or the operation fails; or the system lets no file grow beyond some size, so that writes are
short and then fail, whoever makes them.

usage: killed.py TABLE FOLDER. Prints a JSON object: how many places there were, and what was wrong at each.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmdata.cli.data.index import trainer
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.index import build_index
from mmdata.index.verify import verify

OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make(table: Path, out: Path, **settings: Any) -> None:
    overwrite = settings.pop("overwrite", False)
    convert(table, out, ConvertConfig(shard_rows=2, **settings), engine=threads(1), overwrite=overwrite)


def in_child(action: Callable[[], None]) -> int:
    """Exit status of a forked process that ran `action`; 9 when it failed, 8 when it was disturbed and did not."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except (OSError, DataError):
            os._exit(9)
        os._exit(8 if disturbances else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


disturbances: list[int] = []
"""Operations of this process that were disturbed."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def before(number: int, disturb: Callable[[], None]) -> None:
    """This process is disturbed before its `number`-th operation."""
    left = number

    def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                disturbances.append(number)
                disturb()
            return operation(*args, **options)

        return wrapped

    for name in OPERATIONS:
        setattr(os, name, wrap(getattr(os, name)))


def repeat(
    table: Path, out: Path, expected: dict[str, bytes], disturb: Callable[[], None], *, over: Path | None = None
) -> tuple[int, str]:
    """Disturb a conversion, run it again: (exit status, what is wrong)."""
    shutil.rmtree(out, ignore_errors=True)
    if over:
        shutil.copytree(over, out, symlinks=True)
    allowed = [expected] + ([content(over)] if over else [])

    def disturbed() -> None:
        disturb()
        make(table, out, overwrite=bool(over))

    status = in_child(disturbed)
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
    build_index(folder / "old", make_tokenizer=trainer(300))
    expected = content(folder / "undisturbed")
    report: dict[str, Any] = {"wrong": []}
    old = folder / "old"
    for scenario, disturb, step, over in (
        ("fresh", die, 1, None),
        ("overwrite", die, 1, old),
        ("failing", fail, 2, None),
    ):
        number, status = 0, -1
        while status:
            status, wrong = repeat(table, folder / "out", expected, partial(before, number, disturb), over=over)
            report["wrong"] += [f"{scenario}, operation {number}: {wrong}"] if wrong else []
            number += step
        report[scenario] = number - step
    report["full"] = 0
    for size in range(0, max(map(len, expected.values())), 512 + 7):
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
        status, wrong = repeat(table, folder / "out", expected, limit)
        report["full"] += status == 9
        report["wrong"] += [f"files of {size} bytes: {wrong}"] if wrong else []
    print(json.dumps(report))


if __name__ == "__main__":
    main()
