"""How tests rehearse `make gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "benchmarks" / "gpu.py"
FOR_THE_LOADER = ["xxhash", "simplejpeg"]
FOR_NOTHING = ["protego", "braceexpand", "webdataset"]


def command(out: Path, *words: str) -> list[str]:
    """The rehearsal; no part of it is late on a busy machine."""
    small = ["--device", "cpu", "--small", "--budget-s", "3600"]
    return [sys.executable, str(SCRIPT), "--out", str(out), *small, *words]


def environment(folder: Path, blocked: list[str] = FOR_NOTHING) -> dict[str, str]:
    """One in which these modules cannot be imported."""
    (folder / "blocked").mkdir()
    for name in blocked:
        (folder / "blocked" / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    return os.environ | {"PYTHONPATH": f"{folder / 'blocked'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def rehearsed(folder: Path, blocked: list[str], *words: str) -> tuple[list[str], dict[str, list[dict[str, Any]]]]:
    """The lines that the script prints, and the rows of each part."""
    # In an interpreter of its own: a fork of the tests' template would have imported the blocked modules already.
    done = subprocess.run(
        command(folder / "out", *words),
        capture_output=True,
        text=True,
        env=environment(folder, blocked),
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in results(folder / "out")["rows"]:
        rows.setdefault(row["part"], []).append(row)
    return done.stdout.splitlines(), rows
