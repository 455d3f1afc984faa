"""Memory and time of the contrastive loss, forward and backward: tiled, and dense in two ways.

Beside them, tiled and without a dense form: InfoNCE without Triton's kernels, with a miner that keeps 64 negatives, and
siglip; and siglip_kernel, a package of that name on PyPI, where it is installed (CUDA only).

PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 2048 8192 --dim 256
PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 65536 --dim 512 --device cuda
PYTHONPATH=. python docs/benchmarks/loss_memory.py --rows 65536 1048576 --dim 512 --device cuda --one-process

Each measurement has a process of its own; the forms take turns, and medians are printed. Memory is what a first run
needs beyond the features; time is the median of further runs, or of the first one if it takes more than ten seconds.
With `--one-process`, for CUDA, all are measured in this process: its allocator tells them apart, and code is compiled
once. A form for which there is too little memory says how much it wanted.

On CUDA each form runs as its users run it: the tiled one with products in bfloat16, as in a run in bf16, and the dense
forms under bfloat16 autocast, as open_clip's trainings are. `--precision fp32` gives float32 to all, the default on a
CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train import miners
from mmdata.train.losses import tiles
from mmdata.train.losses.functional import clip_loss, siglip_loss
from mmdata.train.precision import numerics

PAGE_BYTES = 4096
LONG_S = 10.0
"""A first run that takes longer is not repeated."""


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


def siglip(images: Tensor, texts: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    """The sigmoid loss, with the bias of the paper."""
    return siglip_loss(images, texts, scale, torch.full_like(scale, -10.0).requires_grad_(), **settings)


def top_k(images: Tensor, texts: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    """InfoNCE of the 64 hardest negatives of each row."""
    return clip_loss(images, texts, scale, miner=miners.TopK(64), **settings)


def siglip_kernel(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """The sigmoid loss of another package, in bfloat16."""
    package = import_module("siglip_kernel")
    bias = torch.full_like(scale, -10.0).requires_grad_()
    return package.fused_siglip_loss(images.bfloat16(), texts.bfloat16(), scale.log(), bias)


FORMS: dict[str, Callable[..., Tensor]] = {
    "tiled": clip_loss,
    "open_clip": open_clip,
    "lean": lean,
    "without_kernels": clip_loss,
    "siglip": siglip,
    "siglip_kernel": siglip_kernel,
    "top_k": top_k,
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


def measure(form: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes, seconds and value of one form, in this process; or the error that memory was too little."""
    try:
        return _measure(form, rows, given)
    except RuntimeError as error:
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))  # torch's words on both kinds of device
        if wanted is None:
            raise
        return {"error": f"out of memory: wanted {wanted[1]}"}
    finally:
        if given.device == "cuda":
            torch.cuda.empty_cache()


def _measure(form: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    generator = torch.Generator(given.device).manual_seed(0)
    dtype = getattr(torch, given.dtype)
    sides = (torch.randn(rows, given.dim, generator=generator, device=given.device) for _ in range(2))
    images, texts = (F.normalize(x, dim=1).to(dtype).requires_grad_() for x in sides)
    scale = torch.tensor(50.0, device=given.device, dtype=dtype, requires_grad=True)

    lower = given.precision == "bf16" and form in ("open_clip", "lean")
    settings = {} if form in ("open_clip", "lean", "siglip_kernel") else {"precision": given.precision}

    def run(images: Tensor, texts: Tensor) -> float:
        for leaf in (images, texts, scale):
            leaf.grad = None
        with patch.object(tiles, "has_kernels", lambda _: False) if form == "without_kernels" else nullcontext():
            with torch.autocast(given.device, torch.bfloat16, enabled=lower):
                loss = FORMS[form](images, texts, scale, **settings)
            loss.backward()
        return float(loss.detach())  # on CUDA: waits

    few = (x[:64].detach().clone().requires_grad_() for x in (images, texts))
    run(*few)  # code, handles and threads are there

    def timed() -> tuple[float, float]:
        started = time.perf_counter()
        value = run(images, texts)
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, value

    with Peak(given.device) as peak:
        seconds, value = timed()
    if seconds < LONG_S:
        seconds = median(timed()[0] for _ in range(given.runs))
    return {"bytes": peak.bytes, "seconds": seconds, "value": value}


def measure_apart(form: str, rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """As `measure`, in a process of its own."""
    names = ("dim", "device", "dtype", "threads", "runs", "precision")
    settings = [f"--{name}={getattr(given, name)}" for name in names]
    command = [sys.executable, __file__, "--one", "--forms", form, "--rows", str(rows), *settings]
    try:
        return json.loads(subprocess.check_output(command))
    except subprocess.CalledProcessError as error:
        return {"error": f"ended with {error.returncode}; its message is above"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["tiled", "open_clip", "lean"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="processes for each form")
    parser.add_argument("--runs", type=int, default=3, help="timed runs in each process")
    parser.add_argument("--one", action="store_true", help="measure here the one form and number of rows given")
    parser.add_argument("--one-process", action="store_true", help="measure all in this process, for CUDA")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row of the table")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on CUDA, else fp32")
    given = parser.parse_args()
    given.precision = given.precision or ("bf16" if given.device == "cuda" else "fp32")
    with numerics(given.precision, torch.device(given.device)):
        if given.one:
            print(json.dumps(measure(given.forms[0], given.rows[0], given)))
        else:
            compare(given)


def compare(given: argparse.Namespace) -> None:
    """Measure all forms in turn; a row is printed as soon as it is known."""
    if not given.json:
        print("| rows | form | memory, MB | × less in tiled | time, s | tiled / it | loss |")
        print("|---" * 7 + "|")
    for rows in given.rows:
        found: dict[str, list[dict[str, Any]]] = {form: [] for form in given.forms}
        medians: dict[str, dict[str, float]] = {}
        for _ in range(given.rounds):
            for form, its in found.items():
                measured = (measure if given.one_process else measure_apart)(form, rows, given)
                if "error" in measured:
                    print_failure(f"{form}, {rows:,} x {given.dim}", measured["error"], given)
                    continue
                its.append(measured)
                if len(its) == given.rounds:
                    medians[form] = {key: median(x[key] for x in its) for key in measured}
                    print_row(form, rows, medians[form], medians.get("tiled", medians[form]), given)


def print_row(form: str, rows: int, its: dict[str, float], tiled: dict[str, float], given: argparse.Namespace) -> None:
    shows = min(its["bytes"], tiled["bytes"]) >= 50_000  # else it is shown as 0.0 MB, and a ratio of zeros says nothing
    less = its["bytes"] / tiled["bytes"] if shows else None
    ratio = tiled["seconds"] / its["seconds"]
    if given.json:
        row = {"name": f"{form}, {rows:,} x {given.dim}", "memory_mb": round(its["bytes"] / 1e6, 1)}
        row |= {"memory_over_tiled": less and round(less, 1), "ms": round(1e3 * its["seconds"], 2)}
        print(json.dumps({**row, "tiled_over_it": round(ratio, 3), "loss": round(its["value"], 5)}), flush=True)
        return
    shown = "" if less is None else f"{less:.1f}"
    print(
        f"| {rows:,} | {form} | {its['bytes'] / 1e6:,.1f} | {shown} | {its['seconds']:.4f} | {ratio:.2f} "
        f"| {its['value']:.5f} |",
        flush=True,
    )


def print_failure(name: str, said: str, given: argparse.Namespace) -> None:
    print(json.dumps({"name": name, "error": said}) if given.json else f"| {name} | {said} |", flush=True)


if __name__ == "__main__":
    main()
