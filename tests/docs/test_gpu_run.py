"""What `make gpu` keeps of programs that are ended: by their limit, or with the script itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.rehearsal import FOR_NOTHING, command, environment, rehearsed, results
from tests.programs import PATIENCE_S, Program
from tests.waiting import wait_until

PROGRAMS = ("gpu_train.py", "render.py")


def running(folder: Path, setting: str = "") -> list[str]:
    """Command lines of the programs that have `environment(folder)`, and this setting in their environment."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # has ended, or is another user's
            settings = (process / "environ").read_bytes()
            if str(folder / "blocked").encode() in settings and setting.encode() in settings:
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_kill_in_the_middle_keeps_what_was_measured_and_ends_all_that_was_started(tmp_path: Path):
    words = command(tmp_path / "out", "--parts", "loss", "train")
    compiled = f"TORCHINDUCTOR_CACHE_DIR={tmp_path / 'out' / 'compiled'}"
    started_in = tmp_path / "tmp"
    started_in.mkdir()
    settings = environment(tmp_path) | {"TMPDIR": str(started_in)}
    settings.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with Program(words, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("loss: "))
        # A part, and a program that it has started: they share what is compiled.
        while not all(any(name in line for line in running(tmp_path, compiled)) for name in PROGRAMS):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not running(tmp_path))
    # Killed: a part that ends by itself removes its folder.
    assert len(list(started_in.glob("mmdata-gpu-train-*"))) == 1
    rows = results(tmp_path / "out")["rows"]
    assert rows
    assert {row["part"] for row in rows} == {"loss"}


@pytest.mark.sweep
def test_a_part_that_takes_longer_than_its_budget_says_so_and_the_next_begins(tmp_path: Path):
    _, rows = rehearsed(tmp_path, FOR_NOTHING, "--parts", "step", "train", "--budget-s", "0.2")
    late = "took longer than its budget; printed last: no line but rows"
    assert [(part, row["error"]) for part, its in rows.items() for row in its] == [("step", late), ("train", late)]


class Clock:
    """In place of threading.Timer: fires when the test says so."""

    def __init__(self, seconds: float, fire: Callable[[], None]) -> None:
        self.fire = fire

    def start(self) -> None: ...

    def cancel(self) -> None: ...


TESTS = """
import time
from pathlib import Path

def test_adds():
    assert 1 + 1 == 2

def test_is_wrong():
    assert 1 + 1 == 3

def test_hangs():
    Path(__file__).with_name("hangs").touch()
    time.sleep(1000)
"""


@pytest.mark.parametrize("what", ["tests", "rows"])
def test_what_was_printed_before_the_limit_is_kept(
    what: str, script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = script("gpu_run")
    clocks: list[Clock] = []

    def timer(seconds: float, fire: Callable[[], None]) -> Clock:
        clocks.append(Clock(seconds, fire))
        return clocks[0]

    monkeypatch.setattr(run, "threading", SimpleNamespace(Timer=timer, Event=threading.Event))
    (tmp_path / "test_some.py").write_text(TESTS)
    own = {
        "tests": [sys.executable, "-m", "pytest", "-vv", "-c", "/dev/null", str(tmp_path / "test_some.py")],
        "rows": ["sh", "-c", f"""echo '{{"name": "a"}}'; echo half done >&2; touch {tmp_path}/hangs; sleep 1000"""],
    }[what]
    program = run.Program(part="x", budget_s=0.0, command=own, tests="test_some.py" * (what == "tests"))
    rows: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: rows.extend(run.rows_of(program, 0.0, tmp_path / "printed.txt", {})))
    reader.start()
    while not clocks or not (tmp_path / "hangs").exists():
        assert reader.is_alive()
        time.sleep(0.01)
    clocks[0].fire()
    reader.join()
    printed = (tmp_path / "printed.txt").read_text()
    if what == "rows":
        assert rows[0] == {"name": "a"}
        assert rows[1]["name"].startswith("(not finished) sh -c ")
        assert rows[1]["error"] == "took longer than its budget; printed last: half done"
        assert '{"name": "a"}\n' in printed
        assert "\nhalf done\n" in printed
        return
    assert [row["name"] for row in rows] == ["test_some.py"]
    assert re.fullmatch(
        r"took longer than its budget; printed last: \S*::test_hangs; 1 passed, 1 failed; "
        r"\S*::test_is_wrong FAILED +\[ *66%\]",
        rows[0]["error"],
    ), rows[0]["error"]
    assert "::test_adds PASSED" in printed


AT_ITS_END = """
import atexit, os, re, time
from pathlib import Path

@atexit.register
def warn():
    # Standard error goes straight into the file, and what pytest printed through a thread that may be late.
    while not re.search(r" in [\\d.]+s", Path(__file__).with_name("printed.txt").read_text()):
        time.sleep(0.01)
    os.write(2, b"[W1126 09:12:01 ProcessGroupNCCL.cpp:1] destroy_process_group() was not called\\n")

"""


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        ("def test_adds(): ...", {"result": r"1 passed, 0 skipped; in [\d.]+s"}),
        (
            "def test_fails(): assert 0",
            {"error": r"1 failed in [\d.]+s; FAILED \S*test_some.py::test_fails - assert 0"},
        ),
    ],
)
def test_the_result_of_tests_is_pytests_line_though_a_library_warns_later(
    tests: str, found: dict[str, str], script: Callable[[str], Any], tmp_path: Path
):
    run = script("gpu_run")
    (tmp_path / "test_some.py").write_text(AT_ITS_END + tests)
    own = [sys.executable, "-m", "pytest", "-vv", "-c", "/dev/null", str(tmp_path / "test_some.py")]
    program = run.Program(part="x", budget_s=0.0, command=own, tests="test_some.py")
    printed = tmp_path / "printed.txt"
    (row,) = run.rows_of(program, time.monotonic() + PATIENCE_S, printed, {})
    assert printed.read_text().splitlines()[-1].endswith("destroy_process_group() was not called")
    ((kind, words),) = found.items()
    assert row.keys() == {"name", kind}
    assert re.fullmatch(words, row[kind]), row[kind]


def test_the_result_of_tests_that_take_over_a_minute_gives_seconds_only(script: Callable[[str], Any]):
    found = script("gpu_run").in_words("3 passed in 65.43s (0:01:05)")
    assert found == "3 passed, 0 skipped; in 65.43s"


def test_bytes_that_are_no_text_lose_no_row(script: Callable[[str], Any], tmp_path: Path):
    run = script("gpu_run")
    own = ["sh", "-c", r"""printf 'a\377\n'; echo '{"name": "a"}'; printf 'b\377\n' >&2; exit 3"""]
    program = run.Program(part="x", budget_s=0.0, command=own)
    rows = list(run.rows_of(program, time.monotonic() + PATIENCE_S, tmp_path / "printed.txt", {}))
    assert [row["name"] for row in rows] == ["a", f"(not finished) {program.name}"]
    assert rows[1]["error"] in ("ended with 3: a\ufffd", "ended with 3: b\ufffd")  # whichever came last
