"""The pixels of a batch while it is made: images of one shape, or patches of images that keep their own."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import NotRequired

from mmdata.images.pixels import Decoded, EncodedImage, PixelTransform
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket


class PixelEntries(TypedDict):
    """The part of a `Batch` that is made of images."""

    pixel_values: Tensor
    pixel_attention_mask: NotRequired[Tensor]
    spatial_shapes: NotRequired[Tensor]


def batch_pixels(bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> Images | Patches:
    """`Patches` if the bucket has a number of patches, else `Images`; arguments as for `Images`."""
    return (Patches if bucket.patches else Images)(bucket, rows, buffers, transform)


class Images:
    """Images of the bucket's shape, written in place: `pixel_values` is (B, 3, H, W).

    Args:
        bucket: of the batch.
        rows: of the batch, B.
        buffers: lends the memory.
        transform: decodes, crops and resizes.
    """

    def __init__(self, bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> None:
        self._transform = transform
        self._shape = (bucket.height, bucket.width)
        self._pixel_values = buffers.lend((rows, 3, bucket.height, bucket.width))
        self._places = self._pixel_values.unbind()

    def decode(self, image: EncodedImage, *, epoch: int) -> Decoded:
        """Decode an image to about the size that this batch needs; raises BadSample."""
        return self._transform.decode(image, shape=self._shape, patches=0, epoch=epoch)

    def write(self, decoded: Decoded, place: int, *, number: int, epoch: int) -> None:
        """Write a decoded image into row `place` of the batch; raises BadSample."""
        self._transform.write(decoded, self._places[place], number=number, epoch=epoch)

    def entries(self, valid: Tensor) -> PixelEntries:
        """The entries of the batch, with zeros where not `valid` (B,)."""
        self._pixel_values[~valid] = 0  # the memory holds an earlier batch
        return {"pixel_values": self._pixel_values}


class Patches:
    """Images in their own aspect ratio, of at most `bucket.patches` patches each; used as `Images` is."""

    def __init__(self, bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> None:
        self._transform = transform
        self._pixel_values = buffers.lend((rows, bucket.patches, transform.patch_size**2 * 3))
        self._shapes = torch.ones(rows, 2, dtype=torch.int64)

    def decode(self, image: EncodedImage, *, epoch: int) -> Decoded:
        """Decode an image to about the size that this batch needs; raises BadSample."""
        return self._transform.decode(image, shape=None, patches=self._pixel_values.shape[1], epoch=epoch)

    def write(self, decoded: Decoded, place: int, *, number: int, epoch: int) -> None:
        """Write the patches of a decoded image into row `place` of the batch; raises BadSample."""
        shape = self._transform.write_patches(decoded, self._pixel_values[place], number=number, epoch=epoch)
        self._shapes[place] = torch.tensor(shape)

    def entries(self, valid: Tensor) -> PixelEntries:
        """The entries of the batch, with one patch of zeros where not `valid` (B,).

        Without a patch attention would be NaN, and NaN reaches the gradient though the loss masks the row.
        """
        self._pixel_values[~valid] = 0
        self._shapes[~valid] = 1
        places = torch.arange(self._pixel_values.shape[1])  # (N,)
        mask = places < self._shapes.prod(dim=1, keepdim=True)  # (B, N)
        return {
            "pixel_values": self._pixel_values,
            "pixel_attention_mask": mask.long(),
            "spatial_shapes": self._shapes,
        }
