"""All that needs a GPU, measured in ten minutes at most: `make gpu`.

PYTHONPATH=. python docs/benchmarks/gpu.py --out runs/gpu
PYTHONPATH=. python docs/benchmarks/gpu.py --parts step loader
PYTHONPATH=. python docs/benchmarks/gpu.py --device cpu --small          # rehearses the script; says nothing

Each part is programs with a budget of seconds each; what one leaves unused is the next one's too. A row is written into
results.json and results.md as soon as it is measured, and all else that programs print into printed.txt: a stop in the
middle keeps what is there. A program that fails, or takes longer than it may, says so in a row, and the next one
begins. None outlives this one, even after SIGKILL. What one of them compiles, the others find.

No network is needed. The parts tests, loss and step need what comes with PyTorch and transformers. The parts loader and
train also need xxhash and simplejpeg. For a machine without a network bring them in a folder, made elsewhere
with that machine's version of Python, and start with PYTHONPATH=wheels make gpu PYTHON=python3:

    pip install --target wheels --no-deps --only-binary :all: --platform manylinux2014_x86_64 --python-version 3.12 \\
        xxhash simplejpeg

Modules are imported before anything is measured; a line says which parts run, and what the others lack.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_report import page
from gpu_run import ROOT, Program, rows_of

from mmdata.files import write_whole
from mmdata.processes import usable_cores
from mmdata.train.log.provenance import cpu_name, git_commit
from mmdata.version import VERSION

HERE = Path(__file__).parent
PARTS = ["tests", "loss", "step", "loader", "train"]
LOADER = ["torchvision", "PIL", "pyarrow", "fsspec", "tokenizers", "xxhash", "simplejpeg"]
NEEDS = {
    "tests": ["pytest", "hypothesis", "torchvision", "transformers"],
    "loss": [],
    "step": ["transformers"],
    "loader": ["transformers", *LOADER],
    "train": LOADER,
}
"""Modules that a part needs beside torch and what comes with it."""


def programs(given: argparse.Namespace) -> list[Program]:
    """All programs in the order in which they run: ten minutes. The row that takes longest comes last."""
    device, small = ["--device", given.device], ["--small"] * given.small

    def script(part: str, budget_s: float, name: str, *words: str) -> Program:
        command = [sys.executable, str(HERE / name), *device, *words]
        return Program(part=part, budget_s=given.budget_s or budget_s, command=command, needs=NEEDS[part])

    def tests_of(file: Path) -> Program:
        name = str(file.relative_to(ROOT))
        options = ["-vv", "-m", "gpu", "-p", "no:cacheprovider"]  # -vv: pyproject.toml has -q
        largest = "train/test_on_gpu" in name
        if largest and find_spec("xdist") is not None and not given.small:
            options += ["-n", str(min(8, usable_cores()))]  # most of the time is torch.compile's
        budget_s = given.budget_s or (90 if largest else 15)
        command = [sys.executable, "-m", "pytest", *options, name]
        needs = NEEDS["tests"] + LOADER * ("loader" in file.parts)
        return Program(part="tests", budget_s=budget_s, command=command, needs=needs, tests=name)

    # Only the files that have some: others import what such a machine may lack.
    files = [file for file in sorted(ROOT.glob("tests/*/test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    loss = ["loss_memory.py", "--json", "--one-process", "--rounds", "1", "--forms", "tiled"]
    other_siglip = ["siglip_kernel"] if find_spec("siglip_kernel") is not None else []
    rows = ["--dim", "512", "--rows", "8192", "32768", "65536"]
    step = ["--profile", str(given.out / "profile.txt"), "--models"]
    if given.small:
        small_loss = ["--dim", "8", "--runs", "1", "--rows"]
        return [
            *map(tests_of, files[:2]),
            script("loss", 60, *loss, "open_clip", *small_loss, "64"),
            script("step", 240, "gpu_step.py", *small, *step, "tiny"),
            script("loader", 90, "gpu_loader.py", *small, "--model", "tiny"),
            script("train", 60, "gpu_train.py", *small),
            script("loss", 60, *loss, *small_loss, "128"),
        ]
    return [
        *map(tests_of, files),
        script("loss", 60, *loss, "open_clip", "without_kernels", "siglip", *other_siglip, "top_k", *rows),
        script("step", 75, "gpu_step.py", *step, "vit_b_32"),
        script("step", 60, "gpu_step.py", *step, "vit_b_16"),
        script("loader", 75, "gpu_loader.py"),
        script("train", 85, "gpu_train.py"),
        script("step", 55, "gpu_step.py", *step, "vit_l_14"),
        script("loss", 25, *loss, "--dim", "512", "--rows", "262144", "1048576"),
    ]


def missing_modules(chosen: Sequence[Program]) -> list[str]:
    """Modules that the programs need and this Python cannot import."""
    found: list[str] = []
    for name in dict.fromkeys(name for program in chosen for name in program.needs):
        try:
            import_module(name)
        except Exception:  # torchvision built for another torch raises a RuntimeError
            found.append(name)
    return found


def in_words(chosen: Sequence[Program], missing: Sequence[str]) -> str:
    """Which programs run and which do not, in one line."""
    runs = [program for program in chosen if not set(program.needs) & set(missing)]
    parts = list(dict.fromkeys(program.part for program in runs))
    left = dict.fromkeys(
        program.tests if program.part in parts else program.part for program in chosen if program not in runs
    )
    line = f"runs: {', '.join(parts) or 'nothing'}"
    if left:
        line += f"; not: {', '.join(left)}, for which {', '.join(missing)} cannot be imported"
        line += " (how to bring them: the head of docs/benchmarks/gpu.py)"
    return line


class Results:
    """Rows so far, and the files that hold them.

    Args:
        folder: of results.json and results.md.
        machine: what was measured on, by name.
        rehearsal: the figures say nothing.
    """

    def __init__(self, folder: Path, machine: dict[str, Any], *, rehearsal: bool) -> None:
        self._folder, self._machine, self._rehearsal = folder, machine, rehearsal
        self._rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, program: Program, row: dict[str, Any]) -> None:
        """Add a row, and write all of them."""
        self._rows.append({"part": program.part, **row, "command": program.name})
        self.write()

    def write(self) -> None:
        """Write both files whole."""
        whole = {"machine": self._machine, "rehearsal": self._rehearsal, "rows": self._rows}
        write_whole(self._folder / "results.json", (json.dumps(whole, indent=1) + "\n").encode())
        write_whole(self._folder / "results.md", self.markdown().encode())

    def markdown(self) -> str:
        """The machine, the aims, and a table for each part."""
        machine = [f"{value}" if name == "device" else f"{name} {value}" for name, value in self._machine.items()]
        return page(", ".join(machine), self._rows, rehearsal=self._rehearsal)


def machine_of(device: str) -> dict[str, Any]:
    """What is measured on."""
    cpu = cpu_name()
    found: dict[str, Any] = {"device": cpu}
    if device == "cuda":
        found = {"device": torch.cuda.get_device_name(), "driver": "unknown", "CUDA": torch.version.cuda, "CPU": cpu}
        with suppress(OSError, subprocess.CalledProcessError):
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.check_output(asked, text=True).splitlines()[0].strip()
    found |= {"cores": usable_cores(), "load": round(os.getloadavg()[0], 1)}  # of other programs, in cores
    code = {"mmdata": VERSION, "commit": git_commit(ROOT)}
    found |= {name: value for name, value in code.items() if value is not None}
    return {**found, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="few rows, to rehearse this script")
    parser.add_argument("--budget-s", type=float, help="of each program, in place of its own")
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing is measured", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rehearsal = given.small or given.device == "cpu"
    results = Results(given.out, machine_of(given.device), rehearsal=rehearsal)
    chosen = [program for program in programs(given) if program.part in given.parts]
    # Before the imports: torch's compiler sets the variable to a folder of its own.
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(given.out / "compiled")} | dict(os.environ)
    missing = missing_modules(chosen)
    print(in_words(chosen, missing), flush=True)
    brought = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), *brought])
    printed = given.out / "printed.txt"
    printed.write_text("")
    end_s = time.monotonic()
    for program in chosen:
        end_s += program.budget_s
        absent = [name for name in program.needs if name in missing]
        failed = {"name": f"(not run) {program.tests or program.name}", "error": f"cannot import {', '.join(absent)}"}
        for row in [failed] if absent else rows_of(program, end_s, printed, settings):
            results.add(program, row)
            print(f"{program.part}: {json.dumps(row)}", flush=True)
    print(f"in {given.out}: results.json, results.md, printed.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
