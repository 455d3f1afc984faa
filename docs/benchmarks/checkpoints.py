"""What a checkpoint costs: how long steps wait, until it is there, and memory; then the same for reading it.

PYTHONPATH=. OMP_NUM_THREADS=1 python docs/benchmarks/checkpoints.py
PYTHONPATH=. OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/benchmarks/checkpoints.py --parallel fsdp

The state is that of 32 blocks of 1,024 x 1,024 under AdamW: 384 MiB. Memory is that of a rank's process alone (RssAnon)
above what it took before, at the peak.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmdata.config import TrainConfig
from mmdata.train.ranks import collectives, sharding
from mmdata.train.ranks.lockstep import gather
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint, load_weights, read_tensors
from mmdata.train.run.checkpoint_writer import CheckpointWriter
from mmdata.train.run.optimizer import averages, load_averages, make_optimizer

WIDTH, LAYERS = 1024, 32


class Stack(nn.Module):
    """Blocks in a list, as `shard` looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Module()
        self.tower.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.tower.blocks:
            value = block(value)
        return value


@contextmanager
def peak_mib(found: dict[str, float], name: str) -> Iterator[None]:
    """The most memory that this process takes inside, above what it has at the beginning."""
    before, peak, done = own_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, own_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    yield
    done.set()
    watching.join()
    found[name] = max(0.0, peak - before)


def own_mib() -> float:
    """Memory of this process alone, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def timed(found: dict[str, float], name: str, work: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Call a function; its seconds are kept."""
    started = time.perf_counter()
    work(*given, **named)
    found[name] = time.perf_counter() - started


def measure(writer: CheckpointWriter, folder: Path, step: Callable[[], None], model: Any, optimizer: Any, turn: int):
    """Seconds and MiB of one checkpoint on this rank."""
    found: dict[str, float] = {}
    group = dist.group.WORLD if collectives.world_size() > 1 else None

    def save(number: int, background: bool) -> None:
        state = {"step": number, "model": model.state_dict(), "optimizer": averages(model, optimizer)}
        writer.save(state, background=background)

    timed(found, "s a step alone", step)
    gather(None, group)
    with peak_mib(found, "MiB written"):
        timed(found, "s steps wait, in the background", save, 2 * turn, background=True)
        timed(found, "s a step meanwhile", step)
        timed(found, "s until it is there after that", writer.wait)
    timed(found, "s steps wait, in the step", save, 2 * turn + 1, background=False)
    path = latest_checkpoint(folder)
    assert path is not None

    def read() -> None:
        state = load_checkpoint(path, parts=(), group=group)
        read_tensors(
            path, state, like={"model": model.state_dict(), "optimizer": averages(model, optimizer, make=True)}
        )
        load_weights(model, state, origin=str(path))
        load_averages(model, optimizer, state["optimizer"])

    with peak_mib(found, "MiB read"):
        timed(found, "s read", read)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    given = parser.parse_args()
    device = collectives.init(given.device)
    model = Stack().to(device)
    if given.parallel == "fsdp":
        sharding.shard(model, device)
    optimizer, batch = (
        make_optimizer(model, TrainConfig.model_validate({"steps": 1})),
        torch.randn(256, WIDTH, device=device),
    )

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    group = collectives.cpu_group()
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        folder = Path(gather(own, group)[0]) / "checkpoints"
        turns: list[list[dict[str, float]]] = []
        with CheckpointWriter(folder, keep=1, say=print, group=group) as writer:
            for turn in range(given.times):
                turns.append(gather(measure(writer, folder, step, model, optimizer, turn), group))
        gather(None, group)
    if collectives.rank() == 0:
        for name in turns[0][0]:
            ranks = ", ".join(f"{median(turn[rank][name] for turn in turns):.3f}" for rank in range(len(turns[0])))
            print(f"{name}, of each rank: {ranks}", flush=True)
    collectives.finish()


if __name__ == "__main__":
    main()
