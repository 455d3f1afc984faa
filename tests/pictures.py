"""Files of formats that Pillow alone does not write; tests/data/images has them, and each test that needs one its name.

All show `picture()`, 21 pixels high and 31 wide, or that picture turned. They were written by pillow-heif 1.8.1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parent / "data/images"

needs_heif = pytest.mark.skipif(
    importlib.util.find_spec("pillow_heif") is None, reason="pillow-heif is not installed (pip install 'mmdata[heic]')"
)


class Stored(NamedTuple):
    """A file: its format, (height, width) as displayed, and the EXIF orientation that turns `picture()` so."""

    format: str
    height: int
    width: int
    orientation: int = 1


FILES = {
    "upright.heic": Stored("HEIF", 21, 31),
    "turned.heic": Stored("HEIF", 31, 21, 6),
    "mirrored.heic": Stored("HEIF", 31, 21, 5),
    "second_of_two.heic": Stored("HEIF", 21, 31),
}
"""All of them."""


def stored(name: str) -> bytes:
    """The bytes of a file."""
    return (FOLDER / name).read_bytes()


def picture() -> Image.Image:
    """What the files show before it is turned."""
    coarse = np.random.default_rng(7).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((31, 21), Image.Resampling.BICUBIC)
