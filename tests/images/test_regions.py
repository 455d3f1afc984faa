"""Boxes, key points and masks of an image in the pixels of a batch, as torchvision.transforms.v2 moves them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from mmdata.config.images import AugmentConfig
from mmdata.config.targets import TargetsConfig
from mmdata.images.crop import Crop, train_crop
from mmdata.images.decode import oriented, oriented_size
from mmdata.images.outlines import Frame
from mmdata.images.pixels import EncodedImage, PixelTransform, Written
from mmdata.images.regions import Geometry, Regions, follow
from tests.images.placed import png

CLOSE = 1e-3
"""Pixels; torchvision computes in float32."""

sides = st.integers(1, 300)
shares = st.floats(0, 1)
uniforms = st.lists(st.floats(0, 1, exclude_max=True), min_size=4, max_size=4)


@st.composite
def regions_of(draw: st.DrawFn, size: tuple[int, int]) -> Regions:
    """Boxes of any place and size in an image, key points in and around it, and a mask of noise."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, 6))
    corners = np.sort(rng.random((count, 2, 2)), axis=1) * size[::-1]
    if draw(st.booleans()):
        corners = corners.round()
    keypoints = rng.random((count, 3, 3)) * 1.4 - 0.2
    keypoints[..., :2] *= size[::-1]
    keypoints[..., 2] = rng.integers(1, 3, (count, 3))
    return Regions(corners.reshape(-1, 4), keypoints, rng.integers(0, 256, size, np.uint8))


def upright(regions: Regions, size: tuple[int, int], orientation: int) -> Regions:
    assert regions.mask is not None
    frame = Frame(size, orientation, oriented_size(*size, orientation))
    return replace(frame.upright(regions), mask=oriented(regions.mask[..., None], orientation)[..., 0])


def in_tensors(regions: Regions, size: tuple[int, int]) -> tuple[Any, Any, Any]:
    assert regions.keypoints is not None
    return (
        tv_tensors.BoundingBoxes(torch.from_numpy(regions.boxes), format="XYXY", canvas_size=size),
        tv_tensors.KeyPoints(torch.from_numpy(regions.keypoints[..., :2]), canvas_size=size),
        tv_tensors.Mask(torch.tensor(regions.mask)),
    )


def mirrored(points: Any, flip: Callable[[Any], Any]) -> Any:
    """torchvision's flips read key points as numbers of pixels, whose centres are half a pixel further; its resize does
    not. A batch's coordinates are those of its boxes throughout."""
    return tv_tensors.wrap(flip(tv_tensors.wrap(points - 0.5, like=points)) + 0.5, like=points)


def turned(tensors: tuple[Any, Any, Any], orientation: int) -> tuple[Any, Any, Any]:
    """What an EXIF orientation says, in torchvision's flips and in exchanges of rows and columns."""
    boxes, points, mask = tensors
    if orientation >= 5:
        canvas = boxes.canvas_size[::-1]
        boxes = tv_tensors.BoundingBoxes(boxes[:, [1, 0, 3, 2]], format="XYXY", canvas_size=canvas)
        points, mask = tv_tensors.KeyPoints(points.flip(-1), canvas_size=canvas), tv_tensors.Mask(mask.T)
    for flip, which in ((F.vertical_flip, (3, 4, 7, 8)), (F.horizontal_flip, (2, 3, 6, 7))):
        if orientation in which:
            boxes, points, mask = flip(boxes), mirrored(points, flip), flip(mask)
    return boxes, points, mask


def assert_same_mask(found: NDArray[np.uint8], expected: Tensor, geometry: Geometry) -> None:
    """Equal but where a pixel's centre is the edge of two pixels of the mask, between which rounding decides."""
    (top, left, height, width), (rows, columns) = geometry.crop, geometry.size
    down = top + (np.arange(rows) + 0.5) * height / rows
    across = left + (np.arange(columns) + 0.5) * width / columns
    sure_rows, sure_columns = (abs(at - at.round()) > 1e-5 for at in (down, across))
    if geometry.flipped:
        sure_columns = sure_columns[::-1]
    kept = sure_rows[:, None] & sure_columns
    assert found.shape == expected.shape
    assert (found == expected.numpy())[kept].all()


def assert_followed(
    regions: Regions,
    geometry: Geometry,
    tensors: tuple[Any, Any, Any],
    min_visible: float,
    swaps: list[tuple[int, int]],
) -> None:
    """`follow` gives what torchvision makes of the same regions, `tensors`, by crop, resize and flip."""
    boxes, points, mask = tensors
    whole = [int(edge) for edge in geometry.crop]
    cropped = F.crop(boxes, *whole)
    area = ((boxes[:, 2:] - boxes[:, :2]).prod(1)).numpy()
    left = ((cropped[:, 2:] - cropped[:, :2]).prod(1)).numpy()
    assume(not (abs(left - min_visible * area) <= 1e-6 * area).any() or min_visible in (0.0, 1.0))
    expected = np.flatnonzero((left > 0) & (left >= min_visible * area * (1 - 1e-9)))
    boxes, points = F.resize(cropped, list(geometry.size)), F.resize(F.crop(points, *whole), list(geometry.size))
    mask = F.resize(F.crop(mask, *whole), list(geometry.size), interpolation=InterpolationMode.NEAREST_EXACT)
    if geometry.flipped:
        boxes, points, mask = F.horizontal_flip(boxes), mirrored(points, F.horizontal_flip), F.horizontal_flip(mask)
        for one, other in swaps:
            points[:, [one, other]] = points[:, [other, one]]

    found = follow(regions, geometry, min_visible=min_visible, swaps=swaps)
    assert found.kept.tolist() == expected.tolist()
    assert found.boxes == pytest.approx(boxes.numpy()[expected], abs=CLOSE)
    assert (found.boxes >= 0).all()
    assert (found.boxes <= [*geometry.size[::-1]] * 2).all()
    assert found.keypoints is not None
    assert regions.keypoints is not None
    assert found.keypoints[..., :2] == pytest.approx(points.numpy()[expected], abs=CLOSE)
    seen = found.keypoints[..., 2] > 0
    beyond = np.maximum(-points.numpy(), points.numpy() - geometry.size[::-1]).max(axis=-1)[expected]
    assert seen[beyond < -CLOSE].all()
    assert not seen[beyond > CLOSE].any()
    assert found.masks is not None
    assert_same_mask(found.masks, mask, geometry)


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("orientation", range(1, 9))
@settings(max_examples=1250)
@given(
    st.data(), st.tuples(sides, sides), st.tuples(sides, sides), uniforms, st.booleans(), st.sampled_from([0, 0.25, 1])
)
def test_regions_follow_as_in_torchvision(
    orientation: int,
    data: st.DataObject,
    stored: tuple[int, int],
    shape: tuple[int, int],
    numbers: list[float],
    flipped: bool,
    min_visible: float,
):
    regions = data.draw(regions_of(stored))
    size = stored[::-1] if orientation >= 5 else stored
    geometry = Geometry(train_crop(size, shape, numbers, scale=(0.05, 1.0)), shape, flipped)
    found, tensors = upright(regions, stored, orientation), turned(in_tensors(regions, stored), orientation)
    assert found.boxes == pytest.approx(tensors[0].numpy(), abs=CLOSE)
    assert found.mask is not None
    assert torch.equal(torch.tensor(found.mask.copy()), tensors[2])
    assert_followed(found, geometry, tensors, min_visible, [(0, 2)])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_turns_as_pillow_does(orientation: int):
    """A box that is drawn in the stored pixels, and Pillow turns with these."""
    drawn = Image.new("L", (31, 17))
    ImageDraw.Draw(drawn).rectangle((3, 5, 20, 9), fill=255)  # with its last column and row
    exif = drawn.getexif()
    exif[274] = orientation
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", exif=exif)
    turned = np.asarray(ImageOps.exif_transpose(Image.open(buffer)))
    keypoints = np.array([[[3.0, 5.0, 2.0], [20.5, 9.5, 1.0]]])
    stored = Regions(np.array([[3.0, 5.0, 21.0, 10.0]]), keypoints, np.asarray(drawn))
    found = upright(stored, (17, 31), orientation)
    rows, columns = turned.nonzero()
    expected = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert found.boxes.tolist() == [expected]
    assert found.mask is not None
    assert (found.mask == turned).all()
    assert found.keypoints is not None
    corner, last = found.keypoints[0, :, :2]
    assert [*np.minimum(corner, last).round(), *np.maximum(corner, last).round()] == pytest.approx(expected, abs=1)
    assert turned[int(last[1]), int(last[0])] == 255  # the centre of the last pixel of the box
    assert found.keypoints[0, :, 2].tolist() == [2.0, 1.0]


# What the pixels show


def in_file(image: Image.Image, orientation: int, number: int) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return EncodedImage(buffer.getvalue(), "PNG", orientation, number)


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("patches", [0, 40])
@settings(max_examples=40)
@given(data=st.data(), stored=st.tuples(st.integers(8, 90), st.integers(8, 90)), orientation=st.integers(1, 8))
def test_geometry_is_that_of_the_pixels(
    kind: str, patches: int, data: st.DataObject, stored: tuple[int, int], orientation: int
):
    regions, number = data.draw(regions_of(stored)), data.draw(st.integers(0, 99))
    noise = Image.fromarray(np.random.default_rng(number).integers(0, 256, (*stored, 3), np.uint8))
    augment = AugmentConfig(horizontal_flip_prob=0.5) if kind == "train" else None
    targets = TargetsConfig(boxes="json:boxes", keypoints="json:keypoints", keypoint_swaps=[(1, 2)], min_visible=0.5)
    transform = PixelTransform(kind, crop_scale=(0.1, 1.0), augment=augment, patch_size=8, targets=targets)
    image, shape = in_file(noise, orientation, number), None if patches else (24, 32)
    found = upright(regions, stored, orientation)
    decoded = transform.decode(image, shape=shape, patches=patches, epoch=0, regions=found)
    out = torch.empty(patches, 8 * 8 * 3, dtype=torch.uint8) if patches else torch.empty(3, 24, 32, dtype=torch.uint8)
    write = transform.write_patches if patches else transform.write
    geometry, followed = write(decoded, out, number=number, epoch=0, regions=found)
    if patches:
        rows, columns = (side // 8 for side in geometry.size)
        grid = out[: rows * columns].view(rows, columns, 8, 8, 3)
        out = grid.permute(4, 0, 2, 1, 3).reshape(3, *geometry.size)
    exif = noise.getexif()
    exif[274] = orientation
    shown = F.pil_to_tensor(ImageOps.exif_transpose(noise))
    expected = F.resized_crop(shown, *map(int, geometry.crop), list(geometry.size), InterpolationMode.BICUBIC)
    expected = F.horizontal_flip(expected) if geometry.flipped else expected
    assert (out.int() - expected.int()).abs().max() <= 1
    assert followed is not None
    assert_followed(found, geometry, turned(in_tensors(regions, stored), orientation), 0.5, [(1, 2)])
    assert followed.boxes.tolist() == follow(found, geometry, min_visible=0.5).boxes.tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("eighths", [1, 2, 3, 4])
def test_crop_of_a_scaled_jpeg_is_where_its_edges_are(eighths: int, orientation: int):
    """The image is dark up to a column and grey behind it. libjpeg-turbo keeps the mean of each block of 8 × 8 pixels,
    so the dark share of a row of decoded pixels says where the edge is. The ratio of the sizes would put it
    elsewhere.
    """
    height, width = 605, 1001
    shape = (height * eighths // 8 - 1, width * eighths // 8 - 1)
    off: list[float] = []
    for edge in (8, 300, 531, 900, 990):
        shown = np.full((height, width, 3), 192, np.uint8)
        shown[:, :edge] = 64
        image = Image.fromarray(shown)
        back = {6: 8, 8: 6}.get(orientation, orientation)  # what turns the upright image into the stored one
        exif = image.getexif()
        exif[274] = back
        buffer = io.BytesIO()
        ImageOps.exif_transpose(image).save(buffer, "JPEG", quality=100, subsampling=0)
        decoded = PixelTransform("eval").decode(
            EncodedImage(buffer.getvalue(), "JPEG", orientation, 0), shape=shape, patches=0, epoch=0
        )
        size = tuple(decoded.small.image.shape[1:])
        assert size == (-(-height * eighths // 8), -(-width * eighths // 8))
        top, left, _, wide = map(int, decoded.box)
        row = decoded.small.image[1, top + 9, left : left + wide].double()
        dark = float(((192 - row) / 128).sum())
        assert dark == pytest.approx((edge - decoded.crop.left) * wide / decoded.crop.width, abs=0.04)
        off.append(abs(dark - (edge * size[1] / width - left)))
    beyond = size[1] - width * eighths / 8
    assert max(off) > 0.8 * beyond - 0.04  # the other rule misses nearly the whole excess
    assert min(decoded.crop[:2]) > -8
    assert decoded.crop.top + decoded.crop.height < height + 8
    assert decoded.crop.left + decoded.crop.width < width + 8


def test_mask_of_a_scaled_jpeg_is_sampled_between_its_pixels():
    mask = np.arange(64, dtype=np.uint8)[None].repeat(8, axis=0)
    geometry = Geometry(Crop(0.0, 1.25, 8.0, 16.0), (2, 4))  # pixels of 4 columns, with centres at 3.25, 7.25, …
    found = follow(Regions(np.zeros((0, 4)), mask=mask), geometry, min_visible=0).masks
    assert found is not None
    assert found.tolist() == [[3, 7, 11, 15]] * 2
    beyond = geometry._replace(crop=Crop(0.0, 56.0, 8.0, 16.0))  # to column 72: the last one goes on
    found = follow(Regions(np.zeros((0, 4)), mask=mask), beyond, min_visible=0).masks
    assert found is not None
    assert found.tolist() == [[58, 62, 63, 63]] * 2


class Stripe:
    """An outline that fills the whole batch with 1."""

    def draw(self, geometry: Geometry) -> NDArray[np.uint8]:
        return np.ones(geometry.size, np.uint8)


def test_outlines_of_the_boxes_that_are_left_are_drawn():
    boxes = np.array([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    regions = Regions(boxes, outlines=[Stripe(), Stripe()])
    for crop, left in ((Crop(0, 0, 100, 100), 2), (Crop(0, 0, 20, 20), 1), (Crop(20, 20, 20, 20), 0)):
        masks = follow(regions, Geometry(crop, (5, 6)), min_visible=0.25).masks
        assert masks is not None
        assert masks.shape == (left, 5, 6)


def test_follow_example():
    regions = Regions(np.array([[90.0, 10, 120, 20]]))
    geometry = Geometry(Crop(0, 100, 100, 100), (50, 50), flipped=True)
    assert follow(regions, geometry, min_visible=0.6).boxes.tolist() == [[40, 5, 50, 10]]
    assert follow(regions, geometry, min_visible=0.7).kept.tolist() == []


# Crops that hold all boxes


@settings(max_examples=1000)
@given(st.tuples(sides, sides), st.tuples(sides, sides), uniforms, st.tuples(shares, shares, shares, shares))
def test_train_crop_holds_what_it_must(
    size: tuple[int, int], shape: tuple[int, int], numbers: list[float], held: tuple[float, float, float, float]
):
    (x0, x1), (y0, y1) = sorted(held[:2]), sorted(held[2:])
    hold = (x0 * size[1], y0 * size[0], x1 * size[1], y1 * size[0])
    top, left, height, width = train_crop(size, shape, numbers, scale=(0.05, 1.0), hold=hold)
    assert 0 <= left <= hold[0] <= hold[2] <= left + width <= size[1]
    assert 0 <= top <= hold[1] <= hold[3] <= top + height <= size[0]
    free = train_crop(size, shape, numbers, scale=(0.05, 1.0))
    assert height >= free.height
    assert width >= free.width
    if free.left <= hold[0] and hold[2] <= free.left + free.width:
        assert width == free.width  # a side that holds it stays as it was drawn


def test_train_crop_that_holds_a_box_is_uniform_among_those_that_do():
    tops = [
        train_crop((100, 100), (10, 10), [0.0, 0.5, u / 1000, 0.0], scale=(0.25, 0.25), hold=(20, 40, 30, 60)).top
        for u in range(1000)
    ]
    numbers, counts = np.unique(tops, return_counts=True)
    assert numbers.tolist() == list(range(10, 41))  # 50 rows that hold rows 40 to 60
    assert counts.max() - counts.min() <= 1


def kept(transform: PixelTransform, image: EncodedImage, regions: Regions) -> Written:
    out = torch.empty(3, 32, 32, dtype=torch.uint8)
    decoded = transform.decode(image, shape=(32, 32), patches=0, epoch=0, regions=regions)
    return transform.write(decoded, out, number=image.number, epoch=0, regions=regions)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_kept_boxes_are_whole_in_a_scaled_jpeg(photo: Callable[..., bytes], orientation: int):
    data, size = photo(601, 833), (833, 601) if orientation >= 5 else (601, 833)
    targets = TargetsConfig(boxes="json:boxes", keep_boxes=True, min_visible=1.0)
    transform = PixelTransform("train", crop_scale=(0.1, 0.3), targets=targets)
    for number in range(40):
        rng = np.random.default_rng(number)
        corners = (np.sort(rng.random((2, 2, 2)), axis=1) * size[::-1]).reshape(-1, 4)
        written = kept(transform, EncodedImage(data, "JPEG", orientation, number), Regions(corners))
        assert written.followed is not None
        assert written.followed.kept.tolist() == [0, 1]


def test_keep_boxes_changes_nothing_without_boxes():
    image = png(torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 90, 120), np.uint8)), number=5)
    found = [
        PixelTransform(
            "train", crop_scale=(0.2, 0.9), targets=TargetsConfig(boxes="json:boxes", keep_boxes=keep)
        ).decode(image, shape=(32, 32), patches=0, epoch=3, regions=Regions(np.zeros((0, 4))))
        for keep in (False, True)
    ]
    assert found[0].crop == found[1].crop
