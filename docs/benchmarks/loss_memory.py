"""Memory and time of the contrastive loss, forward and backward: tiled, and dense in two ways.

PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 2048 8192 --dim 256
PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 65536 --dim 512 --device cuda
PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 1048576 --dim 512 --device cuda --forms tiled

Each measurement has a process of its own; the forms take turns, and medians are printed. Memory is what a first run
needs beyond the features; time is the median of further runs.

On CUDA each form runs as its users run it: products in TF32, and the dense forms under bfloat16 autocast, as
open_clip's trainings are. `--precision fp32` gives float32 to all, the default on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Event, Thread

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train.losses.contrastive import clip_loss
from mmdata.train.precision import numerics

PAGE_BYTES = 4096


def open_clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """A matrix of logits for each direction, as open_clip's ClipLoss makes them."""
    targets = torch.arange(len(images), device=images.device)
    per_image, per_text = scale * images @ texts.T, scale * texts @ images.T
    return (F.cross_entropy(per_image, targets) + F.cross_entropy(per_text, targets)) / 2


def lean(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """One matrix of logits for both directions."""
    targets = torch.arange(len(images), device=images.device)
    logits = scale * images @ texts.T
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "tiled": clip_loss,
    "open_clip": open_clip,
    "lean": lean,
}


class Peak:
    """The most memory in use inside a `with` block, beyond what there was at its start: `bytes`."""

    def __init__(self, device: str) -> None:
        self.device, self.bytes = device, 0
        self._stop = Event()
        self._watch = Thread(target=self._sample)

    def __enter__(self) -> Peak:
        self._start = self._now()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self._start
        else:
            self._stop.set()
            self._watch.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, self._now() - self._start)
            time.sleep(0.0005)

    def _now(self) -> int:
        if self.device == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def measure(form: str, rows: int, given: argparse.Namespace) -> dict[str, float]:
    """Peak bytes, seconds and value of one form, in this process."""
    torch.set_num_threads(given.threads)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, given.dtype)
    sides = (torch.randn(rows, given.dim, generator=generator) for _ in range(2))
    images, texts = (F.normalize(x, dim=1).to(given.device, dtype).requires_grad_() for x in sides)
    scale = torch.tensor(50.0, device=given.device, dtype=dtype, requires_grad=True)

    lower = given.precision == "bf16" and form != "tiled"

    def run(images: Tensor, texts: Tensor) -> float:
        for leaf in (images, texts, scale):
            leaf.grad = None
        with torch.autocast(given.device, torch.bfloat16, enabled=lower):
            loss = FORMS[form](images, texts, scale)
        loss.backward()
        return float(loss.detach())  # on CUDA: waits

    few = (x[:64].detach().clone().requires_grad_() for x in (images, texts))
    run(*few)  # code, handles and threads are there
    with Peak(given.device) as peak:
        value = run(images, texts)
    seconds: list[float] = []
    for _ in range(given.runs):
        started = time.perf_counter()
        run(images, texts)
        if given.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"bytes": peak.bytes, "seconds": median(seconds), "value": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="processes for each form")
    parser.add_argument("--runs", type=int, default=3, help="timed runs in each process")
    parser.add_argument("--one", action="store_true", help="measure here the one form and number of rows given")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row of the table")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on CUDA, else fp32")
    given = parser.parse_args()
    given.precision = given.precision or ("bf16" if given.device == "cuda" else "fp32")
    if given.one:
        with numerics(given.precision, torch.device(given.device)):
            print(json.dumps(measure(given.forms[0], given.rows[0], given)))
        return
    if not given.json:
        print("| rows | form | memory, MB | × less in tiled | time, s | tiled / it | loss |")
        print("|---" * 7 + "|")
    settings = [
        f"--{name}={getattr(given, name)}" for name in ("dim", "device", "dtype", "threads", "runs", "precision")
    ]
    for rows in given.rows:
        found: dict[str, list[dict[str, float]]] = {form: [] for form in given.forms}
        for _ in range(given.rounds):
            for form in given.forms:
                command = [sys.executable, __file__, "--one", "--forms", form, "--rows", str(rows), *settings]
                try:
                    found[form].append(json.loads(subprocess.check_output(command)))
                except subprocess.CalledProcessError as error:  # such as too little memory: a result too
                    print_failure(f"{form}, {rows:,} x {given.dim}", error, given)
        medians = {form: {key: median(x[key] for x in runs) for key in runs[0]} for form, runs in found.items() if runs}
        for form, its in medians.items():
            print_row(form, rows, its, medians.get("tiled", its), given)


def print_row(form: str, rows: int, its: dict[str, float], tiled: dict[str, float], given: argparse.Namespace) -> None:
    less, ratio = its["bytes"] / max(tiled["bytes"], 1), tiled["seconds"] / its["seconds"]
    if given.json:
        row = {"name": f"{form}, {rows:,} x {given.dim}", "memory_mb": round(its["bytes"] / 1e6, 1)}
        row |= {"memory_over_tiled": round(less, 1), "ms": round(1e3 * its["seconds"], 2)}
        print(json.dumps({**row, "tiled_over_it": round(ratio, 3), "loss": round(its["value"], 5)}), flush=True)
        return
    print(
        f"| {rows:,} | {form} | {its['bytes'] / 1e6:,.1f} | {less:.1f} | {its['seconds']:.4f} | {ratio:.2f} "
        f"| {its['value']:.5f} |",
        flush=True,
    )


def print_failure(name: str, error: subprocess.CalledProcessError, given: argparse.Namespace) -> None:
    said = f"ended with {error.returncode}; its message is above"
    print(json.dumps({"name": name, "error": said}) if given.json else f"| {name} | {said} |", flush=True)


if __name__ == "__main__":
    main()
