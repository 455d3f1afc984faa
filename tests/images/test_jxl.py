"""Sizes of JPEG XL, read without a decoder, against pillow-jxl-plugin."""

from __future__ import annotations

import contextlib
import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmdata.images.jxl import MAX_BOXES, jxl_size
from mmdata.images.probe import sniff
from tests.pictures import FILES, needs_jxl, stored

JXL = {name: file for name, file in FILES.items() if file.format == "JXL"}
SIGNATURE = b"\0\0\0\x0cJXL \r\n\x87\n"


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def codestream(*fields: tuple[int, int]) -> bytes:
    """A codestream that begins with these fields, (value, bits) each, and goes on with ones."""
    value, at = 0, 0
    for number, count in fields:
        value |= number << at
        at += count
    return b"\xff\x0a" + (value | (2**160 - 1) << at).to_bytes(45, "little")


SIZE_20_30 = [(0, 1), (0, 2), (19, 9), (0, 3), (0, 2), (29, 9)]
"""Not in eights; a height of 1 + 19; no ratio; a width of 1 + 29."""


@pytest.mark.parametrize("name", JXL)
def test_jxl_has_the_size_that_is_displayed(name: str):
    assert jxl_size(stored(name)) == (JXL[name].height, JXL[name].width)
    assert jxl_size(memoryview(stored(name))) == (JXL[name].height, JXL[name].width)
    assert sniff(stored(name)[:12]) == "JXL"


@needs_jxl
@pytest.mark.parametrize(
    "size", [(1, 1), (8, 8), (256, 256), (264, 256), (31, 21), (513, 5), (9000, 3), (3, 9000), (48, 64), (160, 90)]
)
def test_jxl_of_any_size_has_the_size_that_was_encoded(size: tuple[int, int]):
    import pillow_jxl  # noqa: F401  registers the format

    for container in (False, True):
        buffer = io.BytesIO()
        Image.new("L", size).save(buffer, "JXL", effort=1, use_container=container)
        assert jxl_size(buffer.getvalue()) == (size[1], size[0])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([*SIZE_20_30, (1, 1)], (20, 30)),  # all is as usual
        ([*SIZE_20_30, (0, 1), (0, 1)], (20, 30)),  # no further fields
        ([*SIZE_20_30, (0, 1), (1, 1), (5, 3), (0, 3)], (30, 20)),
        ([*SIZE_20_30, (0, 1), (1, 1), (7, 3), (1, 1), *SIZE_20_30, (0, 2)], (30, 20)),
        ([*SIZE_20_30, (0, 1), (1, 1), (3, 3), (0, 3)], (20, 30)),
        ([(1, 1), (1, 5), (0, 3), (2, 5), (1, 1)], (16, 24)),  # in eights
        ([(1, 1), (8, 5), (5, 3), (1, 1)], (72, 128)),  # 16:9
        ([(0, 1), (3, 2), (2**30 - 1, 30), (1, 3), (1, 1)], (2**30, 2**30)),
    ],
)
def test_fields_of_the_codestream_are_read_bit_by_bit(fields: list[tuple[int, int]], expected: tuple[int, int]):
    bare = codestream(*fields)
    boxed = SIGNATURE + box(b"ftyp", b"jxl \0\0\0\0jxl ") + box(b"Exif", bytes(40)) + box(b"jxlc", bare)
    parts = [bare[i : i + 20] for i in range(0, len(bare), 20)]
    split = SIGNATURE + b"".join(box(b"jxlp", struct.pack(">I", i) + part) for i, part in enumerate(parts))
    large = SIGNATURE + struct.pack(">I4sQ", 1, b"jxlc", 16 + len(bare)) + bare
    to_the_end = SIGNATURE + struct.pack(">I4s", 0, b"jxlc") + bare
    assert [jxl_size(data) for data in (bare, boxed, split, large, to_the_end)] == [expected] * 5


def test_a_header_that_goes_on_in_another_box_is_refused():
    parts = [struct.pack(">I", 0) + b"\xff\x0a", struct.pack(">I", 1) + codestream(*SIZE_20_30)[2:]]
    with pytest.raises(ValueError, match=r"^ends within its header: cut short"):
        jxl_size(SIGNATURE + b"".join(box(b"jxlp", part) for part in parts))


BROKEN = {
    "an animation": (stored("animated.jxl"), "an animation is not supported: pillow-jxl-plugin gives its last frame"),
    "cut": (stored("bare.jxl")[:3], "ends within its header: cut short"),
    "no codestream": (SIGNATURE + box(b"ftyp", b"jxl "), "ends after 24 bytes, before the codestream: cut short"),
    "cut in a box": (SIGNATURE + b"\0\0\0\1jxlc\0\0", "ends after 22 bytes, before the codestream: cut short"),
    "another codestream": (
        SIGNATURE + box(b"jxlc", b"JFIF" * 9),
        "the codestream starts with b'JF', not with",
    ),
    "too many boxes": (SIGNATURE + box(b"free", b"") * MAX_BOXES, f"no codestream in its first {MAX_BOXES} boxes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_header_says_what_is_wrong(name: str):
    data, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        jxl_size(data)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(JXL)), st.data())
def test_cut_and_changed_headers_end_in_a_message(name: str, data: st.DataObject):
    whole = stored(name)
    cut = data.draw(st.integers(0, len(whole)))
    at, patch = data.draw(st.integers(0, 60)), data.draw(st.binary(max_size=8))
    with contextlib.suppress(ValueError):
        assert min(jxl_size((whole[:at] + patch + whole[at + len(patch) :])[:cut])) > 0
