"""The loader on a machine with a GPU: beside a training step, and alone by cores, with threads and with processes.

PYTHONPATH=. python docs/benchmarks/gpu_loader.py --device cuda
PYTHONPATH=. python docs/benchmarks/gpu_loader.py --device cpu --small      # rehearses the script; says nothing

The images are made here: noise whose amplitudes fall with the frequency, a shorter side of 256, JPEG of quality 95.
A file has 24.5 kB on average (18 to 30), as web photos do that img2dataset shrinks to this side and writes with this
quality: 24 kB. They are decoded, cropped at random to 224 and tokenized. "fed", which comes first, is the speed of a
training step that the loader feeds, as a share of that of the same step on one batch, which stays.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_step import Step
from PIL import Image

import mmdata
from mmdata.images import probe
from mmdata.processes import usable_cores
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.train.precision import choose_precision, numerics
from mmdata.train.prefetch import DevicePrefetcher
from tests.shard_writer import ShardWriter

WORDS = ["a", "the", "of", "on", "two", "red", "blue", "small", "large", "old", "dog", "cat", "man", "street", "house"]


def photo(seed: int, height: int, width: int) -> bytes:
    """A JPEG of noise whose channels mostly agree; its amplitudes are 1 / frequency^1.8, for the size of a photo's."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]) ** 1.8
    frequency[0, 0] = np.inf
    grey, *colors = (
        np.fft.irfft2(np.fft.rfft2(rng.normal(size=(height, width))) / frequency, s=(height, width)) for _ in range(4)
    )
    channels = np.stack([grey + 0.3 * color for color in colors], axis=2)
    pixels = np.clip(128 + 55 * (channels - channels.mean()) / channels.std(), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def make(folder: Path, photos: list[bytes], rows: int) -> None:
    """Shards of `rows` rows, and a tokenizer."""
    rng = np.random.default_rng(0)
    captions = [" ".join(rng.choice(WORDS, int(rng.integers(4, 20)))) for _ in range(rows)]
    train_tokenizer(captions[:2000], folder / "tokenizer", vocab_size=500)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    with ShardWriter(
        folder / "shards", shard_rows=2000, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint
    ) as writer:
        for i, caption in enumerate(captions):
            image = photos[i % len(photos)]
            writer.write(Sample(f"{i:06d}", image, probe(image), [caption]))


def loader_of(folder: Path, rows: int, side: int, **loading: Any) -> mmdata.Loader:
    return mmdata.Loader.from_config(
        {
            "shards": str(folder / "shards"),
            "tokenizer": str(folder / "tokenizer"),
            "global_batch_size": rows,
            "image_size": side,
            "text_buckets": [77],
            "crop_scale": [0.5, 1.0],
            "loading": loading,
        },
        rank=0,
        world_size=1,
    )


def samples_per_s(loader: mmdata.Loader, *, warm_s: float, timed_s: float) -> float:
    """Rows a second, epoch after epoch, once it has run for `warm_s`."""
    rows, begin, started = 0, time.perf_counter(), 0.0
    for batch in chain.from_iterable(repeat(loader)):
        now = time.perf_counter()
        if started and now - started >= timed_s:
            return (rows + len(batch["rows"])) / (now - started)
        if started:
            rows += len(batch["rows"])
        elif now - begin >= warm_s:
            started = now
    raise AssertionError("the loader has no end")


def fed(loader: mmdata.Loader, step: Step, given: argparse.Namespace) -> dict[str, Any]:
    """Steps on batches of the loader, against steps on one batch."""
    device = step.device

    def finish() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    batches: Iterator[Any] = chain.from_iterable(repeat(DevicePrefetcher(loader, device)))
    first: Any = next(batches)
    for _ in range(2 if given.small else 5):
        step.update(first)
    count = 3 if given.small else given.steps
    started = finish()
    for _ in range(count):
        step.update(first)
    alone = finish() - started
    for batch in islice(batches, 1 if given.small else 10):
        step.update(batch)
    started = finish()
    for batch in islice(batches, count):
        step.update(batch)
    taken = finish() - started
    rows = len(first["rows"])
    values = {"samples_per_s": round(count * rows / taken, 1), "share_of_synthetic": round(alone / taken, 4)}
    return {"rows": rows, **values}


def rows_of(folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows of the table, the most important ones first."""
    device, cores = torch.device(given.device), usable_cores()
    side, shorter, images, rows = (32, 40, 4, 64) if given.small else (224, 256, 256, 16384)
    batch, warm_s, timed_s, several = (8, 0.1, 0.2, 2) if given.small else (given.batch, 2.0, 2.0, 4)
    kinds: dict[str, dict[str, Any]] = {
        "a process": {"num_processes": 1},
        f"{several} processes": {"num_processes": several},
        "threads": {"num_processes": 0},
    }
    alone = [(cores, kind) for kind in kinds] + [(max(1, cores // 4), "a process")]
    if given.small:
        del kinds["a process"]
        alone = [(1, "threads")]
    longer = shorter * 4 // 3
    photos = [photo(i, *((shorter, longer) if i % 3 else (longer, shorter))) for i in range(images)]
    make(folder, photos, rows)
    with numerics(choose_precision("auto", device), device):
        step = Step(given.model, device, compiled=False, side=side)
        for kind, loading in kinds.items():
            loader = loader_of(folder, batch, side, num_workers="auto", **loading)
            yield {"name": f"{given.model} fed by the loader, {kind}", **fed(loader, step, given)}
            loader.close()
    size = sum(map(len, photos)) // len(photos)
    for count, kind in alone:
        loader = loader_of(folder, batch, side, num_workers=count, **kinds[kind])
        found = samples_per_s(loader, warm_s=warm_s, timed_s=timed_s)
        loader.close()
        values = {"samples_per_s": round(found, 1), "per_core": round(found / count, 1), "image_bytes": size}
        yield {"name": f"loader, {count} of {cores} cores, {kind}", **values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="timed, with the loader and without")
    parser.add_argument("--model", default="vit_b_32")
    parser.add_argument("--small", action="store_true", help="few rows of small images, to rehearse this script")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mmdata-gpu-loader-"))
    try:
        for row in rows_of(folder, given):
            print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
