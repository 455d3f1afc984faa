"""`make gpu`, rehearsed on a CPU in small: without webdataset, stopped in the middle, with programs too slow, and too
little memory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import Program, run_program

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "benchmarks" / "gpu.py"


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--out", str(out), "--device", "cpu", "--small", *words]


def environment(folder: Path) -> dict[str, str]:
    """One in which webdataset cannot be imported."""
    (folder / "blocked").mkdir()
    (folder / "blocked" / "webdataset.py").write_text("raise ImportError('not on this machine')\n")
    return os.environ | {"PYTHONPATH": f"{folder / 'blocked'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_every_part_gives_rows_without_webdataset(tmp_path: Path):
    done = run_program(
        command(tmp_path / "out"), capture_output=True, text=True, env=environment(tmp_path), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    assert found["machine"]["torch"] == torch.__version__
    assert list(dict.fromkeys(row["part"] for row in found["rows"])) == ["tests", "loss", "step", "loader", "train"]
    assert [row for row in found["rows"] if "error" in row] == []
    of_part = {
        part: [row for row in found["rows"] if row["part"] == part] for part in ("tests", "loss", "step", "loader")
    }
    assert re.match(r"\d+ (skipped|passed)", of_part["tests"][0]["result"])
    assert [row["name"].split(",")[0] for row in of_part["loss"]] == ["tiled", "open_clip"]
    assert all(row["samples_per_s"] > 0 for row in (*of_part["step"], *of_part["loader"]))
    fed = [row["name"] for row in of_part["loader"] if "share_of_synthetic" in row]
    assert fed == ["tiny fed by the loader, threads", "tiny fed by the loader, 2 processes"]
    assert str(ROOT) not in json.dumps([row["command"] for row in found["rows"]])
    page = (tmp_path / "out" / "results.md").read_text()
    assert page.count("\n## ") == 5
    for row in found["rows"]:
        assert f"| {row['name']} |" in page


def running(folder: Path) -> list[str]:
    """Command lines of the programs that have `environment(folder)`."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # has ended, or is another user's
            if str(folder / "blocked").encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_kill_in_the_middle_keeps_what_was_measured_and_ends_all_that_was_started(tmp_path: Path):
    words = command(tmp_path / "out", "--parts", "loss", "train")
    started_in = tmp_path / "tmp"
    started_in.mkdir()
    settings = environment(tmp_path) | {"TMPDIR": str(started_in)}
    with Program(words, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("loss: "))
        deadline = time.monotonic() + 60
        while not any("render.py" in line for line in running(tmp_path)):  # a program that a part has started
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    while left := running(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    # Killed: a part that ends by itself removes its folder.
    assert len(list(started_in.glob("mmdata-gpu-train-*"))) == 1
    rows = results(tmp_path / "out")["rows"]
    assert rows
    assert {row["part"] for row in rows} == {"loss"}


def test_a_loss_for_which_there_is_too_little_memory_says_how_much_it_wanted(tmp_path: Path):
    form = ["--rows", str(1 << 23), "--dim", "1", "--forms", "open_clip"]
    done = run_program(
        [sys.executable, str(SCRIPT.with_name("loss_memory.py")), "--json", "--one-process", *form],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = "out of memory: wanted 281474976710656 bytes"  # 2^23 x 2^23 float32, more than a process can address
    assert [json.loads(line) for line in done.stdout.splitlines()] == 3 * [
        {"name": "open_clip, 8,388,608 x 1", "error": wanted}
    ]


def test_a_part_that_takes_longer_than_its_budget_says_so_and_the_next_begins(tmp_path: Path):
    words = command(tmp_path / "out", "--parts", "step", "train", "--budget-s", "0.2")
    done = run_program(words, capture_output=True, text=True, env=environment(tmp_path), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    late = "took longer than its budget"
    assert [(row["part"], row["error"]) for row in results(tmp_path / "out")["rows"]] == [
        ("step", late),
        ("train", late),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path):
    done = run_program(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "torch sees no GPU here: nothing is measured\n")
    assert not (tmp_path / "out").exists()
