"""What 1 % of damaged photos costs: samples a second beside the same photos sound, and the reasons that are counted.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS   # once
PYTHONPATH=. python docs/benchmarks/damage.py

Both are read in turn by one process, epoch after epoch. A masked row counts as made: its place in the batch is there.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

import mmdata
from docs.benchmarks.loading import HOME, WORKERS

ROUNDS = 5
DAMAGES = ("cut", "zeroed", "bomb", "wrong type")


def damaged(image: bytes, kind: str) -> bytes:
    """A JPEG of the same length, damaged after it was indexed."""
    if kind == "cut":
        return image[: len(image) // 2] + bytes(len(image) - len(image) // 2)
    if kind == "zeroed":
        return bytes(len(image))
    if kind == "wrong type":
        return b"<!DOCTYPE html><title>404</title>".ljust(len(image))
    size = next(image.index(marker) + 5 for marker in (b"\xff\xc0", b"\xff\xc2") if marker in image)
    return image[:size] + struct.pack(">HH", 65_000, 65_000) + image[size + 4 :]


def make(folder: Path) -> int:
    """A copy of the photos with each hundredth row damaged in place; gives their number."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HOME / "photos", folder)
    index = mmdata.Index.open(folder)
    rows = np.arange(50, len(index), 100)
    shards, _ = index.locate(rows)
    places = index.take(rows, ["image_offset", "image_bytes"])
    for i, (shard, offset, size) in enumerate(zip(shards, places["image_offset"], places["image_bytes"], strict=True)):
        with index.shard_path(int(shard)).open("r+b") as tar:
            image = os.pread(tar.fileno(), int(size), int(offset))
            os.pwrite(tar.fileno(), damaged(image, DAMAGES[i % len(DAMAGES)]), int(offset))
    return len(rows)


def main() -> None:
    torch.set_num_threads(1)
    bad = make(HOME / "damaged")
    settings = {"tokenizer": str(HOME / "tokenizer"), "global_batch_size": 256, "text_buckets": [77]}
    loaders = {
        name: mmdata.Loader.from_config({**settings, "shards": str(HOME / name), "loading": {"num_workers": WORKERS}})
        for name in ("photos", "damaged")
    }
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    loads: dict[str, list[float]] = {name: [] for name in loaders}
    for epoch in range(ROUNDS + 1):  # the first one warms up
        for name, loader in loaders.items():
            loader.set_epoch(epoch)
            started, used = time.perf_counter(), time.process_time()
            for _ in loader:
                pass
            if epoch:
                rates[name].append(len(loader.index) / (time.perf_counter() - started))
                loads[name].append((time.process_time() - used) / len(loader.index) * 1e3)
    masked = loaders["damaged"].ledger.masked
    assert sum(masked.values()) == bad * (ROUNDS + 1)
    assert not loaders["photos"].ledger.masked
    for name in loaders:
        print(f"{name:8} {median(rates[name]):6.0f} samples/s  {median(loads[name]):.3f} ms of processor time a sample")
    ratio = median(rates["damaged"]) / median(rates["photos"])
    by_load = median(loads["photos"]) / median(loads["damaged"])
    print(f"ratio {ratio:.3f} ({by_load:.3f} by processor time); {bad} bad rows an epoch: {dict(masked)}")


if __name__ == "__main__":
    main()
