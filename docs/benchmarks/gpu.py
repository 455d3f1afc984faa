"""All that needs a GPU, measured in nine minutes at most: `make gpu`.

PYTHONPATH=. python docs/benchmarks/gpu.py --out runs/gpu
PYTHONPATH=. python docs/benchmarks/gpu.py --parts step loader
PYTHONPATH=. python docs/benchmarks/gpu.py --device cpu --small          # rehearses the script; says nothing

Each part is a program of its own with a budget of seconds. A row is written into results.json and results.md as soon as
it is measured: a stop in the middle keeps what is there. A part that fails, or takes longer than its budget, says so in
a row, and the next one begins. Needs torch, torchvision and transformers; no webdataset and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mmdata.atomic import write_whole
from mmdata.cores import usable_cores

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUDGETS_S = {"tests": 75, "loss": 75, "step": 240, "loader": 90, "train": 60}
"""Nine minutes in all, in the order in which the parts run."""


def command_of(part: str, given: argparse.Namespace) -> list[list[str]]:
    """The programs of a part."""
    python, device, small = sys.executable, ["--device", given.device], ["--small"] * given.small
    if part == "tests":
        # Only the files that have some: others import what such a machine may lack.
        files = [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in file.read_text()]
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
        return [[python, "-m", "pytest", "-m", "gpu", *options, *(files[1:2] if given.small else files)]]
    if part == "loss":
        program = [python, str(HERE / "loss_memory.py"), "--json", *device, "--rounds", "1"]
        if given.small:
            return [[*program, "--rows", "64", "--dim", "8", "--runs", "1"]]
        alone = ["--rows", "1048576", "--dim", "512", "--runs", "1", "--forms", "tiled"]
        return [[*program, "--rows", "8192", "32768", "65536", "--dim", "512"], [*program, *alone]]
    if part == "step":
        models = ["--models", "tiny", "--eager"] if given.small else ["--profile", str(given.out / "profile.txt")]
        return [[python, str(HERE / "gpu_step.py"), *device, *small, *models]]
    if part == "loader":
        return [[python, str(HERE / "gpu_loader.py"), *device, *small, *(["--model", "tiny"] if given.small else [])]]
    return [[python, str(HERE / "gpu_train.py"), *device, *small]]


def rows_of(command: list[str], end_s: float) -> Iterator[dict[str, Any]]:
    """The rows that a program prints, lines of JSON; the last one says why it ended early, if it did."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        clock = threading.Timer(max(0.0, end_s - time.monotonic()), end)
        clock.start()
        said: list[str] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
                elif line.strip():
                    said.append(line.strip())
            status = process.wait()
        finally:
            clock.cancel()
            with suppress(ProcessLookupError):  # also where this program is ended: none of its parts goes on
                os.killpg(process.pid, signal.SIGKILL)
        if late.is_set():
            yield {"name": "(not finished)", "error": "took longer than its budget"}
        elif status:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()] or said or [""]
            yield {"name": "(not finished)", "error": f"ended with {status}: {last[-1][:300]}"}
        elif "pytest" in command and said:
            yield {"name": "tests that need a GPU", "result": said[-1].strip("= ")}


class Results:
    """Rows so far, and the files that hold them.

    Args:
        folder: of results.json and results.md.
        machine: what was measured on, by name.
    """

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        self._folder, self._machine = folder, machine
        self._rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, part: str, row: dict[str, Any], command: list[str]) -> None:
        """Add a row, and write all of them."""
        known = {str(ROOT) + os.sep: "", sys.executable: "python"}
        words = shlex.join(command)
        for long, short in known.items():
            words = words.replace(long, short)
        self._rows.append({"part": part, **row, "command": words})
        self.write()

    def write(self) -> None:
        """Write both files whole."""
        whole = {"machine": self._machine, "rows": self._rows}
        write_whole(self._folder / "results.json", (json.dumps(whole, indent=1) + "\n").encode())
        write_whole(self._folder / "results.md", self.markdown().encode())

    def markdown(self) -> str:
        """The machine, and a table for each part."""
        machine = [f"{value}" if name == "device" else f"{name} {value}" for name, value in self._machine.items()]
        lines = [f"# {', '.join(machine)}"]
        for part in dict.fromkeys(row["part"] for row in self._rows):
            rows = [row for row in self._rows if row["part"] == part]
            columns = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in ("part", "command")]
            lines += ["", f"## {part}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
            lines += ["", *(f"    {command}" for command in dict.fromkeys(row["command"] for row in rows))]
        return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value).replace("|", "/")


def machine_of(device: str) -> dict[str, Any]:
    """What is measured on."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device == "cuda":
        found = {"device": torch.cuda.get_device_name(), "driver": "unknown", "CUDA": torch.version.cuda}
        with suppress(OSError, subprocess.CalledProcessError):
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.check_output(asked, text=True).splitlines()[0].strip()
    return {**found, "torch": torch.__version__, "cores": usable_cores(), "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--parts", nargs="+", choices=list(BUDGETS_S), default=list(BUDGETS_S))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="few rows, to rehearse this script")
    parser.add_argument("--budget-s", type=float, help="of each part, in place of its own")
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing is measured", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = Results(given.out, machine_of(given.device))
    for part in given.parts:
        end_s = time.monotonic() + (given.budget_s or BUDGETS_S[part])
        for command in command_of(part, given):
            for row in rows_of(command, end_s):
                results.add(part, row, command)
                print(f"{part}: {json.dumps(row)}", flush=True)
    print(f"in {given.out}: results.json, results.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
