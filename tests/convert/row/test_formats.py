"""AVIF and HEIC: stored as they are, shrunk where their decoder is installed, and named where it is not."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.units.engines import threads
from mmdata.images import FORMATS
from mmdata.images.decode import decode, oriented
from mmdata.index import Index
from mmdata.storage.folder import find_ledger
from tests.convert.row.test_resize import profile
from tests.pictures import FILES, needs_heif, picture, stored

REMEDIES = {
    "AVIF": "AVIF needs a Pillow with its codec: `pip install -U pillow`",
    "HEIF": "HEIF needs pillow-heif: `pip install 'mmdata[heic]'`",
}
needs_avif = pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF codec")


def avif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    picture().save(buffer, "AVIF", exif=exif, quality=90)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Three images with captions: of each of the two formats, and a JPEG."""
    root = tmp_path / "corpus"
    root.mkdir()
    images = {"a.avif": avif(), "b.heic": stored("turned.heic"), "c.jpg": photo(31, 21)}
    for name, data in images.items():
        (root / name).write_bytes(data)
        (root / name).with_suffix(".txt").write_text(f"picture {name}")
    return root


def run(source: Path, out: Path, **settings: Any) -> Report:
    config = ConvertConfig(**{"max_bad_share": 1.0, **settings})
    return convert(source, out, config, engine=threads(1))


def members(out: Path) -> dict[str, bytes]:
    with tarfile.open(out / "000000.tar") as tar:
        return {one.name: tar.extractfile(one).read() for one in tar if not one.name.endswith("txt")}  # type: ignore


def ledger(out: Path) -> dict[str, tuple[str, str]]:
    lines = map(json.loads, find_ledger(out).read_text().splitlines())
    return {Path(line["path"]).suffix: (line["reason"], line["detail"]) for line in lines}


def assert_stored_as_they_are(folder: Path, out: Path) -> None:
    names = ["a.avif", "b.heic", "c.jpg"]
    expected = {f"{i:09d}{Path(name).suffix}": (folder / name).read_bytes() for i, name in enumerate(names)}
    assert members(out) == expected
    index = Index.open(out)
    assert [FORMATS[number] for number in index.column("image_format")] == ["AVIF", "HEIF", "JPEG"]
    assert index.column("orientation").tolist() == [6, 1, 1]  # AVIF is turned when it is loaded
    sizes = list(zip(index.column("height").tolist(), index.column("width").tolist(), strict=True))
    assert sizes == [(21, 31), (31, 21), (31, 21)]


@needs_avif
@needs_heif
@pytest.mark.parametrize("check", ["full", "header"])
def test_images_are_stored_byte_for_byte(folder: Path, tmp_path: Path, check: str):
    report = run(folder, tmp_path / "out", check=check)
    assert report.accounts["written"] == 3
    assert_stored_as_they_are(folder, tmp_path / "out")


@needs_avif
@needs_heif
def test_resize_reads_them_and_turns_them_once(folder: Path, tmp_path: Path):
    assert run(folder, tmp_path / "out", resize=10).accounts["written"] == 3
    small = Image.fromarray(oriented(np.asarray(picture()), 6)).resize((10, 15), Image.Resampling.LANCZOS)
    for number in range(2):
        image = Image.open(io.BytesIO(members(tmp_path / "out")[f"{number:09d}.jpg"]))
        assert image.size == (10, 15)
        assert np.abs(np.asarray(image, int) - np.asarray(small, int)).mean() < 15  # turned wrongly above 50


@needs_heif
@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.format == "HEIF"])
def test_resize_shrinks_the_pixels_that_the_loader_gives(tmp_path: Path, name: str):
    root = tmp_path / "corpus"
    root.mkdir()
    (root / name).write_bytes(stored(name))
    (root / name).with_suffix(".txt").write_text("a picture")
    run(root, tmp_path / "out", resize=16)
    pixels = decode(stored(name), format="HEIF").permute(1, 2, 0).numpy()
    size = (16, 24) if FILES[name].height > FILES[name].width else (24, 16)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=95, subsampling=0)
    assert members(tmp_path / "out")["000000000.jpg"] == buffer.getvalue()


@pytest.mark.usefixtures("no_decoders")
def test_without_decoders_the_ledger_says_what_to_install(folder: Path, tmp_path: Path):
    for settings in ({}, {"check": "header", "resize": 10}):  # what is shrunk is decoded
        assert run(folder, tmp_path / "out", **settings).accounts["reasons"] == {"unsupported_format": 2}
        expected = {".avif": REMEDIES["AVIF"], ".heic": REMEDIES["HEIF"]}
        assert ledger(tmp_path / "out") == {end: ("unsupported_format", detail) for end, detail in expected.items()}
        assert set(members(tmp_path / "out")) == {"000000002.jpg"} | ({"000000002.json"} if settings else set())
        tmp_path = tmp_path / "header"


@needs_heif
def test_profile_of_a_heic_is_applied_by_resize(tmp_path: Path):
    import pillow_heif

    root = tmp_path / "corpus"
    root.mkdir()
    image = Image.new("RGB", (64, 64), (240, 20, 30))
    image.info["icc_profile"] = profile(exchanged=True)
    pillow_heif.from_pillow(image).save(root / "a.heic", quality=-1)
    (root / "a.txt").write_text("red that the profile makes green")
    run(root, tmp_path / "out", resize=16)
    got = Image.open(io.BytesIO(members(tmp_path / "out")["000000000.jpg"]))
    assert np.abs(np.asarray(got, int) - (20, 240, 30)).max() <= 6
    assert "icc_profile" not in got.info
