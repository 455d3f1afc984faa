"""Decoding: every kind of image against a decoder we did not write, and nothing that is cut short passes."""

from __future__ import annotations

import io
import math
import random
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, features
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from mmdata.errors import BadSample
from mmdata.images import probe
from mmdata.images.decode import check_decodes, decode, oriented_size
from tests.images.by_hand import png

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(["AVIF"] if features.check("avif") else [])]


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pixels(image: Tensor) -> NDArray[np.int64]:
    """(3, H, W) tensor as (H, W, 3) integers that can be subtracted."""
    return image.permute(1, 2, 0).numpy().astype(np.int64)


@pytest.fixture(scope="session")
def picture(photo: Callable[..., bytes]) -> Image.Image:
    """An RGB photo of 40 × 60 pixels."""
    return Image.open(io.BytesIO(photo(40, 60, seed=3, format="PNG"))).convert("RGB")


# Every format, against Pillow and torchvision


@pytest.mark.parametrize("format", FORMATS)
def test_decode_gives_what_pillow_gives(picture: Image.Image, format: str):
    data = encode(picture, format)
    image = decode(data, format=format)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 40, 60))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)
    difference = np.abs(pixels(image) - expected)
    assert difference.max() <= (2 if format == "JPEG" else 0)  # two builds of libjpeg-turbo


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_decode_jpeg_gives_what_torchvision_gives(picture: Image.Image, options: dict[str, Any]):
    data = encode(picture, "JPEG", quality=85, **options)
    expected = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    assert torch.equal(decode(data, format="JPEG"), expected)


def test_decode_takes_read_only_views_and_leaves_them_alone(photo: Callable[..., bytes]):
    data = photo(20, 30)
    view = memoryview(b"before" + data + b"after")[6 : 6 + len(data)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's of memory that is not writable
        image = decode(view, format="JPEG")
    image.fill_(0)
    assert bytes(view) == data


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_decode_ignores_trailing_bytes(picture: Image.Image, format: str):
    data = encode(picture, format)
    assert torch.equal(decode(data + b"\0" * 100 + b"rubbish", format=format), decode(data, format=format))


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", *(["AVIF"] if "AVIF" in FORMATS else [])])
def test_decode_applies_the_orientation_that_probe_found(picture: Image.Image, format: str, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture, format, exif=exif)
    info = probe(data)
    image = decode(data, format=info.format, orientation=info.orientation)
    assert tuple(image.shape[1:]) == oriented_size(info.height, info.width, info.orientation)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.abs(pixels(image) - np.asarray(expected, np.int64)).max() <= (2 if format == "JPEG" else 0)


# Transparency and palettes


def on_white(rgba: Image.Image) -> NDArray[np.int64]:
    values = np.asarray(rgba.convert("RGBA"), np.float64)
    alpha = values[..., 3:] / 255
    return np.rint(values[..., :3] * alpha + 255 * (1 - alpha)).astype(np.int64)


def with_alpha(picture: Image.Image) -> Image.Image:
    image = picture.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(picture.size))
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_decode_composites_alpha_on_white(picture: Image.Image, mode: str, format: str):
    image = with_alpha(picture).convert(mode)
    if format == "WEBP":  # holds RGBA only
        image = image.convert("RGBA")
    data = encode(image, format, **({"lossless": True, "exact": True} if format == "WEBP" else {}))
    assert np.abs(pixels(decode(data, format=format)) - on_white(image)).max() <= 1


def test_decode_palette_is_looked_up(picture: Image.Image):
    image = picture.quantize(17)
    np.testing.assert_array_equal(
        pixels(decode(encode(image, "PNG"), format="PNG")), np.asarray(image.convert("RGB"), np.int64)
    )


def test_decode_palette_with_a_transparent_entry_is_composited(picture: Image.Image):
    image = picture.quantize(17)
    data = encode(image, "PNG", transparency=bytes([0, 128] + [255] * 15))
    expected = on_white(Image.open(io.BytesIO(data)))
    assert (np.asarray(image) == 0).any()
    result = pixels(decode(data, format="PNG"))
    assert np.abs(result - expected).max() <= 1
    assert (result[np.asarray(image) == 0] == 255).all()


@pytest.mark.parametrize("mode", ["L", "1"])
def test_decode_grey_has_three_equal_channels(picture: Image.Image, mode: str):
    image = picture.convert(mode)
    result = decode(encode(image, "PNG"), format="PNG")
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])
    np.testing.assert_array_equal(pixels(result)[..., 0], np.asarray(image.convert("L"), np.int64))


# 16 bits


@pytest.mark.parametrize(("format", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
def test_decode_16_bit_samples_are_scaled(format: str, dtype: str):
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    result = decode(encode(Image.fromarray(values.astype(dtype)), format), format=format)
    np.testing.assert_array_equal(pixels(result)[..., 0], np.rint(values / 257).astype(np.int64))


# CMYK


def test_decode_cmyk_without_a_profile_is_converted_plainly(picture: Image.Image):
    data = encode(picture.convert("CMYK"), "JPEG", quality=95)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)
    np.testing.assert_array_equal(pixels(decode(data, format="JPEG")), expected)
    assert np.abs(expected - np.asarray(picture, np.int64)).mean() < 4  # it is the picture, not its negative


def cmyk_profile(lab: tuple[float, float, float]) -> bytes:
    """A small ICC profile: every mixture of inks has one colour, given in CIELAB, and goes to black with more K."""
    encoded = bytes([round(lab[0] * 2.55), round(lab[1] + 128), round(lab[2] + 128)]) + bytes([0, 128, 128])
    identity = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    ramp = bytes(range(256))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + ramp * 4 + encoded * 8 + ramp * 3
    header = struct.pack(">4x4sI4s4s4s12x4s", b"none", 0x02400000, b"prtr", b"CMYK", b"Lab ", b"acsp").ljust(68, b"\0")
    header = (header + struct.pack(">3i", 0xF6D6, 0x10000, 0xD32D)).ljust(128, b"\0")
    content = header + struct.pack(">I4sII", 1, b"A2B0", 144, len(table)) + table
    return struct.pack(">I", len(content)) + content[4:]


def test_decode_cmyk_goes_through_its_profile(picture: Image.Image):
    red = cmyk_profile((54.3, 80.8, 69.9))  # red of sRGB under D50
    assert ImageCms.ImageCmsProfile(io.BytesIO(red)).profile.xcolor_space == "CMYK"
    data = encode(picture.convert("CMYK"), "JPEG", icc_profile=red)
    result = pixels(decode(data, format="JPEG"))
    np.testing.assert_allclose(result, np.broadcast_to([255, 0, 0], result.shape), atol=6)


@pytest.mark.parametrize("profile", [b"no profile", ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()])
def test_decode_cmyk_with_a_wrong_profile_is_converted_plainly(picture: Image.Image, profile: bytes):
    plain = decode(encode(picture.convert("CMYK"), "JPEG"), format="JPEG")
    data = encode(picture.convert("CMYK"), "JPEG", icc_profile=profile)
    assert torch.equal(decode(data, format="JPEG"), plain)


# Animations


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_decode_animation_gives_its_first_frame(format: str):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:], "duration": 100}
    data = encode(frames[0], format, **options, **({"lossless": True} if format == "WEBP" else {}))
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert (pixels(decode(data, format=format)) == [255, 0, 0]).all()


# What is no picture


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF data")
def test_decode_cut_short_is_refused_wherever_it_was_cut(picture: Image.Image, format: str, options: dict[str, Any]):
    data = encode(picture, format, **options)
    whole = decode(data, format=format)
    for cut in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1, len(data) - 2, len(data) - 12}:
        problem = outcome(data[:cut], format, whole)
        assert problem == "" or problem.startswith(f"corrupt_image: {format} does not decode: "), f"cut at {cut}"


def test_decode_jpeg_with_odd_bytes_is_whole_or_refused(picture: Image.Image):
    data = encode(picture, "JPEG", progressive=True)
    whole = decode(data, format="JPEG")
    assert outcome(data[:-2] + b"\0\0\0" + data[-2:], "JPEG", whole) == ""  # before the end marker
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)  # between two scans
    gap = data[:second] + b"\0\0\0" + data[second:]
    for cut in (gap[: second + 40], gap[: second + 40] + b"\xff\xd9"):
        with pytest.raises(BadSample, match=r"^corrupt_image: JPEG .* 3 extraneous bytes before marker"):
            decode(cut, format="JPEG")


def outcome(data: bytes, format: str, whole: Tensor) -> str:
    """Why data is refused; empty when it still gives the whole picture, bit for bit."""
    try:
        return "" if torch.equal(decode(data, format=format), whole) else "other pixels, no error"
    except BadSample as error:
        return str(error)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("data", [b"", b"\0" * 500, b"<html><body>404 Not Found</body></html>"])
def test_decode_of_something_else_is_refused(format: str, data: bytes):
    with pytest.raises(BadSample, match=f"^corrupt_image: {format} does not decode: "):
        decode(data, format=format)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_decode_opens_no_other_format_than_the_one_named(picture: Image.Image, format: str):
    other = encode(picture, "PPM")
    assert Image.open(io.BytesIO(other)).format == "PPM"
    with pytest.raises(BadSample, match=f"^corrupt_image: {format} does not decode: "):
        decode(other, format=format)


def test_decode_bomb_is_refused_before_its_pixels_are_made():
    with pytest.raises(BadSample, match=r"^image_too_large: 60000×60000 pixels: more than 178956970 in all"):
        decode(png((60_000, 60_000), 8, 2, []), format="PNG")
    jpeg = bytearray(encode(Image.new("RGB", (8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(BadSample, match=r"^image_too_large: 60000×60000 pixels: more than 178956970 in all"):
        decode(bytes(jpeg), format="JPEG")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_decode_of_damaged_bytes_is_a_picture_or_refused(picture: Image.Image, format: str):
    data = encode(picture, format)
    rng = random.Random(0)
    outcomes = {"picture": 0, "refused": 0}
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 4])):
            damaged[rng.randrange(min(len(data), 300))] = rng.randrange(256)
        try:
            image = decode(bytes(damaged), format=format)
        except BadSample:
            outcomes["refused"] += 1
        else:
            assert image.dtype == torch.uint8
            assert image.ndim == 3
            assert math.prod(image.shape) > 0
            assert format != "PNG" or bytes(damaged) == data  # it has checksums
            outcomes["picture"] += 1
    assert outcomes["refused"] > 0
    assert format == "PNG" or outcomes["picture"] > 0


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_check_finds_the_damage_that_decoding_finds(picture: Image.Image, data: st.DataObject):
    options = data.draw(st.sampled_from([{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 2}]))
    mode = data.draw(st.sampled_from(["RGB", "L"]))
    file = bytearray(encode(picture.convert(mode), "JPEG", quality=90, **options))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(2, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del file[data.draw(st.integers(20, len(file) - 1)) :]
    try:
        info = probe(bytes(file))
    except BadSample:
        return
    assert failure(lambda: check_decodes(bytes(file), info)) == failure(lambda: decode(bytes(file), format="JPEG"))


def failure(call: Callable[[], Any]) -> str | None:
    """The reason for which a call fails; None if it does not."""
    try:
        call()
    except BadSample as bad:
        return bad.reason
    return None
