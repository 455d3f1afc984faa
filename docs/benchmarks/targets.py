"""What the boxes of a row cost the loader: rows a second with five boxes and classes a row, against none.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS    # the shards, once
PYTHONPATH=. python docs/benchmarks/targets.py photos                              # or: shrunk

Two loaders over the same shards take turns, epoch by epoch; the first epoch of each does not count.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import mmdata
from mmdata.index import build_index

HOME = Path(os.environ.get("MMDATA_BENCH_DIR", "/tmp/mmdata-loading"))
NAMES = ["cat", "dog", "tree"]
TARGETS = {
    "boxes": "json:boxes",
    "box_format": "relative",
    "box_labels": "json:boxes.category",
    "box_classes": NAMES,
}


def add_boxes(shards: Path, folder: Path) -> None:
    """Write the samples again, with five boxes each."""
    rng, index = np.random.default_rng(0), mmdata.Index.open(shards)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for row in range(len(index)):
            sample = index[row]
            corners = np.sort(rng.random((5, 2, 2)), axis=1).reshape(5, 4).tolist()
            boxes = [
                {"bbox": box, "category": NAMES[k % 3], "phrase": f"a {NAMES[k % 3]}"} for k, box in enumerate(corners)
            ]
            members = {"jpg": sample.image_bytes, "txt": sample.captions[0].encode()}
            for extension, data in {**members, "json": json.dumps({"boxes": boxes}).encode()}.items():
                info = tarfile.TarInfo(f"{row:06d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    build_index(folder)


def epoch(loader: mmdata.Loader) -> tuple[float, float]:
    """Rows a second, and rows a second of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = sum(int(batch["valid"].sum()) for batch in loader)
    return rows / (time.perf_counter() - wall), rows / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["photos", "shrunk"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--phrases", action="store_true", help="and a phrase for each box")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        add_boxes(HOME / given.workload, Path(folder))
        settings: dict[str, Any] = {"shards": folder, "tokenizer": str(HOME / "tokenizer"), "global_batch_size": 256}
        settings |= {"text_buckets": [77], "loading": {"num_workers": 2, "num_processes": 0}}
        targets = {**TARGETS, "box_texts": "json:boxes.phrase"} if given.phrases else TARGETS
        loaders = [mmdata.Loader.from_config(one) for one in (settings, {**settings, "targets": targets})]
        found: list[list[tuple[float, float]]] = [[], []]
        for number in range(given.rounds + 1):
            for place in (0, 1) if number % 2 else (1, 0):
                speeds = epoch(loaders[place])
                if number:
                    found[place].append(speeds)
        for loader in loaders:
            loader.close()
    for what, column in (("wall", 0), ("CPU", 1)):
        without, with_boxes = (median(speeds[column] for speeds in one) for one in found)
        ratios = [two[column] / one[column] for one, two in zip(*found, strict=True)]
        print(f"{given.workload}, {what}: {without:,.0f} rows/s, with boxes {with_boxes:,.0f}: {median(ratios):.3f}")


if __name__ == "__main__":
    main()
