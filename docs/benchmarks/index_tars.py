"""Makes tars as img2dataset writes them, small photos with .txt and .json, to time `mmdata index` on.

PYTHONPATH=. python docs/benchmarks/index_tars.py /tmp/tars 100000
time mmdata index /tmp/tars --out /tmp/index
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SHARD_ROWS, PHOTOS = 5_000, 200
WORDS = [f"word{number}" for number in range(30)]


def make_photos(generator: np.random.Generator) -> list[bytes]:
    """JPEGs of about 11 KB, 256 pixels wide."""
    photos: list[bytes] = []
    for _ in range(PHOTOS):
        coarse = Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((256, int(generator.choice([192, 256, 340]))), Image.Resampling.BICUBIC).save(
            buffer, "JPEG", quality=85
        )
        photos.append(buffer.getvalue())
    return photos


def write_tars(folder: Path, rows: int, *, shard_rows: int = SHARD_ROWS) -> None:
    """Tars of `shard_rows` samples each; the bytes of every image are its own."""
    generator = np.random.default_rng(0)
    photos = make_photos(generator)
    folder.mkdir(parents=True)
    for first in range(0, rows, shard_rows):
        with tarfile.open(folder / f"{first // shard_rows:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row in range(first, min(first + shard_rows, rows)):
                key = f"{row:09d}"
                about = {"url": f"http://x/{key}.jpg", "key": key, "status": "success", "width": 256, "exif": "{}"}
                members = {
                    "jpg": photos[row % PHOTOS] + key.encode(),  # decoders ignore what follows the end of the image
                    "json": json.dumps(about).encode(),
                    "txt": " ".join(generator.choice(WORDS, 12)).encode(),
                }
                for extension, data in members.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=int)
    given = parser.parse_args()
    write_tars(given.folder, given.rows)


if __name__ == "__main__":
    main()
