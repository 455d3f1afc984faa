"""Runs one program of `make gpu`: gives the rows that it prints, and keeps all else that it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEEPER = ["sh", "-c", 'read _; kill -KILL "-$0"']
"""Waits until its standard input closes, then ends a process group."""
LATE = "took longer than its budget"
SUMMARY = re.compile(r"\d+ (passed|failed|skipped|error|deselected).* in [\d.]+s")
"""The line at the end of pytest."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that prints rows, lines of JSON; or pytest with the tests of one file.

    Args:
        part: to which its rows belong.
        budget_s: seconds that it may take, beyond what the programs before it left unused.
        command: that starts it.
        needs: modules that it imports and a machine may lack.
        tests: the file, if it is pytest.
    """

    part: str
    budget_s: float
    command: list[str]
    needs: list[str] = field(default_factory=list[str])
    tests: str = ""

    @property
    def name(self) -> str:
        """The command as one would type it in the checkout."""
        return shlex.join(self.command).replace(sys.executable, "python").replace(str(ROOT) + os.sep, "")


def rows_of(program: Program, end_s: float, printed: Path, settings: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The rows that a program prints; the last one says why it ended early, if it did.

    Args:
        program: to run.
        end_s: when it is ended, on the clock of `time.monotonic`.
        printed: a file to which all is added that the program prints, as it comes.
        settings: environment variables for it.
    """
    with printed.open("a+", encoding="utf-8", errors="replace") as output:
        output.write(f"\n$ {program.name}\n")
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            program.command,
            cwd=ROOT,
            env={**os.environ, **settings, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=output,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        # The other end of its input closes however this process ends. A signal at a parent's death (prctl) would reach
        # the program only, and not what that has started.
        keeper = subprocess.Popen([*KEEPER, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True)
        late = threading.Event()

        def end() -> None:
            late.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        clock = threading.Timer(max(0.0, end_s - time.monotonic()), end)
        clock.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output.write(line)
                output.flush()
                if (row := _row(line)) is not None:
                    yield row
            status = process.wait()
        finally:
            clock.cancel()
            with suppress(ProcessLookupError):  # also where this program is ended: none of its parts goes on
                os.killpg(process.pid, signal.SIGKILL)
            keeper.kill()
            keeper.communicate()
        output.seek(begin)
        lines = [line.strip() for line in output if line.strip()]
        if program.tests:
            yield {"name": program.tests, **_of_tests(lines, status, late=late.is_set())}
        elif late.is_set() or status:
            yield {"name": f"(not finished) {program.name}", "error": _why(lines, status, late=late.is_set())}


def _row(line: str) -> dict[str, Any] | None:
    """A row, if the line is one: the last line of a program that was ended may be cut."""
    with suppress(ValueError):
        return json.loads(line) if line.startswith("{") else None
    return None


def _why(lines: list[str], status: int, *, late: bool) -> str:
    last = next((line for line in reversed(lines) if not line.startswith("{")), "no line but rows")[:300]
    return f"{LATE}; printed last: {last}" if late else f"ended with {status}: {last}"


def _of_tests(lines: list[str], status: int, *, late: bool) -> dict[str, str]:
    """The result of pytest -v, or what it had come to when it was ended."""
    if late:
        count = Counter(found[1] for line in lines if (found := re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b", line)))
        failed = [line for line in lines if re.search(r" (FAILED|ERROR)\b", line)]
        so_far = ", ".join(f"{number} {word.lower()}" for word, number in count.items()) or "no test had ended"
        return {"error": "; ".join([_why(lines, status, late=True), so_far, *failed])[:2000]}
    # Not the last line: a library may warn as the program ends.
    last_lines = [line for line in lines if SUMMARY.search(line)] or lines or ["it printed nothing"]
    last = last_lines[-1].strip("= ")
    if status:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return {"error": "; ".join([last, *failed])[:2000]}
    return {"result": in_words(last)}


def in_words(summary: str) -> str:
    """The last line of pytest, with what its counts mean.

    Example:
        in_words("3 skipped, 40 deselected in 2.10s") gives "0 passed, 3 skipped (what they need is not here); 40 left
        out, since they need no GPU; in 2.10s".
    """
    count = {word: number for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
    seconds = summary.rpartition(" in ")[2].partition(" (")[0]  # from a minute on: 65.43s (0:01:05)
    skipped = f"{count['skipped']} skipped (what they need is not here)" if "skipped" in count else "0 skipped"
    left_out = f"; {count['deselected']} left out, since they need no GPU" if "deselected" in count else ""
    return f"{count.get('passed', 0)} passed, {skipped}{left_out}; in {seconds}"
