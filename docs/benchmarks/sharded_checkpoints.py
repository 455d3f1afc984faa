"""What a checkpoint under FSDP2 costs, whole and sharded: how long steps wait, until it is there, and memory.

PYTHONPATH=. OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 docs/benchmarks/sharded_checkpoints.py

The state is that of 32 blocks of 1,024 x 1,024 under AdamW, shared out over the ranks (gloo): 384 MiB. Both forms in
turn, in a process group of their own; memory is that of a rank's process alone (RssAnon) above what it took before, at
the peak. Then each rank reads the checkpoint into its shares.
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
from mmdata.train.run.sharded_writer import ShardedCheckpointWriter
from torch import nn

from mmdata.train.ranks import collectives, sharding
from mmdata.train.run.checkpoint import latest_checkpoint, load_checkpoint, load_weights
from mmdata.train.run.checkpoint_writer import CheckpointWriter

WIDTH, LAYERS = 1024, 32
WRITERS = {"whole": CheckpointWriter, "sharded": ShardedCheckpointWriter}


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
def peak_mib(found: dict[str, list[float]], name: str) -> Iterator[None]:
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
    found.setdefault(name, []).append(max(0.0, peak - before))


def own_mib() -> float:
    """Memory of this process alone, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def taken(found: dict[str, list[float]], name: str, work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a call returns; its seconds are kept."""
    started = time.perf_counter()
    value = work(*given, **named)
    found.setdefault(name, []).append(time.perf_counter() - started)
    return value


def measure(form: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    """Seconds and MiB of one checkpoint on this rank."""
    found: dict[str, list[float]] = {}
    group = dist.group.WORLD
    with WRITERS[form](folder, keep=1, written=lambda _: None, say=print, group=group) as writer:

        def save(background: bool) -> None:
            state = {"step": number, "settings": {}, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            writer.save(state if form == "sharded" else sharding.whole_state(state), background=background)

        dist.barrier()
        with peak_mib(found, "MiB written"):
            taken(found, "s steps wait, in the background", save, background=True)
            taken(found, "s until it is there after that", writer.wait)
        number += 1
        dist.barrier()
        taken(found, "s steps wait, in the step", save, background=False)
    dist.barrier()
    path = latest_checkpoint(folder)
    assert path is not None

    def read() -> None:
        like = sharding.own_shares(model, optimizer)
        state = load_checkpoint(path, mapped=True, like=like, group=group)
        load_weights(model, state, origin=str(path))
        sharding.load_optimizer(optimizer, state["optimizer"])

    with peak_mib(found, "MiB read"):
        taken(found, "s read", read)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    given = parser.parse_args()
    device = collectives.init("cpu")
    model = Stack()
    sharding.shard(model, device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared, src=0)
        everything: dict[str, dict[str, list[Any]]] = {form: {} for form in WRITERS}
        for turn in range(given.times):
            for form, results in everything.items():
                for name, values in measure(form, Path(shared[0]) / form, model, optimizer, 2 * turn).items():
                    ranks: list[Any] = [None] * collectives.world_size()
                    dist.all_gather_object(ranks, values[0])
                    results.setdefault(name, []).append(ranks)
        dist.barrier()
    if collectives.rank() == 0:
        for form, results in everything.items():
            for name, turns in results.items():
                ranks = ", ".join(f"{median(values):.2f}" for values in zip(*turns, strict=True))
                print(f"{form}: {name}, rank 0 to {collectives.world_size() - 1}: {ranks}", flush=True)
    collectives.finish()


if __name__ == "__main__":
    main()
