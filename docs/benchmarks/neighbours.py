"""Groups of neighbours: how near their rows are, against the exact nearest rows of each row, and how long they take.

The exact nearest rows are a bound that no partition reaches: there each row may be the neighbour of many.

python docs/benchmarks/neighbours.py
python docs/benchmarks/neighbours.py --rows 1000000   # only the seconds: 10⁶ rows × 512, float16, mapped from a file
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmdata.train.memory.neighbours import group_neighbours, mean_similarity

ROWS, DIM, CLUSTERS = 20_000, 64, 500


def corpora() -> dict[str, Tensor]:
    """Clusters, tight and loose, clusters whose sizes fall as 1 / rank, and no clusters at all; (ROWS, DIM) each."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(2000, DIM, generator=generator)
    cluster = torch.randint(CLUSTERS, (ROWS,), generator=generator)
    by_rank = torch.multinomial(1 / torch.arange(1, 2001.0), ROWS, True, generator=generator)
    noise = torch.randn(ROWS, DIM, generator=generator)
    hidden = torch.randn(ROWS, 8, generator=generator) @ torch.randn(8, 256, generator=generator)
    return {
        "500 tight clusters": centres[cluster] + 0.5 * noise,
        "500 loose clusters": centres[cluster] + noise,
        "2,000 clusters, 1 / rank": centres[by_rank] + 0.6 * noise,
        "smooth, of 8 dimensions": hidden.relu() @ torch.randn(256, DIM, generator=generator),
    }


def exact_bound(features: Tensor, size: int) -> float:
    """Mean similarity of each row to its size - 1 nearest."""
    unit = F.normalize(features, dim=1)
    nearest = [(block @ unit.T).topk(size, dim=1).values[:, 1:] for block in unit.split(1000)]  # the first is itself
    return float(torch.cat(nearest).mean())


def show_quality() -> None:
    """A table of similarities."""
    print(f"{'corpus':26}{'size':>5}{'random':>8}{'groups':>8}{'exact':>8}{'share':>7}")
    for name, features in corpora().items():
        for size in (2, 4, 16):
            near, random = mean_similarity(features, group_neighbours(features, size))
            bound = exact_bound(features, size)
            print(f"{name:26}{size:5}{random:8.3f}{near:8.3f}{bound:8.3f}{near / bound:7.2f}", flush=True)


def show_seconds(rows: int) -> None:
    """Seconds for groups of four of a mapped file."""
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((rows // 40, 512), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        written = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(rows, 512))
        for begin in range(0, rows, 10_000):
            count = min(10_000, rows - begin)
            noise = generator.standard_normal((count, 512), dtype=np.float32)
            written[begin : begin + count] = centres[generator.integers(len(centres), size=count)] + 0.5 * noise
        features = np.load(path, mmap_mode="c")
        started = time.perf_counter()
        groups = group_neighbours(features, 4)
        seconds = time.perf_counter() - started
        near, random = mean_similarity(features, groups)
    print(f"{rows:,} rows × 512: {seconds:.0f} s; similarity {near:.3f} in groups, {random:.3f} in random ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int)
    chosen = parser.parse_args().rows
    show_seconds(chosen) if chosen else show_quality()
