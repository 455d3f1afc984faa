"""Seconds to the first batch on an index of 1 million photos, beside webdataset by hand.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS   # once
PYTHONPATH=. python docs/benchmarks/first_batch.py compare

The corpus is that of loading.py, in four tars under 977 names (hard links): a real index, and all its rows can be read.
Each run is a process of its own and the loaders take turns. The clock starts when the loader is asked for, with all
imported that it needs; "with imports" is from the start of the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any

from docs.benchmarks import loading
from docs.benchmarks.plan_scale import process_started

SHARDS, SHARD_ROWS = 977, 1024
FOLDER = loading.HOME / "million"
LOADERS = ["mmdata", "mmdata, process", "webdataset by hand"]
IMPORTS = {
    "mmdata": ["mmdata.loader"],
    "mmdata, process": ["mmdata.loader"],
    "webdataset by hand": [
        "webdataset",
        "torch.utils.data",
        "torchvision.io",
        "torchvision.transforms.v2",
        "tokenizers",
    ],
}


def make() -> None:
    """Hard links to tars, and an index of them with as many shards, which are all read."""
    from mmdata.index import Manifest
    from mmdata.index.writer import ManifestWriter

    shutil.rmtree(FOLDER, ignore_errors=True)
    (source := FOLDER / "source").mkdir(parents=True)
    photos = sorted((loading.HOME / "photos").glob("*.tar"))
    for shard in range(len(photos) // 2):  # of 512 rows each
        with tarfile.open(source / f"{shard}.tar", "w") as joined:
            for path in photos[2 * shard : 2 * shard + 2]:
                with tarfile.open(path) as tar:
                    for member in tar:
                        joined.addfile(member, tar.extractfile(member))
    tokenizer = str(loading.HOME / "tokenizer")
    subprocess.run([sys.executable, "-m", "mmdata", "index", str(source), "--tokenizer", tokenizer], check=True)
    manifest = Manifest.read(source)
    entries, writer = [*manifest], ManifestWriter(FOLDER)
    for shard, number in zip(range(SHARDS), cycle(range(manifest.num_shards)), strict=False):
        entry = entries[number]
        writer.add(replace(entry, name=f"{shard:05d}.tar"), bytes(manifest.columns(number).data))
        os.link(source / entry.name, FOLDER / f"{shard:05d}.tar")
    writer.close(tokenizer=manifest.tokenizer)


def batches_of(name: str) -> Iterator[Any]:
    if name == "webdataset by hand":
        return loading.webdataset_batches("million", train=False, tuned=True)
    import mmdata

    settings = {"shards": str(FOLDER), "tokenizer": str(loading.HOME / "tokenizer"), "global_batch_size": 256}
    workers = "process" if name == "mmdata, process" else "thread"
    more = {"num_workers": loading.WORKERS, "num_processes": int(workers == "process")}
    return iter(mmdata.Loader.from_config({**settings, "transform": "eval", "loading": more}))


def run(name: str) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    for module in IMPORTS[name]:
        importlib.import_module(module)
    loading.WORKLOADS["million"] = (SHARDS * SHARD_ROWS, SHARDS, 256)
    started = time.perf_counter()
    next(batches_of(name))
    done = time.perf_counter()
    return {"first batch": done - started, "with imports": done - process_started()}


def compare(rounds: int) -> None:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    for _ in range(rounds):
        for name in LOADERS:
            command = [sys.executable, __file__, "run", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    theirs = median(result["first batch"] for result in results["webdataset by hand"])
    for name, runs in results.items():
        seconds = {key: median(result[key] for result in runs) for key in runs[0]}
        words = "  ".join(f"{key} {value:5.2f} s" for key, value in seconds.items())
        print(f"{name:20} {words}  {seconds['first batch'] / theirs:5.2f} of webdataset by hand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "run"])
    parser.add_argument("loader", nargs="?", choices=LOADERS)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.what == "compare":
        make()
        compare(given.rounds)
    else:
        print(json.dumps(run(given.loader)), flush=True)
        os._exit(0)  # workers of a loader that was left in the middle are not waited for


if __name__ == "__main__":
    main()
