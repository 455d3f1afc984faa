"""Shrinks large images, and encodes those that were changed: upright, sRGB, JPEG. Equal input gives equal bytes.

Pillow resizes with integers, so every processor gives the same pixels, and encodes with libjpeg-turbo's exact DCT
(below quality 96 simplejpeg takes the fast one, 0.4 dB worse). Other versions of the two may give other bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image, ImageCms

from mmdata.images import ImageInfo
from mmdata.images.pillow import open_image


@dataclass(frozen=True)
class Resize:
    """Shrinks images; never enlarges them.

    Args:
        side: shorter side of a shrunk image, in pixels.
    """

    side: int

    def applies(self, info: ImageInfo) -> bool:
        """Whether an image is larger and therefore shrunk."""
        return min(info.height, info.width) > self.side

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing, halves rounded up: 480 × 641 to a shorter side of 256 gives (256, 342)."""
        shorter = min(height, width)
        return (height * self.side * 2 + shorter) // (2 * shorter), (width * self.side * 2 + shorter) // (2 * shorter)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Shrink an image, RGB and upright."""
        height, width = self.size(image.height, image.width)
        # Lanczos loses least for a later, smaller bicubic crop: 39.7 dB without JPEG, bicubic 38.6 (docs/benchmarks.md,
        # "Shrinking").
        return image.resize((width, height), Image.Resampling.LANCZOS)


def as_jpeg(image: Image.Image, original: bytes, format: str, *, quality: int) -> tuple[bytes, ImageInfo]:
    """Encode an image that was changed.

    Args:
        image: RGB, upright.
        original: the file that it was decoded from; its ICC profile defines the colours.
        format: of that file.
        quality: of the JPEG, 1 to 100. Chroma keeps its full resolution (4:4:4), because the images are small.

    Returns:
        A JPEG without EXIF data and profile, and its header.
    """
    buffer = io.BytesIO()
    image = _to_srgb(image, original, format)
    image.save(buffer, "JPEG", quality=quality, subsampling=0, icc_profile=None, exif=b"")
    return buffer.getvalue(), ImageInfo("JPEG", image.height, image.width)


def _to_srgb(image: Image.Image, original: bytes, format: str) -> Image.Image:
    """The image with its colours converted to sRGB; unchanged without a profile or with a broken one."""
    with open_image(original, format) as file:
        profile, is_grey = file.info.get("icc_profile"), file.mode in ("1", "L", "LA") or file.mode.startswith("I")
    if not profile:
        return image
    try:
        space, transform = _transform(profile)
        if transform is None or (space == "GRAY" and not is_grey):
            return image
        return transform.apply(image.convert("L" if space == "GRAY" else "RGB"))
    except (ImageCms.PyCMSError, OSError):
        return image  # as viewers show it


@lru_cache(maxsize=32)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Colour space of a profile, and its transform to sRGB; None for CMYK, which decoding has converted."""
    # Cached: making a transform takes milliseconds with the GIL held, and most photos share a few profiles.
    source: Any = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = str(source.profile.xcolor_space).strip()
    if space not in ("RGB", "GRAY"):
        return space, None
    mode = "RGB" if space == "RGB" else "L"
    return space, ImageCms.buildTransform(source, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")), mode, "RGB")
