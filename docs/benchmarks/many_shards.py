"""Batches whose rows lie in many shards: milliseconds a batch, and tars opened.

PYTHONPATH=. python docs/benchmarks/many_shards.py /tmp/many-shards 128

The photos are those of `index_tars.py`, 200 in each of the shards, all in one shuffle window; the folder is made at the
first run. Batches of 256 rows; the first epoch warms up.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from index_tars import write_tars

from mmdata import Loader
from mmdata.index import build_index

SHARD_ROWS, BATCH = 200, 256


def main() -> None:
    """Print a line for each of three epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shards", type=int)
    given = parser.parse_args()
    if not given.folder.exists():
        write_tars(given.folder, given.shards * SHARD_ROWS, shard_rows=SHARD_ROWS)
        build_index(given.folder)
    opened = 0
    system = os.open

    def count(path: Any, *more: Any, **named: Any) -> int:
        nonlocal opened
        opened += str(path).endswith(".tar")
        return system(path, *more, **named)

    os.open = count
    settings = {"shards": str(given.folder), "tokenizer": "clip", "global_batch_size": BATCH, "text_buckets": [77]}
    with Loader.from_config({"data": settings}) as loader:
        for epoch in range(3):
            opened, taken, began = 0, list[float](), time.perf_counter()
            for _batch in loader:
                taken.append(time.perf_counter() - began)
                began = time.perf_counter()
            print(
                f"epoch {epoch}: {1000 * median(taken):.0f} ms a batch (median of {len(taken)}), "
                f"{opened / len(taken):.1f} tars opened a batch",
                flush=True,
            )


if __name__ == "__main__":
    main()
