"""How long a plan over a share of the rows takes to make, from real index files: `data.val.share`.

PYTHONPATH=. python docs/benchmarks/val_share.py /tmp/index 5000000

The index files are real and hold random rows of one caption each; there are no tars, as a plan reads none.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from mmdata.config import DataConfig
from mmdata.images.probe import FORMATS
from mmdata.index import Index, ShardEntry
from mmdata.index.encode import encode
from mmdata.index.writer import ManifestWriter
from mmdata.plan.from_config import build_plan
from mmdata.tars.captions import TXT
from mmdata.tars.scan import IndexedMember, IndexRow

SHARD_ROWS, TEMPLATES = 10_000, 16


class Counted:
    """The tokenizer that is said to have counted the captions."""

    fingerprint = "synthetic"

    def count(self, captions: list[str]) -> list[int]:
        """Tokens of each caption: its words."""
        return [len(caption.split()) for caption in captions]


def write_index(folder: Path, rows: int) -> None:
    """Index files of so many rows; each of a few files is used for many shards."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(TEMPLATES):
        hashes = generator.integers(-(2**63), 2**63, SHARD_ROWS).tolist()
        words = np.clip(generator.lognormal(np.log(12), 0.6, SHARD_ROWS), 3, 75).astype(int).tolist()
        columns = encode(
            [
                IndexRow(
                    f"{number:09d}",
                    *(1536 * number, 500, FORMATS.index("JPEG"), 1536 * number + 1024, 90, TXT),
                    *[(480, 640), (640, 480), (512, 512)][number % 3],
                    *(1, -1, image_hash, image_hash, ["a " * length]),
                    [IndexedMember("txt", 1536 * number + 1024, 90, image_hash)],
                )
                for number, (image_hash, length) in enumerate(zip(hashes, words, strict=True))
            ],
            Counted().count,
        )
        files.append(columns)
    folder.mkdir(parents=True)
    writer = ManifestWriter(folder)
    for shard in range(-(-rows // SHARD_ROWS)):
        columns = files[shard % TEMPLATES]
        entry = ShardEntry.of(columns, f"{shard:06d}.tar", size=1536 * SHARD_ROWS, sha256=f"{shard:064x}")
        writer.add(entry, columns.data)
    writer.close(tokenizer=Counted.fingerprint)


def main() -> None:
    """Make the index if it is missing, then make the plan of each split, and of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    if not options.folder.exists():
        write_index(options.folder, options.rows)
    settings = {"shards": str(options.folder), "tokenizer": "none", "global_batch_size": 4096}
    for changes in ({}, {"val": {"share": 0.01}}, {"val": {"share": 0.01}, "split": "val"}):
        data = DataConfig.model_validate({**settings, **changes})
        started = time.perf_counter()
        index = Index.open(options.folder)
        plan = build_plan(data, index, Counted())
        next(plan.steps(0))
        seconds = time.perf_counter() - started
        name = f"{plan.num_rows:,} of {len(index):,} rows, {data.split if data.val else 'no share'}"
        print(f"{name:46} first step after {seconds:5.2f} s: {len(index) / seconds / 1e6:6.2f} million rows/s")


if __name__ == "__main__":
    main()
