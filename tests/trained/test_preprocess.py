"""The pixels that a trained run sees: an image that was opened with Pillow gives those of its file."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from mmdata.config import DataConfig
from mmdata.errors import DataError
from mmdata.images.pillow import file_of
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.plan import LengthAspectPolicy
from mmdata.trained.preprocess import Preprocess
from tests.images.placed import pixels
from tests.pictures import FILES, needs_heif, picture, stored

PREPROCESS = Preprocess(LengthAspectPolicy([1], [(16, 16)]))
XMP = '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def encoded(image: Image.Image, format: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **settings)
    return file.getvalue()


def with_xmp(png: bytes, *, compressed: bool = False) -> bytes:
    """A PNG with XMP data that say orientation 6."""
    text = zlib.compress(XMP.encode()) if compressed else XMP.encode()
    data = b"iTXtXML:com.adobe.xmp\0" + bytes([compressed, 0]) + b"\0\0" + text
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    place = png.index(b"IDAT") - 4
    return png[:place] + chunk + png[place:]


def turned_by_exif(format: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(), format, exif=exif)


MADE = {
    "xmp.png": lambda: with_xmp(encoded(picture(), "PNG")),
    "xmp_compressed.png": lambda: with_xmp(encoded(picture(), "PNG"), compressed=True),
    "large.jpg": lambda: encoded(picture().resize((310, 210)), "JPEG"),
    **{
        f"turned.{format.lower()}": (lambda format=format: turned_by_exif(format)) for format in ("JPEG", "PNG", "WEBP")
    },
    **{f"turned.{format.lower()}": (lambda format=format: turned_by_exif(format)) for format in ("TIFF", "AVIF")},
}
TURNED = [name for name in MADE if name.startswith(("xmp", "turned"))]


def file_named(name: str) -> bytes:
    return MADE[name]() if name in MADE else stored(name)


def opened(path: Path) -> Image.Image:
    if path.suffix == ".heic":
        import pillow_heif

        pillow_heif.register_heif_opener()
    return Image.open(path)


@pytest.mark.parametrize("name", [*MADE, *(pytest.param(name, marks=needs_heif) for name in FILES)])
def test_an_opened_image_gives_the_pixels_of_its_file(name: str, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(file_named(name))
    expected = PREPROCESS(path)
    image = opened(path)
    assert torch.equal(PREPROCESS(image), expected)
    assert torch.equal(PREPROCESS(image), expected)  # it is as it was
    if name != "large.jpg":  # which Pillow decodes at full size
        image.load()
        assert file_of(image) is None
        assert torch.equal(PREPROCESS(image), expected)
        image = opened(path)
        image.load()
        upright = ImageOps.exif_transpose(image).convert("RGB")
        assert upright.size == (
            (21, 31) if name in TURNED or FILES.get(name, FILES["upright.heic"]).height == 31 else (31, 21)
        )


def test_images_are_made_small_first_where_the_loader_does_it(tmp_path: Path):
    path = tmp_path / "large.png"
    picture().resize((310, 210)).save(path)
    data = DataConfig(shards="s", global_batch_size=8, image_size=16, shorter_side=20)
    preprocess = Preprocess.from_config(data)
    loaded = PixelTransform.from_config(data.model_copy(update={"transform": "eval"}))
    found = preprocess(path)
    assert torch.equal(found, pixels(loaded, EncodedImage(path.read_bytes(), "PNG", 1, 0), (16, 16)))
    assert torch.equal(found, preprocess(torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)))
    assert not torch.equal(found, PREPROCESS(path))


def test_an_image_that_was_changed_after_it_was_opened_is_taken_as_it_is(tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(), "PNG"))
    image = Image.open(path)
    image.paste((255, 0, 0), (0, 0, *image.size))
    assert file_of(image) is None
    assert PREPROCESS(image).flatten(1).unique(dim=1).tolist() == [[255], [0], [0]]
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime")]
    animation = Image.open(io.BytesIO(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])))
    animation.seek(1)
    assert PREPROCESS(animation).flatten(1).unique(dim=1).tolist() == [[0], [255], [0]]
    draft = Image.open(io.BytesIO(encoded(picture().resize((310, 210)), "JPEG")))
    draft.draft("L", (80, 60))
    assert file_of(draft) is None


def test_an_opened_image_of_another_format_is_decoded_by_pillow(tmp_path: Path):
    image = Image.open(io.BytesIO(encoded(Image.new("RGB", (20, 20), "lime"), "PPM")))
    assert PREPROCESS(image).flatten(1).unique(dim=1).tolist() == [[0], [255], [0]]


def test_an_opened_image_that_is_damaged_is_named(tmp_path: Path):
    png = bytearray(encoded(Image.fromarray(np.frombuffer(os.urandom(1200), np.uint8).reshape(20, 20, 3)), "PNG"))
    png[-20] ^= 1  # in the pixels
    path = tmp_path / "a.png"
    path.write_bytes(png)
    with pytest.raises(
        DataError, match=rf"^image '{path}': corrupt_image: PNG does not decode: the checksum of a chunk"
    ):
        PREPROCESS(Image.open(path))
