"""Near copies: how many planted ones `mmdata duplicates` finds, how many pairs it finds wrongly, and what it takes.

PYTHONPATH=. python docs/benchmarks/duplicates.py planted PHOTOS.tar    # photos, and their quarters as further ones
PYTHONPATH=. python docs/benchmarks/duplicates.py planted FOLDER_OF_IMAGES --every 10
PYTHONPATH=. python docs/benchmarks/duplicates.py clock PHOTOS.tar      # milliseconds of processor a photo
PYTHONPATH=. python docs/benchmarks/duplicates.py search --rows 1000000 # random pictures, one in a hundred a copy

Each hash in the table of `planted` is compared at the largest distance at which it takes no two different originals for
copies: (recall over all copies, that distance). A crop takes away 5 % of height and of width, at a random place.
"""

from __future__ import annotations

import argparse
import io
import resource
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mmdata.duplicates.groups import near_pairs
from mmdata.duplicates.search import are_near, candidate_pairs, popcount
from mmdata.duplicates.signature import SIDE, THUMBNAIL_BYTES, Signed, brightness, pack, perceptual_hashes, thumbnail
from mmdata.images.decode import decode

Bytes = NDArray[np.uint8]
rng = np.random.default_rng(0)


def read(source: Path, every: int) -> list[bytes]:
    """The images of a tar or of a folder."""
    if source.is_dir():
        return [path.read_bytes() for path in sorted(source.iterdir()) if path.suffix in (".png", ".jpg")][::every]
    with tarfile.open(source) as tar:
        names = [member for member in tar if member.name.endswith((".png", ".jpg"))][::every]
        return [tar.extractfile(member).read() for member in names]  # pyright: ignore


def as_rgb(data: bytes) -> Image.Image:
    layered = Image.open(io.BytesIO(data)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")


def jpeg(image: Image.Image, quality: int = 85) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def resized(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float) -> Image.Image:
    width, height = round(image.width * (1 - share)), round(image.height * (1 - share))
    left, top = (
        int(rng.integers(0, all_of - part + 1)) for all_of, part in zip(image.size, (width, height), strict=True)
    )
    return image.crop((left, top, left + width, top + height))


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "quality 50": lambda image: jpeg(image, 50),
    "quality 75": lambda image: jpeg(image, 75),
    "quality 95": lambda image: jpeg(image, 95),
    "half the size": lambda image: jpeg(resized(image, 0.5)),
    "0.7 of the size": lambda image: jpeg(resized(image, 0.7)),
    "twice the size": lambda image: jpeg(resized(image, 2)),
    "cropped by 2 %": lambda image: jpeg(cropped(image, 0.02)),
    "cropped by 5 %": lambda image: jpeg(cropped(image, 0.05)),
    "cropped by 5 %, half, quality 50": lambda image: jpeg(resized(cropped(image, 0.05), 0.5), 50),
}


def signature(data: bytes) -> Bytes:
    return thumbnail(data, format="JPEG" if data[:2] == b"\xff\xd8" else "PNG")


def signed(thumbnails: Bytes) -> Signed:
    rows = np.arange(len(thumbnails))
    hashes = np.concatenate([perceptual_hashes(part) for part in np.array_split(thumbnails, -(-len(rows) // 4096))])
    return Signed(rows, rows, hashes, np.ones(len(rows), np.bool_), thumbnails)


def planted(source: Path, every: int) -> None:
    images = [as_rgb(data) for data in read(source, every)]
    if not source.is_dir():
        images += [
            image.crop((x, y, x + image.width // 2, y + image.height // 2))
            for image in images
            for x in (0, image.width // 2)
            for y in (0, image.height // 2)
        ]
    count = len(images)
    parts = [np.array([signature(jpeg(image, 92)) for image in images])]
    parts += [np.array([signature(change(image)) for image in images]) for change in CHANGES.values()]
    thumbnails = np.concatenate(parts)
    found = near_pairs(signed(thumbnails))
    merged = np.flatnonzero(found.representative != np.arange(len(thumbnails)))
    pairs = {tuple(pair) for pair in found.pairs.tolist()}

    def is_found(i: int, j: int) -> bool:
        first, second = sorted((int(found.representative[i]), int(found.representative[j])))
        return first == second or (first, second) in pairs

    shares = []
    for number, name in enumerate(CHANGES, 1):
        shares.append(np.mean([is_found(i, number * count + i) for i in range(count)]))
        print(f"{name}: {shares[-1]:.4f}")
    edges = np.concatenate([found.pairs, np.stack([found.representative[merged], merged], 1)])
    right = edges[:, 0] % count == edges[:, 1] % count
    print(f"{count} originals: recall {np.mean(shares):.4f}, precision {right.mean():.4f} of {len(edges):,} pairs")
    wrong = {tuple(sorted(pair)) for pair in (edges[~right] % count).tolist()}
    print(f"{len(wrong)} of {count * (count - 1) // 2:,} pairs of originals taken for copies in any of their versions")
    for name, bits in hashes_of(thumbnails).items():
        hashes = pack(bits)
        first, second = np.triu_indices(count, 1)
        bound = int(popcount(hashes[first] ^ hashes[second]).min()) - 1
        copies = popcount(hashes[count:] ^ np.tile(hashes[:count], len(CHANGES)))
        print(f"{name}: recall {(copies <= bound).mean():.3f} at {bound} bits")


def hashes_of(thumbnails: Bytes) -> dict[str, NDArray[np.bool_]]:
    """Other hashes of 64 bits, from the same thumbnails."""
    light = brightness(thumbnails)
    small = light.reshape(-1, 8, 4, 8, 4).mean((2, 4))
    wide = np.stack([light[:, :, round(32 * i / 9) : round(32 * (i + 1) / 9)].mean(2) for i in range(9)], 2)
    wide = wide.reshape(-1, 8, 4, 9).mean(2)
    places = (2 * np.arange(SIDE) + 1) * np.pi / (2 * SIDE)
    waves = np.cos(np.outer(np.arange(9), places))
    low = (waves @ light @ waves.T)[:, 1:, 1:].reshape(-1, 64)
    bands = small.reshape(-1, 4, 16)
    return {
        "pHash": np.unpackbits(perceptual_hashes(thumbnails).astype(">u8").view(np.uint8).reshape(-1, 8), axis=1) > 0,
        "PDQ's rule at 64 bits": low > np.median(low, axis=1, keepdims=True),
        "dHash": (wide[:, :, 1:] > wide[:, :, :-1]).reshape(-1, 64),
        "mean": (small > small.mean((1, 2), keepdims=True)).reshape(-1, 64),
        "block median": (bands > np.median(bands, axis=2, keepdims=True)).reshape(-1, 64),
    }


def clock(source: Path) -> None:
    photos = read(source, 1)
    ways: dict[str, Callable[[], object]] = {
        "decode small": lambda: [decode(data, format="JPEG", at_least=(64, 64)) for data in photos],
        "with thumbnail": lambda: [signature(data) for data in photos],
        "and hash": lambda: perceptual_hashes(np.array([signature(data) for data in photos])),
    }
    for _ in range(3):
        for name, way in ways.items():
            begun = time.process_time()
            way()
            print(f"{name}: {(time.process_time() - begun) / len(photos) * 1e3:.2f} ms a photo")


def search(rows: int) -> None:
    """Pictures of random waves; every hundredth is a copy of the one before, moved by noise."""
    waves = np.cos(np.pi * np.outer((np.arange(SIDE) + 0.5) / SIDE, np.arange(8))).astype(np.float32)
    thumbnails = np.full((rows, THUMBNAIL_BYTES), 128, np.uint8)
    fall = (1 + np.add.outer(np.arange(8), np.arange(8))).astype(np.float32)
    for begin in range(0, rows, 10_000):
        size = min(10_000, rows - begin)
        weights = rng.standard_normal((size, 8, 8), np.float32) / fall
        images = 128 + 40 * waves @ weights @ waves.T
        images[99::100] = images[98::100][: len(images[99::100])] + rng.normal(0, 2, (len(images[99::100]), SIDE, SIDE))
        thumbnails[begin : begin + size, : SIDE**2] = images.reshape(size, -1).clip(0, 255).astype(np.uint8)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, wall = time.process_time(), time.perf_counter()
    data = signed(thumbnails)
    candidates = [
        np.unique(part @ np.array([rows, 1])) for part in candidate_pairs(data.hashes, lambda a, b: thumbnails[a:b])
    ]
    codes = np.unique(np.concatenate(candidates))
    looked_up = time.process_time() - begun
    pairs = np.stack(np.divmod(codes, rows), axis=1)
    near = pairs[are_near(pairs, lambda numbers: thumbnails[numbers])]
    spent = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    right = (near[:, 1] == near[:, 0] + 1) & (near[:, 1] % 100 == 99)
    print(
        f"{rows:,} rows: {len(codes):,} candidates in {looked_up:.0f} s, confirmed in {spent - looked_up:.0f} s of "
        f"processor, {time.perf_counter() - wall:.0f} s by the clock; {(most - made) / 1024:.0f} MB more than the "
        f"{rows * THUMBNAIL_BYTES / 2**20:.0f} MB of thumbnails; found {right.sum():,} of {rows // 100:,} copies, and "
        f"{(~right).sum():,} others"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planted", "clock", "search"))
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "planted":
        planted(given.source, given.every)
    elif given.what == "clock":
        clock(given.source)
    else:
        search(given.rows)


if __name__ == "__main__":
    main()
