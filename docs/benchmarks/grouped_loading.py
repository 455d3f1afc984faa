"""Rows a second of a loader whose batches are groups of four, against one of random batches; interleaved.

python docs/benchmarks/grouped_loading.py configs/emoji.yaml
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from mmdata.config import DataConfig, load_config
from mmdata.config.batches import GroupsConfig
from mmdata.loader import Loader


def rows_per_s(data: DataConfig, epoch: int) -> float:
    """Of one epoch, from the first batch on, with the plan of the epoch."""
    with Loader.from_config(data) as loader:
        loader.set_epoch(epoch)
        started, rows = time.perf_counter(), 0
        for batch in loader:
            rows += int(batch["valid"].sum())
    return rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    data = load_config(arguments.config).data
    count = len(Loader.from_config(data).index)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups.npy"
        of_rows = np.random.default_rng(0).permutation(np.arange(count) // 4)
        np.save(path, of_rows)
        ways = {
            "random": data,
            "groups of 4": data.model_copy(update={"groups": GroupsConfig(source=str(path), size=4)}),
            "half in groups": data.model_copy(update={"groups": GroupsConfig(source=str(path), size=4, share=0.5)}),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(arguments.rounds):
            for name, settings in ways.items():
                found[name].append(rows_per_s(settings, number))
    print("| batches | rows/s | of random (median of the rounds) |\n|---|---|---|")
    for name, speeds in found.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, found["random"], strict=True))
        print(f"| {name} | {statistics.median(speeds):,.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
