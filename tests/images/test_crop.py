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

from mmdata.images.crop import Crop, eval_crop, resize_crop, train_crop, whole_pixels
from mmdata.images.pixels import PixelTransform
from mmdata.seeding import Purpose, uniforms
from tests.images.placed import png

sides = st.integers(1, 4000)
sizes = st.tuples(sides, sides)
shapes = st.tuples(st.integers(1, 512), st.integers(1, 512))


def inside(box: Crop, size: tuple[int, int]) -> bool:
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
        ((480, 640), (224, 224), Crop(0, 37 * 640 / 298, 480, 224 * 640 / 298)),
        ((640, 480), (224, 224), Crop(37 * 640 / 298, 0, 224 * 640 / 298, 480)),
        ((300, 400), (192, 256), Crop(0, 0, 300, 400)),
        ((448, 640), (224, 224), Crop(0, 96, 448, 448)),
        ((10, 10), (224, 224), Crop(0, 0, 10, 10)),
    ],
)
def test_eval_crop_examples(size: tuple[int, int], shape: tuple[int, int], box: Crop):
    assert eval_crop(size, shape) == pytest.approx(box)


@given(
    sizes,
    shapes,
    st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
)
def test_train_crop_lies_within_the_image(
    size: tuple[int, int], shape: tuple[int, int], numbers: list[float], scale: list[float]
):
    assert inside(train_crop(size, shape, numbers, scale=(scale[0], scale[1])), size)


def crops(size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float], count: int) -> NDArray[np.float64]:
    """(count, 4) boxes of the rows 0 … count-1, as a loader draws them."""
    drawn = [uniforms(4, seed=1, epoch=0, purpose=Purpose.ROW_TRANSFORM, position=row) for row in range(count)]
    return np.array([train_crop(size, shape, numbers, scale=scale) for numbers in drawn], np.float64)


def largest_gap(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Kolmogorov and Smirnov's statistic: the largest difference between two empirical distributions."""
    every = np.sort(np.concatenate([a, b]))
    shares = [np.searchsorted(np.sort(sample), every, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


# So small that every box of torchvision's fits at its first try: a ratio of 4/3 or 3/4 is the hardest.
@pytest.mark.parametrize(("size", "scale"), [((300, 400), (0.08, 0.55)), ((500, 333), (0.2, 0.48))])
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


UNIFORM = {
    "default": ((2400, 3200), (224, 224), (0.9, 1.0)),
    "3:2": ((1200, 1800), (224, 224), (0.3, 1.0)),
    "portrait of 1:3 in a wide bucket": ((3000, 1000), (192, 256), (0.05, 0.9)),
}


@pytest.mark.parametrize(("size", "shape", "scale"), UNIFORM.values(), ids=UNIFORM)
def test_train_crop_area_and_ratio_are_uniform_where_they_fit(
    size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float]
):
    count, (height, width) = 4000, size
    boxes = crops(size, shape, scale, count)
    aspect, own = shape[1] / shape[0], width / height
    share = boxes[:, 2] * boxes[:, 3] / (height * width)
    most = min(scale[1], aspect * 4 / 3 / own, own / (aspect * 3 / 4))  # of a box of an allowed ratio
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    # The ratios with which a box of its area lies in the image.
    low = np.maximum(np.log(aspect * 3 / 4), np.log(own * share))
    high = np.minimum(np.log(aspect * 4 / 3), np.log(own / share))
    wide = high - low > 0.05  # others are decided by the rounding to whole pixels
    places = [boxes[:, i] / np.maximum(1, size[i] - boxes[:, 2 + i]) for i in (0, 1)]
    even = (np.arange(count) + 0.5) / count
    found = {
        "area": (share - scale[0]) / (most - scale[0]),
        "ratio": (ratio - low)[wide] / (high - low)[wide],
        "top": places[0][size[0] - boxes[:, 2] > 20],
        "left": places[1][size[1] - boxes[:, 3] > 20],
    }
    for name, sample in found.items():
        assert len(sample) > 500, name
        assert largest_gap(sample, even) < 1.95 * math.sqrt(1 / len(sample)) + 0.02, name  # 0.001; whole pixels


@pytest.mark.parametrize(
    ("size", "shape", "box"),
    [
        ((200, 300), (224, 224), (200, 267)),  # 3:2, and 2:3
        ((300, 200), (224, 224), (267, 200)),
        ((100, 1000), (224, 224), (100, 133)),  # 10:1, and 1:10
        ((1000, 100), (224, 224), (133, 100)),
        ((100, 1000), (192, 256), (100, 178)),  # 16:9, 4/3 of the bucket's
    ],
)
def test_train_crop_of_an_image_that_no_area_fits_is_the_largest_at_a_random_place(
    size: tuple[int, int], shape: tuple[int, int], box: tuple[int, int]
):
    boxes = crops(size, shape, (0.9, 1.0), 2000)
    assert {(height, width) for _, _, height, width in boxes.tolist()} == {box}
    if shape == (224, 224):  # torchvision's, which is always in the middle
        theirs = RandomResizedCrop.get_params(torch.empty(3, *size), [0.9, 1.0], [3 / 4, 4 / 3])
        assert tuple(theirs[2:]) == box
    free = (size[0] - box[0], size[1] - box[1])
    along = 0 if free[0] else 1
    counts = np.bincount(boxes[:, along].astype(int), minlength=free[along] + 1)
    assert len(counts) == free[along] + 1
    expected = 2000 / len(counts)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    assert chi_square < degrees + 3.09 * math.sqrt(2 * degrees) + 6.4  # 0.999
    assert (boxes[:, 1 - along] == 0).all()


@pytest.mark.parametrize("size", [(480, 720), (720, 480), (1080, 1920), (400, 1600)])
def test_train_crop_of_a_wide_photo_differs_from_epoch_to_epoch(size: tuple[int, int]):
    transform = PixelTransform("train", seed=3)  # the default scale
    image = torch.arange(size[1]).remainder(251).to(torch.uint8).expand(3, *size)
    image = image + torch.arange(size[0]).remainder(13).to(torch.uint8)[:, None]
    boxes = [transform.decode(png(image), shape=(224, 224), patches=0, epoch=epoch).box for epoch in range(8)]
    assert len(set(boxes)) >= 6


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


def resized(image: Tensor, box: Crop, shape: tuple[int, int]) -> Tensor:
    out = torch.full((3, *shape), 77, dtype=torch.uint8)
    resize_crop(image, whole_pixels(box, (image.shape[1], image.shape[2])), out)
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


@pytest.mark.parametrize("box", [Crop(10, 20, 300, 310), Crop(0, 0, 100, 90), Crop(100, 7, 224, 300)])
def test_resize_crop_is_that_of_pillow(box: Crop):
    image = photo_like(420, 400)
    ours = resized(image, box, (224, 224))
    area = (box.left, box.top, box.left + box.width, box.top + box.height)
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((224, 224), Image.Resampling.BICUBIC, box=area)
    theirs = torch.from_numpy(np.array(pillow)).permute(2, 0, 1)
    # Near the border Pillow looks beyond the box, which a crop cannot.
    assert psnr(ours[:, 4:-4, 4:-4], theirs[:, 4:-4, 4:-4]) > 50


def test_resize_crop_of_the_same_size_copies():
    image = photo_like(60, 80)
    assert torch.equal(resized(image, Crop(5, 7, 30, 40), (30, 40)), image[:, 5:35, 7:47])


def test_resize_crop_does_not_care_how_the_image_lies_in_memory():
    image, box = photo_like(90, 70), Crop(3, 4, 60, 61)
    channels_last = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as decoders give it
    turned = image.transpose(1, 2).contiguous().transpose(1, 2)  # as orient() does
    for view in (channels_last, turned):
        assert torch.equal(resized(view, box, (32, 48)), resized(image, box, (32, 48)))


def test_resize_crop_keeps_flat_colour():
    image = torch.tensor([255, 0, 128], dtype=torch.uint8)[:, None, None].expand(3, 40, 50)
    for shape in [(224, 224), (7, 9)]:
        assert resized(image, Crop(0, 0, 40, 50), shape).flatten(1).unique(dim=1).tolist() == [[255], [0], [128]]
