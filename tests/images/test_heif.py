"""Headers of HEIC and AVIF, read without a decoder, against pillow-heif and Pillow."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from mmdata.images.heif import MAX_BOXES, HeifHeader, heif_format, read_heif
from mmdata.images.probe import sniff
from tests.pictures import FILES, needs_heif, stored

HEIC = {name: file for name, file in FILES.items() if file.format == "HEIF"}


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def full(kind: bytes, content: bytes, version: int = 0, flags: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags) + content)


def ispe(width: int, height: int) -> bytes:
    return full(b"ispe", struct.pack(">II", width, height))


def clap(*numbers: int) -> bytes:
    return box(b"clap", struct.pack(">8I", *(number % 2**32 for number in numbers)))


def heif(properties: list[bytes], *, brands: bytes = b"heic\0\0\0\0mif1heic", first: bytes = b"", wide: bool = False):
    """A file whose image, item 2, has all properties; item 1 has none of them."""
    numbers = range(1, len(properties) + 1)
    if wide:
        ids, count = struct.pack(">I", 2), bytes([len(properties)])
        entry = ids + count + b"".join(struct.pack(">H", 0x8000 | number) for number in numbers)
        ipma = full(b"ipma", struct.pack(">IIB", 2, 1, 0) + entry, 1, 1)
        primary = full(b"pitm", struct.pack(">I", 2), 1)
    else:
        entry = struct.pack(">HB", 2, len(properties)) + bytes(0x80 | number for number in numbers)
        ipma = full(b"ipma", struct.pack(">IHB", 2, 1, 0) + entry)
        primary = full(b"pitm", struct.pack(">H", 2))
    iprp = box(b"iprp", box(b"ipco", b"".join(properties)) + ipma)
    return box(b"ftyp", brands) + first + full(b"meta", primary + iprp)


@pytest.mark.parametrize("name", HEIC)
def test_heic_has_the_size_that_is_displayed(name: str):
    header = read_heif(stored(name))
    assert header.displayed == (HEIC[name].height, HEIC[name].width)
    assert header.orientation == HEIC[name].orientation
    assert read_heif(memoryview(stored(name))) == header


@needs_heif
@pytest.mark.parametrize("orientation", range(1, 9))
def test_heic_of_any_size_has_the_size_that_libheif_decodes(orientation: int):
    import pillow_heif

    rng = np.random.default_rng(orientation)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for width, height in rng.integers(1, 90, (4, 2)):
        file = pillow_heif.from_pillow(Image.new("RGB", (int(width), int(height))))
        buffer = io.BytesIO()
        file.save(buffer, exif=exif.tobytes())
        image = pillow_heif.HeifImageFile(buffer)
        image.load()
        header = read_heif(buffer.getvalue())
        assert (header.displayed, header.orientation) == ((image.height, image.width), orientation)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF codec")
@pytest.mark.parametrize("orientation", range(1, 9))
def test_avif_has_the_size_and_orientation_that_pillow_finds(orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (31, 21)).save(buffer, "AVIF", exif=exif)
    with Image.open(buffer) as image:
        assert (image.height, image.width, image.getexif().get(0x0112, 1)) == (21, 31, orientation)
    header = read_heif(buffer.getvalue())
    assert (header.height, header.width, header.orientation) == (21, 31, orientation)


TURN, MIRROR = box(b"irot", b"\3"), box(b"imir", b"\0")
PROPERTIES = {
    "plain": ([ispe(30, 20)], HeifHeader(20, 30, (20, 30), 1)),
    "another before it": ([box(b"hvcC", bytes(9)), ispe(30, 20)], HeifHeader(20, 30, (20, 30), 1)),
    "turned": ([ispe(30, 20), TURN], HeifHeader(20, 30, (30, 20), 6)),
    "turned and mirrored": ([ispe(30, 20), TURN, MIRROR], HeifHeader(20, 30, (30, 20), 7)),
    "cropped": ([ispe(64, 64), clap(31, 1, 21, 1, -33, 2, -43, 2)], HeifHeader(64, 64, (21, 31), 1)),
    "cropped by fractions": ([ispe(64, 64), clap(61, 2, 21, 1, 0, 1, 0, 1)], HeifHeader(64, 64, (21, 31), 1)),
    "cropped beyond its edges": ([ispe(30, 20), clap(99, 1, 99, 1, 0, 1, 0, 1)], HeifHeader(20, 30, (20, 30), 1)),
    "cropped, then turned": ([ispe(30, 20), clap(10, 1, 4, 1, 0, 1, 0, 1), TURN], HeifHeader(20, 30, (10, 4), 6)),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_of_the_primary_image_decide(name: str, wide: bool):
    properties, expected = PROPERTIES[name]
    assert read_heif(heif(properties, wide=wide)) == expected


LARGE_BOX = struct.pack(">I4sQ", 1, b"free", 24) + bytes(8)


@pytest.mark.parametrize("first", [b"", box(b"free", bytes(50)), LARGE_BOX])
def test_boxes_before_the_header_are_stepped_over(first: bytes):
    assert read_heif(heif([ispe(30, 20)], first=first)).displayed == (20, 30)


BROKEN = {
    "no meta": (box(b"ftyp", bytes(16)), "ends after 24 bytes, without a box b'meta'"),
    "a sequence": (box(b"ftyp", bytes(16)) + box(b"moov", bytes(9)), "a sequence without a still image is not supp"),
    "no primary": (full(b"meta", box(b"iprp", b"")), "no box b'pitm' says which of its images is shown"),
    "no size": (heif([TURN]), r"no size \(ispe\) of its image"),
    "a side of 0": (heif([ispe(0, 20)]), "a side of its image is 0"),
    "a property too many": (heif([ispe(9, 9)]).replace(b"\x81", b"\x82"), "its image has property 2 of 1"),
    "division by 0": (heif([ispe(9, 9), clap(1, 0, 1, 1, 0, 1, 0, 1)]), r"a cropping \(clap\) divides by 0"),
    "a short cropping": (heif([ispe(9, 9), box(b"clap", bytes(8))]), r"a cropping \(clap\) that is cut short"),
    "nothing left": (heif([ispe(9, 9), clap(2, 1, 2, 1, 99, 1, 0, 1)]), r"a cropping \(clap\) leaves nothing"),
    "a short size": (heif([full(b"ispe", b"\0\0")]), "ends within its header: cut short"),
    "a box beyond the end": (b"\0\0\0\x09meta", r"a box b'meta' of 9 bytes where 8 are left: cut short"),
    "a box of 7 bytes": (b"\0\0\0\x07meta", r"a box b'meta' of 7 bytes where 8 are left: cut short"),
    "too many boxes": (box(b"free", b"") * (MAX_BOXES + 1), f"more than {MAX_BOXES} boxes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_says_what_is_wrong(name: str):
    data, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        read_heif(data)


def test_any_number_of_items_is_looked_through_in_bounded_work():
    # Each entry has 255 properties of another item; a reader of all would make 2^32 steps of the number it claims.
    entries = full(b"ipma", struct.pack(">I", 2**32 - 1) + (struct.pack(">HB", 1, 255) + bytes(255)) * 2000)
    data = full(b"meta", full(b"pitm", struct.pack(">H", 2)) + box(b"iprp", box(b"ipco", b"") + entries))
    with pytest.raises(ValueError, match="ends within its header: cut short"):
        read_heif(data)


@pytest.mark.parametrize(
    ("brands", "format"),
    [
        (b"avif\0\0\0\0mif1miaf", "AVIF"),
        (b"avis\0\0\0\0msf1avis", "AVIF"),
        (b"heic\0\0\0\0mif1heic", "HEIF"),
        (b"hevc\0\0\0\0", "HEIF"),
        (b"mif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"mif1\0\0\0\0mif1heic", "HEIF"),
        (b"mif1\0\0\0\0mif1", "HEIF"),
        (b"msf1\0\0\0\0avisheic", "HEIF"),
        (b"isom\0\0\0\0avif", None),
        (b"crx \0\0\0\1crx isom", None),
    ],
)
def test_brands_decide_the_format(brands: bytes, format: str | None):
    data = box(b"ftyp", brands) + b"avif" * 20
    assert heif_format(data[:64]) == sniff(data) == format


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(HEIC)), st.data())
def test_cut_and_changed_headers_end_in_a_message(name: str, data: st.DataObject):
    whole = stored(name)
    cut = data.draw(st.integers(0, len(whole)))
    at, patch = data.draw(st.integers(0, 500)), data.draw(st.binary(max_size=8))
    with contextlib.suppress(ValueError):
        header = read_heif((whole[:at] + patch + whole[at + len(patch) :])[:cut])
        assert min(*header.displayed, header.height, header.width) > 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"meta", b"iprp", b"ipco", b"ipma", b"pitm", b"ispe"]), st.binary())))
def test_any_boxes_end_in_a_message(boxes: list[tuple[bytes, bytes]]):
    inner = b"".join(box(kind, content) for kind, content in boxes)
    for data in (inner, full(b"meta", inner), full(b"meta", box(b"iprp", inner))):
        with contextlib.suppress(ValueError):
            read_heif(data)
