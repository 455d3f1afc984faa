"""A converted folder read by Hugging Face's `datasets`, which must take the tars, and nothing else, for the data."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdata.convert import ConvertConfig, convert
from mmdata.index import Index, ShardStore
from tests.programs import run_program

READ = """
import hashlib, json, sys
from datasets import load_dataset
out, cache = sys.argv[1:]

def told(rows):
    rows = [row for row in rows]
    pixels = [hashlib.sha256(row["jpg"].convert("RGB").tobytes()).hexdigest() for row in rows]
    return [[row["__key__"], row["txt"], digest] for row, digest in zip(rows, pixels)]

ways = {
    "folder": lambda: load_dataset(out, cache_dir=cache)["train"],
    "stream": lambda: load_dataset(out, split="train", streaming=True, cache_dir=cache),
    "data_dir": lambda: load_dataset("webdataset", data_dir=out, cache_dir=cache)["train"],
    "data_files": lambda: load_dataset("webdataset", data_files={"train": out + "/*.tar"}, cache_dir=cache)["train"],
}
print(json.dumps({name: told(way()) for name, way in ways.items()}))
"""


@pytest.mark.parametrize("tool", ["convert", "index"])
@pytest.mark.sweep(keep=1)
def test_all_ways_of_load_dataset_give_the_rows_and_pixels_of_the_index(tmp_path: Path, photo: Any, tool: str) -> None:
    (tmp_path / "raw").mkdir()
    lines: list[str] = []
    for i in range(7):
        (tmp_path / f"raw/{i}.jpg").write_bytes(photo(20 + i, 30, seed=i % 6))
        lines.append(json.dumps({"image": f"{i}.jpg", "caption": f"picture {i}"}))
    lines.append(json.dumps({"image": "gone.jpg", "caption": "left out"}))  # a line in the ledger
    (tmp_path / "raw/t.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    settings = ConvertConfig(shard_rows=3, max_bad_share=0.5, train_tokenizer=300)
    convert(tmp_path / "raw/t.jsonl", out, settings)
    if tool == "index":  # tars of others, indexed where they lie
        for path in (out / "__mmdata__").glob("*.*"):
            path.unlink()
        command = [sys.executable, "-m", "mmdata", "index", str(out)]
        run_program(command, check=True, capture_output=True)
    index = Index.open(out)
    store, rows = ShardStore(index), np.arange(len(index))
    columns = index.take(rows, ["image_offset", "image_bytes"])
    shards, _ = index.locate(rows)
    images = [store.read(int(s), int(o), int(n)) for s, o, n in zip(shards, *columns.values(), strict=True)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = run_program(
        [sys.executable, "-c", READ, str(out), str(tmp_path / "cache")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert list(read) == ["folder", "stream", "data_dir", "data_files"]
    for name, found in read.items():
        assert [(key, text) for key, text, _ in found] == [(key, f"picture {int(key)}") for key in index.keys(rows)], (
            name
        )
        assert [digest for *_, digest in found] == [pixels(image) for image in images], name


def pixels(image: bytes) -> str:
    """SHA-256 of the decoded image, by Pillow."""
    with Image.open(io.BytesIO(image)) as opened:
        return hashlib.sha256(opened.convert("RGB").tobytes()).hexdigest()
