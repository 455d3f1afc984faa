"""How many single flipped bits in an image file decode, without a word, to other pixels; by format.

PYTHONPATH=. python docs/benchmarks/flipped_bits.py
"""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from mmdata.errors import BadSample
from mmdata.images.decode import decode

FLIPS, SIDE = 300, 96
SETTINGS = {
    "JPEG": {"quality": 92},
    "PNG": {},
    "WEBP": {"lossless": True},
    "GIF": {},
}


def picture() -> Image.Image:
    """A smooth random picture."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def main() -> None:
    rng = np.random.default_rng(1)
    for name, settings in SETTINGS.items():
        buffer = io.BytesIO()
        picture().save(buffer, name, **settings)
        data = buffer.getvalue()
        whole = decode(data, format=name)
        counts = {"error": 0, "other pixels": 0, "the same pixels": 0}
        for bit in rng.choice(8 * len(data), FLIPS, replace=False).tolist():
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            try:
                found = decode(bytes(changed), format=name)
            except BadSample:
                counts["error"] += 1
            else:
                counts["the same pixels" if torch.equal(found, whole) else "other pixels"] += 1
        print(f"{name:5} {len(data):6} bytes  " + "  ".join(f"{word}: {count}" for word, count in counts.items()))


if __name__ == "__main__":
    main()
