"""From a row's encoded image to its place in a batch, under the row's own random numbers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mmdata.errors import BadSample, ConfigError, Reason
from mmdata.seeding import Purpose, random_raw, uniforms
from mmdata.transform.image import Box, eval_crop, resize_crop, train_crop
from mmdata.transform.patches import native_size, write_patches

CROP_TRIES = 10

UserTransform = Callable[[Tensor, tuple[int, int], torch.Generator], Tensor]
"""(uint8 (3, h, w) image, (height, width) to be made, the row's generator) -> uint8 (3, height, width).

The size is the bucket's; at native resolution the one that the whole image would get."""


class PixelTransform:
    """Crops a decoded image to the shape of its bucket, or cuts it into patches at its own aspect ratio.

    Args:
        kind: "train" (random resized crop), "eval" (largest centred crop), or "module:callable", a `UserTransform`.
        crop_scale: share of the area that a training crop keeps (min, max).
        seed: of the run.
        patch_size: side of a patch, in pixels.

    Raises:
        ConfigError: no such transform.
    """

    def __init__(
        self, kind: str, *, crop_scale: tuple[float, float] = (0.9, 1.0), seed: int = 0, patch_size: int = 16
    ) -> None:
        self.patch_size = patch_size
        self._crop_scale = crop_scale
        self._seed = seed
        self._random_crop = kind == "train"
        self._user = None if kind in ("train", "eval") else _import_transform(kind)

    def __call__(self, image: Tensor, out: Tensor, *, row: int, epoch: int) -> None:
        """Write a row's pixels.

        Args:
            image: uint8 (3, h, w), as decoded.
            out: uint8 (3, H, W), the row's place in the batch.
            row: number in the index.
            epoch: from 0.

        Raises:
            BadSample: the user's transform raised, or returned another shape or dtype.
        """
        if self._user is not None:
            self._apply_user(image, out, row, epoch)
        else:
            resize_crop(image, self._crop(_size(image), _size(out), row, epoch), out)

    def patches(self, image: Tensor, out: Tensor, *, row: int, epoch: int) -> tuple[int, int]:
        """Write a row's patches: of the whole image, or in training of a random crop of about its aspect ratio.

        Args:
            image: uint8 (3, h, w), as decoded.
            out: uint8 (N, patch_size² · 3), the row's place in the batch; zeros where there are fewer than N patches.
            row: number in the index.
            epoch: from 0.

        Returns:
            How many patches high and wide the image is.

        Raises:
            BadSample: as above.
        """
        size = _size(image)
        box = self._crop(size, size, row, epoch)
        height, width = native_size(box.height, box.width, patch_size=self.patch_size, patches=out.shape[0])
        resized = torch.empty(3, height, width, dtype=torch.uint8)
        if self._user is not None:
            self._apply_user(image, resized, row, epoch)
        else:
            resize_crop(image, box, resized)
        write_patches(resized, out, patch_size=self.patch_size)
        return height // self.patch_size, width // self.patch_size

    def _crop(self, size: tuple[int, int], shape: tuple[int, int], row: int, epoch: int) -> Box:
        if not self._random_crop:
            return eval_crop(size, shape)
        numbers = uniforms(4 * CROP_TRIES, seed=self._seed, epoch=epoch, purpose=Purpose.ROW_TRANSFORM, position=row)
        return train_crop(size, shape, numbers, scale=self._crop_scale)

    def _apply_user(self, image: Tensor, out: Tensor, row: int, epoch: int) -> None:
        assert self._user is not None
        raw = random_raw(1, seed=self._seed, epoch=epoch, purpose=Purpose.ROW_TRANSFORM, position=row)
        generator = torch.Generator().manual_seed(int(raw[0] >> 1))
        try:
            result: Any = self._user(image, _size(out), generator)
        except Exception as error:
            raise BadSample(Reason.TRANSFORM_FAILED, f"{type(error).__name__}: {error}") from error
        wanted = f"{out.dtype} {tuple(out.shape)}"
        if not isinstance(result, Tensor):
            raise BadSample(Reason.TRANSFORM_FAILED, f"returned {type(result).__name__}, not a tensor {wanted}")
        if result.shape != out.shape or result.dtype != out.dtype:
            raise BadSample(Reason.TRANSFORM_FAILED, f"returned {result.dtype} {tuple(result.shape)}, not {wanted}")
        out.copy_(result)


def _size(image: Tensor) -> tuple[int, int]:
    return int(image.shape[1]), int(image.shape[2])


def _import_transform(name: str) -> UserTransform:
    module, colon, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transform '{name}': {error}") from error
    if not callable(found):
        raise ConfigError(f"transform '{name}': expected train, eval, or 'module:callable'")
    return cast(UserTransform, found)
