"""What a checkpoint costs a run: how long steps wait for its writing, and the memory that resuming takes.

PYTHONPATH=. python docs/benchmarks/checkpoints.py pause
PYTHONPATH=. python docs/benchmarks/checkpoints.py resume
PYTHONPATH=. python docs/benchmarks/checkpoints.py gather

The state is that of 32 layers of 1,024 x 1,024 under AdamW: 384 MiB. "pause" writes it in the background and in the
step, in turn. "resume" reads it mapped and as a copy, each in a process of its own; memory is that of the process
alone (RssAnon), above what model and optimizer took before. "gather" shares the state out over two ranks (FSDP2, gloo)
and gathers it on the first, as a checkpoint does; what each rank's copy of its own share takes is a bound of what
checkpoints in parts could take.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn  # pyright: ignore[reportPrivateImportUsage]

from mmdata.train.ranks import sharding
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint, load_weights, save_checkpoint
from mmdata.train.run.checkpoint_writer import CheckpointWriter

WIDTH, LAYERS = 1024, 32


def trained() -> tuple[nn.Module, torch.optim.AdamW, Callable[[], None]]:
    """A model and its optimizer after one step, and a step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(256, WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def taken(work: Callable[..., object], *given: Any, **named: Any) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    work(*given, **named)
    return time.perf_counter() - started


def pause(folder: Path, times: int) -> None:
    """Seconds that the steps wait for a checkpoint, and those of a step while one is written."""
    model, optimizer, step = trained()
    waited: dict[str, list[float]] = {"in the step": [], "in the background": []}
    beside: list[float] = []
    with CheckpointWriter(folder, keep=1, written=lambda _: None, say=print) as writer:
        for number in range(2 * times):
            background = number % 2 == 1
            state = {"step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            spent = taken(writer.save, sharding.whole_state(state), background=background)
            waited["in the background" if background else "in the step"].append(spent)
            if background:
                beside += [taken(step) for _ in range(2)]
            writer.wait()
    alone = [taken(step) for _ in range(10)]
    for name, seconds in waited.items():
        print(
            f"written {name}: steps wait {median(seconds):.3f} s (of {times}: {min(seconds):.3f} to {max(seconds):.3f})"
        )
    print(f"a step while one is written {median(beside):.3f} s, alone {median(alone):.3f} s")


def resume(folder: Path, times: int) -> None:
    """Seconds and memory of reading a checkpoint into a model and its optimizer."""
    model, optimizer, _ = trained()
    save_checkpoint(folder, {"step": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, keep=1)
    for _ in range(times):
        for mapped in (True, False):
            subprocess.run([sys.executable, __file__, "read", str(folder), *["--mapped"] * mapped], check=True)


def read(folder: Path, *, mapped: bool) -> None:
    """Read the checkpoint once, in this process."""
    torch.set_num_threads(1)
    model, optimizer, _ = trained()
    path = latest_checkpoint(folder)
    assert path is not None
    before, peak, done = own_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, own_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    started = time.perf_counter()
    state = load_checkpoint(path, mapped=mapped)
    load_weights(model, state, origin=str(path))
    sharding.load_optimizer(optimizer, state["optimizer"])
    seconds = time.perf_counter() - started
    done.set()
    watching.join()
    print(f"{'mapped' if mapped else 'as a copy'}: {seconds:.2f} s, {peak - before:.0f} MiB at the peak", flush=True)


def gather(rank: int, rendezvous: str, times: int) -> None:
    """Seconds in which two ranks gather their state on the first, and in which each copies its own share."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    sharding.shard(model, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    gathered: list[float] = []
    copied: list[float] = []
    for _ in range(times):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        shares = [value.to_local() for value in pytree.tree_leaves(state) if isinstance(value, DTensor)]
        copied.append(taken(lambda shares=shares: [share.clone() for share in shares]))
        gathered.append(taken(sharding.whole_state, state))
    if rank == 0:
        print(f"gathered on the first of two ranks: {median(gathered):.3f} s; own share copied: {median(copied):.3f} s")
    dist.destroy_process_group()


def own_mib() -> float:
    """Memory of this process alone, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pause", "resume", "read", "gather"])
    parser.add_argument("folder", nargs="?", type=Path, help="of the checkpoint to read")
    parser.add_argument("--mapped", action="store_true")
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    if given.what == "read":
        read(given.folder, mapped=given.mapped)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "gather":
            spawn(gather, (f"{folder}/ranks", given.times), nprocs=2)
            return
        {"pause": pause, "resume": resume}[given.what](Path(folder), given.times)


if __name__ == "__main__":
    main()
