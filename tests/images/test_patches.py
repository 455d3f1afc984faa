"""Patches as SigLIP 2 NaFlex takes them: the sizes and bytes that transformers' own processor makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.siglip2.image_processing_siglip2 import (
    Siglip2ImageProcessor,
    get_image_size_for_max_num_patches,
)

from mmdata.errors import BadSample
from mmdata.images.crop import Crop, native_size, resize_crop, write_patches
from mmdata.images.pixels import PixelTransform
from tests.images.placed import patches, png

sides = st.one_of(st.integers(1, 70), st.integers(1, 2000), st.integers(1, 70_000))


def smooth(height: int, width: int) -> Tensor:
    """A picture with one gradient in each channel, uint8 (3, height, width)."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return (torch.stack([y, x, (x + y) / 2]) * 255).to(torch.uint8)


def noise(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@given(sides, sides, st.integers(1, 32), st.integers(1, 4096))
def test_native_size_is_the_one_of_transformers(height: int, width: int, patch_size: int, patches: int):
    expected = get_image_size_for_max_num_patches(height, width, patch_size, patches)
    assert native_size(height, width, patch_size=patch_size, patches=patches) == expected


def test_native_size_example_of_the_docstring():
    assert native_size(480, 640, patch_size=16, patches=256) == (224, 288)


def processed(image: Tensor, *, patches: int, patch_size: int, **settings: bool) -> dict[str, Tensor]:
    """What the library makes of an image, its values kept as they are."""
    processor = Siglip2ImageProcessor(
        do_normalize=False, do_rescale=False, patch_size=patch_size, max_num_patches=patches, **settings
    )
    return processor(image, return_tensors="pt")


@pytest.mark.parametrize(("height", "width"), [(32, 48), (16, 16), (96, 8), (8, 8)])
def test_write_patches_gives_the_bytes_of_transformers(height: int, width: int):
    image = noise(height, width)
    expected = processed(image, patches=30, patch_size=8, do_resize=False)
    out = torch.full((30, 8 * 8 * 3), 7, dtype=torch.uint8)
    write_patches(image, out, patch_size=8)
    assert torch.equal(out, expected["pixel_values"][0])
    assert expected["spatial_shapes"].tolist() == [[height // 8, width // 8]]


@pytest.mark.parametrize(("height", "width"), [(60, 80), (300, 100), (33, 500), (8, 8)])
def test_eval_patches_are_those_of_transformers_up_to_resampling(height: int, width: int):
    image = smooth(height, width)
    expected = processed(image, patches=64, patch_size=8)
    shape, out = patches(PixelTransform("eval", patch_size=8), png(image, number=3), 64, epoch=1)
    assert [list(shape)] == expected["spatial_shapes"].tolist()
    # The library resamples linearly, we cubically.
    assert (out.int() - expected["pixel_values"][0].int()).abs().max() <= 12


def test_eval_patches_are_the_whole_image_resized():
    image, resized = noise(60, 80), torch.empty(3, 48, 64, dtype=torch.uint8)
    resize_crop(image, Crop(0, 0, 60, 80), resized)
    expected = torch.empty(50, 8 * 8 * 3, dtype=torch.uint8)
    write_patches(resized, expected, patch_size=8)
    shape, out = patches(PixelTransform("eval", patch_size=8), png(image), 50)
    assert shape == (6, 8)
    assert torch.equal(out, expected)
    assert (out[48:] == 0).all()


def test_train_patches_are_those_of_a_random_crop_of_about_the_image_s_aspect_ratio():
    image, transform = noise(60, 120), PixelTransform("train", crop_scale=(0.2, 0.9), seed=4, patch_size=4)
    seen: set[bytes] = set()
    for row in range(20):
        (rows, columns), out = patches(transform, png(image, number=row), 64)
        assert 40 <= rows * columns <= 64
        # 4/3 around the image's own ratio of 2, and half a patch of rounding on either side
        assert 2 * 0.75 * (rows - 1) <= columns
        assert columns - 1 <= 2 * 4 / 3 * rows
        shape, again = patches(transform, png(image, number=row), 64)
        assert shape == (rows, columns)
        assert torch.equal(out, again)
        seen.add(out.numpy().tobytes())
    assert len(seen) == 20


def turned_grey(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """A user's transform: the drawn grey, with the wanted size in the corner."""
    grey = int(torch.randint(100, 200, (1,), generator=generator))
    out = torch.full((3, *size), grey, dtype=torch.uint8)
    out[:, 0, 0] = torch.tensor([size[0], size[1], image.shape[1]])
    return out


def one_size(image: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.zeros(3, 16, 16, dtype=torch.uint8)


def test_user_transform_gets_the_size_of_the_whole_image():
    shape, out = patches(PixelTransform(f"{__name__}:turned_grey", patch_size=8), png(noise(60, 80)), 33)
    assert shape == (5, 6)
    assert out[0, :3].tolist() == [40, 48, 60]
    assert len(out[:30].flatten()[3:].unique()) == 1
    assert (out[30:] == 0).all()


def test_user_transform_of_another_size_is_a_bad_sample():
    transform = PixelTransform(f"{__name__}:one_size", patch_size=8)
    with pytest.raises(BadSample, match=r"returned torch.uint8 \(3, 16, 16\), not torch.uint8 \(3, 40, 48\)"):
        patches(transform, png(noise(60, 80)), 30)
