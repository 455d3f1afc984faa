"""Decoded images that are kept: epoch 2 against epoch 1, and the same pixels kept by LMDB.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS    # the shards, once
PYTHONPATH=. python docs/benchmarks/pixel_cache.py photos                          # or: shrunk, large
PYTHONPATH=. python docs/benchmarks/pixel_cache.py lmdb                            # needs lmdb

First: random crops of 224 from images of 256, two workers. In each round one loader keeps nothing, and another fills a
new file in its first epoch and reads it in the next. Second: processes write the rows in a random order, each its share
of them, then each reads all in an order of its own; LMDB has a transaction a row, does not sync, and has no hashes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import mmdata
from mmdata.images.crop import Crop
from mmdata.images.pixels import PixelTransform, SmallImage
from mmdata.index import Index
from mmdata.loader.pixel_cache import PixelCache

HOME = Path(os.environ.get("MMDATA_BENCH_DIR", "/tmp/mmdata-loading"))
SIDE, BYTES, ROWS = 256, 8 * 10**9, 4096
Speed = tuple[float, float]
"""Rows a second, and processor time of a row in ms."""


def epochs(workload: str, cache: str | None, count: int) -> list[Speed]:
    settings: dict[str, Any] = {"shards": str(HOME / workload), "tokenizer": str(HOME / "tokenizer")}
    settings |= {"global_batch_size": 16 if workload == "large" else 256, "text_buckets": [77], "shorter_side": SIDE}
    kept = {} if cache is None else {"cache_pixels_gb": BYTES / 1e9, "cache_dir": cache}
    settings["loading"] = {"num_workers": 2, "num_processes": 0, **kept}
    found: list[Speed] = []
    with mmdata.Loader.from_config(settings, rank=0, world_size=1) as loader:
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.process_time()
            rows = sum(len(batch["rows"]) for batch in loader)
            found.append((rows / (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu) / rows))
    return found


def store(engine: str, folder: Path) -> tuple[Any, Any]:
    """How an engine reads and writes the pixels of a row."""
    if engine == "cache":
        transform = PixelTransform("train", shorter_side=SIDE)
        cache = PixelCache(Index.open(HOME / "shrunk"), transform, folder, max_bytes=BYTES)
        return cache.read, lambda row, image: cache.write(SmallImage(image, Crop(0, 0, *image.shape[1:]), row))
    import lmdb

    environment = lmdb.open(str(folder), map_size=BYTES, readahead=False, meminit=False, sync=False)

    def read(row: int) -> Any:
        with environment.begin(buffers=True) as transaction:  # the buffer ends with it
            return torch.from_numpy(np.frombuffer(transaction.get(b"%08d" % row), np.uint8).copy())

    def write(row: int, image: Any) -> None:
        with environment.begin(write=True) as transaction:
            transaction.put(b"%08d" % row, image.permute(1, 2, 0).reshape(-1).numpy().data)

    return read, write


def process(engine: str, folder: str, task: str, part: int, parts: int) -> None:
    """Reads all rows, or writes a share of them, when it is told to."""
    torch.set_num_threads(1)
    order = np.random.default_rng(part if task == "read" else 0).permutation(ROWS).tolist()
    sizes = Index.open(HOME / "shrunk").take(np.arange(ROWS), ["height", "width"])
    shapes = list(zip(sizes["height"].tolist(), sizes["width"].tolist(), strict=True))
    images = {shape: torch.randint(1, 256, (*shape, 3), dtype=torch.uint8).permute(2, 0, 1) for shape in set(shapes)}
    read, write = store(engine, Path(folder))
    print("ready", flush=True)
    input()
    wall, cpu = time.perf_counter(), time.process_time()
    for row in order if task == "read" else order[part::parts]:
        assert read(row) is not None if task == "read" else write(row, images[shapes[row]]) is None
    print(time.perf_counter() - wall, time.process_time() - cpu)


def together(engine: str, folder: str, task: str, parts: int) -> Speed:
    """The speed of so many processes at the same time, which share the machine."""
    command = [sys.executable, __file__, "process", engine, folder, task]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(part), str(parts)], **pipes) for part in range(parts)]
    for one in started:
        assert one.stdout.readline() == "ready\n"
    for one in started:
        print(file=one.stdin, flush=True)
    walls, cpus = zip(*(map(float, one.communicate()[0].split()) for one in started), strict=True)
    rows = ROWS * (parts if task == "read" else 1)
    return rows / max(walls), 1e3 * sum(cpus) / rows


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        process(*sys.argv[2:5], *map(int, sys.argv[5:]))  # type: ignore[arg-type, call-arg]
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["photos", "shrunk", "large", "lmdb"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    runs: dict[str, list[Speed]] = {}
    for _ in range(given.rounds):
        if given.what != "lmdb":
            with tempfile.TemporaryDirectory(dir=HOME) as folder:
                found = [*epochs(given.what, None, 1), *epochs(given.what, folder, 2)]
            for name, speed in zip(("nothing kept", "epoch 1", "epoch 2"), found, strict=True):
                runs.setdefault(name, []).append(speed)
            continue
        for parts in (1, 4):
            for engine in ("cache", "lmdb"):
                with tempfile.TemporaryDirectory(dir=HOME) as folder:
                    for task in ("write", "read"):
                        speed = together(engine, folder, task, parts)
                        runs.setdefault(f"{task} in {parts}, {engine}", []).append(speed)
    for name, speeds in runs.items():
        speed, cpu_ms = (median(values) for values in zip(*speeds, strict=True))
        print(f"{given.what}, {name}: {speed:,.0f} rows/s, {cpu_ms:.3f} ms of CPU a row")


if __name__ == "__main__":
    main()
