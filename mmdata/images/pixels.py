"""From a row's encoded image to its pixels in a batch, under the row's own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdata.config import DataConfig
from mmdata.config.images import AugmentConfig
from mmdata.config.settings import name_of
from mmdata.images.augment import NUM_DRAWS, apply_changes, draw_changes
from mmdata.images.crop import Crop, eval_crop, native_size, resize_crop, train_crop, write_patches
from mmdata.images.decode import decode, jpeg_size
from mmdata.images.user import UserTransform
from mmdata.seeding import Purpose, random_raw, uniforms


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


class Decoded(NamedTuple):
    """A decoded image and the part of it to write into the batch.

    Attributes:
        image: uint8 (3, h, w), at full size or scaled down.
        box: the part, in pixels of `image`.
        size: (height, width) to resize the box to, in pixels.
    """

    image: Tensor
    box: Crop
    size: tuple[int, int]
    crop: Crop


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
        targets: Any = None,
    ) -> None:
        self._targets = targets
        self.patch_size = patch_size
        self.seed = seed
        self._kind = name_of(kind)
        self._exact = exact
        self._crop_scale = crop_scale
        self._random_crop = kind == "train"
        self._augment = augment if self._random_crop else None
        self._user = None if kind in ("train", "eval") else UserTransform(kind)

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
        )

    def identity(self) -> dict[str, Any]:
        """What a row's pixels depend on besides the row, its epoch, its shape and the seed, as JSON.

        Settings that make no difference for this transform are None. A user's transform is identified by its name and
        the content of its file.
        """
        return {
            "transform": self._kind,
            "crop_scale": list(self._crop_scale) if self._random_crop else None,
            "decode": None if self._user else "exact" if self._exact else "fast",
            "augment": (self._augment and self._augment.model_dump(exclude_defaults=True)) or None,
            "transform_source": self._user and self._user.source,
        }

    def decode(
        self,
        encoded: EncodedImage,
        *,
        shape: tuple[int, int] | None,
        patches: int,
        epoch: int,
        regions: Any = None,
    ) -> Decoded:
        """Decode an image and choose the part of it to write.

        Args:
            encoded: the image.
            shape: (height, width) of the bucket; None if the image keeps its aspect ratio, in patches.
            patches: largest number of patches, if there is no shape.
            epoch: from 0.

        Raises:
            BadSample: the image does not decode.
        """
        data, format, orientation, number, checked = encoded
        # A JPEG's header gives its size, so the crop is chosen before decoding, and only as many pixels as the crop
        # needs are decoded. A user's transform gets the image at full size.
        if format != "JPEG" or self._exact or self._user is not None:
            image = decode(data, format=format, orientation=orientation, checked=checked)
            return self.choose_part(image, shape=shape, patches=patches, number=number, epoch=epoch)
        height, width = jpeg_size(data, orientation)
        box, target = self._part((height, width), shape, patches, number, epoch)
        at_least = _decoded_size((height, width), box, target)
        image = decode(data, format=format, orientation=orientation, at_least=at_least)
        scaled = _size(image)
        return Decoded(image, box.scaled(scaled[0] / height, scaled[1] / width), target, box)

    def choose_part(
        self, image: Tensor, *, shape: tuple[int, int] | None, patches: int, number: int = 0, epoch: int = 0
    ) -> Decoded:
        """As `decode`, of an image that is decoded already: uint8 (3, h, w), RGB."""
        box, target = self._part(_size(image), shape, patches, number, epoch)
        return Decoded(image, box, target, box)

    def write(self, decoded: Decoded, out: Tensor, *, number: int, epoch: int, regions: Any = None) -> Any:
        """Stand-in: see `_write`."""
        from mmdata.images.regions import Geometry, Written, follow

        flipped = self._write(decoded, out, number=number, epoch=epoch)
        geometry = Geometry(decoded.crop, decoded.size, bool(flipped))
        followed = None if regions is None else follow(regions, geometry, min_visible=self._targets.min_visible)
        return Written(geometry, followed)

    def _write(self, decoded: Decoded, out: Tensor, *, number: int, epoch: int) -> Any:
        """Write the chosen part of an image.

        Args:
            decoded: from `decode`.
            out: uint8 (3, H, W), (H, W) = `decoded.size`; overwritten.
            number: `EncodedImage.number`.
            epoch: from 0.

        Raises:
            BadSample: the user's transform raised, or returned another shape or dtype.
            ConfigError: the user's transform does not give equal pixels for equal rows.
        """
        if self._user is not None:
            raw = random_raw(1, seed=self.seed, epoch=epoch, purpose=Purpose.ROW_TRANSFORM, position=number)
            self._user(decoded.image, out, seed=int(raw[0] >> 1))
            return
        resize_crop(decoded.image, decoded.box, out)
        if self._augment is not None:
            draws = uniforms(NUM_DRAWS, seed=self.seed, epoch=epoch, purpose=Purpose.AUGMENTATION, position=number)
            apply_changes(changes := draw_changes(self._augment, draws), out)
            return changes.flip

    def write_patches(self, decoded: Decoded, out: Tensor, *, number: int, epoch: int, regions: Any = None) -> Any:
        """Write the chosen part of an image as patches; see `write`.

        Args:
            decoded: from `decode`.
            out: uint8 (N, patch_size² · 3), overwritten; zeros after the last patch.
            number: `EncodedImage.number`.
            epoch: from 0.

        Returns:
            (height, width) of the image, in patches.
        """
        resized = torch.empty(3, *decoded.size, dtype=torch.uint8)
        written = self.write(decoded, resized, number=number, epoch=epoch, regions=regions)
        write_patches(resized, out, patch_size=self.patch_size)
        return written

    def _part(
        self, size: tuple[int, int], shape: tuple[int, int] | None, patches: int, number: int, epoch: int
    ) -> tuple[Crop, tuple[int, int]]:
        """The part of an image of `size` to write, and the size to resize it to."""
        if self._random_crop:
            draws = uniforms(4, seed=self.seed, epoch=epoch, purpose=Purpose.ROW_TRANSFORM, position=number)
            box = train_crop(size, shape or size, draws, scale=self._crop_scale)
        else:
            box = eval_crop(size, shape or size)
        if shape is not None:
            return box, shape
        return box, native_size(round(box.height), round(box.width), patch_size=self.patch_size, patches=patches)


def _decoded_size(size: tuple[int, int], box: Crop, target: tuple[int, int]) -> tuple[int, int] | None:
    """The smallest size to decode an image at, so that its box is no smaller than the target; None for full size."""
    # Scales above 1/2 are not worth it: libjpeg-turbo takes as long for them as for full size.
    if box.height < 2 * target[0] or box.width < 2 * target[1]:
        return None
    return math.ceil(size[0] * target[0] / box.height), math.ceil(size[1] * target[1] / box.width)


def _size(image: Tensor) -> tuple[int, int]:
    return int(image.shape[1]), int(image.shape[2])
