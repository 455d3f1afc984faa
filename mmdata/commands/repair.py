"""How thoroughly `mmdata repair` looks at images: decoded in full, as for training, or their headers only."""

from __future__ import annotations

from mmdata.errors import BadSample, Reason
from mmdata.images.probe import NO_LIMITS, probe
from mmdata.repair.payloads import CheckImage, check_header

CHECKS = ("decode", "header", "none")


def image_check(name: str) -> CheckImage | None:
    """The check of one of `CHECKS`."""
    return {"decode": check_decode, "header": check_header, "none": None}[name]


def check_decode(data: bytes) -> None:
    """Decode an image in full.

    Raises:
        BadSample: its header or its pixels are damaged, or the format cannot be decoded here.
    """
    from mmdata.images.decode import decode  # imports torch, which takes seconds

    info = probe(data, limits=NO_LIMITS)
    pixels = decode(data, format=info.format, checked=True)
    if tuple(pixels.shape) != (3, info.height, info.width):
        raise BadSample(
            Reason.CORRUPT_IMAGE,
            f"header says {info.width}×{info.height} pixels, there are {pixels.shape[2]}×{pixels.shape[1]}",
        )
