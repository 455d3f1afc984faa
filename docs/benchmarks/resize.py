"""What `mmdata convert --resize 256` keeps of photos: each is shrunk, encoded, decoded and cropped to 224 × 224 as in
evaluation, and compared with the same crop of the original.

PYTHONPATH=. python docs/benchmarks/resize.py FOLDER_OF_JPG
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmdata.convert.row.resize import Resize
from mmdata.images.crop import eval_crop, resize_crop, whole_pixels
from mmdata.images.decode import decode

SIDE, CROP, ROUNDS = 256, 224, 5


def cropped(image: Tensor) -> Tensor:
    """The part that evaluation keeps, (3, CROP, CROP)."""
    out = torch.empty(3, CROP, CROP, dtype=torch.uint8)
    size = (image.shape[1], image.shape[2])
    resize_crop(image, whole_pixels(eval_crop(size, (CROP, CROP)), size), out)
    return out


def psnr(ours: Tensor, theirs: Tensor) -> float:
    """In dB, from 8-bit pixels."""
    return float(-10 * torch.log10(((ours.double() - theirs.double()) / 255).square().mean() + 1e-12))


def main() -> None:
    """Print a line for each filter and each encoding."""
    photos = [decode(path.read_bytes(), format="JPEG") for path in sorted(Path(sys.argv[1]).glob("*.jpg"))]
    photos = [photo for photo in photos if min(photo.shape[1:]) > SIDE]
    expected = [cropped(photo) for photo in photos]
    print(f"{len(photos)} photos with a shorter side over {SIDE}, made {SIDE}")
    for name in ("BICUBIC", "LANCZOS"):
        small = [shrunk(photo, Image.Resampling[name]) for photo in photos]
        found = [psnr(cropped(as_tensor(image)), crop) for image, crop in zip(small, expected, strict=True)]
        print(f"{name}, not encoded: mean {np.mean(found):.1f} dB, worst {min(found):.1f}")
    for chroma in ("4:4:4", "4:2:0"):
        for quality in (95, 90):
            files = [encoded(image, quality, chroma) for image in small]
            began = time.perf_counter()
            for _ in range(ROUNDS):
                decoded = [decode(file, format="JPEG") for file in files]
            milliseconds = 1000 * (time.perf_counter() - began) / ROUNDS / len(files)
            found = [psnr(cropped(image), crop) for image, crop in zip(decoded, expected, strict=True)]
            size = np.mean([len(file) for file in files]) / 1000
            print(f"LANCZOS, {chroma}, quality {quality}: mean {np.mean(found):.1f} dB, ", end="")
            print(f"worst {min(found):.1f}; {size:.0f} kB; decoded in {milliseconds:.2f} ms")


def shrunk(photo: Tensor, method: Image.Resampling) -> Image.Image:
    """A photo with a shorter side of SIDE."""
    height, width = Resize(SIDE).size(photo.shape[1], photo.shape[2])
    return Image.fromarray(photo.permute(1, 2, 0).numpy()).resize((width, height), method)


def as_tensor(image: Image.Image) -> Tensor:
    """uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def encoded(image: Image.Image, quality: int, chroma: str) -> bytes:
    """A JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=chroma)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
