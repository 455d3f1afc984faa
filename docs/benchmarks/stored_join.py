"""What a join costs: `mmdata join` of recaptions, once, and each start of a loader from then on.

PYTHONPATH=. python docs/benchmarks/stored_join.py make /tmp/stored-join --rows 200000    # shards and a table; once
PYTHONPATH=. python docs/benchmarks/stored_join.py run /tmp/stored-join

The images are tiny and all alike: no image is read. Each start is a process of its own; its time is that of
`Loader.from_config`, without the imports.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from mmdata import Loader
from mmdata.cli.data.join import join_tables
from mmdata.config import DataConfig
from mmdata.images import probe
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter

WORDS = np.array(["a", "red", "dog", "near", "the", "old", "house", "with", "trees", "under", "grey", "sky"])


def make(home: Path, num_rows: int) -> None:
    """Shards of labels, and a table of two captions a row in a random order."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    image, info = buffer.getvalue(), probe(buffer.getvalue())
    with ShardWriter(home / "shards", shard_rows=10_000) as writer:
        for row in range(num_rows):
            writer.write(Sample(f"{row:09d}", image, info, [], label=row % 10))
    rng = np.random.default_rng(0)
    order = rng.permutation(num_rows)
    captions = [[" ".join(rng.choice(WORDS, 14)) for _ in range(2)] for _ in range(num_rows)]
    table = pa.table({"key": [f"{row:09d}" for row in order.tolist()], "recap": captions})
    pyarrow.parquet.write_table(table, home / "recaps.parquet")


def settings(home: Path) -> dict[str, Any]:
    """A section `data` that draws the captions of the table."""
    return {
        "shards": str(home / "shards"),
        "tokenizer": "clip",
        "global_batch_size": 256,
        "image_size": 32,
        "join": [{"table": str(home / "recaps.parquet")}],
        "captions": {"join:recap": 1.0},
        "loading": {"num_workers": 1, "num_processes": 0},
    }


def start(home: Path) -> None:
    """One start, in a process of its own."""
    begun = time.perf_counter()
    Loader.from_config(settings(home), rank=0, world_size=1).close()
    print(f"{time.perf_counter() - begun:.1f} s")


def join(home: Path) -> None:
    """What `mmdata join` does."""
    begun = time.perf_counter()
    list(join_tables(DataConfig.model_validate(settings(home))))
    print(f"{time.perf_counter() - begun:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "run", "join", "start"))
    parser.add_argument("home", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    given = parser.parse_args()
    if given.what == "make":
        make(given.home, given.rows)
    elif given.what == "join":
        join(given.home)
    elif given.what == "start":
        start(given.home)
    else:
        for name in ("join", "start", "start"):
            done = subprocess.run([sys.executable, __file__, name, given.home], capture_output=True, text=True)
            print(f"{name}: {done.stdout.strip() or done.stderr}")


if __name__ == "__main__":
    main()
