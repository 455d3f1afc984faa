"""Memory of loaders: what a program and its workers take, which part of it is there before any batch, whether it grows.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS   # once
PYTHONPATH=. python docs/benchmarks/memory.py compare photos
PYTHONPATH=. python docs/benchmarks/memory.py flat                                 # 20 epochs; --workers process

Memory is the proportional set size of all processes as it would be were they alone on the machine: what other programs
have mapped of the same libraries does not change it. Linux only.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from docs.benchmarks.loading import HOME, mmdata_batches, webdataset_batches

STEADY = 20  # batches
EPOCHS = 20
LOADERS: dict[str, Callable[[str], Iterator[Any]]] = {
    "mmdata": lambda workload: mmdata_batches(workload, train=False, decode="fast", augment=None),
    "webdataset by hand": lambda workload: webdataset_batches(workload, train=False, tuned=True),
}


def process_ids(root: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{root}/task").glob("*/children")
    return [
        root,
        *(found for file in children for child in file.read_text().split() for found in process_ids(int(child))),
    ]


def memory_mb() -> dict[str, float]:
    """Of this process and its descendants, in MB (10⁶ bytes): `all`, and of it pages of `files`.

    Pages that a process has for itself count by their proportional size; those of a file, libraries mostly, by the
    process that has most of them, since workers have their parent's.
    """
    own, files = 0.0, defaultdict[str, float](float)
    for process in process_ids(os.getpid()):
        mapped = defaultdict[str, float](float)
        file, size = "", {}
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            key, *values = line.split()
            if not key.endswith(":"):
                file = values[4] if len(values) > 4 else ""
            elif key in ("Rss:", "Pss:", "Anonymous:"):
                size[key] = int(values[0]) * 1024 / 1e6
                if key == "Anonymous:":
                    of_file = file.startswith("/") and not file.startswith(("/dev/shm", "/memfd"))
                    own += min(size["Pss:"], size[key]) if of_file else size["Pss:"]
                    mapped[file] += size["Rss:"] - size[key] if of_file else 0.0
        for name, mb in mapped.items():
            files[name] = max(files[name], mb)
    return {"all": own + sum(files.values()), "files": sum(files.values())}


def parts(workload: str, name: str) -> dict[str, float]:
    """MB with torch imported, with all that the loader imports and its first batch, and after `STEADY` batches."""
    import torch

    torch.set_num_threads(1)
    found = {"torch": memory_mb()["all"]}
    batches = LOADERS[name](workload)
    next(batches)
    found["first batch"] = memory_mb()["all"]
    for _ in range(STEADY):
        next(batches)
    steady = memory_mb()
    return {**found, "steady": steady["all"], "of it libraries": steady["files"]}


def compare(workload: str, rounds: int) -> None:
    """Ours beside webdataset by hand, in turn; medians."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    for _ in range(rounds):
        for name in LOADERS:
            command = [sys.executable, __file__, "parts", workload, name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()}
    for name, of_name in medians.items():
        print(f"{name:20}" + "".join(f"  {key} {mb:5.0f} MB" for key, mb in of_name.items()))
    ours, theirs = medians.values()
    without = (ours["steady"] - ours["torch"]) / (theirs["steady"] - theirs["torch"])
    print(f"ratio {ours['steady'] / theirs['steady']:.2f}; beyond torch itself {without:.2f}")


def make_mixed(samples: int = 1024, shards: int = 4) -> Path:
    """Photos of three formats and all aspect ratios."""
    from PIL import Image

    with tarfile.open(HOME / "shrunk" / "00000.tar") as tar:
        photos = [tar.extractfile(member).read() for member in tar.getmembers()[:64:2]]  # type: ignore[union-attr]
    folder = HOME / "mixed"
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for i in range(shard * samples // shards, (shard + 1) * samples // shards):
                format, buffer = ("JPEG", "PNG", "WEBP")[i % 3], io.BytesIO()
                image = Image.open(io.BytesIO(photos[i % len(photos)])).convert("RGB")
                image.resize((200 + i * 7 % 201, 200 + i * 11 % 201)).save(buffer, format)
                extension = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[format]
                for suffix, data in ((extension, buffer.getvalue()), ("txt", b"a photo " * (1 + i % 9))):
                    member = tarfile.TarInfo(f"{i:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    command = [sys.executable, "-m", "mmdata", "index", str(folder), "--tokenizer", str(HOME / "tokenizer")]
    subprocess.run(command, check=True)
    return folder


def flat(workers: str) -> None:
    """Epoch by epoch over photos of many shapes: memory, and what must not grow at all."""
    import mmdata

    folder = HOME / "mixed" if (HOME / "mixed").exists() else make_mixed()
    settings = {"shards": str(folder), "tokenizer": str(HOME / "tokenizer"), "global_batch_size": 64}
    shapes = {"image_buckets": 3, "text_buckets": 3, "transform": "train"}
    loader = mmdata.Loader.from_config({**settings, **shapes, "loading": {"num_processes": int(workers == "process")}})
    found: list[float] = []
    for epoch in range(EPOCHS):
        for _ in loader:
            pass
        found.append(memory_mb()["all"])
        files = sum(len(os.listdir(f"/proc/{process}/fd")) for process in process_ids(os.getpid()))
        print(
            f"epoch {epoch + 1:2}  {found[-1]:7.1f} MB  {files} descriptors  {threading.active_count()} threads  "
            f"{len(os.listdir('/dev/shm'))} in /dev/shm",
            flush=True,
        )
    print(f"{workers}: epoch {EPOCHS} has {found[-1] / found[1] - 1:+.2%} of the memory of epoch 2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "parts", "flat"])
    parser.add_argument("workload", nargs="?", default="photos")
    parser.add_argument("loader", nargs="?", choices=LOADERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", choices=["thread", "process"], default="thread")
    given = parser.parse_args()
    if given.what == "compare":
        compare(given.workload, given.rounds)
    elif given.what == "flat":
        flat(given.workers)
    else:
        print(json.dumps(parts(given.workload, given.loader)), flush=True)
        os._exit(0)  # workers of a loader that was left in the middle are not waited for


if __name__ == "__main__":
    main()
