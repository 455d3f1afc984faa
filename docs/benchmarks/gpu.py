"""All that needs a GPU, measured in nine minutes at most: `make gpu`.

PYTHONPATH=. python docs/benchmarks/gpu.py --out runs/gpu
PYTHONPATH=. python docs/benchmarks/gpu.py --parts step loader
PYTHONPATH=. python docs/benchmarks/gpu.py --device cpu --small          # rehearses the script; says nothing

Each part is programs with a budget of seconds each; what one leaves unused is the next one's too. A row is written into
results.json and results.md as soon as it is measured: a stop in the middle keeps what is there. A program that fails,
or takes longer than it may, says so in a row, and the next one begins. None outlives this one, even after SIGKILL.
Needs torch, torchvision and transformers; no webdataset and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_report import page

from mmdata.atomic import write_whole
from mmdata.cores import usable_cores
from mmdata.train.run.sessions import cpu_name, git_commit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ["tests", "loss", "step", "loader", "train"]
STEP_BUDGETS_S = {"vit_b_32": 95, "vit_b_16": 70, "vit_l_14": 75}
"""A model's share of the part."""
KEEPER = ["sh", "-c", 'read _; kill -KILL "-$0"']
"""Waits until its standard input closes, then ends a process group."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that prints rows, lines of JSON.

    Args:
        part: to which its rows belong.
        budget_s: seconds that it may take, beyond what the programs before it left unused.
        command: that starts it.
    """

    part: str
    budget_s: float
    command: list[str]


def programs(given: argparse.Namespace) -> list[Program]:
    """All programs in the order in which they run: nine minutes."""
    device, small = ["--device", given.device], ["--small"] * given.small

    def program(part: str, budget_s: float, *words: str) -> Program:
        return Program(part=part, budget_s=given.budget_s or budget_s, command=[sys.executable, *words])

    def script(part: str, budget_s: float, name: str, *words: str) -> Program:
        return program(part, budget_s, str(HERE / name), *device, *words)

    # Only the files that have some: others import what such a machine may lack.
    files = [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    loss = ["loss_memory.py", "--json", "--one-process", "--rounds", "1", "--forms", "tiled"]
    shape = ["--dim", "512", "--rows", "8192", "32768", "65536"]
    step = ["--profile", str(given.out / "profile.txt"), "--models"]
    if given.small:
        return [
            program("tests", 75, "-m", "pytest", *options, *files[1:2]),
            script("loss", 75, *loss, "open_clip", "--dim", "8", "--rows", "64", "--runs", "1"),
            script("step", 240, "gpu_step.py", *small, *step, "tiny"),
            script("loader", 90, "gpu_loader.py", *small, "--model", "tiny"),
            script("train", 60, "gpu_train.py", *small),
        ]
    return [
        program("tests", 75, "-m", "pytest", *options, *files),
        script("loss", 60, *loss, "open_clip", *shape, "1048576"),
        script("loss", 15, *loss, "lean", *shape),
        *(script("step", budget_s, "gpu_step.py", *step, model) for model, budget_s in STEP_BUDGETS_S.items()),
        script("loader", 90, "gpu_loader.py"),
        script("train", 60, "gpu_train.py"),
    ]


def rows_of(command: list[str], end_s: float) -> Iterator[dict[str, Any]]:
    """The rows that a program prints; the last one says why it ended early, if it did."""
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
            keeper.kill()
            keeper.communicate()
        name = f"(not finished) {short(command)}"
        if late.is_set():
            yield {"name": name, "error": "took longer than its budget"}
        elif status and "pytest" in command and said:
            failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
            yield {"name": "tests that need a GPU", "error": "; ".join([said[-1].strip("= "), *failed])[:2000]}
        elif status:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()] or said or [""]
            yield {"name": name, "error": f"ended with {status}: {last[-1][:300]}"}
        elif "pytest" in command and said:
            yield {"name": "tests that need a GPU", "result": in_words(said[-1].strip("= "))}


def in_words(summary: str) -> str:
    """The last line of pytest, with what its counts mean.

    Example:
        in_words("3 skipped, 40 deselected in 2.10s") gives "0 passed, 3 skipped (what they need is not here); 40 left
        out, since they need no GPU; in 2.10s".
    """
    count = {word: number for number, word in re.findall(r"(\d+) ([a-z]+)", summary)}
    seconds = summary.rpartition(" in ")[2]
    skipped = f"{count['skipped']} skipped (what they need is not here)" if "skipped" in count else "0 skipped"
    left_out = f"; {count['deselected']} left out, since they need no GPU" if "deselected" in count else ""
    return f"{count.get('passed', 0)} passed, {skipped}{left_out}; in {seconds}"


def short(command: list[str]) -> str:
    """A command as one would type it in the checkout."""
    return shlex.join(command).replace(str(ROOT) + os.sep, "").replace(sys.executable, "python")


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
        self._rows.append({"part": program.part, **row, "command": short(program.command)})
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
    code = {"mmdata": mmdata_version(), "commit": git_commit(ROOT, tracked="pyproject.toml")}
    found |= {name: value for name, value in code.items() if value is not None}
    return {**found, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def mmdata_version() -> str | None:
    """Of the installed package; None for a checkout on PYTHONPATH."""
    with suppress(PackageNotFoundError):
        return version("mmdata")
    return None


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
    end_s = time.monotonic()
    for program in programs(given):
        if program.part in given.parts:
            end_s += program.budget_s
            for row in rows_of(program.command, end_s):
                results.add(program, row)
                print(f"{program.part}: {json.dumps(row)}", flush=True)
    print(f"in {given.out}: results.json, results.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
