"""What a vector a row costs the loader: samples a second with a field of 768 float16, against none.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS    # the shards, once
PYTHONPATH=. python docs/benchmarks/joined_fields.py

The vector lies in a joined table, or in a .npy or .npz of tars that are joined by key, in another order. All take
turns, each run a loader of its own over web photos with a shorter side of 256, in batches of 256; what counts is the
ratio of the medians.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

import mmdata
from mmdata.cli.data.join import join_tables
from mmdata.config import DataConfig
from mmdata.index import build_index

HOME = Path(os.environ.get("MMDATA_BENCH_DIR", "/tmp/mmdata-loading"))
DIMENSIONS = 768


def write_table(path: Path, index: mmdata.Index) -> None:
    """A vector for each row, in a random order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(index))
    vectors = rng.normal(size=len(index) * DIMENSIONS).astype(np.float16)
    feature = pa.FixedSizeListArray.from_arrays(pa.array(vectors), DIMENSIONS)
    pyarrow.parquet.write_table(pa.table({"key": index.keys(order), "feature": feature}), path)


def write_tar(path: Path, index: mmdata.Index, kind: str) -> None:
    """A tar of a vector for each row, as .npy or .npz, in a random order, with its index."""
    rng = np.random.default_rng(0)
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for key in index.keys(rng.permutation(len(index))):
            file, vector = io.BytesIO(), rng.normal(size=DIMENSIONS).astype(np.float16)
            if kind == "npy":
                np.save(file, vector)
            else:
                np.savez(file, feature=vector)
            info = tarfile.TarInfo(f"{key}.{kind}")
            info.size = file.tell()
            file.seek(0)
            tar.addfile(info, file)
    build_index(path.parent)


def samples_per_s(settings: dict[str, Any], seconds: float) -> float:
    """Rows a second of a loader, from its first epoch's end on."""
    with mmdata.Loader.from_config(settings, rank=0, world_size=1) as loader:
        for _ in loader:
            pass
        rows, started = 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            rows += sum(len(batch["rows"]) for batch in loader)
        return rows / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a run, at least")
    given = parser.parse_args()
    shards = HOME / "shrunk"
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "features.parquet"
        write_table(table, mmdata.Index.open(shards))
        plain: dict[str, Any] = {
            "shards": str(shards),
            "tokenizer": str(HOME / "tokenizer"),
            "global_batch_size": 256,
            "transform": "eval",
            "text_buckets": [77],
        }
        joined = {**plain, "join": [{"table": str(table)}], "fields": {"feature": "join:feature"}}
        settings_of = {"without": plain, "a joined table": joined}
        for kind, source in (("npy", "npy"), ("npz", "npz:feature")):
            write_tar(Path(folder) / kind / "0.tar", mmdata.Index.open(shards), kind)
            join = [{"shards": str(Path(folder) / kind), "name": "tars"}]
            settings_of[f"a .{kind}"] = {**plain, "join": join, "fields": {"feature": f"join:tars:{source}"}}
        for settings in settings_of.values():
            if "join" in settings:
                list(join_tables(DataConfig.model_validate(settings)))
        found: dict[str, list[float]] = {name: [] for name in settings_of}
        for _ in range(given.rounds):
            for name, settings in settings_of.items():
                found[name].append(samples_per_s(settings, given.seconds))
    for name, rates in found.items():
        print(f"{name}: {median(rates):,.0f} samples/s ({min(rates):,.0f} to {max(rates):,.0f})")
        print(f"    ratio of the medians: {median(rates) / median(found['without']):.3f}")


if __name__ == "__main__":
    main()
