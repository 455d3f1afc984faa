"""The pixels of a batch while it is made: images of one shape, patches of images that keep their own, or files."""

from __future__ import annotations

from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from typing_extensions import NotRequired

from mmdata.encoded_images import PIXELS, Place
from mmdata.images.pixels import Decoded, EncodedImage, PixelTransform
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket

GROWTH = 2**22
"""Memory for files is lent in multiples of this many bytes, so that batches use each other's."""


class PixelEntries(TypedDict):
    """The part of a `Batch` that is made of images."""

    pixel_values: Tensor
    pixel_attention_mask: NotRequired[Tensor]
    spatial_shapes: NotRequired[Tensor]


class FileEntries(TypedDict):
    """The same part where the device decodes."""

    encoded_images: Tensor
    image_layout: Tensor


class BatchImages(Protocol):
    """The images of a batch in progress."""

    def decode(self, image: EncodedImage, *, epoch: int) -> Any:
        """What `write` takes of an image; raises BadSample."""
        ...

    def write(self, decoded: Any, place: int, *, number: int, epoch: int) -> None:
        """Write it into row `place` of the batch; raises BadSample."""
        ...

    def entries(self, valid: Tensor) -> PixelEntries | FileEntries:
        """The entries of the batch, with nothing where not `valid` (B,)."""
        ...


def batch_images(bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> BatchImages:
    """`Files` if the device decodes, else as `batch_pixels`; arguments as for `Images`."""
    return (Files if transform.on_device else batch_pixels)(bucket, rows, buffers, transform)


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


class Files:
    """JPEG files and what is to be made of them, for `mmdata.encoded_images`; used as `Images` is.

    Images of other kinds, and unusual JPEGs, are decoded here, and their crops take the places of their files.
    """

    def __init__(self, bucket: Bucket, rows: int, buffers: BufferPool, transform: PixelTransform) -> None:
        self._transform = transform
        self._buffers = buffers
        self._shape = (bucket.height, bucket.width)
        self._files: list[bytes | memoryview] = [b""] * rows
        self._places = [Place(0, 0, PIXELS, 0, 0, 0, 0, 0, 0, *self._shape)] * rows

    def decode(self, image: EncodedImage, *, epoch: int) -> tuple[EncodedImage, Place] | Decoded:
        """The file and the part of it that the row shows; the image, if it must be decoded here. Raises BadSample."""
        place = self._transform.place(image, shape=self._shape, epoch=epoch)
        if place is not None:
            return image, place
        return self._transform.decode(image, shape=self._shape, patches=0, epoch=epoch)

    def write(self, decoded: tuple[EncodedImage, Place] | Decoded, place: int, *, number: int, epoch: int) -> None:
        """Keep a file, or write a crop, for row `place` of the batch; raises BadSample."""
        if not isinstance(decoded, Decoded):
            self._files[place], self._places[place] = decoded[0].data, decoded[1]
            return
        crop = torch.empty(3, *self._shape, dtype=torch.uint8)
        self._transform.write(decoded, crop, number=number, epoch=epoch)
        self._files[place] = crop.numpy().tobytes()
        self._places[place] = self._places[place]._replace(end=crop.numel())

    def entries(self, valid: Tensor) -> FileEntries:
        """The entries of the batch; a row that is not `valid` (B,) has no bytes."""
        used = [file if ok else b"" for file, ok in zip(self._files, valid.tolist(), strict=True)]
        ends = np.cumsum([len(file) for file in used]).tolist()
        files = self._buffers.lend((max(1, -(-ends[-1] // GROWTH)) * GROWTH,))[: ends[-1]]
        values, layout = files.numpy(), list[Place]()
        for place, file, end in zip(self._places, used, ends, strict=True):
            layout.append(place._replace(begin=end - len(file), end=end))
            values[end - len(file) : end] = np.frombuffer(file, np.uint8)
        return {"encoded_images": files, "image_layout": torch.tensor(layout)}
