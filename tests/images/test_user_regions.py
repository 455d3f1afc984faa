"""Users' transforms with regions: torchvision's tensors in and out, checked as strictly as pixels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from mmdata.config.targets import TargetsConfig
from mmdata.errors import BadSample, ConfigError, Reason
from mmdata.images.crop import UNKNOWN, Crop
from mmdata.images.pixels import PixelTransform
from mmdata.images.regions import Followed, Geometry, Regions, follow
from mmdata.images.user import UserTransform
from tests.images.placed import png

Sample = dict[str, Any]
CROP = v2.Compose(
    [v2.RandomResizedCrop((32, 32), scale=(0.2, 0.8)), v2.RandomHorizontalFlip(), v2.ClampBoundingBoxes()]
)
SANE = v2.Compose([CROP, v2.SanitizeBoundingBoxes()])


class Filled:
    """An outline that is filled with 1."""

    def draw(self, geometry: Geometry) -> NDArray[np.uint8]:
        return np.ones(geometry.size, np.uint8)


@pytest.fixture
def image() -> Tensor:
    """Uint8 (3, 60, 80)."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 60, 80), dtype=np.uint8))


def regions(**more: Any) -> Regions:
    """Four boxes, in the corners and over all."""
    boxes = np.array([[2, 3, 12, 10], [60, 2, 78, 12], [5, 5, 75, 55], [3, 45, 20, 58]], np.float64)
    return Regions(boxes, **more)


def of_all() -> Regions:
    keypoints = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
    keypoints[..., 2] = 2
    return regions(keypoints=keypoints, mask=np.arange(4800).reshape(60, 80).astype(np.uint8))


def in_image(given: Regions) -> Followed:
    """Regions of the image as it is decoded."""
    return follow(given, Geometry(Crop(0, 0, 60, 80), (60, 80)), min_visible=0)


@pytest.mark.parametrize(
    "given", [regions(), of_all(), regions(outlines=[Filled()] * 4)], ids=["boxes", "all", "outlines"]
)
@pytest.mark.parametrize("transform", [CROP, SANE], ids=["crop", "sanitized"])
def test_user_transform_with_regions_equals_torchvision_with_the_process_seeded(
    image: Tensor, given: Regions, transform: Any
):
    user, sizes = UserTransform(transform, with_regions=True), set[int]()
    for seed in range(12):
        out = torch.zeros(3, 32, 32, dtype=torch.uint8)
        found = user(image, out, seed=seed, regions=in_image(given))
        sample: Sample = {
            "image": tv_tensors.Image(image),
            "boxes": tv_tensors.BoundingBoxes(torch.tensor(given.boxes).float(), format="XYXY", canvas_size=(60, 80)),  # type: ignore[call-overload]
            "labels": torch.arange(4),
        }
        torch.manual_seed(seed)
        expected = transform(sample)
        has_area = (expected["boxes"][:, 2:] > expected["boxes"][:, :2]).all(1)
        assert torch.equal(out, expected["image"])
        assert found is not None
        assert found.kept.tolist() == expected["labels"][has_area].tolist()
        assert found.boxes.tolist() == expected["boxes"][has_area].tolist()
        sizes.add(len(found.kept))
        if given.keypoints is not None:
            assert found.keypoints is not None
            assert found.keypoints.shape == (len(found.kept), 2, 3)
        if given.mask is not None:
            assert found.masks is not None
            assert found.masks.shape == (32, 32)
        if given.outlines is not None:
            assert found.masks is not None
            assert found.masks.shape == (len(found.kept), 32, 32)
    assert len(sizes) > 1


def test_user_transform_with_regions_moves_them_as_its_pixels(image: Tensor):
    """A mask of the image's own red values stays equal to them."""
    given = regions(mask=image[0].numpy())
    transform = v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(1.0)])
    out = torch.zeros(3, 32, 32, dtype=torch.uint8)
    found = UserTransform(transform, with_regions=True)(image, out, seed=3, regions=in_image(given))
    assert found is not None
    assert found.masks is not None
    assert (found.masks == out[0].numpy()).all()


def test_boxes_that_are_left_have_their_places_among_all_of_the_row(image: Tensor):
    """A box without an area is not given to the transform."""
    boxes = np.array([[5, 5, 5, 9], [2, 3, 12, 10], [60, 2, 78, 12]], np.float64)
    out = torch.zeros(3, 60, 80, dtype=torch.uint8)
    found = UserTransform(v2.Identity(), with_regions=True)(image, out, seed=0, regions=in_image(Regions(boxes)))
    assert found is not None
    assert found.kept.tolist() == [1, 2]
    assert found.boxes.tolist() == boxes[1:].tolist()


def test_pixels_of_users_transform_with_regions_have_no_known_crop(image: Tensor):
    transform = PixelTransform(SANE, targets=TargetsConfig(boxes="json:boxes"))
    decoded = transform.decode(png(image), shape=(32, 32), patches=0, epoch=0, regions=regions())
    out = torch.zeros(3, 32, 32, dtype=torch.uint8)
    geometry, followed = transform.write(decoded, out, number=0, epoch=0, regions=regions())
    assert geometry == (UNKNOWN, (32, 32), False)
    assert followed is not None


# What is refused


def cut(sample: Sample, size: tuple[int, int], generator: torch.Generator) -> Sample:
    return v2.CenterCrop(size)(sample)


def with_changed(**changes: Callable[[Any], Any]) -> Callable[..., Sample]:
    """A transform whose result is changed in some entries."""

    def transform(sample: Sample, size: tuple[int, int], generator: torch.Generator) -> Sample:
        return {
            name: changes.get(name, lambda value: value)(value) for name, value in cut(sample, size, generator).items()
        }

    return transform


def on(boxes: Any, **changes: Any) -> Any:
    return tv_tensors.BoundingBoxes(boxes, **{"format": "XYXY", "canvas_size": (32, 32), **changes})


@pytest.mark.parametrize(
    ("transform", "detail"),
    [
        (
            lambda sample, size, generator: cut(sample, size, generator)["image"],
            "returned Image, not a dictionary of image,",
        ),
        (
            with_changed(image=lambda image: image[:, :5]),
            r"returned torch.uint8 \(3, 5, 32\), not torch.uint8 \(3, 32, 32\)",
        ),
        (with_changed(image=lambda image: image / 255), r"returned torch.float32 .*; leave ToDtype"),
        (
            with_changed(boxes=lambda boxes: boxes.as_subclass(Tensor)),
            r"returned boxes Tensor torch.float32 \(4, 4\), not BoundingBoxes torch.float32 \(4, 4\) XYXY on",
        ),
        (with_changed(boxes=lambda boxes: on(boxes[:3])), r"returned boxes BoundingBoxes torch.float32 \(3, 4\)"),
        (
            with_changed(boxes=lambda boxes: on(boxes, format="XYWH")),
            r"returned boxes .* XYWH on \(32, 32\), not .* XYXY on",
        ),
        (
            with_changed(boxes=lambda boxes: on(boxes, canvas_size=(60, 80))),
            r"returned boxes .* on \(60, 80\), not .* on \(32, 32\)",
        ),
        (
            with_changed(boxes=lambda boxes: on(boxes.long())),
            "returned boxes .* torch.int64 .*, not BoundingBoxes torch",
        ),
        (with_changed(boxes=lambda boxes: on(boxes * torch.nan)), r"returned boxes \[\[nan, .*, not left, top, right"),
        (with_changed(boxes=lambda boxes: on(32 - boxes)), "returned boxes .*, not left, top, right and bottom"),
        (
            with_changed(labels=lambda labels: labels + 1),
            r"returned labels \[1, 2, 3, 4\], not some of the numbers 0 to 3",
        ),
        (with_changed(labels=lambda labels: labels - 1), r"returned labels \[-1, "),
        (with_changed(labels=lambda labels: labels.flip(0)), r"returned labels \[3, 2, 1, 0\], not .*, rising"),
        (with_changed(labels=lambda labels: labels * 0), r"returned labels \[0, 0, 0, 0\]"),
        (
            with_changed(labels=lambda labels: labels.float()),
            r"returned labels Tensor torch.float32 \(4,\), not Tensor torch",
        ),
        (with_changed(labels=lambda labels: labels.tolist()), "returned labels list, not Tensor torch.int64"),
        (with_changed(keypoints=lambda points: points[:, :1]), r"returned keypoints Tensor torch.float32 \(4, 1, 2\)"),
        (
            with_changed(keypoints=lambda points: tv_tensors.wrap(points + torch.inf, like=points)),
            "returned keypoints that are infinite or NaN",
        ),
        (
            with_changed(visibility=lambda seen: seen[:1]),
            r"returned visibility Tensor torch.float32 \(1, 2\), not .* \(4, 2\)",
        ),
        (
            with_changed(masks=lambda mask: tv_tensors.Mask(mask[:4])),
            r"returned masks Mask torch.uint8 \(4, 32\), not Mask",
        ),
        (with_changed(masks=lambda mask: tv_tensors.Mask(mask.float())), "returned masks Mask torch.float32"),
    ],
)
def test_user_transform_that_returns_other_regions_is_a_bad_sample(image: Tensor, transform: Any, detail: str):
    out = torch.zeros(3, 32, 32, dtype=torch.uint8)
    with pytest.raises(BadSample, match=f"transform_failed: {detail}") as caught:
        UserTransform(transform, with_regions=True)(image, out, seed=0, regions=in_image(of_all()))
    assert caught.value.reason is Reason.TRANSFORM_FAILED


def test_user_transform_that_leaves_a_region_out_is_a_bad_sample(image: Tensor):
    def transform(sample: Sample, size: tuple[int, int], generator: torch.Generator) -> Sample:
        result = cut(sample, size, generator)
        return {name: result[name] for name in ("image", "boxes")}

    detail = "returned a dictionary of image, boxes, not a dictionary of image, boxes, labels"
    with pytest.raises(BadSample, match=detail):
        UserTransform(transform, with_regions=True)(
            image, torch.zeros(3, 32, 32, dtype=torch.uint8), seed=0, regions=in_image(regions())
        )


@pytest.mark.parametrize("name", ["boxes", "labels"])
def test_user_transform_whose_regions_differ_when_it_is_called_again_is_refused(image: Tensor, name: str):
    calls = iter(range(99))

    def transform(sample: Sample, size: tuple[int, int], generator: torch.Generator) -> Sample:
        result, call = cut(sample, size, generator), next(calls)
        if name == "boxes":
            result["boxes"] = on(result["boxes"] * (1 + call / 100))
        else:
            result |= {"boxes": on(result["boxes"][call % 2 :]), "labels": result["labels"][call % 2 :]}
        return result

    with pytest.raises(
        ConfigError, match="called again with the same row and generator, it gave other boxes: it keeps"
    ):
        UserTransform(transform, with_regions=True)(
            image, torch.zeros(3, 32, 32, dtype=torch.uint8), seed=0, regions=in_image(regions())
        )


def test_user_transform_may_change_regions_in_place(image: Tensor):
    def transform(sample: Sample, size: tuple[int, int], generator: torch.Generator) -> Sample:
        sample["boxes"].add_(1)
        sample["masks"].add_(1)
        return cut(sample, size, generator)

    given, before = in_image(of_all()), in_image(of_all())
    out = torch.zeros(3, 32, 32, dtype=torch.uint8)
    assert UserTransform(transform, with_regions=True)(image, out, seed=0, regions=given) is not None
    assert given.masks is not None
    assert before.masks is not None
    assert (given.boxes == before.boxes).all()
    assert (given.masks == before.masks).all()


def test_user_transform_with_regions_names_torchvision_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ConfigError, match=r"tensors of torchvision, which is missing \(.*\): `pip install torchvision`"
    ):
        UserTransform(cut, with_regions=True)
    UserTransform(cut)  # without regions it is not needed
