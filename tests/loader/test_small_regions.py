"""Regions with `shorter_side`: they lie where the objects are seen, and are the same where decoded images are kept."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from mmdata import Batch, Loader
from tests.loader.target_tars import COLOURS, GREY, Box, objects, picture, sample, settings_of

SIZE = (409, 601)
"""(height, width) as stored. Decoded at an eighth they are 52 × 76 pixels, of which the last ones cover 7 more."""
BOXES: list[Box] = [(20, 30, 150, 140), (430, 270, 160, 130), (230, 60, 120, 150)]
TARGETS: dict[str, Any] = {
    "boxes": "json:boxes",
    "box_labels": "json:boxes.number",
    "keypoints": "json:boxes.keypoints",
    "keypoint_swaps": [],
    "masks": "json:boxes.segmentation",
    "min_visible": 0.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "whole images": {},
    "crops": {"transform": "train", "crop_scale": [0.3, 0.9], "augment": {"horizontal_flip_prob": 0.5}},
    "crops that hold their boxes": {"transform": "train", "targets": {**TARGETS, "keep_boxes": True}},
    "patches": {
        "image_buckets": None,
        "image_patches": [48],
        "patch_size": 8,
        "targets": {name: value for name, value in TARGETS.items() if name != "masks"},
    },
    "a transform of torchvision": {
        "transform": f"{__name__}:cropped",
        "targets": {name: value for name, value in TARGETS.items() if name not in ("keypoint_swaps", "min_visible")},
    },
}


def cropped(inputs: Any, size: tuple[int, int], generator: torch.Generator) -> Any:
    inputs["image"] -= 0  # in place
    return v2.Compose([v2.RandomResizedCrop(size, scale=(0.4, 1.0)), v2.RandomHorizontalFlip()])(inputs)


def photo(orientation: int) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    image = Image.open(io.BytesIO(picture(SIZE, BOXES)))
    image.save(buffer, "JPEG", quality=98, subsampling=0, exif=exif)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A section `data` of eight images that only their orientations tell apart."""
    middles = [[left + width / 2, top + height / 2, 2] for left, top, width, height in BOXES]
    corners = [[(x, y), (x + width, y), (x + width, y + height), (x, y + height)] for x, y, width, height in BOXES]
    outlines = [[[side for corner in four for side in corner]] for four in corners]
    listed = objects(BOXES, number=range(3), keypoints=middles, segmentation=outlines)
    samples = {str(turn): {**sample({"boxes": listed}, image=b""), "jpg": photo(turn)} for turn in range(1, 9)}
    for members in samples.values():
        del members["png"]
    given = settings_of(tmp_path_factory.mktemp("small"), samples, image_buckets=[[48, 70], [70, 48]])
    return {**given, "global_batch_size": 4, "shorter_side": 48, "targets": TARGETS}


def epochs(data: dict[str, Any], **loading: Any) -> tuple[list[Batch], int]:
    """The batches of three epochs, and the bytes of images that were read for the last one."""
    with Loader.from_config({**data, "loading": {**data["loading"], **loading}}) as loader:
        batches = [*loader, *loader]
        before = loader.stats.read_bytes
        return [*batches, *loader], loader.stats.read_bytes - before


def image_of(batch: Any, row: int) -> Tensor:
    """The pixels of a row, float64 (3, h, w)."""
    values = batch["pixel_values"][row]
    if "spatial_shapes" in batch:
        rows, columns = batch["spatial_shapes"][row].tolist()
        values = values[: rows * columns].view(rows, columns, 8, 8, 3).permute(4, 0, 2, 1, 3)
        values = values.reshape(3, rows * 8, columns * 8)
    return values.double()


def coverage(image: Tensor, number: int) -> Tensor:
    """The share of each pixel that is of an object's colour, and not grey: (h, w)."""
    grey, colour = (torch.tensor(values, dtype=torch.float64) for values in (GREY, COLOURS[number]))
    return torch.einsum("chw,c->hw", image - grey[:, None, None], colour - grey) / (colour - grey).square().sum()


def _rounded(begin: float, end: float) -> slice:
    """The pixels whose centres lie in a stretch."""
    return slice(math.ceil(begin - 0.5), math.floor(end + 0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_regions_of_small_images_lie_where_their_objects_are_seen(data: dict[str, Any], kind: str):
    batches, _ = epochs({**data, **KINDS[kind]})
    least = 3 if kind in ("whole images", "crops that hold their boxes", "patches") else 0
    slack = 2 if kind == "a transform of torchvision" else 1  # which resizes masks that were drawn small
    seen, turns = 0, set[str]()
    batch: Any
    for batch in batches:
        for row, key in enumerate(batch["keys"]):
            turns.add(key)
            image = image_of(batch, row)
            boxes = batch["boxes"][row][batch["boxes_valid"][row]].double()
            assert len(boxes) >= least
            for place, (left, top, right, bottom) in enumerate(boxes.tolist()):
                if min(right - left, bottom - top) < 8:
                    continue
                number, where = int(batch["box_labels"][row, place]), (key, place)
                shares = coverage(image, number)
                y, x = max(0, math.floor(top) - 4), max(0, math.floor(left) - 4)
                window = slice(y, math.ceil(bottom) + 4), slice(x, math.ceil(right) + 4)
                around = shares[window]
                total = float(around.sum())
                down = float(around.sum(1) @ (torch.arange(len(around)).double() + 0.5)) / total
                across = float(around.sum(0) @ (torch.arange(around.shape[1]).double() + 0.5)) / total
                assert (x + across, y + down) == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.3), where
                assert total == pytest.approx((right - left) * (bottom - top), rel=0.06), where
                point_x, point_y, visibility = batch["keypoints"][row, place, 0].tolist()
                if visibility:
                    assert shares[int(point_y), int(point_x)] > 0.8, where
                if "masks" in batch:
                    mask = batch["masks"][row, place].bool()
                    inner = mask[_rounded(top + slack, bottom - slack), _rounded(left + slack, right - slack)]
                    assert inner.all(), where
                    outer = _rounded(max(0, top - slack), bottom + slack), _rounded(max(0, left - slack), right + slack)
                    assert mask.sum() == mask[outer].sum(), where
                    assert float(mask.sum()) == pytest.approx((right - left) * (bottom - top), rel=0.15 * slack), where
                seen += 1
    assert turns == set("12345678")
    assert seen > 40


@pytest.mark.parametrize("kind", KINDS)
def test_regions_are_the_same_where_decoded_images_are_kept(
    data: dict[str, Any], same: Callable[[Batch, Batch], bool], tmp_path: Path, kind: str
):
    data = {**data, **KINDS[kind]}
    expected, read = epochs(data)
    assert read
    for workers in (0, 2):  # first filled, then found
        kept, read = epochs(data, num_workers=workers, cache_pixels_gb=0.1, cache_dir=str(tmp_path))
        assert not read
        assert len(kept) == len(expected)
        assert all(map(same, kept, expected))
