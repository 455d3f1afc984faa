"""Loaders side by side on two cores: decode, crop to 224 × 224, tokenize, batches in the main process.

PYTHONPATH=. python docs/benchmarks/loading.py make FOLDER_OF_JPG_AND_TXT_PAIRS
PYTHONPATH=. python docs/benchmarks/loading.py compare photos           # or: shrunk, large; --train for random crops
PYTHONPATH=. python docs/benchmarks/loading.py compare photos --augment 0.4   # random crops, flip, colours
PYTHONPATH=. python docs/benchmarks/loading.py run photos "mmdata fast"

Each run is a process of its own, the loaders take turns, and what counts is the ratio of the medians. The bare loop is
the limit: two threads over images that lie in memory, no shards, no order, no queue; the best that the same libraries
do. Needs psutil.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HOME = Path(os.environ.get("MMDATA_BENCH_DIR", "/tmp/mmdata-loading"))
WORKLOADS = {"photos": (4096, 8, 256), "shrunk": (4096, 8, 256), "large": (64, 8, 16)}  # samples, shards, batch
SIDE, LENGTH, WORKERS = 224, 77, 2
SKIPPED, TIMED = 3, 10  # batches


def make(source: Path) -> None:
    """Corpora of one set of photos: as they are, with a shorter side of 256, and of 12 megapixels."""
    from PIL import Image

    from mmdata.text.tokenizer import train_tokenizer

    photos = [path.read_bytes() for path in sorted(source.glob("*.jpg"))]
    captions = [path.with_suffix(".txt").read_text().strip() for path in sorted(source.glob("*.jpg"))]
    train_tokenizer(captions, HOME / "tokenizer", vocab_size=2000)

    def resized(photo: bytes, size: Callable[[Image.Image], tuple[int, int]]) -> bytes:
        image, buffer = Image.open(io.BytesIO(photo)).convert("RGB"), io.BytesIO()
        image.resize(size(image), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    def shorter_256(image: Image.Image) -> tuple[int, int]:
        return tuple(round(side * 256 / min(image.size)) for side in image.size)

    makers: dict[str, Callable[[bytes], bytes]] = {
        "photos": lambda photo: photo,
        "shrunk": lambda photo: resized(photo, shorter_256),
        "large": lambda photo: resized(photo, lambda _: (4000, 3000)),
    }
    for workload, (samples, shards, _) in WORKLOADS.items():
        made = [makers[workload](photo) for photo in (photos[:8] if workload == "large" else photos)]
        folder = HOME / workload
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(shards):
            with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
                for i in range(shard * samples // shards, (shard + 1) * samples // shards):
                    caption = f"no {i} {captions[i * 7 % len(captions)]}".encode()
                    for extension, data in (("jpg", made[i % len(made)]), ("txt", caption)):
                        member = tarfile.TarInfo(f"{i:06d}.{extension}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
        command = [sys.executable, "-m", "mmdata", "index", str(folder), "--tokenizer", str(HOME / "tokenizer")]
        subprocess.run(command, check=True)


def mmdata_batches(workload: str, *, train: bool, decode: str, augment: dict[str, float] | None) -> Iterator[Any]:
    import mmdata

    settings = {
        "shards": str(HOME / workload),
        "tokenizer": str(HOME / "tokenizer"),
        "global_batch_size": WORKLOADS[workload][2],
        "text_buckets": [LENGTH],
        "transform": "train" if train else "eval",
        "augment": augment,
        "decode": decode,
        "loading": {"num_workers": WORKERS},
    }
    loader = mmdata.Loader.from_config(settings)
    while True:
        yield from loader


def webdataset_batches(workload: str, *, train: bool, tuned: bool) -> Iterator[Any]:
    """As its documentation shows it (Pillow, float), or by hand: torchvision's decoder, uint8, captions in one call."""
    import torch
    import webdataset
    from torch.utils.data import DataLoader
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import InterpolationMode, v2

    size, bicubic = WORKLOADS[workload][2], InterpolationMode.BICUBIC
    crop: list[Any] = (
        [v2.RandomResizedCrop(SIDE, scale=(0.9, 1.0), interpolation=bicubic, antialias=True)]
        if train
        else [v2.Resize(SIDE, interpolation=bicubic, antialias=True), v2.CenterCrop(SIDE)]
    )
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    transform = v2.Compose(crop if tuned else crop + floats)
    tokenize = tokenizer()

    def decoded(data: bytes) -> Any:
        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)

    shards = sorted(str(path) for path in (HOME / workload).glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None, empty_check=False).repeat()
    if tuned:
        samples = dataset.to_tuple("jpg", "txt").map_tuple(
            lambda data: transform(decoded(data)), lambda caption: caption.decode()
        )
        batches = samples.batched(
            size, collation_fn=lambda pairs: (torch.stack([p for p, _ in pairs]), tokenize([c for _, c in pairs]))
        )
    else:
        samples = dataset.decode("pilrgb").to_tuple("jpg", "txt").map_tuple(transform, lambda text: tokenize([text])[0])
        batches = samples.batched(size)
    yield from DataLoader(batches, batch_size=None, num_workers=WORKERS)


def tokenizer() -> Callable[[list[str]], Any]:
    """Captions to ids (n, 77), one call a batch."""
    import torch
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(HOME / "tokenizer" / "tokenizer.json"))
    backend.enable_truncation(LENGTH)
    backend.enable_padding(length=LENGTH)
    return lambda captions: torch.tensor([found.ids for found in backend.encode_batch_fast(captions)])


def augmented(image: Any, rng: random.Random, augment: dict[str, float]) -> Any:
    """A crop after torchvision's flip and colour jitter, in random order."""
    from torchvision.transforms.v2 import functional

    from mmdata.images.augment import HUE_SHARE, JITTER_PROB

    if rng.random() < augment["horizontal_flip_prob"]:
        image = functional.horizontal_flip(image)
    if rng.random() >= JITTER_PROB:
        return image
    names = ["brightness", "contrast", "saturation", "hue"]
    rng.shuffle(names)
    for name in names:
        spread = augment["color_jitter"] * (HUE_SHARE if name == "hue" else 1.0)
        factor = (name != "hue") + rng.uniform(-spread, spread)
        image = getattr(functional, f"adjust_{name}")(image, factor)
    return image


def bare_loop(workload: str, *, train: bool, exact: bool, augment: dict[str, float] | None) -> dict[str, float]:
    """Samples a second of two threads, and their processor time a sample.

    Each goes over its half of the images in memory, into the rows of a ready batch.
    """
    import simplejpeg
    import torch
    from torch.nn.functional import interpolate
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.set_num_threads(1)
    samples: list[tuple[bytes, str]] = []
    for path in sorted((HOME / workload).glob("*.tar")):
        with tarfile.open(path) as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        samples += [(data, found[f"{name[:-3]}txt"].decode()) for name, data in found.items() if name.endswith("jpg")]
    size, tokenize, rng = WORKLOADS[workload][2], tokenizer(), random.Random(0)
    batches = TIMED // 2
    times, busy = [0.0] * WORKERS, [0.0] * WORKERS
    ready = threading.Barrier(WORKERS)

    def crop(height: int, width: int) -> tuple[int, int, int, int]:
        if not train:
            side = min(height, width)
            return (height - side) // 2, (width - side) // 2, side, side
        ratio, area = rng.uniform(0.75, 4 / 3), rng.uniform(0.9, 1.0) * height * width
        rows, columns = min(height, round((area / ratio) ** 0.5)), min(width, round((area * ratio) ** 0.5))
        return rng.randint(0, height - rows), rng.randint(0, width - columns), rows, columns

    def place(data: bytes, out: Any) -> None:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
        top, left, rows, columns = crop(height, width)
        if not exact and min(rows, columns) >= 2 * SIDE:
            least = {"min_height": -(-SIDE * height // rows), "min_width": -(-SIDE * width // columns)}
            array = simplejpeg.decode_jpeg(data, "RGB", **least)
            y, x = array.shape[0] / height, array.shape[1] / width
            top, left, rows, columns = round(top * y), round(left * x), round(rows * y), round(columns * x)
            image = torch.from_numpy(array).permute(2, 0, 1)
        else:
            image = decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), ImageReadMode.RGB)
        region = image[None, :, top : top + rows, left : left + columns]
        resized = interpolate(region, (SIDE, SIDE), mode="bicubic", antialias=True)[0]
        out.copy_(augmented(resized, rng, augment) if augment else resized)

    def work(thread: int) -> None:
        mine = samples[thread::WORKERS]
        out = torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8)
        started = 0.0
        for batch in range(-1, batches):
            if batch == 0:  # the one before warmed up
                ready.wait()
                started, busy[thread] = time.perf_counter(), -time.thread_time()
            part = [mine[(batch * size + i) % len(mine)] for i in range(size)]
            for row, (data, _) in zip(out, part, strict=True):
                place(data, row)
            tokenize([caption for _, caption in part])
        times[thread] = time.perf_counter() - started
        busy[thread] += time.thread_time()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = WORKERS * batches * size
    return {"samples_per_s": rows / max(times), "cpu_ms": 1e3 * sum(busy) / rows}


OURS = {"mmdata fast": "fast", "mmdata exact": "exact", "mmdata device": "device"}  # device: no pixel is made here
BARE = {"bare loop fast": False, "bare loop exact": True}
OTHERS = {"webdataset": False, "webdataset by hand": True}


def run(workload: str, name: str, *, train: bool, augment: dict[str, float] | None) -> dict[str, float]:
    """Samples a second, processor time of this process a sample, which other programs change little, seconds to the
    first batch, and memory (proportional share of all processes) in MB."""
    import torch

    torch.set_num_threads(1)
    if name in BARE:
        return bare_loop(workload, train=train, exact=BARE[name], augment=augment)
    started = time.perf_counter()
    if name in OURS:
        batches = mmdata_batches(workload, train=train, decode=OURS[name], augment=augment)
    else:
        batches = webdataset_batches(workload, train=train, tuned=OTHERS[name])
    next(batches)
    first_s = time.perf_counter() - started
    for _ in range(SKIPPED - 1):
        next(batches)
    rows = TIMED * WORKLOADS[workload][2]
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(TIMED):
        next(batches)
    found = {
        "samples_per_s": rows / (time.perf_counter() - started),
        "cpu_ms": 1e3 * (time.process_time() - busy) / rows,
    }
    return {**found, "first_batch_s": first_s, "memory_mb": memory_mb()}


def memory_mb() -> float:
    import psutil

    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)]) / 1e6


def compare(workload: str, options: list[str], *, rounds: int) -> None:
    """All loaders in turn, `rounds` times, and a table of medians; with augmentation the bare loops and ours."""
    names = [*BARE, *OURS, *OTHERS]
    if "--augment" in options:
        names = [*BARE, "mmdata fast", "mmdata exact"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, results in found.items():
            command = [sys.executable, __file__, "run", workload, name, *options]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{workload} {' '.join(options)}: medians of {rounds}; ratio to the bare loop of its kind")
    rates = {name: median(result["samples_per_s"] for result in results) for name, results in found.items()}
    for name, results in found.items():
        bare = rates["bare loop exact" if "exact" in name else "bare loop fast"]
        more = "".join(
            f"  {key} {median(result[key] for result in results):8.2f}" for key in results[0] if key != "samples_per_s"
        )
        print(f"{name:20} {rates[name]:7.0f} samples/s  {rates[name] / bare:5.2f}{more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "compare", "run"])
    parser.add_argument("where", help="make: folder of photos; else photos, shrunk or large")
    parser.add_argument("loader", nargs="?", choices=[*BARE, *OURS, *OTHERS])
    parser.add_argument("--train", action="store_true", help="random crops")
    parser.add_argument("--augment", type=float, metavar="JITTER", help="random crops, flips and colours, by so much")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    augment = None if given.augment is None else {"horizontal_flip_prob": 0.5, "color_jitter": given.augment}
    train = given.train or augment is not None
    if given.what == "make":
        make(Path(given.where))
    elif given.what == "compare":
        options = ["--train"] if given.train else []
        options += [] if given.augment is None else ["--augment", str(given.augment)]
        compare(given.where, options, rounds=given.rounds)
    else:
        print(json.dumps(run(given.where, given.loader, train=train, augment=augment)), flush=True)
        os._exit(0)  # workers of a loader that was left in the middle are not waited for


if __name__ == "__main__":
    main()
