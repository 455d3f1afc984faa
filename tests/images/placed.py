"""What a transform makes of an image, by the two calls with which the loader makes it."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from mmdata.images.pixels import EncodedImage, PixelTransform, SmallImage


def png(image: Tensor, *, number: int = 0) -> EncodedImage:
    """A tensor uint8 (3, h, w) as a PNG, which loses nothing."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return EncodedImage(buffer.getvalue(), "PNG", 1, number)


def pixels(
    transform: PixelTransform,
    image: EncodedImage | SmallImage,
    shape: tuple[int, int],
    *,
    epoch: int = 0,
    fill: int = 0,
) -> Tensor:
    """The pixels in a bucket of a shape."""
    out = torch.full((3, *shape), fill, dtype=torch.uint8)
    decoded = transform.decode(image, shape=shape, patches=0, epoch=epoch)
    transform.write(decoded, out, number=image.number, epoch=epoch)
    return out


def patches(
    transform: PixelTransform, image: EncodedImage | SmallImage, count: int, *, epoch: int = 0
) -> tuple[tuple[int, int], Tensor]:
    """How many patches high and wide, and the patches, in a bucket of `count`."""
    out = torch.empty(count, transform.patch_size**2 * 3, dtype=torch.uint8)
    decoded = transform.decode(image, shape=None, patches=count, epoch=epoch)
    written = transform.write_patches(decoded, out, number=image.number, epoch=epoch)
    height, width = (side // transform.patch_size for side in written.geometry.size)
    return (height, width), out
