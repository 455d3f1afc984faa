"""Finds what makes a loader faster, by trying it on the user's own rows and machine. Only what helped is reported."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from mmdata.config import DataConfig
from mmdata.config.convert import ConvertConfig
from mmdata.convert.row.resize import Resize, as_jpeg
from mmdata.errors import BadSample
from mmdata.images import ImageInfo
from mmdata.images.decode import decode_pixels, oriented
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.inspect.profile import CORE, Profile, profile
from mmdata.loader import Loader
from mmdata.loader.entries.pixels import BatchPixels
from mmdata.loader.reader import RowReader
from mmdata.loader.stats import NOTICEABLE
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket
from mmdata.processes import most_workers, num_cores
from mmdata.system import IS_POSIX

SAMPLE_ROWS = 64
"""Largest number of images that are shrunk in a trial."""
TRIAL_S = 1.5
"""Time of a trial of other settings, and upper bound of the time to decode the images once."""
WORTH_IT = 1.1
"""Least gain of a remedy that is reported, in times as fast."""
MOST_PROCESSES = 4
"""Largest number of worker processes that is advised."""
READERS = 4
"""Factor of the number of workers that is tried if they wait for a disk, which needs no core."""


class Remedy(NamedTuple):
    """A change that makes the loader faster.

    Attributes:
        words: the change.
        gain: times as fast, of the whole loader.
        measured: how that is known.
    """

    words: str
    gain: float
    measured: str

    def __str__(self) -> str:
        return f"{self.words} ({self.gain:.1f}x, {self.measured})"


def remedies(loader: Loader, data: DataConfig, found: Profile) -> list[Remedy]:
    """Changes that make a loader's slowest stage faster, the best first; none if the loader keeps up.

    Args:
        loader: the measured loader.
        data: its settings.
        found: its profile.
    """
    stage = found.bottleneck
    if stage in ("device", "transfer", "") or found.stats is None:
        return []
    tried: list[Remedy] = []
    if stage in ("decode", "transform"):
        if shrunk := _shrink(loader, data, found):
            tried.append(shrunk)
        if data.decode != "fast":
            tried.append(_try(data, data.model_copy(update={"decode": "fast"}), "data.decode=fast", found))
    if workers := _other_workers(data, found):
        words = f"data.loading.num_workers={workers}"
        tried.append(_try(data, data.with_loading(num_workers=workers), words, found))
    helped = [remedy for remedy in tried if remedy.gain >= WORTH_IT]
    return sorted(helped, key=lambda remedy: -remedy.gain)


def storage_in_words(found: Profile) -> str:
    """Speed of reading images from the shards, and the speed that the loop needs; "" if nothing was read."""
    if found.stats is None or not found.rows or not found.stats.read_bytes:
        return ""
    row_mb = found.stats.read_bytes / found.stats.rows / 1e6
    came = f"the shards gave {row_mb * found.samples_per_s:,.1f} MB/s of images"
    if found.step_s:
        came += f", and the loop would take {row_mb * found.rows / found.steps / found.step_s:,.1f} MB/s"
    return (
        f"{came}; a fast local disk helps: a URL in data.shards (file:///mnt/slow) and data.loading.cache_dir keep the "
        "shards on one"
    )


def cores_in_words(found: Profile, num_workers: int) -> str:
    """Why workers wait for a core or the interpreter's lock; "" if they do not wait noticeably."""
    if found.stage_shares.get(CORE, 0.0) < NOTICEABLE:
        return ""
    cores, load = num_cores(), os.getloadavg()[0] if IS_POSIX else 0.0
    if load > cores + 0.5:
        remedy = "end what else runs, or lower data.loading.num_workers"
        return f"the load of this machine is {load:.1f} on {cores} cores: {remedy}"
    if not num_workers:
        return ""
    given = "several" if num_workers > 1 else "one of its own"
    return (
        "a tokenizer or transform that is Python code holds the interpreter's lock: "
        f"data.loading.num_processes={min(MOST_PROCESSES, num_workers)} gives it {given}"
    )


def _shrink(loader: Loader, data: DataConfig, found: Profile) -> Remedy | None:
    """Tries the first images after `mmdata convert --resize`; None where no image is larger than that."""
    assert found.stats is not None
    step = next(iter(loader.plan.steps(0, start=0, rank=0, world_size=1)))
    bucket, transform = step.bucket, loader.builder.spec.transform
    if bucket.patches:
        return None  # at native resolution every pixel counts
    row_s = (found.stats.wall_s["decode"] + found.stats.wall_s["transform"]) / max(1, found.stats.rows)
    first = np.flatnonzero(step.rows >= 0)[: int(min(SAMPLE_ROWS, max(4, TRIAL_S / max(row_s, 1e-6))))]
    samples = RowReader(loader.index, loader.builder.store, step.rows[first], step.passes[first])
    images = [samples.stored_image(i) for i in range(len(first))]
    # 256 for 224, as is customary: the crop needs some room.
    needed = max(bucket.height, bucket.width)
    side = -(-needed * 256 // 224 // 32) * 32
    small = [_shrunk(image, Resize(side)) for image in images]
    if all(after is before for after, before in zip(small, images, strict=True)):
        return None
    before_s, after_s = _fastest(images, small, bucket=bucket, transform=transform)
    own_s = found.stats.own_s  # without waiting for a core, which falls with all work
    share = (own_s["decode"] + own_s["transform"]) / (sum(own_s.values()) or 1.0)
    why = f"{side / needed:.2g} x the {needed} pixels of a batch: room for crops"
    words = f"shrink to {side} with `{_shrink_command(data, side)}`, {why}"
    times = before_s / after_s
    measured = f"estimated: {times:.1f}x in decoding and cropping {len(first)} of your images"
    # Amdahl's law: a share of 0.8 that is 4 times as fast gives 1 / (0.2 + 0.8 / 4) = 2.5 times.
    return Remedy(words, 1 / (1 - share + share / times), measured)


def _shrink_command(data: DataConfig, side: int) -> str:
    """The command that shrinks the corpus."""
    # Without --tokenizer the new index would have no caption lengths, and each start would count them.
    local = isinstance(data.shards, str) and "://" not in data.shards
    folders = [data.shards, f"{data.shards}-{side}"] if local else ["SOURCE", "OUT"]
    tokenizer = ["--tokenizer", data.tokenizer] if data.tokenizer else []
    return shlex.join(["mmdata", "convert", *map(str, folders), "--resize", str(side), *tokenizer])


def _shrunk(image: EncodedImage, resize: Resize) -> EncodedImage:
    """An image after `mmdata convert --resize`."""
    try:
        pixels = decode_pixels(image.data, image.format)
    except BadSample:
        return image
    info = ImageInfo(image.format, pixels.shape[0], pixels.shape[1], image.orientation)
    if not resize.applies(info):
        return image
    small = resize(Image.fromarray(oriented(pixels, image.orientation)))
    data, _ = as_jpeg(small, bytes(image.data), image.format, quality=ConvertConfig().quality)
    return image._replace(data=data, format="JPEG", orientation=1)


def _fastest(*samples: Sequence[EncodedImage], bucket: Bucket, transform: PixelTransform) -> list[float]:
    """Seconds to decode, crop and resize each of some samples: best of three, in turn, in a thread like a worker's."""

    def seconds(images: Sequence[EncodedImage]) -> float:
        pixels = BatchPixels(bucket, len(images), BufferPool(), transform)
        started = time.perf_counter()
        for place, image in enumerate(images):
            try:
                pixels.write(pixels.decode(image, epoch=0), place, number=image.number, epoch=0)
            except BadSample:
                continue
        return time.perf_counter() - started

    callers = torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        times = [[pool.submit(seconds, images).result() for images in samples] for _ in range(3)]
    torch.set_num_threads(callers)  # threads that start later inherit the number
    return [min(each) for each in zip(*times, strict=True)]


def _other_workers(data: DataConfig, found: Profile) -> int | None:
    """Another number of workers that may help: more if cores are free or reads wait, else fewer; None: none."""
    cores, now = num_cores(), max(1, most_workers(data.loading.num_workers))
    if found.bottleneck == "read":
        return READERS * now
    is_crowded = now > cores and found.stage_shares[CORE] > NOTICEABLE
    return cores if now < cores or is_crowded else None


def _try(data: DataConfig, changed: DataConfig, words: str, found: Profile) -> Remedy:
    """Measures the whole loader with other settings, in turn with the present ones."""
    steps = max(2, min(found.steps, round(TRIAL_S * found.samples_per_s * found.steps / max(1, found.rows))))
    loaders = [Loader.from_config(settings, rank=0, world_size=1) for settings in (data, changed)]
    rates = [[profile(loader, steps).samples_per_s for loader in loaders] for _ in range(2)]
    before, after = (max(each) for each in zip(*rates, strict=True))
    return Remedy(words, after / before, f"measured; this machine has {num_cores()} cores")
