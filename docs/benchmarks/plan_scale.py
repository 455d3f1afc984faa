"""The plan of 10^9 rows in 100,000 shards: a cold start, a resume in mid-epoch, and the rate afterwards.

PYTHONPATH=. python docs/benchmarks/plan_scale.py make /tmp/billion   # writes the manifest; once
PYTHONPATH=. python docs/benchmarks/plan_scale.py run /tmp/billion    # one process from a cold start
PYTHONPATH=. python docs/benchmarks/plan_scale.py run /tmp/billion --lanes 64 --world-size 64
PYTHONPATH=. python docs/benchmarks/plan_scale.py mask /tmp/billion --share 0.1     # writes a mask of 10^9 rows; once
PYTHONPATH=. python docs/benchmarks/plan_scale.py run /tmp/billion --mask /tmp/billion/mask-0.1.npy
PYTHONPATH=. python docs/benchmarks/plan_scale.py window              # 10^7 rows in one window

Shards, their index files and their rows are made up (tests/index/synthetic.py); the manifest is real.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmdata.index import Manifest
from mmdata.plan import BucketPolicy, LengthAspectPolicy, Plan, Rows, Shapes
from mmdata.plan.choose import choose_lengths
from mmdata.plan.rows import count_cells
from mmdata.tables.selection import Selection
from mmdata.tables.table import NpyFile
from tests.index.synthetic import synthetic_rows, write_synthetic_manifest

SHARD_ROWS, SEED, BATCH = 10_000, 0, 4096
CHUNK_ROWS = 10**7
SHAPES = [(224, 224), (192, 256), (256, 192)]


class ManifestRows(Rows):
    """Rows as the manifest counts them, made up when asked for."""

    def __init__(self, manifest: Manifest, mask: str | None = None) -> None:
        self.manifest = manifest
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(manifest.shard_rows)])
        self.fingerprint = manifest.root
        self._rows = synthetic_rows(manifest.num_shards, SHARD_ROWS, SEED)
        self._counts: NDArray[np.int64] | None = None
        self.selection = None if mask is None else selection_of_mask(mask, self.starts)

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        shard, place = np.divmod(rows, SHARD_ROWS)
        template = self._rows.template[shard]
        return Shapes(
            self._rows.tokens[template, place], self._rows.height[template, place], self._rows.width[template, place]
        )

    def bucket_counts(self, policy: BucketPolicy, epoch: int, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.selection is not None:
            return super().bucket_counts(policy, epoch, shards)
        if self._counts is None:
            self._counts = count_cells(self.manifest.cells(), policy, lengths=True)
        return self._counts[shards]


def selection_of_mask(path: str, starts: NDArray[np.int64]) -> Selection:
    """The rows for which a mask is True."""
    file = NpyFile(path, of="mask")
    masks = (file.read(*starts[shard : shard + 2].tolist()) for shard in range(len(starts) - 1))
    return Selection(starts, masks, name=Path(path).name)


class OneWindow(Rows):
    """10^7 rows in 1,000 shards, lengths in memory."""

    def __init__(self) -> None:
        self.starts = np.arange(0, 10**7 + 1, 10_000)
        self.fingerprint = "window"
        self.length = np.clip(np.random.default_rng(0).lognormal(np.log(14), 0.6, 10**7), 3, 77).astype(np.int64)

    def shapes(self, rows: NDArray[np.int64], epoch: int) -> Shapes:
        return Shapes(self.length[rows], np.ones_like(rows), np.ones_like(rows))


def process_started() -> float:
    """When this process began, on the clock of `perf_counter`: the cost of imports counts too. Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - age_s


def clock(what: str, since: float) -> float:
    now = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:46} {now - since:7.2f} s   peak memory {peak:,.0f} MB", flush=True)
    return time.perf_counter()


def write_mask(folder: str, share: float) -> None:
    """A mask in which each row is True with this probability."""
    manifest, rng = Manifest.read(folder), np.random.default_rng(SEED)
    path = Path(folder) / f"mask-{share:g}.npy"
    mask = np.lib.format.open_memmap(path, "w+", np.bool_, (manifest.rows,))
    for first in range(0, manifest.rows, CHUNK_ROWS):
        chosen = mask[first : first + CHUNK_ROWS]
        chosen[:] = rng.random(len(chosen), np.float32) < share
    print(path)


def run(folder: str, lanes: int, world_size: int, mask: str | None) -> None:
    manifest = Manifest.read(folder)
    policy = LengthAspectPolicy(choose_lengths(manifest.token_histogram(), 8), SHAPES)
    plan = Plan(ManifestRows(manifest, mask), policy, global_batch_size=BATCH, num_lanes=lanes)
    steps = plan.steps(0, world_size=world_size)
    next(steps)
    since = clock(f"first of {len(plan):,} steps, imports included", process_started())
    count = max(1, 4 * 2**20 // BATCH)
    rows = sum(len(step.rows) for step in itertools.islice(steps, count))
    print(f"{rows / (time.perf_counter() - since):,.0f} rows planned per second and rank")
    since = time.perf_counter()
    middle = len(plan) // 2
    again = Plan(ManifestRows(manifest, mask), policy, global_batch_size=BATCH, num_lanes=lanes)
    step = next(again.steps(1, start=middle, world_size=world_size))
    clock(f"resumed at step {step.number:,} of another epoch", since)
    state = json.dumps({"epoch": 1, "step": middle, "plan": plan.identity()})
    print(f"state: {len(state)} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "mask", "run", "window"])
    parser.add_argument("folder", nargs="?", default="/tmp/billion")
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that a mask selects")
    parser.add_argument("--mask", help="plan the rows that this .npy file selects")
    options = parser.parse_args()
    if options.what == "make":
        write_synthetic_manifest(options.folder, options.shards, SHARD_ROWS, SEED)
    elif options.what == "run":
        run(options.folder, options.lanes, options.world_size, options.mask)
    elif options.what == "mask":
        write_mask(options.folder, options.share)
    else:
        rows, since = OneWindow(), time.perf_counter()
        plan = Plan(rows, LengthAspectPolicy([9, 14, 21, 77], SHAPES[:1]), global_batch_size=BATCH, window_rows=10**7)
        next(plan.steps(0))
        clock("10^7 rows in one window", since)


if __name__ == "__main__":
    main()
