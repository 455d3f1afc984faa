"""How images become pixels, and the shapes that they have in batches."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import NOT_BOOLEAN, OwnFunction, Positive, Settings, Share, Side, name_of


class AugmentConfig(Settings):
    """Random changes of a training crop, each row's its own in each epoch; all are off unless set."""

    horizontal_flip_prob: Share = 0.0
    """Probability that a crop is mirrored left to right. Captions that say left or right, and writing in images, are
    wrong after a flip."""
    color_jitter: Annotated[float, Field(ge=0.0, le=2.0), NOT_BOOLEAN] = 0.0
    """Strength of changes of colour, which four in five crops get, in random order. Brightness, contrast and saturation
    change by a factor between 1 - color_jitter (at least 0) and 1 + color_jitter, and the hue turns by a quarter of it
    at most, as a share of the colour circle."""
    grayscale_prob: Share = 0.0
    """Probability that the colours become grey, after the other changes."""


class ImagesConfig(Settings):
    """How images become pixels, and the shapes that they have in batches."""

    image_size: Side = 224
    """Side of the square that images are cropped and resized to, in pixels; for a rectangle give one shape, as
    `image_buckets: [[128, 160]]`. With a number of `image_buckets` the chosen shapes have about as many pixels; with a
    list of shapes, or `image_patches`, it is not used."""
    image_buckets: Positive | Annotated[list[tuple[Side, Side]], Field(min_length=1)] | None = None
    """Image shapes as [height, width] pairs in pixels; each image goes to the shape nearest in aspect ratio. A number:
    choose up to so many shapes of about `image_size`² pixels that crop least. null: one square of `image_size`."""
    patch_size: Positive = 16
    """Side of the model's patches, in pixels. The sides of shapes that are chosen for a number of `image_buckets` are
    multiples of it, and `image_patches` cuts images into such patches."""
    image_patches: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Native resolution, in place of image shapes: each image keeps its aspect ratio and goes to the smallest of these
    numbers of patches that holds it. For models of SigLIP 2's NaFlex kind."""
    transform: OwnFunction = "train"
    """How an image becomes pixels. train: random resized crop. eval: resize and centre crop. Or a transform of your
    own, as "module:callable"; in Python also the callable itself."""
    decode: Literal["fast", "exact"] = "fast"
    """fast: decode a JPEG at a half, a quarter or an eighth of its size where the crop allows it. exact: decode every
    image at full size, which takes longer and is nearer to Pillow's pixels."""
    shorter_side: Side | None = None
    """Resize each image so that its shorter side has this many pixels, before it is cropped; smaller images are not
    enlarged. It is what `data.loading.cache_pixels_gb` keeps. 256 is customary for an `image_size` of 224: a random
    crop that keeps a small share of such an image is enlarged. A `transform` of your own gets the small image;
    exported image processors resize once. null: crop the image at its own size."""
    crop_scale: tuple[Share, Share] = (0.9, 1.0)
    """Smallest and largest share of the image's area that a training crop keeps. An image that is much wider or higher
    than its batch's shape keeps less, since no larger crop fits."""
    augment: AugmentConfig | None = None
    """Random flips and colour changes of training crops; null: none. Only with `transform: train`."""

    @model_validator(mode="after")
    def _check_images(self) -> ImagesConfig:
        shapes = self.image_buckets
        if isinstance(shapes, list) and len(set(shapes)) != len(shapes):
            raise ValueError(f"image_buckets must differ from each other: got {[list(b) for b in shapes]}")
        if isinstance(shapes, int) and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size ({self.image_size}) must be a multiple of patch_size ({self.patch_size}) where "
                "image_buckets is a number: the shapes that are chosen consist of whole patches"
            )
        if self.image_patches is not None:
            if sorted(set(self.image_patches)) != self.image_patches:
                raise ValueError(f"image_patches must rise: got {self.image_patches}")
            if self.image_buckets is not None:
                raise ValueError("image_patches and image_buckets exclude each other: give one")
        if self.shorter_side is not None and self.shorter_side < self._least_side():
            raise ValueError(
                f"shorter_side ({self.shorter_side}) must be at least {self._least_side()}, the shorter side of the "
                "largest image shape: else each image would be made smaller than its crop, and enlarged again"
            )
        if self.crop_scale[0] > self.crop_scale[1] or self.crop_scale[0] == 0:
            raise ValueError(f"crop_scale must be (min, max) with 0 < min <= max: got {self.crop_scale}")
        if self.augment is not None and self.transform != "train":
            raise ValueError(
                f"augment changes the crops of transform train, and transform is '{name_of(self.transform)}': leave "
                "augment out (data.augment=null)"
            )
        return self

    def _least_side(self) -> int:
        """Shorter side of the image shape in which it is longest; for patches, of a square of the most."""
        if self.image_patches is not None:
            return self.patch_size * math.isqrt(self.image_patches[-1])
        shapes = self.image_buckets
        return max(map(min, shapes)) if isinstance(shapes, list) else self.image_size
