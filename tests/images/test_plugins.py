"""Formats whose decoders are packages of their own: the pixels that Pillow gives with them, and what to install."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from mmdata.errors import BadSample, Reason
from mmdata.images import ImageInfo, probe
from mmdata.images.decode import check_decodes, decode, oriented
from mmdata.images.pillow import decode_pillow
from tests.pictures import FILES, needs_heif, picture, stored

DECODED = [pytest.param(name, marks=needs_heif) for name in FILES]


def opened(name: str) -> Image.Image:
    """A file as Pillow opens it with the package, in its own way, and as the package's pages say to use it."""
    import pillow_heif

    return pillow_heif.open_heif(io.BytesIO(stored(name))).to_pillow()


def shown(name: str) -> np.ndarray:
    """Pixels of a file as the loader decodes it, (H, W, 3)."""
    data = stored(name)
    info = probe(data)
    check_decodes(data, info)
    image = decode(data, format=info.format, orientation=info.orientation)
    assert tuple(image.shape) == (3, FILES[name].height, FILES[name].width)
    assert image.dtype == torch.uint8
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", DECODED)
def test_pixels_are_those_of_pillow_with_the_package(name: str):
    assert np.array_equal(shown(name), np.asarray(opened(name).convert("RGB")))


@pytest.mark.parametrize("name", DECODED)
def test_orientation_is_applied_once(name: str):
    expected = oriented(np.asarray(picture()), FILES[name].orientation)
    difference = expected.astype(np.float64) - shown(name)
    assert np.abs(difference).mean() < 20  # coded with loss; turned wrongly it is above 60


def examined(data: bytes, info: ImageInfo) -> None:
    """Read an image as converting does."""
    probe(data)
    check_decodes(data, info)


@pytest.mark.parametrize("name", DECODED)
def test_every_cut_is_refused(name: str):
    data = stored(name)
    info = probe(data)
    for size in range(1, len(data), 7):
        with pytest.raises(BadSample) as caught:
            examined(data[:size], info)
        assert caught.value.reason in (Reason.CORRUPT_IMAGE, Reason.NOT_AN_IMAGE)


@pytest.mark.parametrize("name", DECODED)
def test_flipped_bits_give_pixels_or_a_reason(name: str):
    whole = stored(name)

    @settings(max_examples=60)
    @given(st.lists(st.integers(0, 8 * len(whole) - 1), min_size=1, max_size=3))
    def flipped(bits: list[int]) -> None:
        data = bytearray(whole)
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(BadSample):
            info = probe(bytes(data))
            check_decodes(bytes(data), info)

    flipped()


@needs_heif
def test_heic_with_alpha_is_composited_on_white():
    import pillow_heif

    image = Image.new("RGBA", (64, 64), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, quality=-1)
    pixels = decode_pillow(buffer.getvalue(), "HEIF").astype(int)
    assert np.abs(pixels[:, :28] - 255).max() <= 3
    assert np.abs(pixels[:, 36:] - (255, 0, 0)).max() <= 3


@pytest.mark.usefixtures("no_decoders")
def test_missing_decoder_is_named_with_what_to_install():
    data = stored("upright.heic")
    remedy = r"HEIF needs pillow-heif: `pip install 'mmdata\[heic\]'`"
    for act in (lambda: probe(data), lambda: check_decodes(data, ImageInfo("HEIF", 21, 31))):
        with pytest.raises(BadSample, match=f"^unsupported_format: {remedy}$") as caught:
            act()
        assert caught.value.reason is Reason.UNSUPPORTED_FORMAT


@pytest.mark.usefixtures("no_decoders")
def test_missing_codec_of_avif_is_named_with_what_to_install():
    with pytest.raises(BadSample, match=r"^unsupported_format: AVIF needs a Pillow with its codec: `pip install"):
        decode_pillow(b"\0\0\0\x1cftypavif", "AVIF")


def test_first_frame_of_an_animated_avif_is_taken():
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF codec")
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (31, 21), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, "AVIF", save_all=True, append_images=frames[1:], quality=90)
    data = buffer.getvalue()
    assert data[8:12] == b"avis"
    assert probe(data) == ImageInfo("AVIF", 21, 31, 1)
    assert np.abs(decode_pillow(data, "AVIF").astype(int) - (255, 0, 0)).max() <= 5
