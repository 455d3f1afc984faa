"""Warnings of decoders: told once for each kind, with the name of the sample, in index, convert and decoding."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmdata.convert.convert import convert
from mmdata.convert.engines import threads
from mmdata.convert.recipe import ConvertConfig
from mmdata.images import pillow, probe
from mmdata.images.decode import decode
from mmdata.images.pillow import name_warnings
from mmdata.index import build_index


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """As in a process that has decoded nothing yet."""
    monkeypatch.setattr(pillow, "_told", set())
    caplog.set_level(logging.WARNING, "mmdata")
    return caplog


@pytest.fixture
def warned_of(photo: Callable[..., bytes]) -> bytes:
    """A JPEG of whose EXIF data Pillow warns."""
    data = photo(20, 30)
    return data[:2] + b"\xff\xe1\x00\x10Exif\0\0MM\0\x2a\xff\xff\xff\xff" + data[2:]


def test_decoder_warning_names_its_sample_once(
    anew: pytest.LogCaptureFixture, tmp_path: Path, tar, warned_of: bytes, recwarn: pytest.WarningsRecorder
):
    warnings.simplefilter("always")
    shards = tmp_path / "shards"
    shards.mkdir()
    members = [(f"{key}.{end}", data) for key in "ab" for end, data in (("jpg", warned_of), ("txt", b"x"))]
    (shards / "a.tar").write_bytes(tar(members))
    build_index(shards)
    (record,) = anew.records
    assert record.getMessage() == (
        "shard 'a.tar', sample 'a': Pillow warns: Corrupt EXIF data. Expecting to read 2 bytes but only got 0. "
        "(said once, for the first image like it)"
    )
    assert not [w for w in recwarn if "EXIF" in str(w.message)]


def test_decoder_warning_of_convert_names_its_row(anew: pytest.LogCaptureFixture, tmp_path: Path, warned_of: bytes):
    (tmp_path / "images").mkdir()
    for name in ("a", "b\x1b[2J"):
        (tmp_path / f"images/{name}.jpg").write_bytes(warned_of + name.encode())
        (tmp_path / f"images/{name}.txt").write_text("x")
    convert(tmp_path / "images", tmp_path / "out", ConvertConfig(), engine=threads(2))
    (record,) = anew.records
    assert record.getMessage().startswith(("a.jpg: Pillow warns: Corrupt", r"b\x1b[2J.jpg: Pillow warns: Corrupt"))


def test_decoder_warnings_of_many_threads_are_told_once(anew: pytest.LogCaptureFixture):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 30)).save(buffer, "TIFF")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\x03\x01\x03\x00")  # compression, one value: now two
    data[at + 4] = 2
    warnings.simplefilter("always")

    def one(number: int) -> Any:
        with name_warnings(lambda: f"sample {number}"):
            return decode(bytes(data), format="TIFF").shape

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(one, range(64)))) == 1
    (record,) = anew.records
    assert "Pillow warns: Metadata Warning, tag 259 had too many entries: 2, expected 1" in record.getMessage()


def test_decoder_warnings_of_others_go_their_usual_way(anew: pytest.LogCaptureFixture, warned_of: bytes):
    with name_warnings(lambda: "mine"), pytest.warns(UserWarning, match="a user's"):
        warnings.warn("a user's", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        probe(warned_of)  # not within name_warnings
    assert not anew.records
