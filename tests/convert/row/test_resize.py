"""Images that are shrunk while they are converted, and those that are not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.resize import Resize
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import hash64
from mmdata.images import ImageInfo
from mmdata.index import Index
from tests.convert.conftest import encode, good_rows, jsonl, members, tolerant

Outcome = Callable[..., tuple[str, str]]


def smooth(height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(7).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def psnr(a: Image.Image, b: Image.Image) -> float:
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return float(10 * np.log10(255**2 / np.mean(difference**2)))


@pytest.fixture
def shrunk(outcome: Outcome, corpus: Path, tmp_path: Path) -> Callable[..., bytes]:
    """`shrunk(data, **settings)`: what is stored of an image, by default with a shorter side of 16."""

    def run(data: bytes, **settings: Any) -> bytes:
        (corpus / "it").write_bytes(data)
        assert outcome({"image": "it", "caption": "x"}, **{"resize": 16, **settings}) == ("", "")
        stored = [data for name, data in members(tmp_path / "out").items() if name.startswith("000000003.")]
        return stored[0]

    return run


@given(st.integers(2, 3000), st.integers(2, 3000), st.integers(1, 600))
def test_shorter_side_is_met_and_the_other_rounded(height: int, width: int, side: int) -> None:
    resize = Resize(side)
    if not resize.applies(ImageInfo("JPEG", height, width)):
        assert min(height, width) <= side
        return
    got = resize.size(height, width)
    assert min(got) == side < min(height, width)
    assert abs(max(got) - max(height, width) * side / min(height, width)) <= 0.5
    assert (got[0] <= got[1]) == (height <= width) or got[0] == got[1]


def test_size_has_halves_rounded_up() -> None:
    assert Resize(256).size(480, 641) == (256, 342)
    assert Resize(2).size(4, 5) == (2, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (16, 300), (15, 40), (300, 16)])
def test_small_image_is_stored_byte_for_byte(shrunk: Any, photo: Any, height: int, width: int, kind: str) -> None:
    data = photo(height, width, format=kind)
    assert shrunk(data) == data


def test_large_image_is_stored_small_and_the_index_speaks_of_what_is_stored(
    shrunk: Any, photo: Any, tmp_path: Path
) -> None:
    data = shrunk(photo(60, 90), resize=40)
    index = Index.open(tmp_path / "out")
    names = ["height", "width", "orientation", "image_format", "image_bytes", "image_hash"]
    row = {name: index.column(name).tolist()[3] for name in names}
    expected = (40, 60, 1, 0, len(data), hash64(data))  # 0 is JPEG
    assert tuple(row[name] for name in names) == expected
    json_of_row = json.loads(members(tmp_path / "out")["000000003.json"])
    assert json_of_row == {"captions": ["x"], "original_height": 60, "original_width": 90}
    assert "000000000.json" not in members(tmp_path / "out")  # 20 × 30 pixels: not shrunk


@pytest.mark.parametrize(("settings", "quality"), [({}, 95), ({"quality": 70}, 70)])
def test_encoding_is_pillows_with_full_chroma(shrunk: Any, settings: dict[str, int], quality: int) -> None:
    small = smooth(64, 96).resize((24, 16), Image.Resampling.LANCZOS)
    got = shrunk(encode(smooth(64, 96), "PNG"), **settings)
    assert got == encode(small, "JPEG", quality=quality, subsampling="4:4:4")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_and_cleared(shrunk: Any, tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    original = encode(smooth(60, 90), "JPEG", exif=exif, quality=95)
    got = Image.open(io.BytesIO(shrunk(original, resize=40)))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(original)))
    assert got.size == ((60, 40) if orientation < 5 else (40, 60))
    assert psnr(got, upright.resize(got.size, Image.Resampling.LANCZOS)) > 40
    assert not got.getexif()
    stored = json.loads(members(tmp_path / "out")["000000003.json"])
    assert (stored["original_width"], stored["original_height"]) == upright.size


def flat(mode: str, colour: Any) -> Image.Image:
    return Image.new(mode, (40, 40), colour)


FLAT = {
    "alpha, clear": (lambda: encode(flat("RGBA", (0, 0, 0, 0)), "PNG"), (255, 255, 255)),
    "alpha, half": (lambda: encode(flat("RGBA", (255, 0, 0, 128)), "PNG"), (255, 127, 127)),
    "palette": (lambda: encode(flat("RGB", (10, 200, 30)).quantize(4), "PNG"), (10, 200, 30)),
    "16 bits": (lambda: encode(Image.fromarray(np.full((40, 40), 32_896, np.uint16)), "PNG"), (128, 128, 128)),
    "CMYK": (lambda: encode(flat("CMYK", (0, 255, 255, 0)), "JPEG", quality=95), (255, 0, 0)),
    "grey": (lambda: encode(flat("L", 77), "JPEG", quality=95), (77, 77, 77)),
    "first frame": (
        lambda: encode(flat("RGB", "red"), "GIF", save_all=True, append_images=[flat("RGB", "blue")]),
        (255, 0, 0),
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_pixels_of_any_kind_become_rgb(shrunk: Any, name: str) -> None:
    make, colour = FLAT[name]
    got = Image.open(io.BytesIO(shrunk(make())))
    assert (got.format, got.mode, got.size) == ("JPEG", "RGB", (16, 16))
    assert np.abs(np.asarray(got, int) - colour).max() <= 2


def profile(space: bytes = b"RGB ", *, exchanged: bool = False) -> bytes:
    """The sRGB profile, its red and green exchanged, or said to be of another colour space."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = data[:16] + space + data[20:]
    if exchanged:
        data = data.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
    return data


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("icc", "colour"),
    [
        (profile(), (240, 20, 30)),
        (profile(exchanged=True), (20, 240, 30)),
        (profile(b"CMYK"), (240, 20, 30)),
        (profile(b"GRAY"), (240, 20, 30)),
        (b"no profile", (240, 20, 30)),
    ],
)
def test_profile_is_applied_where_it_can_be(shrunk: Any, kind: str, icc: bytes, colour: tuple[int, int, int]) -> None:
    options = {} if kind == "PNG" else {"quality": 100}
    got = Image.open(io.BytesIO(shrunk(encode(flat("RGB", (240, 20, 30)), kind, icc_profile=icc, **options))))
    assert np.abs(np.asarray(got, int) - colour).max() <= 5
    assert "icc_profile" not in got.info


def test_duplicates_are_those_of_the_originals(corpus: Path, tmp_path: Path) -> None:
    for name, size in (("small", 40), ("large", 80)):  # shrunk they are alike
        (corpus / f"{name}.png").write_bytes(encode(flat("RGB", "red").resize((size, size)), "PNG"))
    (corpus / "again.png").write_bytes((corpus / "large.png").read_bytes())
    rows = [{"image": f"{name}.png", "caption": name} for name in ("small", "large", "again")]
    report = convert(jsonl(corpus / "t.jsonl", rows), tmp_path / "out", tolerant(resize=16))
    assert (report.accounts["written"], report.accounts["duplicate"]) == (2, 1)
    stored = members(tmp_path / "out")
    assert stored["000000000.jpg"] == stored["000000001.jpg"]


def test_size_that_the_metadata_says_is_that_of_the_first_original(corpus: Path, tmp_path: Path, photo: Any) -> None:
    (corpus / "it.jpg").write_bytes(photo(60, 90))
    sizes = {"width": 90, "height": 60, "original_width": 900, "original_height": 600}
    table = jsonl(corpus / "t.jsonl", [{"image": "it.jpg", "caption": "x", **sizes}])
    convert(table, tmp_path / "out", ConvertConfig(resize=20, keep=tuple(sizes)))
    stored = json.loads(members(tmp_path / "out")["000000000.json"])
    assert stored == {"captions": ["x"], **sizes, "width": 30, "height": 20}


def test_settings_are_in_the_manifest_and_another_size_is_another_conversion(corpus: Path, tmp_path: Path) -> None:
    table = jsonl(corpus / "t.jsonl", good_rows())
    settings = convert(table, tmp_path / "out", ConvertConfig(resize=16)).accounts["run"]["settings"]
    assert (settings["resize"], settings["quality"]) == (16, 95)
    for other, message in (
        (ConvertConfig(resize=17), r"resize: was 16, is 17\);"),
        (ConvertConfig(resize=16, quality=90), r"quality: was 95, is 90\);"),
        (ConvertConfig(), r"quality: was 95, is not set; resize: was 16, is not set\);"),
    ):
        with pytest.raises(DataError, match=message):
            convert(table, tmp_path / "out", other)


def test_quality_is_no_setting_of_a_conversion_that_shrinks_nothing(corpus: Path, tmp_path: Path) -> None:
    report = convert(jsonl(corpus / "t.jsonl", good_rows()), tmp_path / "out")
    assert "quality" not in report.accounts["run"]["settings"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality": 90}, "quality is that of images that are shrunk or blurred: give resize or blur_boxes as well"),
        ({"resize": 0}, "'resize': expected integer ≥ 1 or null; got 0"),
        ({"resize": 256, "quality": 101}, "'quality': expected integer from 1 to 100; got 101"),
    ],
)
def test_wrong_setting_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(ConvertConfig, settings, origin="settings")
