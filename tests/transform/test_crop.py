"""Crops: within the image, distributed as torchvision's, and resized as torchvision and Pillow do."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2.functional import center_crop, resize

from mmdata.seeding import Purpose, uniforms
from mmdata.transform.image import Box, eval_crop, resize_crop, train_crop

sides = st.integers(1, 4000)
sizes = st.tuples(sides, sides)
shapes = st.tuples(st.integers(1, 512), st.integers(1, 512))


def inside(box: Box, size: tuple[int, int]) -> bool:
    return (
        min(box.top, box.left) >= 0
        and min(box.height, box.width) > 0
        and box.top + box.height <= size[0] * (1 + 1e-12)
        and box.left + box.width <= size[1] * (1 + 1e-12)
    )


@given(sizes, shapes)
def test_eval_crop_has_the_shape_of_the_target_and_lies_in_the_middle(size: tuple[int, int], shape: tuple[int, int]):
    box = eval_crop(size, shape)
    assert inside(box, size)
    pixel = (box.height / shape[0], box.width / shape[1])  # of the resized image
    assert size[0] == pytest.approx(box.height) or size[1] == pytest.approx(box.width)
    assert abs(size[0] - box.height - 2 * box.top) <= pixel[0] * (1 + 1e-9)
    assert abs(size[1] - box.width - 2 * box.left) <= pixel[1] * (1 + 1e-9)


@given(sizes, st.integers(1, 512))
def test_eval_crop_is_what_torchvision_resizes_and_cuts(size: tuple[int, int], side: int):
    box = eval_crop(size, (side, side))
    resized = resize(torch.empty(3, *size, device="meta"), [side], antialias=True).shape[1:]
    assert (size[0] * side / box.height, size[1] * side / box.width) == pytest.approx(tuple(resized))
    offset = (round((resized[0] - side) / 2), round((resized[1] - side) / 2))
    assert (box.top * side / box.height, box.left * side / box.width) == pytest.approx(offset)


@pytest.mark.parametrize(
    ("size", "shape", "box"),
    [
        ((480, 640), (224, 224), Box(0, 37 * 640 / 298, 480, 224 * 640 / 298)),
        ((640, 480), (224, 224), Box(37 * 640 / 298, 0, 224 * 640 / 298, 480)),
        ((300, 400), (192, 256), Box(0, 0, 300, 400)),
        ((448, 640), (224, 224), Box(0, 96, 448, 448)),
        ((10, 10), (224, 224), Box(0, 0, 10, 10)),
    ],
)
def test_eval_crop_examples(size: tuple[int, int], shape: tuple[int, int], box: Box):
    assert eval_crop(size, shape) == pytest.approx(box)


@given(
    sizes,
    shapes,
    st.lists(st.floats(0, 1, exclude_max=True), min_size=40, max_size=40),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
)
def test_train_crop_lies_within_the_image(
    size: tuple[int, int], shape: tuple[int, int], numbers: list[float], scale: list[float]
):
    assert inside(train_crop(size, shape, numbers, scale=(scale[0], scale[1])), size)


def crops(size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float], count: int) -> NDArray[np.float64]:
    """(count, 4) boxes of the rows 0 … count-1, as a loader draws them."""
    drawn = [uniforms(40, seed=1, epoch=0, purpose=Purpose.ROW_TRANSFORM, position=row) for row in range(count)]
    return np.array([train_crop(size, shape, numbers, scale=scale) for numbers in drawn], np.float64)


def largest_gap(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Kolmogorov and Smirnov's statistic: the largest difference between two empirical distributions."""
    every = np.sort(np.concatenate([a, b]))
    shares = [np.searchsorted(np.sort(sample), every, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize(("size", "scale"), [((300, 400), (0.08, 1.0)), ((500, 333), (0.5, 0.8))])
def test_train_crop_is_distributed_as_torchvisions(size: tuple[int, int], scale: tuple[float, float]):
    count = 3000
    ours = crops(size, (224, 224), scale, count)
    torch.manual_seed(0)
    blank = torch.empty(3, *size)
    theirs = np.array([RandomResizedCrop.get_params(blank, list(scale), [3 / 4, 4 / 3]) for _ in range(count)], float)
    features: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
        "area": lambda box: box[:, 2] * box[:, 3],
        "aspect": lambda box: box[:, 3] / box[:, 2],
        "top": lambda box: box[:, 0] / np.maximum(1, size[0] - box[:, 2]),
        "left": lambda box: box[:, 1] / np.maximum(1, size[1] - box[:, 3]),
    }
    critical = 1.95 * math.sqrt(2 / count)  # exceeded with probability 0.001
    gaps = {name: largest_gap(feature(ours), feature(theirs)) for name, feature in features.items()}
    assert max(gaps.values()) < critical, gaps


def test_train_crop_reaches_every_edge():
    boxes = crops((9, 7), (224, 224), (0.2, 0.6), 500)
    assert boxes[:, :2].min(axis=0).tolist() == [0, 0]
    assert (boxes[:, 0] + boxes[:, 2]).max() == 9
    assert (boxes[:, 1] + boxes[:, 3]).max() == 7


def test_train_crop_varies_around_the_aspect_ratio_of_the_bucket():
    boxes = crops((2000, 2000), (192, 256), (0.05, 0.1), 2000)
    log_aspect = np.log(boxes[:, 3] / boxes[:, 2]) - math.log(256 / 192)
    assert abs(log_aspect.mean()) < 0.015
    assert np.abs(log_aspect).max() < math.log(4 / 3) + 0.01
    counts, _ = np.histogram(log_aspect, bins=10, range=(-math.log(4 / 3), math.log(4 / 3)))
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.999


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((200, 300), Box(0, 16, 200, 267)),  # 3:2, and 2:3
        ((300, 200), Box(16, 0, 267, 200)),
        ((100, 1000), Box(0, 433, 100, 133)),  # 10:1, and 1:10
        ((1000, 100), Box(433, 0, 133, 100)),
    ],
)
def test_train_crop_that_no_try_fits_is_torchvisions(size: tuple[int, int], box: Box):
    theirs = RandomResizedCrop.get_params(torch.empty(3, *size), [0.9, 1.0], [3 / 4, 4 / 3])
    for row in range(20):
        numbers = uniforms(40, seed=0, epoch=0, purpose=Purpose.ROW_TRANSFORM, position=row)
        assert train_crop(size, (224, 224), numbers, scale=(0.9, 1.0)) == box == tuple(theirs)


def test_train_crop_that_no_try_fits_keeps_to_the_aspect_ratio_of_the_bucket():
    numbers = uniforms(40, seed=0, epoch=0, purpose=Purpose.ROW_TRANSFORM)
    assert train_crop((100, 1000), (192, 256), numbers, scale=(0.9, 1.0)) == Box(0, 411, 100, 178)  # 16:9


# Resizing


def photo_like(height: int, width: int) -> Tensor:
    """Uint8 (3, height, width): detail at all scales that falls off as a photo's does, and a few hard edges."""
    rng = np.random.default_rng(0)
    spectrum = np.fft.rfft2(rng.standard_normal((3, height, width)), axes=(1, 2))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    smooth = np.fft.irfft2(spectrum / (frequency + 1 / 300), s=(height, width), axes=(1, 2))
    image = 128 + 45 * smooth / smooth.std()
    image[:, height // 3 : height // 2, width // 4 : width // 2] += 60
    return torch.from_numpy(image.clip(0, 255).astype(np.uint8))


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    return float(10 * torch.log10(255**2 / (a.double() - b.double()).square().mean()))


def resized(image: Tensor, box: Box, shape: tuple[int, int]) -> Tensor:
    out = torch.full((3, *shape), 77, dtype=torch.uint8)
    resize_crop(image, box, out)
    return out


@pytest.mark.parametrize("size", [(448, 640), (960, 672), (336, 1008), (300, 300), (112, 168)])
def test_eval_crop_and_resize_is_that_of_torchvision(size: tuple[int, int]):
    image = photo_like(*size)
    ours = resized(image, eval_crop(size, (224, 224)), (224, 224))
    shorter_side = resize(image, [224], interpolation=InterpolationMode.BICUBIC, antialias=True)
    theirs = center_crop(shorter_side, [224, 224])
    # At the border of the crop theirs looks beyond it.
    assert psnr(ours[:, 4:-4, 4:-4], theirs[:, 4:-4, 4:-4]) > 48
    assert psnr(ours, theirs) > 36
    assert psnr(ours.roll(1, 2), theirs) < 30  # the measure sees a shift by one pixel


@pytest.mark.parametrize("box", [Box(10, 20, 300, 310), Box(0, 0, 100, 90), Box(100, 7, 224, 300)])
def test_resize_crop_is_that_of_pillow(box: Box):
    image = photo_like(420, 400)
    ours = resized(image, box, (224, 224))
    area = (box.left, box.top, box.left + box.width, box.top + box.height)
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((224, 224), Image.Resampling.BICUBIC, box=area)
    theirs = torch.from_numpy(np.array(pillow)).permute(2, 0, 1)
    # Near the border Pillow looks beyond the box, which a crop cannot.
    assert psnr(ours[:, 4:-4, 4:-4], theirs[:, 4:-4, 4:-4]) > 50


def test_resize_crop_of_the_same_size_copies():
    image = photo_like(60, 80)
    assert torch.equal(resized(image, Box(5, 7, 30, 40), (30, 40)), image[:, 5:35, 7:47])


def test_resize_crop_does_not_care_how_the_image_lies_in_memory():
    image, box = photo_like(90, 70), Box(3, 4, 60, 61)
    channels_last = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as decoders give it
    turned = image.transpose(1, 2).contiguous().transpose(1, 2)  # as orient() does
    for view in (channels_last, turned):
        assert torch.equal(resized(view, box, (32, 48)), resized(image, box, (32, 48)))


def test_resize_crop_keeps_flat_colour():
    image = torch.tensor([255, 0, 128], dtype=torch.uint8)[:, None, None].expand(3, 40, 50)
    for shape in [(224, 224), (7, 9)]:
        assert resized(image, Box(0, 0, 40, 50), shape).flatten(1).unique(dim=1).tolist() == [[255], [0], [128]]
