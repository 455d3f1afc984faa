"""Images of formats that are known and not read: one reason, whoever meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mmdata.convert.convert import convert
from mmdata.convert.engines import threads
from mmdata.convert.recipe import ConvertConfig
from mmdata.errors import BadSample, Reason
from mmdata.images import probe
from mmdata.images.unread import unread_format
from mmdata.index import build_index

UNREAD = {
    "jp2": ("JPEG 2000", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(30)),
    "psd": ("Photoshop", b"8BPS\0\1" + bytes(30)),
    "svg": ("SVG", b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- drawn -->\n<SVG xmlns="http://www.w3.org/2000/svg"/>'),
    "pdf": ("PDF", b"%PDF-1.7\n"),
    "eps": ("PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n"),
    "fits": ("FITS", b"SIMPLE  =                    T" + b" " * 50),
    "ico": ("ICO", b"\0\0\1\0\1\0\x10\x10" + bytes(30)),
    "cur": ("CUR", b"\0\0\2\0\1\0\x10\x10" + bytes(30)),
    "exr": ("OpenEXR", b"\x76\x2f\x31\x01\2\0\0\0" + bytes(30)),
    "hdr": ("Radiance HDR", b"#?RADIANCE\n"),
    "ppm": ("Netpbm", b"P6\n2 2\n255\n" + bytes(12)),
    "qoi": ("QOI", b"qoif" + bytes(30)),
    "dcm": ("DICOM", bytes(128) + b"DICM" + bytes(30)),
    "cr3": ("camera raw", b"\0\0\0\x18ftypcrx \0\0\0\1crx isom" + bytes(30)),
}
NO_IMAGES = [
    b"",
    b"<html>",
    b"<?xml version='1.0'?><rss/>",
    b"\0\0\0\x18ftypmp42" + bytes(30),
    b"Portable",
    b"\x80\x04.",
]


@pytest.mark.parametrize("end", UNREAD)
def test_unread_format_is_named(end):
    name, data = UNREAD[end]
    assert (unread_format(data), unread_format(memoryview(data))) == (name, name)
    with pytest.raises(BadSample, match=f"^unsupported_format: {name}, which is not read; starts with b"):
        probe(data)


@pytest.mark.parametrize("data", NO_IMAGES)
def test_unread_format_is_no_name_for_what_is_no_image(data):
    assert unread_format(data) is None


def test_unread_format_has_one_reason_in_index_and_convert(tmp_path: Path, tar, photo: Callable[..., bytes]):
    members = [("good.jpg", photo(20, 30)), ("good.txt", b"good")]
    for end, (_, data) in UNREAD.items():
        members += [(f"{end}.{end}", data), (f"{end}.txt", b"a picture")]
    shards, images = tmp_path / "shards", tmp_path / "images"
    shards.mkdir()
    images.mkdir()
    (shards / "a.tar").write_bytes(tar(members))
    for name, data in members:
        (images / name).write_bytes(data)
    config = partial(ConvertConfig, max_bad_share=1.0)

    def of_convert(source: Path, out: Path) -> dict[str, tuple[str, str]]:
        convert(source, out, config(), engine=threads(1))
        lines = map(json.loads, (out / "__mmdata__/quarantine.jsonl").read_text().splitlines())
        return {Path(line["path"] or line["place"]).stem: (line["reason"], line["detail"]) for line in lines}

    indexed = build_index(shards, out=tmp_path / "index", max_bad_share=1.0).quarantined
    found = [
        {line["key"]: (line["reason"], line["detail"]) for line in indexed},
        of_convert(images, tmp_path / "from images"),
    ]
    assert found[0].keys() == UNREAD.keys()
    assert {reason for reason, _ in found[0].values()} == {Reason.UNSUPPORTED_FORMAT.value}
    assert found[1] == found[0]
    packed = of_convert(shards, tmp_path / "from tars")
    assert sorted(packed.values()) == sorted(found[0].values())
