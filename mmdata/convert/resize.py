"""Large images made small: shorter side to N, upright, in sRGB, as JPEG. Equal images and settings give equal bytes.

Pillow resizes with integers, the same on every processor, and encodes with libjpeg-turbo's exact transform (simplejpeg
takes the fast one below quality 96, 0.4 dB worse). Other versions of the two may give other bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image, ImageCms
from torch import Tensor

from mmdata.shards import ImageInfo


@dataclass(frozen=True)
class Resize:
    """Makes images smaller; never larger.

    Args:
        side: the shorter side that larger images get, in pixels.
        quality: of the JPEG, 1 to 100. Chroma is kept at full resolution (4:4:4): the images are small already.
    """

    side: int
    quality: int

    def applies(self, info: ImageInfo) -> bool:
        """Whether an image is larger, so that it is not stored as it is."""
        return min(info.height, info.width) > self.side

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing, halves rounded up: 480 × 641 to a shorter side of 256 gives (256, 342)."""
        shorter = min(height, width)
        return (height * self.side * 2 + shorter) // (2 * shorter), (width * self.side * 2 + shorter) // (2 * shorter)

    def __call__(self, pixels: Tensor, original: bytes, format: str) -> tuple[bytes, ImageInfo]:
        """Resize and encode an image.

        Args:
            pixels: uint8 (3, H, W) at full size, as displayed.
            original: the file they were decoded from; its ICC profile says what its colours mean.
            format: of that file.

        Returns:
            A JPEG without EXIF or profile, and what its header says.
        """
        height, width = self.size(pixels.shape[1], pixels.shape[2])
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        # Lanczos keeps most of what a later, smaller bicubic crop shows: 39.7 dB without JPEG, bicubic 38.6
        # (docs/benchmarks.md, "Shrinking").
        image = _to_srgb(image.resize((width, height), Image.Resampling.LANCZOS), original, format)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self.quality, subsampling=0, icc_profile=None, exif=b"")
        return buffer.getvalue(), ImageInfo("JPEG", height, width)


def _to_srgb(image: Image.Image, original: bytes, format: str) -> Image.Image:
    """Colours as sRGB has them; as they are where no profile, or a broken one, says what they were."""
    with Image.open(io.BytesIO(original), formats=[format]) as file:
        profile, is_grey = file.info.get("icc_profile"), file.mode in ("1", "L", "LA") or file.mode.startswith("I")
    if not profile:
        return image
    try:
        space, transform = _transform(profile)
        if transform is None or (space == "GRAY" and not is_grey):
            return image
        return transform.apply(image.convert("L" if space == "GRAY" else "RGB"))
    except (ImageCms.PyCMSError, OSError):
        return image  # what viewers show then


@lru_cache(maxsize=32)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Colour space of a profile, and its transform to sRGB; none for CMYK, which decoding has converted.

    Making one takes milliseconds with the GIL held, and most photos share a few profiles.
    """
    source: Any = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = str(source.profile.xcolor_space).strip()
    if space not in ("RGB", "GRAY"):
        return space, None
    mode = "RGB" if space == "RGB" else "L"
    return space, ImageCms.buildTransform(source, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")), mode, "RGB")
