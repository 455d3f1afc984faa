"""Which images are kept as they are, and which are quarantined."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdata.images import FORMATS
from mmdata.index import Index
from tests.convert.conftest import encode
from tests.images.by_hand import png_chunk


def with_chunk(chunk: bytes) -> bytes:
    data = encode(Image.new("RGB", (20, 20), "red"), "PNG")
    return data[:33] + chunk + data[33:]  # signature 8 + IHDR 25


def pixel_bomb() -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", BOMB) + png_chunk(b"IEND", b"")


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Noise, so that files are long enough to be cut."""
    pixels = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file(height: int, width: int, *, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    return encode(picture(height, width, mode), kind)


BOMB = zlib.compress(bytes(70 * 2**20), 9)

BAD = {
    "truncated JPEG": (lambda: file(64, 64)[:-400], "corrupt_image"),
    "truncated PNG": (lambda: file(64, 64, kind="PNG")[:-400], "corrupt_image"),
    "truncated WebP": (lambda: file(64, 64, kind="WEBP")[:-100], "corrupt_image"),
    "1x1": (lambda: file(1, 1), "image_too_small"),
    "long and thin": (lambda: encode(Image.new("L", (6500, 2)), "PNG"), "extreme_aspect"),
    "pixel bomb": (pixel_bomb, "image_too_large"),
    "text bomb": (lambda: with_chunk(png_chunk(b"zTXt", b"Comment\0\0" + BOMB)), "corrupt_image"),
    "empty file": (lambda: b"", "empty_file"),
    "HTML": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", "not_an_image"),
    "SVG": (lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "not_an_image"),
    "PDF": (lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "not_an_image"),
    "FITS": (lambda: b"SIMPLE  =                    T" + b" " * 50, "not_an_image"),
    "broken HEIC header": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "corrupt_image"),
    "TIFF of floats": (lambda: encode(Image.new("F", (40, 30)), "TIFF"), "unsupported_format"),
    "pickle": (lambda: b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system", "not_an_image"),
    "broken JPEG header": (lambda: file(64, 64)[:30] + bytes(200), "corrupt_image"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_image_is_quarantined(outcome: Any, corpus: Path, name: str) -> None:
    make, reason = BAD[name]
    (corpus / "it.jpg").write_bytes(make())
    assert outcome({"image": "it.jpg", "caption": "x"})[0] == reason


def palette() -> bytes:
    image = picture(20, 30).quantize(8)
    return encode(image, "PNG", transparency=3)


def animation(kind: str) -> bytes:
    frames = [picture(20, 30), Image.new("RGB", (30, 20), "red")]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def broken_exif() -> bytes:
    return file(20, 30)[:2] + b"\xff\xe1\x00\x10Exif\0\0MM\0\x2a\xff\xff\xff\xff" + file(20, 30)[2:]


GOOD = {
    "CMYK JPEG": ("it.jpg", lambda: file(20, 30, mode="CMYK"), "JPEG"),
    "grey JPEG": ("it.jpg", lambda: file(20, 30, mode="L"), "JPEG"),
    "progressive JPEG": ("it.jpg", lambda: encode(picture(20, 30), "JPEG", progressive=True), "JPEG"),
    "16-bit PNG": ("it.png", lambda: encode(Image.fromarray(np.full((20, 30), 40_000, np.uint16)), "PNG"), "PNG"),
    "alpha": ("it.png", lambda: encode(picture(20, 30, "RGBA"), "PNG"), "PNG"),
    "palette with transparency": ("it.png", palette, "PNG"),
    "one bit": ("it.png", lambda: encode(picture(20, 30, "1"), "PNG"), "PNG"),
    "animated GIF": ("it.gif", lambda: animation("GIF"), "GIF"),
    "animated WebP": ("it.webp", lambda: animation("WEBP"), "WEBP"),
    "BMP": ("it.bmp", lambda: encode(picture(20, 30), "BMP"), "BMP"),
    "TIFF": ("it.tif", lambda: encode(picture(20, 30), "TIFF"), "TIFF"),
    "wrong extension": ("it.png", lambda: file(20, 30), "JPEG"),
    "no extension": ("it", lambda: file(20, 30), "JPEG"),
    "upper-case extension": ("IT.JPG", lambda: file(20, 30), "JPEG"),
    "trailing bytes": ("it.jpg", lambda: file(20, 30) + b"<!-- tail -->" * 9, "JPEG"),
    "broken EXIF": ("it.jpg", broken_exif, "JPEG"),
}


@pytest.mark.parametrize("name", GOOD)
def test_usable_image_is_kept_byte_for_byte(outcome: Any, corpus: Path, tmp_path: Path, name: str) -> None:
    path, make, kind = GOOD[name]
    (corpus / path).write_bytes(make())
    assert outcome({"image": path, "caption": "x"}) == ("", "")
    index = Index.open(tmp_path / "out")
    row = index.take(np.array([3]), ["image_offset", "image_bytes", "height", "width", "image_format"])
    start, size = int(row["image_offset"][0]), int(row["image_bytes"][0])
    assert (tmp_path / "out/000000.tar").read_bytes()[start : start + size] == make()
    assert (int(row["height"][0]), int(row["width"][0])) == (20, 30)
    assert FORMATS[int(row["image_format"][0])] == kind


def test_exif_orientation_is_recorded(outcome: Any, corpus: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (corpus / "it.jpg").write_bytes(encode(picture(20, 30), "JPEG", exif=exif))
    assert outcome({"image": "it.jpg", "caption": "x"}) == ("", "")
    index = Index.open(tmp_path / "out")
    assert index.column("orientation").tolist() == [1, 1, 1, 6]
    assert index.column("height").tolist() == [20] * 4


@pytest.mark.parametrize(
    ("settings", "size", "reason"),
    [
        ({"min_side": 20}, (19, 30), "image_too_small"),
        ({}, (20, 401), "extreme_aspect"),
        ({"max_image_bytes": 3000}, (60, 60), "image_too_large"),
    ],
)
def test_image_beyond_a_limit_is_left_out(
    outcome: Any, corpus: Path, settings: dict[str, Any], size: tuple[int, int], reason: str
) -> None:
    (corpus / "it.jpg").write_bytes(file(*size))
    assert outcome({"image": "it.jpg", "caption": "x"}, **settings)[0] == reason


@pytest.mark.parametrize(("caption", "more"), [("photo b", ""), ("b again", ", with other captions or another label")])
def test_first_of_equal_images_wins(outcome: Any, corpus: Path, caption: str, more: str) -> None:
    (corpus / "copy.jpg").write_bytes((corpus / "b.jpg").read_bytes())
    got = outcome({"image": "copy.jpg", "caption": caption})
    assert got == ("duplicate_image", f"the image of row 1 again, byte for byte{more}")


def test_equal_images_are_kept_when_asked(outcome: Any, corpus: Path) -> None:
    (corpus / "copy.jpg").write_bytes((corpus / "b.jpg").read_bytes())
    assert outcome({"image": "copy.jpg", "caption": "b again"}, keep_duplicates=True) == ("", "")


def test_row_that_is_unusable_is_no_winner(corpus: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption\na.jpg,\na.jpg,y\nb.jpg,z\n")
    accounts = make(corpus / "t.csv").accounts
    assert (accounts["written"], accounts["duplicate"], accounts["quarantined"]) == (2, 0, 1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"check": "header"}, ""), ({}, "corrupt_image"), ({"check": "header", "resize": 40}, "corrupt_image")],
)
def test_check_header_trusts_what_follows_the_header_of_an_image_that_stays(
    outcome: Any, corpus: Path, settings: dict[str, Any], reason: str
) -> None:
    (corpus / "cut.jpg").write_bytes(encode(picture(60, 90), "JPEG")[:-200])
    assert outcome({"image": "cut.jpg", "caption": "cut"}, **settings)[0] == reason
