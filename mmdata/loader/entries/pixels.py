"""The pixels of a batch while it is made: images of one shape, or patches of images that keep their own."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mmdata.images.crop import UNKNOWN
from mmdata.images.pixels import Decoded, EncodedImage, PixelTransform, SmallImage, Written
from mmdata.images.regions import Geometry, Regions
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
        self._geometries = [Geometry(UNKNOWN, (0, 0))] * rows

    def decode(self, image: EncodedImage | SmallImage, *, epoch: int, regions: Regions | None = None) -> Decoded:
        """Decode an image to about the size that this batch needs; raises BadSample."""
        return self._transform.decode(image, shape=self._shape, patches=self._patches, epoch=epoch, regions=regions)

    def write(
        self, decoded: Decoded, place: int, *, number: int, epoch: int, regions: Regions | None = None
    ) -> Written:
        """Write a decoded image into row `place` of the batch; raises BadSample."""
        write = self._transform.write_patches if self._patches else self._transform.write
        written = write(decoded, self._places[place], number=number, epoch=epoch, regions=regions)
        self._geometries[place] = written.geometry
        return written

    def entries(self, valid: Tensor) -> dict[str, Tensor]:
        """The entries of the batch, with zeros, or one patch of zeros, and an unknown crop where not `valid` (B,).

        Without a patch attention would be NaN, and NaN reaches the gradient though the loss masks the row.
        """
        # The memory holds an earlier batch. Numbers of rows touch these alone; a mask would read all pixels.
        self._pixel_values[(~valid).nonzero().flatten()] = 0
        crops, sizes, flips = zip(*self._geometries, strict=True)
        crop = torch.from_numpy(np.fromiter(chain.from_iterable(crops), np.float32)).view(-1, 4)
        crop[~valid] = torch.nan
        flipped = torch.from_numpy(np.array(flips)) & valid
        entries = {"pixel_values": self._pixel_values, "crop": crop, "flipped": flipped}
        if not self._patches:
            return entries
        shapes = torch.tensor(sizes) // self._transform.patch_size  # (B, 2), rows and columns of patches
        shapes[~valid] = 1
        places = torch.arange(self._patches)  # (N,)
        mask = places < shapes.prod(dim=1, keepdim=True)  # (B, N)
        return {**entries, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}
