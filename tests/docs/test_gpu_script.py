"""`make gpu`, rehearsed on a CPU in small: without webdataset, stopped in the middle, with programs too slow, and too
little memory.
"""

from __future__ import annotations

import importlib
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

from mmdata.train.run.sessions import git_commit
from tests.programs import Program, run_program

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "benchmarks" / "gpu.py"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("gpu_report")


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--out", str(out), "--device", "cpu", "--small", *words]


def environment(folder: Path) -> dict[str, str]:
    """One in which webdataset cannot be imported."""
    (folder / "blocked").mkdir()
    (folder / "blocked" / "webdataset.py").write_text("raise ImportError('not on this machine')\n")
    return os.environ | {"PYTHONPATH": f"{folder / 'blocked'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_every_part_gives_rows_without_webdataset(tmp_path: Path, report: Any):
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
    assert re.fullmatch(
        r"\d+ passed, \d+ skipped( \(what they need is not here\))?"
        r"(; \d+ left out, since they need no GPU)?; in [\d.]+s",
        of_part["tests"][0]["result"],
    )
    assert [row["name"].split(",")[0] for row in of_part["loss"]] == ["tiled", "open_clip"]
    assert all(row["samples_per_s"] > 0 for row in (*of_part["step"], *of_part["loader"]))
    assert [row["name"] for row in of_part["step"]] == [
        "tiny, padded to 77, eager",
        "tiny, padded to 77, compiled",
        "tiny, padded to 77, compiled, mining top_k 64",
        "tiny, bucketed, compiled",
    ]
    assert "aten::" in (tmp_path / "out" / "profile.txt").read_text()
    fed = [row["name"] for row in of_part["loader"] if "share_of_synthetic" in row]
    assert fed == [f"tiny fed by the loader, {kind}" for kind in ("threads", "2 processes", "threads, decode: device")]
    assert str(ROOT) not in json.dumps([row["command"] for row in found["rows"]])
    page = (tmp_path / "out" / "results.md").read_text()
    assert page.count("\n## ") == 5
    assert "\n**A rehearsal: small models, few rows. Its figures say nothing about a GPU.**\n" in page
    assert "\n- `share_of_synthetic`: " in page
    assert "Aims" not in page, "of small models they say nothing"
    assert "\n- eager: without torch.compile\n" in page
    header = page.splitlines()[0]
    assert f", cores {found['machine']['cores']}, load {found['machine']['load']}, " in header
    commit = git_commit(ROOT, tracked="pyproject.toml")
    assert commit is None or f", commit {commit}, " in header
    for row in found["rows"]:
        assert f"| {row['name']} |" in page


def test_aims_are_judged_by_the_rows(report: Any):
    rows: list[dict[str, Any]] = [
        {"name": "tiled, 65,536 x 512", "ms": 90.0, "memory_mb": 100.0},
        {"name": "open_clip, 65,536 x 512", "ms": 100.0, "memory_mb": 7900.0},
        {"name": "tiled, 1,048,576 x 512", "ms": 9000.0, "memory_mb": 11900.0},
        {"name": "vit_b_16, padded to 77, eager", "samples_per_s": 2000.0, "share_of_peak": "unknown peak"},
        {"name": "vit_b_16, padded to 77, compiled", "samples_per_s": 2500.0, "share_of_peak": 0.41},
        {"name": "vit_b_32, padded to 77, compiled", "samples_per_s": 1000.0, "step_ms": 100.0},
        {"name": "vit_b_32, padded to 77, compiled, mining top_k 64", "samples_per_s": 940.0, "step_ms": 53.0},
        {"name": "vit_b_32, bucketed, compiled", "samples_per_s": 1310.0, "step_ms": 76.0},
        {"name": "vit_l_14, compiled", "error": "took longer than its budget"},
        {"name": "vit_b_32 fed by the loader, threads", "share_of_synthetic": 0.9},
        {"name": "vit_b_32 fed by the loader, a process", "share_of_synthetic": 0.985},
    ]
    page = report.page("a GPU", [{"part": "step", "command": "x", **row} for row in rows], rehearsal=False)
    assert "rehearsal" not in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert lines[1:14] == [
        "| time of the tiled loss ÷ open_clip's under bf16, 8,192 × 512 | ≤ 1 |  | not measured |",
        "| time of the tiled loss ÷ open_clip's under bf16, 32,768 × 512 | ≤ 1 |  | not measured |",
        "| time of the tiled loss ÷ open_clip's under bf16, 65,536 × 512 | ≤ 1 | 0.9 | reached |",
        "| memory of open_clip's loss ÷ the tiled one's, 65,536 × 512 | ≥ 80 | 79 | **not reached** |",
        "| memory of the tiled loss, 1,048,576 × 512, GB | ≤ 12 | 11.9 | reached |",
        "| ViT-B/32, share of the peak | ≥ 35.0 % |  | not measured |",
        "| ViT-B/16, share of the peak | ≥ 40.0 % | 41.0 % | reached, by vit_b_16, padded to 77, compiled |",
        "| ViT-B/16, samples/s padded to 77 | ≥ 3,200 | 2,500 | **not reached**, by vit_b_16, padded to 77, compiled |",
        "| ViT-L/14, share of the peak | ≥ 40.0 % |  | not measured |",
        "| ViT-L/14, samples/s padded to 77 | ≥ 750 |  | not measured |",
        "| ViT-B/32, samples/s bucketed ÷ padded to 77 | ≥ 1.3 | 1.31 | reached |",
        "| ViT-B/16, samples/s compiled ÷ eager | ≥ 1.25 | 1.25 | reached |",
        "| ViT-B/32, mining (top_k 64): longer step | ≤ 5.0 % | 6.4 % | **not reached** |",
    ]
    share = "| ViT-B/32 fed by the loader ÷ on one batch | ≥ 0.98 | 0.985 | reached, "
    assert lines[14] == f"{share}by vit_b_32 fed by the loader, a process |"


def test_ratio_of_memory_that_is_none_is_empty(tmp_path: Path):
    form = ["--rows", "8", "--dim", "8", "--forms", "tiled", "--rounds", "1"]
    program = [
        "import loss_memory as script",
        "script.measure = lambda form, rows, given: {'bytes': 40_000, 'seconds': 0.1, 'value': 1.0}",
        "script.main()",
    ]
    done = run_program(
        [sys.executable, "-c", "\n".join(program), "--json", "--one-process", *form],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPT.parent}"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["memory_over_tiled"] is None


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
