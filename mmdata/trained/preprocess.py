"""Images of any kind to the pixels that the evaluation's loader makes of them, by the loader's own decoder and crop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from typing_extensions import Self

from mmdata.batch import MODEL_KEYS
from mmdata.config import DataConfig
from mmdata.config.data import evaluation_data
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.images import probe
from mmdata.images.decode import oriented_size
from mmdata.images.pillow import DECODER_ERRORS, file_of, pixels_of
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.loader.corpus import open_index
from mmdata.loader.entries.pixels import BatchPixels
from mmdata.loader.workers.buffers import BufferPool
from mmdata.plan import Bucket, BucketPolicy, LengthAspectPolicy, NativePolicy
from mmdata.plan.buckets import Shapes
from mmdata.plan.choose import image_shapes
from mmdata.safe_read import read_regular
from mmdata.tars.samples import MAX_IMAGE_BYTES

ImageLike = str | os.PathLike[str] | bytes | Image.Image | Tensor
"""A path, the bytes of an image file, an image of Pillow, or uint8 (3, H, W) in RGB."""


class Preprocess:
    """The evaluation's preprocessing: decode, resize to cover the model's shape, crop at the centre.

    Where the run has several image shapes, an image goes to the one nearest in aspect ratio. A loader does the same,
    but for the few rows that are left over at the end of an epoch, which fill up batches of another shape.

    A path, bytes, or an image that was opened and not loaded yet give the pixels of the loader, bit for bit:
    orientation, CMYK, transparency on white, 16 bits scaled to 8. An image that Pillow has loaded is at full size,
    where the loader decodes a large JPEG at a half or less of it (`data.decode: fast`): pixels of JPEGs more than twice
    as large as the crop differ a little. And a BMP has lost its alpha by then.

    Args:
        policy: gives an image its shape.
        patch_size: side of a patch, in pixels; used at native resolution.
        exact: decode large JPEGs at full size too.
    """

    def __init__(self, policy: BucketPolicy, *, patch_size: int = 16, exact: bool = False) -> None:
        self._policy = policy
        self._transform = PixelTransform("eval", patch_size=patch_size, exact=exact)

    @classmethod
    def from_config(cls, data: DataConfig) -> Self:
        """The preprocessing of an evaluation with these settings.

        Raises:
            ConfigError: `image_buckets` is a number, and the corpus from which the shapes are chosen is not there.
        """
        return cls(_policy(data), patch_size=data.patch_size, exact=data.decode == "exact")

    def __call__(self, image: ImageLike) -> Tensor:
        """The pixels of one image.

        Returns:
            uint8 (3, H, W), RGB: `model.encode_image` normalises uint8 itself. At native resolution its patches,
            (N, patch_size² · 3), for which the model also needs the other entries of `inputs`.

        Raises:
            DataError: the image cannot be read or decoded; names it.
            TypeError: not an image.
        """
        return self.inputs(image)["pixel_values"][0]

    def inputs(self, image: ImageLike) -> dict[str, Tensor]:
        """What a model takes of a batch that holds one image; see `__call__`."""
        try:
            if isinstance(image, Image.Image) and (file := file_of(image)) is not None:
                return self._of_file(file)
            if isinstance(image, Image.Image):
                try:
                    image = torch.from_numpy(pixels_of(image)).permute(2, 0, 1)
                except DECODER_ERRORS as error:
                    raise BadSample(Reason.CORRUPT_IMAGE, str(error)) from error
            return self._of_pixels(image) if isinstance(image, Tensor) else self._of_file(image)
        except BadSample as error:
            raise DataError(f"{describe(image)}: {error}") from error

    def _of_file(self, image: str | os.PathLike[str] | bytes) -> dict[str, Tensor]:
        data = _read(image)
        info = probe(data)
        bucket = self._bucket(*oriented_size(info.height, info.width, info.orientation))
        pixels = BatchPixels(bucket, 1, BufferPool(), self._transform)
        encoded = EncodedImage(data, info.format, info.orientation, 0, checked=True)
        pixels.write(pixels.decode(encoded, epoch=0), 0, number=0, epoch=0)
        return _inputs(pixels)

    def _of_pixels(self, image: Tensor) -> dict[str, Tensor]:
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
            raise TypeError(
                f"an image tensor is uint8 (3, H, W) in RGB: got {image.dtype} {tuple(image.shape)}; pixels that are "
                "normalised already go to run.model.encode_image"
            )
        bucket = self._bucket(*image.shape[1:])
        pixels = BatchPixels(bucket, 1, BufferPool(), self._transform)
        shape = None if bucket.patches else (bucket.height, bucket.width)
        part = self._transform.choose_part(image.cpu(), shape=shape, patches=bucket.patches)
        pixels.write(part, 0, number=0, epoch=0)
        return _inputs(pixels)

    def _bucket(self, height: int, width: int) -> Bucket:
        one = (np.array([number], np.int64) for number in (1, height, width, 0))
        return self._policy.buckets[int(self._policy.assign(Shapes(*one))[0])]


def _inputs(pixels: BatchPixels) -> dict[str, Tensor]:
    entries = pixels.entries(torch.ones(1, dtype=torch.bool))
    return {name: value for name, value in entries.items() if name in MODEL_KEYS}


def describe(image: object) -> str:
    """An image in words, for messages: its path, or what it is."""
    if isinstance(image, str | os.PathLike):
        return f"image '{os.fspath(cast('str', image))}'"
    if isinstance(image, Image.Image) and (name := getattr(image, "filename", "")):
        return f"image '{os.fspath(name)}'"
    return f"an image given as {type(image).__name__}"


def stack(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of the entries of several images of one shape."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _read(image: object) -> bytes:
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str | os.PathLike):
        raise TypeError(
            f"an image is a path, the bytes of a file, an image of Pillow or a uint8 tensor (3, H, W): got "
            f"{type(image).__name__}"
        )
    path = cast("str | os.PathLike[str]", image)
    if (size := os.stat(path).st_size) > MAX_IMAGE_BYTES:
        raise BadSample(Reason.IMAGE_TOO_LARGE, f"{size} bytes; the limit is {MAX_IMAGE_BYTES}")
    return read_regular(path, "image")


def _policy(data: DataConfig) -> BucketPolicy:
    """The shapes of an evaluation; the text length of the buckets means nothing here."""
    if data.image_patches is not None:
        return NativePolicy([1], data.image_patches, patch_size=data.patch_size)
    if not isinstance(data.image_buckets, int):
        return LengthAspectPolicy([1], data.image_buckets or [(data.image_size, data.image_size)])
    with suppress(ConfigError):  # without a validation set the shapes are those of training
        data = evaluation_data(data)
    try:
        return LengthAspectPolicy([1], image_shapes(data, open_index(data)))
    except (DataError, OSError) as error:
        raise ConfigError(
            "data.image_buckets is a number, so the image shapes come from the corpus, which cannot be opened "
            f"({error}); put it back, or train with data.image_buckets as a list of shapes"
        ) from error
