"""Boxes beside images that are shrunk or turned stay those of the original, and the JSON says how to place them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from tests.convert.sources.corpora import CATEGORIES, coco_box, coco_document, coco_image, samples

BOX = [16, 8, 48, 24]
"""White on black, in 64 × 96 pixels (height × width)."""
_TURN = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270, 8: Image.Transpose.ROTATE_90}


def drawn(orientation: int) -> bytes:
    pixels = np.zeros((64, 96, 3), np.uint8)
    x, y, width, height = BOX
    pixels[y : y + height, x : x + width] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95, exif=exif)
    return buffer.getvalue()


def converted(tmp_path: Path, orientation: int, **settings: Any) -> tuple[dict[str, Any], Image.Image]:
    """The JSON and the image that are stored."""
    (tmp_path / "000000000001.jpg").write_bytes(drawn(orientation))
    image = coco_image(1, height=64, width=96)
    content = coco_document([image], [coco_box(1, 1, 18, BOX)], categories=CATEGORIES)
    (tmp_path / "instances.json").write_text(json.dumps(content))
    config = ConvertConfig(caption_templates=["a {}"], keep=("height", "width"), **settings)
    convert(tmp_path / "instances.json", tmp_path / "out", config, engine=threads(1))
    with tarfile.open(tmp_path / "out/000000.tar") as tar:
        stored = next(tar.extractfile(one).read() for one in tar if one.name.endswith(".jpg"))  # type: ignore[union-attr]
    return samples(tmp_path / "out")[0], Image.open(io.BytesIO(stored))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_box_of_the_original_is_found_in_the_shrunk_image(tmp_path: Path, orientation: int) -> None:
    sample, image = converted(tmp_path, orientation, resize=32)
    assert sample["boxes"][0]["bbox"] == BOX
    assert sample.get("original_orientation", 1) == orientation
    assert ("original_orientation" in sample) == (orientation != 1)
    assert (sample["height"], sample["width"]) == image.size[::-1]
    shown = (96, 64) if orientation >= 5 else (64, 96)
    assert (sample["original_height"], sample["original_width"]) == shown
    # As docs/convert.md says it: the box in the upright original, then scaled by the widths.
    x, y, width, height = BOX
    mask = Image.new("L", (96, 64))
    mask.paste(255, (x, y, x + width, y + height))
    upright = mask.transpose(_TURN[orientation]) if orientation in _TURN else mask
    assert (upright.height, upright.width) == shown
    expected = np.asarray(upright.resize(image.size, Image.Resampling.BOX)) > 127
    assert np.array_equal(np.asarray(image.convert("L")) > 127, expected)


def test_box_beside_an_image_stored_as_it_is_needs_nothing(tmp_path: Path) -> None:
    sample, image = converted(tmp_path, 6)
    assert set(sample) == {"captions", "boxes", "height", "width"}
    pixels = np.asarray(image.convert("L"))
    assert image.size == (sample["width"], sample["height"]) == (96, 64)  # the file is not turned; loading turns it
    x, y, width, height = BOX
    assert pixels[y + 1 : y + height - 1, x + 1 : x + width - 1].min() > 240
    assert pixels[:, : x - 8].max() < 15


def test_boxes_pass_through_tars_that_are_shrunk_later(tmp_path: Path) -> None:
    converted(tmp_path, 6)
    convert(tmp_path / "out", tmp_path / "small", ConvertConfig(resize=32), engine=threads(1))
    (sample,) = samples(tmp_path / "small")
    assert sample["boxes"][0]["bbox"] == BOX
    assert (sample["original_height"], sample["original_width"], sample["original_orientation"]) == (96, 64, 6)


@pytest.mark.parametrize("settings", [{"resize": 32}, {"blur_boxes": "faces"}])
def test_a_turned_image_says_so_under_whatever_key_its_objects_are(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "it.jpg").write_bytes(drawn(6))
    row = {"image": "it.jpg", "caption": "x", "objects": [BOX], "faces": [[0.0, 0.0, 0.1, 0.1]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    convert(tmp_path / "rows.jsonl", tmp_path / "out", ConvertConfig(keep=("objects",), **settings), engine=threads(1))
    (sample,) = samples(tmp_path / "out")
    assert sample["objects"] == [BOX]
    assert (sample["original_height"], sample["original_width"], sample["original_orientation"]) == (96, 64, 6)


def test_merged_rows_keep_what_their_boxes_lost(tmp_path: Path) -> None:
    """Rows of equal images are merged by content; the first one's losses stay counted."""
    for number in (1, 2):
        (tmp_path / f"{number:012d}.jpg").write_bytes(drawn(1))
    boxes = [coco_box(1, 1, 18, BOX), coco_box(2, 1, 18, [0, 0, 0, 0]), coco_box(3, 2, 1, BOX)]
    content = coco_document([coco_image(1), coco_image(2)], boxes, categories=CATEGORIES)
    (tmp_path / "instances.json").write_text(json.dumps(content))
    config = ConvertConfig(caption_templates=["a {}"], group_by="content")
    report = convert(tmp_path / "instances.json", tmp_path / "out", config, engine=threads(1))
    assert samples(tmp_path / "out")[0]["captions"] == ["a dog", "a person"]
    assert (report.accounts["merged"], report.accounts["lost"]) == (1, {"box_unusable": 1})
