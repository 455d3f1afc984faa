"""Finds what makes a loader faster, by trying it on the user's own rows and machine. Only what helped is reported."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image

from mmdata.config import DataConfig
from mmdata.config.convert import ConvertConfig
from mmdata.config.texts import TextsConfig
from mmdata.convert.row.resize import Resize, as_jpeg
from mmdata.errors import BadSample
from mmdata.images import ImageInfo
from mmdata.images.decode import decode_pixels, oriented
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.inspect.profile import CORE, Profile, profile
from mmdata.loader import Loader
from mmdata.loader.image_buffers import BatchPixels
from mmdata.loader.reader import RowReader
from mmdata.loader.stats import NOTICEABLE
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket
from mmdata.processes import most_workers, num_cores
from mmdata.text.tokenizer import Tokenizer

SAMPLE_ROWS = 64
"""Largest number of rows in a trial."""
TRIAL_S = 1.5
"""Time of a trial of a number of workers, and upper bound of the time to decode the sample once."""
WORTH_IT = 1.1
"""Least gain of a remedy that is reported, in times as fast."""
READERS = 4
"""Factor of the number of workers that is tried if they wait for a disk, which needs no core."""


@dataclass(frozen=True)
class Remedy:
    """A change that makes the loader faster.

    Attributes:
        words: the change.
        gain: times as fast, as measured.
        measured: what was measured.
        share: share of the workers' time that the measured part takes.
    """

    words: str
    gain: float
    measured: str
    share: float = 1.0

    @property
    def whole(self) -> float:
        """Times as fast for the whole loader, by Amdahl's law.

        A share of 0.8 that is 4 times as fast gives 1 / (0.2 + 0.8 / 4) = 2.5 times.
        """
        return 1 / (1 - self.share + self.share / self.gain)

    def __str__(self) -> str:
        estimate = f"; about {self.whole:.1f}x the whole loader, estimated" if self.share < 1 else ""
        return f"{self.words} ({self.gain:.1f}x {self.measured}{estimate})"


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
    sample = _FirstRows(loader, found)
    tried: list[Remedy | None] = []
    if stage in ("decode", "transform"):
        tried += [_shrink(sample, data), _decode_fast(sample, data)]
    elif stage == "read":
        tried.append(_read_again(sample))
    elif stage == "tokenize":
        tried.append(_fast_tokenizer(sample, data))
    tried.append(_more_workers(data, found))
    helped = [remedy for remedy in tried if remedy is not None and remedy.whole >= WORTH_IT]
    return sorted(helped, key=lambda remedy: -remedy.whole)


def storage_in_words(found: Profile) -> str:
    """Speed of reading images from the shards, and the speed that the loop needs; "" if nothing was read."""
    if found.stats is None or not found.rows or not found.stats.read_bytes:
        return ""
    row_mb = found.stats.read_bytes / found.stats.rows / 1e6
    came = f"the shards gave {row_mb * found.samples_per_s:,.1f} MB/s of images"
    if not found.step_s:
        return came
    return f"{came}, and the loop would take {row_mb * found.rows / found.steps / found.step_s:,.1f} MB/s"


def cores_in_words(found: Profile) -> str:
    """Why workers wait for a core or the interpreter's lock; "" if they do not wait noticeably."""
    if found.stage_shares.get(CORE, 0.0) < NOTICEABLE:
        return ""
    cores, load = num_cores(), os.getloadavg()[0]
    if load > cores + 0.5:
        remedy = "end what else runs, or lower data.loading.num_workers"
        return f"the load of this machine is {load:.1f} on {cores} cores: {remedy}"
    return (
        "a tokenizer or transform that is Python code holds the interpreter's lock: data.loading.num_processes=4 "
        "gives it several"
    )


class _FirstRows:
    """Some rows of the first batch, with what a worker needs to make them."""

    def __init__(self, loader: Loader, found: Profile) -> None:
        step = next(iter(loader.plan.steps(0, start=0, rank=0, world_size=1)))
        rows, passes = step.rows[step.rows >= 0], step.passes[step.rows >= 0]
        assert found.stats is not None
        row_s = (found.stats.wall_s["decode"] + found.stats.wall_s["transform"]) / max(1, found.stats.rows)
        count = int(min(SAMPLE_ROWS, max(4, TRIAL_S / max(row_s, 1e-6))))
        self.read = RowReader(loader.index, loader.builder.store, rows[:count], passes[:count])
        self.count = len(rows[:count])
        self.images = [self.read.stored_image(i) for i in range(self.count)]
        self.bucket: Bucket = step.bucket
        self.transform: PixelTransform = loader.builder.spec.transform
        self.tokenizer: Tokenizer | None = loader.builder.spec.tokenizer
        self.read_s = found.stats.wall_s["read"] / max(1, found.stats.rows)  # for a row
        self._spent_s = found.stats.own_s

    def share(self, *stages: str) -> float:
        """Share of the workers' time that stages take, without waiting for a core, which falls with all work."""
        return sum(self._spent_s[stage] for stage in stages) / (sum(self._spent_s.values()) or 1.0)

    def pixels(self, images: list[EncodedImage], transform: PixelTransform) -> Callable[[], None]:
        """Decode, crop and resize images, as a worker does."""
        pixels = BatchPixels(self.bucket, len(images), BufferPool(), transform)

        def make() -> None:
            for place, image in enumerate(images):
                try:
                    pixels.write(pixels.decode(image, epoch=0), place, number=image.number, epoch=0)
                except BadSample:
                    continue

        return make


def _shrink(sample: _FirstRows, data: DataConfig) -> Remedy | None:
    bucket = sample.bucket
    if bucket.patches:
        return None  # at native resolution every pixel counts
    # 256 for 224, as is customary: the crop needs some room.
    needed = max(bucket.height, bucket.width)
    side = -(-needed * 256 // 224 // 32) * 32
    resize = Resize(side)
    small = [_shrunk(image, resize) for image in sample.images]
    if all(after is before for after, before in zip(small, sample.images, strict=True)):
        return None  # no image is larger than that
    gain = _gain(sample.pixels(sample.images, sample.transform), sample.pixels(small, sample.transform))
    why = f"{side / needed:.2g} x the {needed} pixels of a batch: room for crops"
    return _pixels_remedy(f"shrink to {side} with `{_shrink_command(data, side)}`, {why}", gain, sample)


def _shrink_command(data: DataConfig, side: int) -> str:
    """The command that shrinks the corpus."""
    # Without --tokenizer the new index would have no caption lengths, and each start would count them.
    local = isinstance(data.shards, str) and "://" not in data.shards
    folders = [data.shards, f"{data.shards}-{side}"] if local else ["SOURCE", "OUT"]
    tokenizer = ["--tokenizer", data.tokenizer] if data.tokenizer else []
    return shlex.join(["mmdata", "convert", *map(str, folders), "--resize", str(side), *tokenizer])


def _pixels_remedy(words: str, gain: float, sample: _FirstRows) -> Remedy:
    measured = f"decoding and cropping {sample.count} of your images"
    return Remedy(words, gain, measured, sample.share("decode", "transform"))


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


def _decode_fast(sample: _FirstRows, data: DataConfig) -> Remedy | None:
    if data.decode == "fast":
        return None
    fast = PixelTransform.from_config(data.model_copy(update={"decode": "fast"}))
    gain = _gain(sample.pixels(sample.images, sample.transform), sample.pixels(sample.images, fast))
    return _pixels_remedy("data.decode=fast", gain, sample)


def _read_again(sample: _FirstRows) -> Remedy:
    """Reads the sample again: its bytes are in the kernel's page cache now, which is the best case of a local disk."""
    started = time.perf_counter()
    for i in range(sample.count):
        sample.read.stored_image(i)
        try:
            sample.read.caption(i)
        except BadSample:
            continue
    again_s = (time.perf_counter() - started) / sample.count
    words = (
        "keep the shards on a fast local disk: a URL in data.shards (file:///mnt/slow) and data.loading.cache_dir do so"
    )
    measured = f"reading {sample.count} of your rows once more, from memory"
    return Remedy(words, sample.read_s / again_s, measured, sample.share("read"))


def _fast_tokenizer(sample: _FirstRows, data: TextsConfig) -> Remedy | None:
    tokenizer = sample.tokenizer
    if type(tokenizer) is Tokenizer or tokenizer is None or data.tokenizer is None:
        return None
    captions: list[str] = []
    for i in range(sample.count):
        try:
            captions.append(sample.read.caption(i))
        except BadSample:
            continue
    fast, length = Tokenizer.load(data.tokenizer, max_length=data.max_length), data.max_length
    gain = _gain(lambda: tokenizer.encode(captions, length), lambda: fast.encode(captions, length))
    return Remedy(
        f"the fast tokenizer of '{data.tokenizer}' in place of {type(tokenizer).__name__}",
        gain,
        f"on {len(captions)} of your captions",
        sample.share("tokenize"),
    )


def _more_workers(data: DataConfig, found: Profile) -> Remedy | None:
    """Tries another number of workers, in turn with the present: more if cores are free or reads wait, else fewer."""
    assert found.stats is not None
    cores, now = num_cores(), max(1, most_workers(data.loading.num_workers))
    if found.bottleneck == "read":
        then = READERS * now
    elif now < cores or (now > cores and found.stage_shares[CORE] > NOTICEABLE):
        then = cores
    else:
        return None
    steps = max(2, min(found.steps, round(TRIAL_S * found.samples_per_s * found.steps / max(1, found.rows))))
    loaders = [Loader.from_config(data.with_loading(num_workers=count), rank=0, world_size=1) for count in (now, then)]
    rates: list[list[float]] = [[], []]
    for _ in range(2):
        for place, loader in enumerate(loaders):
            rates[place].append(profile(loader, steps).samples_per_s)
    words = f"data.loading.num_workers={then}"
    return Remedy(words, max(rates[1]) / max(rates[0]), f"the whole loader; this machine has {cores} cores")


def _gain(before: Callable[[], object], after: Callable[[], object]) -> float:
    """How many times as fast `after` is: best of three runs each, in turn, in a thread like a worker's."""
    callers = torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        times = [[pool.submit(_seconds, work).result() for work in (before, after)] for _ in range(3)]
    torch.set_num_threads(callers)  # threads that start later inherit the number
    return min(time[0] for time in times) / min(time[1] for time in times)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
