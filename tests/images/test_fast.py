"""Fast decoding: the same part of the picture as exact decoding, from fewer pixels."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from mmdata.errors import BadSample
from mmdata.images.decode import decode, jpeg_size
from mmdata.images.pixels import EncodedImage, PixelTransform
from tests.images.placed import patches, pixels

Photo = Callable[..., bytes]


def psnr(ours: Tensor, theirs: Tensor) -> float:
    return float(-10 * torch.log10(((ours.float() - theirs.float()) / 255).square().mean() + 1e-12))


def both(kind: str, image: EncodedImage, shape: tuple[int, int], **settings: object) -> tuple[Tensor, Tensor]:
    fast, exact = (PixelTransform(kind, exact=exact, **settings) for exact in (False, True))
    return pixels(fast, image, shape), pixels(exact, image, shape)


@pytest.mark.parametrize("kind", ["eval", "train"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_fast_is_the_same_part_of_the_picture(photo: Photo, kind: str, orientation: int):
    data = photo(601, 833, seed=orientation)
    for number in range(5):
        image = EncodedImage(data, "JPEG", orientation, number)
        fast, exact = both(kind, image, (96, 96), crop_scale=(0.5, 1.0))
        assert not torch.equal(fast, exact)  # it was decoded at another size
        assert psnr(fast, exact) > 36
        assert psnr(fast.roll(2, 2), exact) < psnr(fast, exact) - 3  # the measure sees a shift


def test_fast_of_patches_is_the_same_part_of_the_picture(photo: Photo):
    image = EncodedImage(photo(600, 900, seed=3), "JPEG", 1, 0)
    found = [patches(PixelTransform("train", patch_size=8, exact=exact), image, 100) for exact in (False, True)]
    assert found[0][0] == found[1][0]
    assert psnr(found[0][1], found[1][1]) > 36


@pytest.mark.parametrize(
    ("height", "width", "shape", "scaled"),
    [
        (400, 600, (224, 224), False),  # less than twice the target
        (448, 600, (224, 224), True),
        (448, 600, (112, 300), True),
        (448, 599, (112, 300), False),
        (3000, 4000, (224, 224), True),
    ],
)
def test_fast_decodes_at_a_fraction_where_the_crop_stays_large_enough(
    photo: Photo, height: int, width: int, shape: tuple[int, int], scaled: bool
):
    image = EncodedImage(photo(height, width), "JPEG", 1, 0)
    decoded = PixelTransform("eval").decode(image, shape=shape, patches=0, epoch=0)
    assert (decoded.small.image.shape[1] < height) == scaled
    assert decoded.box.height >= shape[0] * (1 - 1e-9)
    assert decoded.box.width >= shape[1] * (1 - 1e-9)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_fast_other_formats_are_decoded_at_their_own_size(photo: Photo, format: str):
    image = EncodedImage(photo(600, 800, format=format), format, 1, 0)
    assert torch.equal(*both("eval", image, (64, 64)))


def test_fast_leaves_the_whole_image_to_a_users_transform(photo: Photo):
    transform = PixelTransform(f"{__name__}:whole_size")
    found = pixels(transform, EncodedImage(photo(600, 800), "JPEG", 1, 0), (32, 32))
    assert found[0, 0, :2].tolist() == [600 // 8, 800 // 8]


def whole_size(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    out = torch.zeros(3, *size, dtype=torch.uint8)
    out[:, 0, 0], out[:, 0, 1] = image.shape[1] // 8, image.shape[2] // 8
    return out


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 120), st.integers(1, 120), st.integers(1, 8))
def test_fast_fits_every_size(height: int, width: int, rows: int, columns: int, orientation: int):
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 200, np.uint8)).save(buffer, "JPEG")
    for kind in ("eval", "train"):
        image = EncodedImage(buffer.getvalue(), "JPEG", orientation, 7)
        found = pixels(PixelTransform(kind, crop_scale=(0.05, 1.0)), image, (rows, columns))
        assert (found.int() - 200).abs().max() <= 2


def test_fast_cut_photo_is_a_bad_sample(photo: Photo):
    data = photo(1200, 1600)
    transform = PixelTransform("eval")
    for end in (2, 100, len(data) // 2, len(data) - 100):
        with pytest.raises(BadSample, match="corrupt_image: JPEG does not decode"):
            transform.decode(EncodedImage(data[:end], "JPEG", 1, 0), shape=(64, 64), patches=0, epoch=0)


def test_jpeg_size_is_the_one_displayed(photo: Photo):
    data = photo(30, 50)
    assert (jpeg_size(data), jpeg_size(data, 6)) == ((30, 50), (50, 30))
    assert decode(data, format="JPEG", orientation=6, at_least=(20, 10)).shape == (3, 25, 15)
