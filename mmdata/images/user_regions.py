"""Regions of an image as a user's transform gets and returns them: in torchvision's tensors.

torchvision is imported here alone, and only for a transform that gets regions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdata.errors import BadSample, ConfigError, Reason
from mmdata.images.crop import Crop
from mmdata.images.regions import Followed, Geometry, Regions, follow

NO_REGIONS = Followed(np.zeros(0, np.int64), np.zeros((0, 4)))
"""Those of an image of which none were read."""


def tv_tensors() -> Any:
    """The module of torchvision's tensors.

    Raises:
        ConfigError: it is not installed; the message says what to install.
    """
    try:
        from torchvision import tv_tensors
    except ImportError as error:
        raise ConfigError(
            f"a transform of your own gets data.targets as tensors of torchvision, which is missing ({error}): `pip "
            "install torchvision`"
        ) from error
    return tv_tensors


def sample_of(image: Tensor, regions: Followed) -> dict[str, Tensor]:
    """What a transform gets: an image and its regions.

    Args:
        image: uint8 (3, h, w), upright.
        regions: of it, in its pixels.

    Returns:
        image: tv_tensors.Image.
        boxes: tv_tensors.BoundingBoxes, float32 (n, 4), XYXY.
        labels: int64 (n,), the place of each box among those of its row: by them the boxes that are left are known, and
            `SanitizeBoundingBoxes` removes them with the boxes.
        keypoints: tv_tensors.KeyPoints, float32 (n, K, 2), where asked for.
        visibility: float32 (n, K), of the key points, likewise; 0 of those outside the image.
        masks: tv_tensors.Mask, uint8 (h, w), or (n, h, w) of each box's object; where asked for.
    """
    tv, size = tv_tensors(), tuple(image.shape[1:])
    boxes = tv.BoundingBoxes(torch.from_numpy(regions.boxes).float(), format="XYXY", canvas_size=size)
    sample = {"image": tv.Image(image), "boxes": boxes, "labels": torch.arange(len(boxes))}
    if regions.keypoints is not None:
        keypoints = torch.from_numpy(regions.keypoints).float()
        sample["keypoints"] = tv.KeyPoints(keypoints[..., :2], canvas_size=size)
        sample["visibility"] = keypoints[..., 2]
    if regions.masks is not None:
        sample["masks"] = tv.Mask(torch.tensor(regions.masks))  # a copy, which the transform may change
    return sample


def check_regions(result: dict[str, Any], sample: dict[str, Any], size: tuple[int, int]) -> dict[str, Tensor]:
    """The regions that a transform has returned, those of the boxes that are left.

    Key points, their visibility and masks may be those of all boxes still: transforms that remove boxes leave them.

    Args:
        result: has the entries of `sample`.
        sample: what the transform was given.
        size: (height, width) of the pixels that it returned.

    Raises:
        BadSample: an entry has another type, dtype, shape, format or canvas than it must, or values that are none.
    """
    labels, count = result["labels"], len(sample["labels"])
    left = len(labels) if isinstance(labels, Tensor) and labels.ndim == 1 else count
    found: dict[str, Tensor] = {}
    for name, given in sample.items():
        if name == "image":
            continue
        of_box = size if name == "masks" else tuple(given.shape[1:])
        shapes: list[tuple[int, ...]] = [size] if name == "masks" and given.ndim == 2 else [(left, *of_box)]
        if name not in ("boxes", "labels"):
            shapes.append((count, *of_box))
        returned, expected = _words(result[name]), [_words(given, shape, size) for shape in shapes]
        if returned not in expected:
            together = "; boxes are removed together with their labels" if name == "boxes" else ""
            raise BadSample(Reason.TRANSFORM_FAILED, f"returned {name} {returned}, not {expected[0]}{together}")
        found[name] = result[name].as_subclass(Tensor)
    labels, boxes = found["labels"], found["boxes"]
    if left and (labels[0] < 0 or labels[-1] >= count or (labels.diff() <= 0).any()):
        places = f"some of the numbers 0 to {count - 1}, rising: the places of the boxes that are left"
        raise BadSample(Reason.TRANSFORM_FAILED, f"returned labels {labels.tolist()}, not {places}")
    if not boxes.isfinite().all() or (boxes[:, 2:] < boxes[:, :2]).any():
        raise BadSample(Reason.TRANSFORM_FAILED, f"returned boxes {boxes.tolist()}, not left, top, right and bottom")
    if "keypoints" in found and not found["keypoints"].isfinite().all():
        raise BadSample(Reason.TRANSFORM_FAILED, "returned keypoints that are infinite or NaN")
    of_all = {name for name, value in found.items() if len(value) != left and (name, value.ndim) != ("masks", 2)}
    return {name: value[labels] if name in of_all else value for name, value in found.items()}


def _words(value: Any, shape: tuple[int, ...] | None = None, size: tuple[int, int] | None = None) -> str:
    """What an entry is, or would be with another shape and on a canvas of another size."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    words = f"{type(value).__name__} {value.dtype} {shape or tuple(value.shape)}"
    for attribute in ("format", "canvas_size"):
        if (found := getattr(value, attribute, None)) is not None:
            words += f" {found.name}" if attribute == "format" else f" on {size or tuple(found)}"
    return words


def followed_of(result: dict[str, Tensor], regions: Followed) -> Followed:
    """The regions that are left, in pixels of the batch: boxes are cut at its edges, and those without an area go.

    Args:
        result: of `check_regions`, with the image.
        regions: that the transform was given.
    """
    height, width = result["image"].shape[1:]
    keypoints = masks = None
    if "keypoints" in result:
        keypoints = torch.cat([result["keypoints"], result["visibility"][..., None]], dim=-1).double().numpy()
    whole = Geometry(Crop(0, 0, height, width), (height, width))
    left = follow(Regions(result["boxes"].double().numpy(), keypoints), whole, min_visible=0)
    if "masks" in result:
        masks = result["masks"].numpy()
        masks = masks if masks.ndim == 2 else masks[left.kept]
    return replace(left, kept=regions.kept[result["labels"].numpy()[left.kept]], masks=masks)
