"""From a row's encoded image to its pixels in a batch, under the row's own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdata.config import DataConfig
from mmdata.config.images import AugmentConfig
from mmdata.config.settings import name_of
from mmdata.config.targets import OF_CROPS, TargetsConfig
from mmdata.images.augment import NUM_DRAWS, apply_changes, draw_changes
from mmdata.images.crop import (
    UNKNOWN,
    Crop,
    eval_crop,
    native_size,
    resize_crop,
    shown_of_jpeg,
    train_crop,
    whole_pixels,
    write_patches,
)
from mmdata.images.decode import decode, jpeg_size, mirrored
from mmdata.images.regions import Floats, Followed, Geometry, Regions, follow, hull
from mmdata.images.user import UserTransform
from mmdata.seeding import Purpose, random_raw, uniforms

ROUNDING = 1e-6
"""Tolerance in eighths for sides of boxes, which are products."""


class SmallImage(NamedTuple):
    """A decoded image, at full size or made smaller.

    Attributes:
        image: uint8 (3, h, w), upright, often a view with the channels last in memory.
        shown: the part of the upright original that it shows, in its pixels: all of it, and of a JPEG that was decoded
            at a fraction of its size up to 7 pixels beyond.
        number: as that of an `EncodedImage`.
    """

    image: Tensor
    shown: Crop
    number: int

    @property
    def size(self) -> tuple[int, int]:
        return int(self.image.shape[1]), int(self.image.shape[2])

    @property
    def geometry(self) -> Geometry:
        """How the pixels of the original came into it."""
        return Geometry(self.shown, self.size)

    def resized(self, size: tuple[int, int]) -> SmallImage:
        """The image in another size, with the channels last in memory."""
        out = torch.empty(*size, 3, dtype=torch.uint8).permute(2, 0, 1)
        resize_crop(self.image, Crop(0, 0, *self.size), out)
        return self._replace(image=out)


class EncodedImage(NamedTuple):
    """An image as it is in its shard.

    Attributes:
        data: the whole file.
        format: as `mmdata.images.probe` names it.
        orientation: EXIF orientation, 1 to 8.
        number: keys its random numbers, 0 or more; equal numbers give equal crops in an epoch.
        checked: True if `probe` has read these bytes before; a PNG's checksums are then not compared again.
    """

    data: bytes | memoryview
    format: str
    orientation: int
    number: int
    checked: bool = False


class Wanted(NamedTuple):
    """What the part of an image to write depends on, besides the image's size.

    Attributes:
        shape: (height, width) of the bucket; None if the image keeps its aspect ratio, in patches.
        patches: largest number of patches, if there is no shape.
        number: `EncodedImage.number`.
        epoch: from 0.
        held: float64 (n, 4), boxes that the part holds, in pixels of the image; None: it need not hold any.
    """

    shape: tuple[int, int] | None
    patches: int
    number: int = 0
    epoch: int = 0
    held: Floats | None = None


class Decoded(NamedTuple):
    """A decoded image and the part of it to write into the batch.

    Attributes:
        small: the image.
        box: the part, in whole pixels of `small`.
        size: (height, width) to resize the box to, in pixels.
    """

    small: SmallImage
    box: Crop
    size: tuple[int, int]

    @property
    def crop(self) -> Crop:
        """The part to write, in pixels of the upright original, between which its edges may lie."""
        return self.small.geometry.to_original(self.box)


class Written(NamedTuple):
    """What was written into a batch.

    Attributes:
        geometry: how the pixels of the image came there; its crop is `UNKNOWN` of a user's transform.
        followed: where the regions are that were given; None without them.
    """

    geometry: Geometry
    followed: Followed | None


class PixelTransform:
    """Crops an image to the shape of its bucket, or cuts it into patches at its own aspect ratio.

    A JPEG is decoded at a fraction of its size if the crop stays large enough: libjpeg-turbo scales down while it
    decodes, in a half to a fifth of the time. Pixels then differ a little (docs/benchmarks.md).

    Args:
        kind: "train" (random resized crop), "eval" (largest centred crop), or a callable or "module:callable" (a
            `UserTransform`).
        crop_scale: share of the area that a training crop keeps (min, max); see `train_crop`.
        augment: flip and colour changes of training crops.
        seed: of the run.
        patch_size: side of a patch, in pixels.
        exact: decode every image at full size.
        targets: how regions of images follow; None: images have none.
        shorter_side: images are made as small as this before they are cropped, in pixels; None: they are not.

    Attributes:
        patch_size, seed, exact, shorter_side: as given.

    Raises:
        ConfigError: the user's transform cannot be imported or takes other arguments.
    """

    def __init__(
        self,
        kind: str | Callable[..., Any],
        *,
        crop_scale: tuple[float, float] = (0.9, 1.0),
        augment: AugmentConfig | None = None,
        seed: int = 0,
        patch_size: int = 16,
        exact: bool = False,
        targets: TargetsConfig | None = None,
        shorter_side: int | None = None,
    ) -> None:
        self.patch_size = patch_size
        self.seed = seed
        self._kind = name_of(kind)
        self.exact = exact
        self.shorter_side = shorter_side
        self._crop_scale = crop_scale
        self._random_crop = kind == "train"
        self._augment = augment if self._random_crop else None
        self._targets = targets
        self._holds = targets is not None and targets.keep_boxes and self._random_crop
        self._user = None if kind in ("train", "eval") else UserTransform(kind, with_regions=targets is not None)

    @classmethod
    def from_config(cls, data: DataConfig) -> PixelTransform:
        """The transform that a section `data` describes."""
        return cls(
            data.transform,
            crop_scale=data.crop_scale,
            augment=data.augment,
            seed=data.seed,
            patch_size=data.patch_size,
            exact=data.decode == "exact",
            targets=data.targets,
            shorter_side=data.shorter_side,
        )

    def identity(self) -> dict[str, Any]:
        """What a row's pixels depend on besides the row, its epoch, its shape and the seed, as JSON.

        Settings that make no difference for this transform are None. A user's transform is identified by its name and
        the content of its file.
        """
        return {
            "transform": self._kind,
            "crop_scale": list(self._crop_scale) if self._random_crop else None,
            "shorter_side": self.shorter_side,
            "decode": None if self._user and not self.shorter_side else "exact" if self.exact else "fast",
            "augment": (self._augment and self._augment.model_dump(exclude_defaults=True)) or None,
            "transform_source": self._user and self._user.source,
            "regions": self._targets and self._targets.model_dump(include=OF_CROPS, mode="json"),
        }

    def decode(
        self,
        encoded: EncodedImage | SmallImage,
        *,
        shape: tuple[int, int] | None,
        patches: int,
        epoch: int,
        regions: Regions | None = None,
    ) -> Decoded:
        """Decode an image and choose the part of it to write.

        Args:
            encoded: the image, or what `small` has made of it before.
            shape: (height, width) of the bucket; None if the image keeps its aspect ratio, in patches.
            patches: largest number of patches, if there is no shape.
            epoch: from 0.
            regions: of the image, for `keep_boxes`.

        Raises:
            BadSample: the image does not decode.
        """
        held = regions.boxes if regions is not None and self._holds else None
        wanted = Wanted(shape, patches, encoded.number, epoch, held)
        if self.shorter_side is not None:
            return self._placed(self.small(encoded), wanted)
        assert isinstance(encoded, EncodedImage), "others were made small by `shorter_side`"
        # A JPEG's header gives its size, so the crop is chosen before decoding, and only as many pixels as the crop
        # needs are decoded. A user's transform gets the image at full size.
        if encoded.format != "JPEG" or self.exact or self._user is not None:
            return self._placed(_decoded(encoded), wanted)
        size = jpeg_size(encoded.data, encoded.orientation)
        part, target = self._part(size, wanted)
        small = _scaled_jpeg(encoded, size, part, target)
        box = whole_pixels(small.geometry.from_original(part), small.size, outwards=self._holds)
        return Decoded(small, box, target)

    def choose_part(self, image: Tensor, *, shape: tuple[int, int] | None, patches: int) -> Decoded:
        """As `decode`, of an image that is decoded already: uint8 (3, h, w), RGB."""
        whole = _whole(image, 0)
        if self.shorter_side is not None:
            whole = whole.resized(self._small_size(whole.size))
        return self._placed(whole, Wanted(shape, patches))

    def _placed(self, small: SmallImage, wanted: Wanted) -> Decoded:
        """The part of a decoded image that is chosen in its own pixels."""
        held = None if wanted.held is None else Regions(wanted.held).moved(small.geometry.points).boxes
        part, target = self._part(small.size, wanted._replace(held=held))
        return Decoded(small, whole_pixels(part, small.size, outwards=self._holds), target)

    def small(self, encoded: EncodedImage | SmallImage) -> SmallImage:
        """The image, decoded, and made as small as `shorter_side` says.

        Raises:
            BadSample: the image does not decode.
        """
        if isinstance(encoded, SmallImage):
            return encoded
        if encoded.format != "JPEG" or self.exact:
            whole = _decoded(encoded)
            return whole.resized(self._small_size(whole.size))
        size = jpeg_size(encoded.data, encoded.orientation)
        target = self._small_size(size)
        return _scaled_jpeg(encoded, size, Crop(0, 0, *size), target).resized(target)

    def _small_size(self, size: tuple[int, int]) -> tuple[int, int]:
        assert self.shorter_side is not None
        height, width = small_sizes(np.array([size]), self.shorter_side)[0].tolist()
        return height, width

    def write(
        self, decoded: Decoded, out: Tensor, *, number: int, epoch: int, regions: Regions | None = None
    ) -> Written:
        """Write the chosen part of an image.

        Args:
            decoded: from `decode`.
            out: uint8 (3, H, W), (H, W) = `decoded.size`; overwritten.
            number: `EncodedImage.number`.
            epoch: from 0.
            regions: of the image; they follow its pixels.

        Raises:
            BadSample: the user's transform raised, or returned another shape or dtype, or other regions than it may.
            ConfigError: the user's transform does not give equal pixels for equal rows.
        """
        if self._user is not None:
            raw = random_raw(1, seed=self.seed, epoch=epoch, purpose=Purpose.ROW_TRANSFORM, position=number)
            given = None if regions is None else follow(regions, decoded.small.geometry, min_visible=0)
            followed = self._user(decoded.small.image, out, seed=int(raw[0] >> 1), regions=given)
            return Written(Geometry(UNKNOWN, decoded.size), followed)
        resize_crop(decoded.small.image, decoded.box, out)
        is_flipped = False
        if self._augment is not None:
            draws = uniforms(NUM_DRAWS, seed=self.seed, epoch=epoch, purpose=Purpose.AUGMENTATION, position=number)
            changes = draw_changes(self._augment, draws)
            apply_changes(changes, out)
            is_flipped = changes.flip
        geometry = Geometry(decoded.crop, decoded.size, is_flipped)
        if regions is None or self._targets is None:
            return Written(geometry, None)
        swaps = self._targets.keypoint_swaps or []
        return Written(geometry, follow(regions, geometry, min_visible=self._targets.min_visible, swaps=swaps))

    def write_patches(
        self, decoded: Decoded, out: Tensor, *, number: int, epoch: int, regions: Regions | None = None
    ) -> Written:
        """Write the chosen part of an image as patches; see `write`.

        Args:
            decoded: from `decode`.
            out: uint8 (N, patch_size² · 3), overwritten; zeros after the last patch.
            number: `EncodedImage.number`.
            epoch: from 0.
            regions: of the image.

        Returns:
            As `write`: pixels are those of the resized image, whose size is a number of patches high and wide.
        """
        resized = torch.empty(3, *decoded.size, dtype=torch.uint8)
        written = self.write(decoded, resized, number=number, epoch=epoch, regions=regions)
        write_patches(resized, out, patch_size=self.patch_size)
        return written

    def _part(self, size: tuple[int, int], wanted: Wanted) -> tuple[Crop, tuple[int, int]]:
        """The part of an image of `size` to write, and the size to resize it to."""
        shape = wanted.shape or size
        if self._random_crop:
            purpose = Purpose.ROW_TRANSFORM
            draws = uniforms(4, seed=self.seed, epoch=wanted.epoch, purpose=purpose, position=wanted.number)
            hold = None if wanted.held is None else hull(wanted.held)
            box = train_crop(size, shape, draws, scale=self._crop_scale, hold=hold)
        else:
            box = eval_crop(size, shape)
        if wanted.shape is not None:
            return box, shape
        height, width = round(box.height), round(box.width)
        return box, native_size(height, width, patch_size=self.patch_size, patches=wanted.patches)


def _whole(image: Tensor, number: int) -> SmallImage:
    return SmallImage(image, Crop(0, 0, int(image.shape[1]), int(image.shape[2])), number)


def _decoded(encoded: EncodedImage) -> SmallImage:
    """An image at full size."""
    data, format, orientation, number, checked = encoded
    return _whole(decode(data, format=format, orientation=orientation, checked=checked), number)


def _scaled_jpeg(encoded: EncodedImage, size: tuple[int, int], box: Crop, target: tuple[int, int]) -> SmallImage:
    """A JPEG of `size`, decoded as small as its box may be to be resized to the target."""
    least = _decoded_size(size, box, target)
    image = decode(encoded.data, format="JPEG", orientation=encoded.orientation, at_least=least)
    if least is None:
        return _whole(image, encoded.number)
    decoded = int(image.shape[1]), int(image.shape[2])
    return SmallImage(image, shown_of_jpeg(size, decoded, mirrored(encoded.orientation)), encoded.number)


def _decoded_size(size: tuple[int, int], box: Crop, target: tuple[int, int]) -> tuple[int, int] | None:
    """The smallest size to decode an image at, so that its box is no smaller than the target; None for full size."""
    # Scales above 1/2 are not worth it: libjpeg-turbo takes as long for them as for full size.
    if box.height < 2 * target[0] or box.width < 2 * target[1]:
        return None
    eighths = math.ceil(8 * max(target[0] / box.height, target[1] / box.width) - ROUNDING)
    return -(-size[0] * eighths // 8), -(-size[1] * eighths // 8)


def small_sizes(sizes: NDArray[np.integer[Any]], shorter_side: int) -> NDArray[np.int64]:
    """Sizes (n, 2), in pixels, of images whose shorter side is made as small as `shorter_side`, if it is larger.

    Example:
        small_sizes([[480, 640], [100, 90]], 256) is [[256, 341], [100, 90]].

    Source: torchvision's Resize, which rounds the longer side down.
    """
    sizes = sizes.astype(np.int64)
    shorter = sizes.min(axis=1, keepdims=True)
    return sizes * np.minimum(shorter, shorter_side) // np.maximum(shorter, 1)  # rows without an image have 0
