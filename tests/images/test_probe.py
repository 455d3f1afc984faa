from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmdata.errors import BadSample, Reason
from mmdata.images import EXTENSIONS, FORMATS, ImageInfo, Limits, probe
from mmdata.images.probe import sniff
from tests.images.by_hand import png, png_chunk
from tests.pictures import FILES, needs_heif, stored

STORED = {"HEIF": "turned.heic"}
"""Files of the formats that Pillow alone does not write."""


def needs(name: str) -> Any:
    """A file as a parameter, for tests that open it."""
    return pytest.param(name, marks=needs_heif)


PROBED = [
    *FORMATS[:-1],
    pytest.param("HEIF", marks=needs_heif),
]


def encoded(format: str, *, size: tuple[int, int] = (30, 20), orientation: int | None = None) -> bytes:
    if format in STORED:
        return stored(STORED[format])
    buffer = io.BytesIO()
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", size, "red").save(buffer, format, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("format", PROBED)
def test_every_format_is_probed_by_its_magic(format):
    expected = ImageInfo(format, *((31, 21) if format in STORED else (20, 30)), 1)
    assert probe(encoded(format)) == expected
    assert probe(memoryview(encoded(format))) == expected
    assert set(EXTENSIONS) == set(FORMATS)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_recorded_and_not_applied(format, orientation):
    assert probe(encoded(format, orientation=orientation)) == ImageInfo(format, 20, 30, orientation)


@pytest.mark.parametrize("name", [needs(name) for name in FILES])
def test_image_of_a_package_has_the_size_that_is_displayed(name):
    assert probe(stored(name)) == ImageInfo(FILES[name].format, FILES[name].height, FILES[name].width, 1)


@pytest.mark.parametrize(
    ("brands", "format"),
    [
        (b"avif\0\0\0\0", "AVIF"),
        (b"mif1\0\0\0\0miafavif", "AVIF"),
        (b"heic\0\0\0\0mif1heic", "HEIF"),
        (b"mif1\0\0\0\0mif1heic", "HEIF"),
        (b"msf1\0\0\0\0", "HEIF"),
        (b"mp42\0\0\0\0isom", None),
        (b"crx \0\0\0\1crx isom", None),
    ],
)
def test_heif_and_avif_are_told_by_their_brands(brands, format):
    assert sniff(struct.pack(">I4s", 8 + len(brands), b"ftyp") + brands + b"\0\0\0\x08heic") == format


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_out_of_range_is_upright(orientation):
    assert probe(encoded("JPEG", orientation=orientation)).orientation == 1


def test_a_tiff_has_the_shape_that_pillow_decodes():
    data = encoded("TIFF", orientation=6)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert (image.height, image.width) == (30, 20)
    assert probe(data) == ImageInfo("TIFF", 30, 20, 1)


def test_corrupt_exif_is_no_reason_to_lose_a_picture():
    data = encoded("JPEG", orientation=6)
    at = data.index(b"Exif\0\0")
    assert probe(data[: at + 6] + b"\xff" * 8 + data[at + 14 :]) == ImageInfo("JPEG", 20, 30, 1)


def test_trailing_bytes_are_accepted():
    assert probe(encoded("JPEG") + b"trailing").height == 20


def bad(data: bytes, reason: Reason, detail: str, needed: Any) -> Any:
    return pytest.param(data, reason, detail, marks=needed)


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (b"", Reason.EMPTY_FILE, "image of 0 bytes"),
        (b"<!DOCTYPE html><html>", Reason.NOT_AN_IMAGE, "starts with b'<!DOCTYPE html><'"),
        (b"BMW is a car maker", Reason.NOT_AN_IMAGE, "starts with"),
        (b"<?xml version='1.0'?><svg/>", Reason.NOT_AN_IMAGE, "starts with"),
        (b"%PDF-1.7", Reason.NOT_AN_IMAGE, "starts with"),
        (b"SIMPLE  =     T", Reason.NOT_AN_IMAGE, "starts with"),
        bad(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", Reason.CORRUPT_IMAGE, "HEIF does not decode: ", needs_heif),
        bad(stored("turned.heic")[:300], Reason.CORRUPT_IMAGE, "HEIF does not decode: ", needs_heif),
        (b"\xff\xd8\xff\xe0", Reason.CORRUPT_IMAGE, "JPEG does not decode"),
        (encoded("PNG")[:20], Reason.CORRUPT_IMAGE, "PNG does not decode: ends after 20 bytes, within a chunk b'IHDR'"),
        (encoded("WEBP")[:24], Reason.CORRUPT_IMAGE, "WEBP does not decode"),
        (encoded("AVIF")[:40], Reason.CORRUPT_IMAGE, "AVIF does not decode"),
        (encoded("PNG", size=(1, 1)), Reason.IMAGE_TOO_SMALL, "1×1 pixels: shorter side under 2"),
        (png((2**20, 2**20), 8, 2, []), Reason.IMAGE_TOO_LARGE, "1048576×1048576 pixels: more than 178956970 in all"),
        (encoded("PNG", size=(41, 2)), Reason.EXTREME_ASPECT, "41×2 pixels: sides differ more than 20 to 1"),
        (
            png((9, 9), 8, 2, [], before=png_chunk(b"zTXt", b"bomb\0\0" + zlib.compress(bytes(2**26)))),
            Reason.CORRUPT_IMAGE,
            "PNG does not decode: Decompressed data too large",
        ),
    ],
)
def test_images_that_cannot_be_used_have_a_reason(data, reason, detail):
    with pytest.raises(BadSample, match=detail) as caught:
        probe(data)
    assert caught.value.reason is reason


def test_limits_are_the_callers():
    assert probe(encoded("PNG", size=(41, 1)), limits=Limits(min_side=1, max_aspect=50)).width == 41
    with pytest.raises(BadSample, match="more than 599 in all"):
        probe(encoded("PNG"), limits=Limits(max_pixels=599))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("format", PROBED)
def test_damaged_headers_give_a_reason_and_nothing_else(format):
    whole = encoded(format, orientation=3)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(whole)), st.integers(0, len(whole) - 1), st.binary(max_size=8))
    def damaged(cut: int, at: int, patch: bytes) -> None:
        data = (whole[:at] + patch + whole[at + len(patch) :])[:cut]
        with contextlib.suppress(BadSample):
            assert probe(data).format in FORMATS

    damaged()


# EXIF and checksums of PNG


def exif(orientation: int) -> bytes:
    """EXIF data as a chunk eXIf has it."""
    found = Image.Exif()
    found[0x0112] = orientation
    return found.tobytes().removeprefix(b"Exif\0\0")


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
EXIF_CHUNKS = {
    "eXIf": png_chunk(b"eXIf", exif(6)),
    "XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
    "XMP, compressed": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP)),
    "EXIF before XMP": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.replace(b"6", b"3"))
    + png_chunk(b"eXIf", exif(6)),
}


@pytest.mark.parametrize("name", EXIF_CHUNKS)
@pytest.mark.parametrize("place", ["before the pixels", "after the pixels"])
def test_orientation_of_a_png_is_found_before_the_pixels_and_that_of_exif_after_them_too(name, place):
    chunks = EXIF_CHUNKS[name]
    whole = encoded("PNG")
    at = 33 if place == "before the pixels" else len(whole) - 12
    data = whole[:at] + chunks + whole[at:]
    is_found = place == "before the pixels" or "eXIf" in name or "EXIF" in name
    assert probe(data) == ImageInfo("PNG", 20, 30, 6 if is_found else 1)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image.getexif()[0x0112] == 6


def test_every_flipped_bit_of_a_png_is_refused():
    whole = encoded("PNG", size=(5, 4), orientation=6)
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadSample) as caught:
            probe(bytes(data))
        assert caught.value.reason is (Reason.NOT_AN_IMAGE if bit < 64 else Reason.CORRUPT_IMAGE)
