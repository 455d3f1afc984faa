"""Images that are made small before they are cropped: torchvision's size and pixels, whatever is cropped from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from mmdata.errors import BadSample
from mmdata.images.decode import decode
from mmdata.images.pixels import EncodedImage, PixelTransform, small_sizes
from tests.images.placed import patches, pixels

Photo = Callable[..., bytes]


@given(st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 60_000)), max_size=20), st.integers(1, 16_384))
def test_small_sizes_are_those_of_torchvision_and_never_larger(sizes: list[tuple[int, int]], side: int):
    found = small_sizes(np.array(sizes, np.int32).reshape(-1, 2), side).tolist()
    for size, small in zip(sizes, found, strict=True):
        given = torch.empty(3, *size, device="meta", dtype=torch.uint8)
        resized = resize(given, [side], antialias=True) if min(size) > side else given
        assert small == list(resized.shape[1:])


def test_small_sizes_of_the_docstring_and_of_rows_without_an_image():
    assert small_sizes(np.array([[480, 640], [100, 90], [0, 0]]), 256).tolist() == [[256, 341], [100, 90], [0, 0]]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_resized_as_torchvision_does_and_stands_upright(photo: Photo, format: str, orientation: int):
    data = photo(151, 233, seed=orientation, format=format)
    small = PixelTransform("eval", exact=True, shorter_side=60).small(EncodedImage(data, format, orientation, 0))
    whole = decode(data, format=format, orientation=orientation)
    assert small.shown == (0, 0, *whole.shape[1:])
    expected = resize(whole, [60], interpolation=InterpolationMode.BICUBIC, antialias=True)
    assert small.image.shape == expected.shape
    # torchvision rounds once more where the processor has no AVX2
    assert (small.image.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_large_jpeg_is_decoded_at_a_fraction_unless_exact(photo: Photo, orientation: int):
    image = EncodedImage(photo(601, 833, seed=orientation), "JPEG", orientation, 0)
    fast, exact = (PixelTransform("eval", exact=exact, shorter_side=96).small(image) for exact in (False, True))
    assert exact.shown == (0, 0, *((601, 833) if orientation < 5 else (833, 601)))
    assert all(0 <= more - side < 8 for more, side in zip(fast.shown[2:], exact.shown[2:], strict=True))
    assert fast.image.shape == exact.image.shape
    assert not torch.equal(fast.image, exact.image)
    assert psnr(fast.image, exact.image) > 36
    assert psnr(fast.image.roll(2, 2), exact.image) < psnr(fast.image, exact.image) - 3  # the measure sees a shift


def psnr(ours: Tensor, theirs: Tensor) -> float:
    return float(-10 * torch.log10(((ours.float() - theirs.float()) / 255).square().mean() + 1e-12))


def test_an_image_that_is_small_enough_stays_as_it_is(photo: Photo):
    data = photo(40, 300, format="PNG")
    small = PixelTransform("train", shorter_side=40).small(EncodedImage(data, "PNG", 5, 0))
    assert torch.equal(small.image, decode(data, format="PNG", orientation=5))
    assert small.image.permute(1, 2, 0).is_contiguous()


@pytest.mark.parametrize("kind", ["train", "eval", f"{__name__}:corner"])
def test_what_was_made_small_before_gives_the_same_pixels(photo: Photo, kind: str):
    transform = PixelTransform(kind, crop_scale=(0.3, 0.9), shorter_side=64, patch_size=8)
    for number in range(5):
        image = EncodedImage(photo(151, 233, seed=number), "JPEG", 6, number)
        known = transform.small(image)
        assert torch.equal(pixels(transform, known, (48, 32)), pixels(transform, image, (48, 32)))
        of_patches = [patches(transform, one, 30) for one in (known, image)]
        assert of_patches[0][0] == of_patches[1][0]
        assert torch.equal(of_patches[0][1], of_patches[1][1])


def corner(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    assert min(image.shape[1:]) == 64
    return image[:, : size[0], : size[1]].clone()


def test_an_image_that_was_decoded_elsewhere_is_made_small_too(photo: Photo):
    transform = PixelTransform("eval", exact=True, shorter_side=64)
    data = photo(151, 233, format="PNG")
    part = transform.choose_part(decode(data, format="PNG"), shape=(32, 32), patches=0)
    out = torch.empty(3, 32, 32, dtype=torch.uint8)
    transform.write(part, out, number=0, epoch=0)
    assert torch.equal(out, pixels(transform, EncodedImage(data, "PNG", 1, 0), (32, 32)))


def test_a_cut_photo_is_a_bad_sample(photo: Photo):
    data = photo(1200, 1600)
    for exact in (False, True):
        with pytest.raises(BadSample, match="corrupt_image: JPEG does not decode"):
            PixelTransform("eval", exact=exact, shorter_side=64).small(EncodedImage(data[:-2000], "JPEG", 1, 0))


def test_what_pixels_depend_on_names_the_side_and_the_decoding_of_a_users_transform():
    own = f"{__name__}:corner"
    names = [PixelTransform(own, shorter_side=side).identity() for side in (None, 64)]
    assert [(name["shorter_side"], name["decode"]) for name in names] == [(None, None), (64, "fast")]
