"""`make gpu`, rehearsed on a CPU in small: without what a machine may lack, and with too little memory."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.train.log.provenance import git_commit
from mmdata.train.ranks import parallel
from tests.docs.rehearsal import FOR_NOTHING, FOR_THE_LOADER, ROOT, SCRIPT, environment, rehearsed, results
from tests.programs import PATIENCE_S, run_program


@pytest.fixture
def report(script: Callable[[str], Any]) -> Any:
    return script("gpu_report")


@pytest.mark.sweep
def test_loss_step_and_tests_run_on_a_machine_without_the_loaders_packages(tmp_path: Path):
    lines, rows = rehearsed(tmp_path, [*FOR_THE_LOADER, *FOR_NOTHING])
    assert lines[0] == (
        "runs: tests, loss, step; not: tests/loader/test_to_gpu.py, loader, train, for which xxhash, simplejpeg "
        "cannot be imported (how to bring them: the head of docs/benchmarks/gpu.py)"
    )
    assert list(rows) == ["tests", "loss", "step", "loader", "train"]
    errors = [row for part in rows.values() for row in part if "error" in row]
    assert [row["name"] for row in errors] == [
        "(not run) tests/loader/test_to_gpu.py",
        "(not run) python docs/benchmarks/gpu_loader.py --device cpu --small --model tiny",
        "(not run) python docs/benchmarks/gpu_train.py --device cpu --small",
    ]
    assert {row["error"] for row in errors} == {"cannot import xxhash, simplejpeg"}
    assert re.fullmatch(
        r"\d+ passed, \d+ skipped( \(what they need is not here\))?"
        r"(; \d+ left out, since they need no GPU)?; in [\d.]+s",
        rows["tests"][1]["result"],
    )
    assert [row["name"] for row in rows["loss"]] == ["tiled, 64 x 8", "open_clip, 64 x 8", "tiled, 128 x 8"]
    assert all(row["samples_per_s"] > 0 for row in rows["step"])
    assert [row["name"] for row in rows["step"]] == [
        "tiny, padded to 77, eager",
        "tiny, padded to 77, compiled",
        "tiny, padded to 77, compiled, mining top_k 64",
        "tiny, bucketed, compiled",
    ]
    assert "aten::" in (tmp_path / "out" / "profile.txt").read_text()
    assert "\n- eager: without torch.compile\n" in (tmp_path / "out" / "results.md").read_text()
    printed = (tmp_path / "out" / "printed.txt").read_text()
    assert "\ntests/train/test_host_copy.py::" in printed, "pytest names each test"


@pytest.mark.sweep
def test_loader_and_train_run_with_the_three_packages_that_they_need(tmp_path: Path):
    lines, rows = rehearsed(tmp_path, FOR_NOTHING, "--parts", "loader", "train")
    assert lines[0] == "runs: loader, train"
    assert list(rows) == ["loader", "train"]
    assert [row for part in rows.values() for row in part if "error" in row] == []
    assert all(row["samples_per_s"] > 0 for row in rows["loader"])
    fed = [row["name"] for row in rows["loader"] if "share_of_synthetic" in row]
    assert fed == [f"tiny fed by the loader, {kind}" for kind in ("2 processes", "threads")]
    found = results(tmp_path / "out")
    assert found["machine"]["torch"] == torch.__version__
    assert str(ROOT) not in json.dumps([row["command"] for row in found["rows"]])
    page = (tmp_path / "out" / "results.md").read_text()
    assert page.count("\n## ") == 2
    assert "\n**A rehearsal: small models, few rows. Its figures say nothing about a GPU.**\n" in page
    assert "\n- `share_of_synthetic`: " in page
    assert "Aims" not in page, "of small models they say nothing"
    header = page.splitlines()[0]
    assert f", cores {found['machine']['cores']}, load {found['machine']['load']}, " in header
    commit = git_commit(ROOT)
    assert commit is None or f", commit {commit}, " in header
    for row in found["rows"]:
        assert f"| {row['name']} |" in page


def test_the_longest_row_comes_last_and_all_programs_have_ten_minutes(script: Callable[[str], Any], tmp_path: Path):
    given = Namespace(device="cuda", small=False, budget_s=None, out=tmp_path)
    programs = script("gpu").programs(given)
    assert sum(program.budget_s for program in programs) <= 10 * 60
    names = [program.name for program in programs]

    def first(word: str) -> int:
        return next(number for number, name in enumerate(names) if word in name.split())

    assert first("65536") < first("docs/benchmarks/gpu_loader.py") < first("1048576") == len(names) - 1
    tests = [program.tests for program in programs if program.part == "tests"]
    assert tests == [
        "tests/loader/test_to_gpu.py",
        "tests/train/test_host_copy.py",
        "tests/train/test_miner_weights.py",
        "tests/train/test_on_gpu.py",
    ]


def test_each_form_of_a_step_tries_the_larger_number_of_rows(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
):
    step = script("gpu_step")

    def measured(step: Any, rows: int, *others: Any) -> dict[str, Any]:
        if rows > 32 and not parallel.is_compiled(step.model):
            raise torch.cuda.OutOfMemoryError
        return {"rows": rows}

    monkeypatch.setattr(step, "measured", measured)
    monkeypatch.setattr(parallel, "BACKEND", "aot_eager")
    monkeypatch.setitem(step.ROWS, "micro", 96)
    given = Namespace(device="cpu", small=False, times=1, profile=None)
    assert [(row["name"], row["rows"]) for row in step.rows_of("micro", given)] == [
        ("micro, padded to 77, eager", 24),
        ("micro, padded to 77, compiled", 96),
        ("micro, bucketed, compiled", 96),
    ]


def test_kernels_of_attention_are_a_row_for_each_tower(script: Callable[[str], Any]):
    rows = list(script("gpu_step").attention_rows("vit_b_32", 2, 64, torch.device("cpu"), 1))
    assert [(row["name"], row["rows"]) for row in rows] == [
        ("attention of vit_b_32, images", 2),
        ("attention of vit_b_32, texts", 2),
    ]
    assert all(row["flash_ms"] > 0 for row in rows), "a CPU has this kernel, and no other"


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
    assert lines[1:15] == [
        "| time of the tiled loss ÷ open_clip's under bf16, 8,192 × 512 | ≤ 0.5 |  | not measured |",
        "| time of the tiled loss ÷ open_clip's under bf16, 32,768 × 512 | ≤ 0.5 |  | not measured |",
        "| time of the tiled loss ÷ open_clip's under bf16, 65,536 × 512 | ≤ 0.5 | 0.9 | **not reached** |",
        "| memory of open_clip's loss ÷ the tiled one's, 32,768 × 512 | ≥ 40 |  | not measured |",
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
    assert lines[15] == f"{share}by vit_b_32 fed by the loader, a process |"


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
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["memory_over_tiled"] is None


def test_a_loss_for_which_there_is_too_little_memory_says_how_much_it_wanted(tmp_path: Path):
    form = ["--rows", str(1 << 23), "--dim", "1", "--forms", "open_clip"]
    done = run_program(
        [sys.executable, str(SCRIPT.with_name("loss_memory.py")), "--json", "--one-process", *form],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = "out of memory: wanted 281474976710656 bytes"  # 2^23 x 2^23 float32, more than a process can address
    assert [json.loads(line) for line in done.stdout.splitlines()] == 3 * [
        {"name": "open_clip, 8,388,608 x 1", "error": wanted}
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path):
    done = run_program(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "torch sees no GPU here: nothing is measured\n")
    assert not (tmp_path / "out").exists()
