"""Kinds of image that Pillow converts otherwise than they are meant, against arithmetic on the values in the file."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mmdata.errors import BadSample
from mmdata.images import probe
from mmdata.images.decode import decode
from tests.images.by_hand import bmp, png, png_chunk, tiff

Values = NDArray[Any]
rng = np.random.default_rng(0)
GREY16 = rng.integers(0, 2**16, (5, 7), dtype=np.uint16)
RGB16 = rng.integers(0, 2**16, (5, 7, 3), dtype=np.uint16)
RGB8 = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
ALPHA8 = rng.integers(0, 256, (5, 7, 1), dtype=np.uint8)


def pixels(data: bytes) -> NDArray[np.int64]:
    """(H, W, 3), as the loader decodes it."""
    info = probe(data)
    return decode(data, format=info.format, orientation=info.orientation).permute(1, 2, 0).numpy().astype(np.int64)


def scaled(values: Values, most: float) -> NDArray[np.int64]:
    """Values from 0 to `most` as 0 to 255; one sample of a grey one counts for all three."""
    levels = np.rint(values.astype(np.float64) / most * 255).astype(np.int64)
    return np.repeat(levels[..., None], 3, axis=2) if levels.ndim == 2 else levels


def on_white(rgb: Values, alpha: Values) -> NDArray[np.int64]:
    share = alpha.astype(np.float64) / 255
    return np.rint(rgb * share + 255 * (1 - share)).astype(np.int64)


def keyed(rgb: NDArray[np.int64], is_key: Values) -> NDArray[np.int64]:
    return np.where(is_key[..., None], 255, rgb)


def lines(values: Values, dtype: str) -> list[bytes]:
    return [line.astype(dtype).tobytes() for line in values]


def strip(values: Values, dtype: str) -> list[bytes]:
    return [values.astype(dtype).tobytes()]


# PNG


def key(*samples: int) -> bytes:
    return png_chunk(b"tRNS", struct.pack(f">{len(samples)}H", *samples))


def test_png_grey_of_16_bits_with_a_transparent_value():
    values, transparent = GREY16.copy(), GREY16[2, 3]
    values[0, 0] = transparent ^ 1  # as near as can be, and opaque
    data = png((5, 7), 16, 0, lines(values, ">u2"), before=key(int(transparent)))
    np.testing.assert_array_equal(pixels(data), keyed(scaled(values, 65535), values == transparent))


def test_png_colour_of_16_bits_with_a_transparent_colour_is_not_read():
    data = png((5, 7), 16, 2, lines(RGB16, ">u2"), before=key(*RGB16[2, 3].tolist()))
    for act in (lambda: probe(data), lambda: decode(data, format="PNG")):
        with pytest.raises(
            BadSample, match=r"^unsupported_format: PNG: a transparent colour of 16 bits is not supported"
        ):
            act()


@pytest.mark.parametrize("colours", [0, 2, 4, 6])
def test_png_of_16_bits_is_scaled_and_composited(colours: int):
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colours]
    values = rng.integers(0, 2**16, (5, 7, channels), dtype=np.uint16)
    rgb = scaled(values[..., :1].repeat(3, axis=2) if channels < 3 else values[..., :3], 65535)
    expected = on_white(rgb, values[..., -1:] / 257) if channels in (2, 4) else rgb
    data = png((5, 7), 16, colours, lines(values, ">u2"))
    assert np.abs(pixels(data) - expected).max() <= 2  # Pillow keeps the high byte: a level of the colour, one of alpha


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_png_grey_of_few_bits_with_a_transparent_value(bits: int):
    values = rng.integers(0, 2**bits, (5, 8))
    spread = values[..., None] >> np.arange(bits - 1, -1, -1) & 1  # to single bits, the greatest first
    packed = np.packbits(spread.reshape(5, -1).astype(np.uint8), axis=1)
    for sample in {0, 1, 2**bits - 1}:
        data = png((5, 8), bits, 0, [line.tobytes() for line in packed], before=key(sample))
        np.testing.assert_array_equal(pixels(data), keyed(scaled(values, 2**bits - 1), values == sample))


def test_png_colour_with_a_transparent_colour_of_8_bits_in_16():
    values = RGB8 // 64 * 64
    data = png((5, 7), 8, 2, lines(values, "u1"), before=key(*(int(v) | 0xFF00 for v in values[2, 3])))
    expected = keyed(values.astype(np.int64), (values == values[2, 3]).all(axis=2))
    np.testing.assert_array_equal(pixels(data), expected)


# TIFF


WHITE_IS_ZERO, COLOUR, PALETTE, YCBCR = 0, 2, 3, 6
MAP8 = rng.integers(0, 256, (256, 3), dtype=np.uint8)
planes = [RGB8[..., i].tobytes() for i in range(3)]
alpha_first = RGB8.astype(np.int64) * ALPHA8 // 255

TIFFS: dict[str, tuple[bytes, Values, int]] = {
    "16 bits": (tiff((5, 7), strip(GREY16, "<u2"), t258=16), scaled(GREY16, 65535), 0),
    "16 bits, big-endian": (tiff((5, 7), strip(GREY16, ">u2"), order=">", t258=16), scaled(GREY16, 65535), 0),
    "colour of 16 bits": (
        tiff((5, 7), strip(RGB16, "<u2"), t258=[16] * 3, t262=COLOUR, t277=3),
        scaled(RGB16, 65535),
        1,
    ),
    "planes of 8 bits": (tiff((5, 7), planes, t258=[8] * 3, t262=COLOUR, t277=3, t284=2), RGB8, 0),
    "alpha": (
        tiff((5, 7), strip(np.dstack([RGB8, ALPHA8]), "u1"), t258=[8] * 4, t262=COLOUR, t277=4, t338=2),
        on_white(RGB8, ALPHA8),
        1,
    ),
    "colours multiplied by alpha": (
        tiff((5, 7), strip(np.dstack([alpha_first, ALPHA8]), "u1"), t258=[8] * 4, t262=COLOUR, t277=4, t338=1),
        alpha_first + 255 - ALPHA8.astype(np.int64),
        2,
    ),
    "grey multiplied by alpha": (
        tiff((5, 7), strip(np.dstack([alpha_first[..., :1], ALPHA8]), "u1"), t258=[8] * 2, t277=2, t338=1),
        (alpha_first[..., :1] + 255 - ALPHA8.astype(np.int64)).repeat(3, axis=2),
        2,
    ),
    "fourth channel of no meaning": (
        tiff((5, 7), strip(np.dstack([RGB8, ALPHA8]), "u1"), t258=[8] * 4, t262=COLOUR, t277=4, t338=0),
        RGB8,
        0,
    ),
    "palette": (
        tiff((5, 7), strip(RGB8[..., 0], "u1"), t258=8, t262=PALETTE, t320=(MAP8.T.astype(int) * 257).ravel().tolist()),
        MAP8[RGB8[..., 0]],
        0,
    ),
    "YCbCr": (
        tiff((5, 7), strip(RGB8, "u1"), t258=[8] * 3, t262=YCBCR, t277=3, t530=[1, 1]),
        np.asarray(Image.fromarray(RGB8, "YCbCr").convert("RGB")),
        0,
    ),
}


@pytest.mark.parametrize(("data", "expected", "bound"), TIFFS.values(), ids=TIFFS)
def test_tiff_is_what_its_tags_say(data: bytes, expected: Values, bound: int):
    assert np.abs(pixels(data) - expected.astype(np.int64)).max() <= bound


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_of_16_bits_is_turned(orientation: int):
    small = GREY16 // 257
    data = [tiff((5, 7), strip(v, d), order=">", t258=b, t274=orientation) for v, d, b in
            [(small * 257, ">u2", 16), (small, "u1", 8)]]  # fmt: skip
    np.testing.assert_array_equal(*map(pixels, data))
    assert pixels(data[0]).shape == ((7, 5, 3) if orientation >= 5 else (5, 7, 3))


GREY = r"grey of more than 8 bits is not supported, but for 16 bits from 0 \(black\) to 65535 \(white\)"
NOT_READ = {
    "signed": (tiff((5, 7), strip(GREY16, "<u2"), t258=16, t339=2), "TIFF: signed samples are not supported"),
    "planes of 16 bits": (
        tiff((5, 7), [RGB16[..., i].tobytes() for i in range(3)], t258=[16] * 3, t262=COLOUR, t277=3, t284=2),
        "TIFF: uncompressed planes of more than 8 bits are not supported",
    ),
    "thumbnail": (
        tiff((5, 7), strip(RGB8, "u1"), t258=[8] * 3, t262=COLOUR, t277=3, t254=1, t330=8),
        "TIFF: not supported: its first page is a thumbnail of another one",
    ),
    "64 bits": (tiff((5, 7), [bytes(280)], t258=64, t339=3), "TIFF: unknown pixel mode"),
    "16 bits, white is 0": (tiff((5, 7), strip(GREY16, "<u2"), t258=16, t262=WHITE_IS_ZERO), f"TIFF: {GREY}"),
    "12 bits": (tiff((2, 4), [bytes(6)] * 2, t258=12, t278=1), f"TIFF: {GREY}"),
    "32 bits": (tiff((5, 7), [bytes(140)], t258=32, t339=1), f"TIFF: {GREY}"),
    "floats": (tiff((5, 7), [bytes(140)], t258=32, t339=3), f"TIFF: {GREY}"),
    "palette of 8 bits": (
        tiff((5, 7), strip(RGB8[..., 0], "u1"), t258=8, t262=PALETTE, t320=MAP8.T.ravel().tolist()),
        "TIFF: a palette of 8 bits is not supported",
    ),
}


@pytest.mark.parametrize(("data", "message"), NOT_READ.values(), ids=NOT_READ)
def test_tiff_that_is_not_read_says_so_in_header_and_decoding_alike(data: bytes, message: str):
    for act in (lambda: probe(data), lambda: decode(data, format="TIFF")):
        with pytest.raises(BadSample, match=f"^unsupported_format: {message}"):
            act()


# BMP


@pytest.mark.parametrize("top_down", [False, True])
def test_bmp_of_32_bits_is_opaque(top_down: bool):
    bgrx = np.dstack([RGB8[..., ::-1], ALPHA8])  # the header of 40 bytes leaves the fourth byte without a meaning
    np.testing.assert_array_equal(pixels(bmp((5, 7), 32, lines(bgrx, "u1"), top_down=top_down)), RGB8)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("black_first", [True, False])
def test_bmp_palette_of_black_and_white(bits: int, black_first: bool):
    values = rng.integers(0, 2, (5, 8))
    packed = {1: np.packbits(values.astype(np.uint8), axis=1), 4: values[:, ::2] << 4 | values[:, 1::2], 8: values}[
        bits
    ]
    padded = [line.astype(np.uint8).tobytes().ljust(-(-len(line) // 4) * 4, b"\0") for line in packed]
    black, white = bytes(4), b"\xff\xff\xff\0"
    data = bmp((5, 8), bits, padded, palette=black + white if black_first else white + black)
    if black_first and bits > 1:  # Pillow reads one bit a pixel
        for act in (lambda: probe(data), lambda: decode(data, format="BMP")):
            with pytest.raises(BadSample, match=f"^unsupported_format: BMP: .* with {bits} bits is not supported"):
                act()
    else:
        np.testing.assert_array_equal(pixels(data), scaled(values if black_first else 1 - values, 1))
