"""A row's pixels: a function of (row, epoch, seed) alone, by our transforms or by a user's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdata.config.images import AugmentConfig
from mmdata.config.targets import TargetsConfig
from mmdata.errors import BadSample, ConfigError, Reason
from mmdata.images.crop import eval_crop, resize_crop, whole_pixels
from mmdata.images.pixels import PixelTransform
from tests.images.placed import pixels, png


@pytest.fixture(scope="session")
def image() -> Tensor:
    """Uint8 (3, 60, 80) noise: every crop of it is another picture."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 60, 80), dtype=np.uint8))


def apply(transform: PixelTransform, image: Tensor, *, row: int, epoch: int = 0, fill: int = 0) -> Tensor:
    return pixels(transform, png(image, number=row), (32, 32), epoch=epoch, fill=fill)


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        ("train", {"crop_scale": (0.2, 0.8)}),
        ("train", {"crop_scale": (1.0, 1.0), "augment": AugmentConfig(horizontal_flip_prob=0.5, color_jitter=0.4)}),
        ("transforms_of_users:noisy", {}),
    ],
    ids=["crop", "augmentation", "own"],
)
def test_pixels_of_a_row_depend_on_row_epoch_and_seed(users: str, image: Tensor, kind: str, drawn: dict[str, Any]):
    square = image[:, :, :60]  # of which a crop of all is always the same

    def draw(row: int, epoch: int, seed: int) -> bytes:
        return apply(PixelTransform(kind, seed=seed, **drawn), square, row=row, epoch=epoch).numpy().tobytes()

    assert len({draw(*place) for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}) == 4
    again = draw(5, 2, 9)
    torch.manual_seed(5)
    assert draw(5, 2, 9) == again


def test_pixels_of_a_row_depend_on_nothing_else(image: Tensor):
    transform = PixelTransform("train", crop_scale=(0.2, 0.8), seed=3)
    alone = [apply(transform, image, row=row) for row in range(40)]
    torch.manual_seed(1)
    np.random.seed(1)
    backwards = [apply(transform, image, row=row, fill=255) for row in reversed(range(40))][::-1]
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(lambda row: apply(transform, image, row=row), range(40)))
    for row in range(40):
        assert torch.equal(alone[row], backwards[row])
        assert torch.equal(alone[row], threads[row])


def test_pixels_of_a_png_are_refused_by_its_checksum_unless_it_is_compared_already(image: Tensor):
    whole = png(image, number=0)
    damaged = whole._replace(data=bytes(whole.data[:-1]) + bytes([whole.data[-1] ^ 1]))  # of its last chunk
    transform = PixelTransform("eval")
    with pytest.raises(BadSample, match="corrupt_image: PNG does not decode: the checksum of a chunk b'IEND'"):
        pixels(transform, damaged, (32, 32))
    found = pixels(transform, damaged._replace(checked=True), (32, 32))
    assert torch.equal(found, pixels(transform, whole, (32, 32)))


def test_pixels_depend_on_how_regions_follow_alone():
    targets = TargetsConfig(boxes="json:boxes", keep_boxes=True, box_buckets=4)
    assert PixelTransform("train", targets=targets).identity()["regions"] == {
        "min_visible": 0.25,
        "keep_boxes": True,
        "keypoint_swaps": None,
    }
    assert PixelTransform("train").identity()["regions"] is None


def test_pixels_draw_nothing_from_the_global_generators(image: Tensor):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    apply(PixelTransform("train"), image, row=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_pixels_eval_is_the_centred_crop_in_every_epoch(image: Tensor):
    expected = torch.empty(3, 32, 32, dtype=torch.uint8)
    resize_crop(image, whole_pixels(eval_crop((60, 80), (32, 32)), (60, 80)), expected)
    for row, epoch in [(0, 0), (7, 3)]:
        assert torch.equal(apply(PixelTransform("eval", seed=row), image, row=row, epoch=epoch), expected)


# Transforms of users

USERS = """
import torch

def noisy(image, shape, generator):
    noise = torch.randint(0, 256, (3, *shape), generator=generator)
    return noise.to(torch.uint8)

class Corner:
    def __call__(self, image, shape, generator):
        return image[:, : shape[0], : shape[1]]

corner = Corner()

def fails(image, shape, generator):
    raise KeyError("no such colour")

def small(image, shape, generator):
    return image[:, :5, :6]

def floats(image, shape, generator):
    return image[:, : shape[0], : shape[1]] / 255

def nothing(image, shape, generator):
    pass

NUMBER = 3
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with transforms."""
    (tmp_path / "transforms_of_users.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "transforms_of_users"


def test_pixels_users_transform_gets_image_and_shape(users: str, image: Tensor):
    out = apply(PixelTransform(f"{users}:corner"), image, row=0)
    assert torch.equal(out, image[:, :32, :32])


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("fails", "KeyError: 'no such colour'"),
        ("small", "returned torch.uint8 (3, 5, 6), not torch.uint8 (3, 32, 32)"),
        (
            "floats",
            "returned torch.float32 (3, 32, 32), not torch.uint8 (3, 32, 32); leave ToDtype, ToTensor and Normalize "
            "out of the transform: pixels stay uint8, and mmdata.batch.normalized, or the model, makes floats of them "
            "on the device",
        ),
        ("nothing", "returned NoneType, not a tensor torch.uint8 (3, 32, 32)"),
    ],
)
def test_pixels_users_transform_that_fails_is_a_bad_sample(users: str, image: Tensor, name: str, detail: str):
    with pytest.raises(BadSample) as caught:
        apply(PixelTransform(f"{users}:{name}"), image, row=0)
    assert (caught.value.reason, caught.value.detail) == (Reason.TRANSFORM_FAILED, detail)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("trian", r"transform 'trian': expected train, eval, or 'module:callable'"),
        ("no_such_module:crop", r"No module named 'no_such_module'; a file of the current folder is found with "),
        ("transforms_of_users:none", r"transform '.*:none': module 'transforms_of_users' has no attribute 'none'"),
        ("transforms_of_users:NUMBER", r"transform '.*:NUMBER': expected train, eval, or 'module:callable'"),
    ],
)
def test_pixels_unknown_transform_is_refused(users: str, kind: str, message: str):
    with pytest.raises(ConfigError, match=message):
        PixelTransform(kind)
