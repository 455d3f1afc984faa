"""The pixels of a batch while it is made: images of one shape, or patches of images that keep their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdata.images.pixels import Decoded, EncodedImage, PixelTransform
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket


class BatchPixels:
    """The pixels of a batch, written in place.

    Images of the bucket's shape are `pixel_values` (B, 3, H, W). Images in their own aspect ratio, where the bucket has
    a number of patches, are at most so many patches each (B, N, P).

    Args:
        bucket: of the batch.
        rows: of the batch, B.
        buffers: lends the memory.
        transform: decodes, crops and resizes.
    """

    def __init__(self, bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> None:
        self._transform, self._patches = transform, bucket.patches
        self._shape = None if bucket.patches else (bucket.height, bucket.width)
        of_row = (bucket.patches, transform.patch_size**2 * 3) if bucket.patches else (3, bucket.height, bucket.width)
        self._pixel_values = buffers.lend((rows, *of_row))
        self._places = self._pixel_values.unbind()
        self._shapes = torch.ones(rows, 2, dtype=torch.int64)  # of the patches of each row

    def decode(self, image: EncodedImage, *, epoch: int, regions: Any = None) -> Decoded:
        """Decode an image to about the size that this batch needs; raises BadSample."""
        return self._transform.decode(image, shape=self._shape, patches=self._patches, epoch=epoch, regions=regions)

    def write(self, decoded: Decoded, place: int, *, number: int, epoch: int, regions: Any = None) -> Any:
        """Write a decoded image into row `place` of the batch; raises BadSample."""
        how = {"number": number, "epoch": epoch, "regions": regions}
        if not self._patches:
            return self._transform.write(decoded, self._places[place], **how)
        written = self._transform.write_patches(decoded, self._places[place], **how)
        size = self._transform.patch_size
        self._shapes[place] = torch.tensor([side // size for side in written.geometry.size])
        return written

    def entries(self, valid: Tensor) -> dict[str, Tensor]:
        """The entries of the batch, with zeros, or one patch of zeros, where not `valid` (B,).

        Without a patch attention would be NaN, and NaN reaches the gradient though the loss masks the row.
        """
        self._pixel_values[~valid] = 0  # the memory holds an earlier batch
        if not self._patches:
            return {"pixel_values": self._pixel_values}
        self._shapes[~valid] = 1
        places = torch.arange(self._patches)  # (N,)
        mask = places < self._shapes.prod(dim=1, keepdim=True)  # (B, N)
        return {
            "pixel_values": self._pixel_values,
            "pixel_attention_mask": mask.long(),
            "spatial_shapes": self._shapes,
        }
