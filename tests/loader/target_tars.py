"""Tars of images on which the objects are seen: each is a rectangle of its own colour on grey."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmdata.index import build_index
from tests.loader.member_tars import json_of, write_tar

COLOURS = [(250, 20, 20), (20, 220, 20), (30, 30, 250), (230, 220, 20), (220, 30, 220), (20, 220, 220)]
GREY = (128, 128, 128)
Box = tuple[int, int, int, int]


def picture(size: tuple[int, int], boxes: Sequence[Box], *, orientation: int = 1) -> bytes:
    """A PNG of (height, width) as stored; boxes are left, top, width and height, the k-th of the k-th colour."""
    pixels = np.full((*size, 3), GREY, np.uint8)
    for colour, (left, top, width, height) in zip(COLOURS, boxes, strict=False):
        pixels[top : top + height, left : left + width] = colour
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def classes_png(classes: np.ndarray[Any, Any], mode: str | None = None) -> bytes:
    """A PNG of numbers; `mode` P gives it a palette."""
    image = Image.fromarray(classes)
    if mode == "P":
        image = Image.fromarray(classes, "L")
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    elif mode is not None:
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def objects(boxes: Sequence[Sequence[float]], **values: Sequence[Any]) -> list[dict[str, Any]]:
    """Objects as `mmdata convert` writes them, with a value each of some names."""
    found: list[dict[str, Any]] = [{"bbox": list(box)} for box in boxes]
    for name, listed in values.items():
        for one, value in zip(found, listed, strict=True):
            one[name] = value
    return found


def settings_of(folder: Path, samples: dict[str, dict[str, bytes]], **settings: Any) -> dict[str, Any]:
    """Index the samples in a tar; a section `data` for them that loads whole images in the order of the rows."""
    write_tar(folder / "a.tar", samples)
    build_index(folder, max_bad_share=0.5)
    number = len(samples)
    loading = {"num_workers": 0, "num_processes": 0, "max_bad_share": 0.9}
    data = {"global_batch_size": number, "image_size": 32, "transform": "eval", "shuffle": False, "loading": loading}
    return {"shards": str(folder), "tokenizer": None, **data, **settings}


def sample(content: dict[str, Any], *, image: bytes, **members: bytes) -> dict[str, bytes]:
    return {"png": image, "json": json_of({"caption": "objects", **content}), **members}
