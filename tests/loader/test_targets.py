"""`data.targets`: objects of the samples come with their rows, where the crop has gone; others' boxes never do."""

from __future__ import annotations

import io
import json
import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import mmdata
from mmdata import Loader
from mmdata.config import DataConfig, evaluation_data
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError
from mmdata.hashing import hash64
from mmdata.index import build_index
from tests.joins import load as load_joined
from tests.loader.member_tars import json_of, npy, write_tar
from tests.loader.target_tars import COLOURS, Box, classes_png, objects, picture, sample, settings_of

CLASSES = ["cat", "dog", "tree"]
SIZE = (48, 64)
SQUARE_SIZE = (64, 64)
BOXES: list[Box] = [(4, 6, 20, 16), (30, 10, 24, 30), (6, 28, 18, 14)]
NAMES = ["dog", "cat", "tree"]
KEYPOINTS = [[8, 8, 2, 20, 12, 1], [[40, 20, 2], [44, 30, 2]], [10, 30, 2, 20, 36, 0]]
PHRASES = ["a red dog", "a green cat behind it", "a blue tree"]
SQUARE = [[4, 6, 24, 6, 24, 22, 4, 22]]
NAMED = {"boxes": "json:boxes", "box_labels": "json:boxes.category", "box_classes": CLASSES}
EVERYTHING = {
    **NAMED,
    "keypoints": "json:boxes.keypoints",
    "keypoint_swaps": [],
    "masks": "json:boxes.segmentation",
    "box_texts": "json:boxes.phrase",
}


def content(boxes: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The JSON of a sample with the three objects, and what a test changes."""
    listed = objects(BOXES, category=NAMES, keypoints=KEYPOINTS, phrase=PHRASES, segmentation=[SQUARE, None, {**RUNS}])
    return {"boxes": listed if boxes is None else boxes, **changes}


RUNS = {"size": list(SIZE), "counts": [100, 20, 48 * 64 - 120]}


def rows(one: dict[str, bytes] | None, *, number: int = 4) -> dict[str, dict[str, bytes]]:
    """Samples of which the second is another one."""
    good = sample(content(), image=picture(SIZE, BOXES))
    return {f"{row:03d}": one if row == 1 and one is not None else good for row in range(number)}


def load(data: dict[str, Any]) -> tuple[dict[str, Any], Loader]:
    """All batches as one, its rows in the order of the index and padding last; what is joined is joined before."""
    with load_joined(data) as loader:
        found: list[dict[str, Any]] = [dict(batch) for batch in loader]
    batch = {
        name: torch.cat([one[name] for one in found]) for name, value in found[0].items() if torch.is_tensor(value)
    }
    order = torch.argsort(batch["rows"].masked_fill(batch["rows"] < 0, 99))
    return {name: value[order] for name, value in batch.items()}, loader


def seen(batch: dict[str, Any], row: int, place: int) -> torch.Tensor:
    """The mean colour well inside a box."""
    left, top, right, bottom = batch["boxes"][row, place].tolist()
    inner = slice(math.ceil(top) + 1, math.floor(bottom) - 1), slice(math.ceil(left) + 1, math.floor(right) - 1)
    return batch["pixel_values"][row][:, inner[0], inner[1]].float().mean(dim=(1, 2))


def assert_seen(batch: dict[str, Any], row: int, places: list[int]) -> None:
    """The boxes of a row are those of the objects with these numbers."""
    assert batch["boxes_valid"][row].nonzero().flatten().tolist() == list(range(len(places)))
    for k, place in enumerate(places):
        assert (seen(batch, row, k) - torch.tensor(COLOURS[place])).abs().max() < 12, (row, k)


def test_entries_and_their_empty_values(tmp_path: Path):
    data = settings_of(tmp_path, rows(sample(content([]), image=picture(SIZE, []))), tokenizer="clip")
    batch, loader = load({**data, "global_batch_size": 3, "targets": EVERYTHING})
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in batch.items() if hasattr(value, "dtype")}
    assert {name: shape for name, shape in shapes.items() if name.startswith(("box", "key", "mask"))} == {
        "boxes": (torch.float32, (6, 3, 4)),
        "boxes_valid": (torch.bool, (6, 3)),
        "box_labels": (torch.int64, (6, 3)),
        "box_input_ids": (torch.int64, (6, 3, 16)),
        "box_attention_mask": (torch.int64, (6, 3, 16)),
        "box_text_hash": (torch.int64, (6, 3)),
        "keypoints": (torch.float32, (6, 3, 2, 3)),
        "masks": (torch.uint8, (6, 3, 32, 32)),
    }
    tokenizer = loader.builder.spec.tokenizer
    assert tokenizer is not None
    ids, mask = tokenizer.encode(PHRASES, 16)
    assert_seen(batch, 0, [0, 1, 2])
    assert batch["box_labels"][0].tolist() == [1, 0, 2]
    assert batch["box_input_ids"][0].tolist() == ids.tolist()
    assert batch["box_attention_mask"][0].tolist() == mask.tolist()
    assert batch["box_text_hash"][0].tolist() == [hash64(one.tobytes()) for one in ids]
    assert batch["valid"].tolist() == [True, True, True, True, False, False]
    for row in (1, 4, 5):  # without objects, and padding
        assert not batch["boxes"][row].any()
        assert not batch["boxes_valid"][row].any()
        assert batch["box_labels"][row].tolist() == [-1, -1, -1]
        assert (batch["box_input_ids"][row] == tokenizer.pad_id).all()
        assert batch["box_attention_mask"][row].tolist() == [[1] + [0] * 15] * 3
        assert not batch["box_text_hash"][row].any()
        assert not batch["keypoints"][row].any()
        assert not batch["masks"][row].any()
    assert loader.stats.boxes == {"shown": 9}


# Orientation and size: in whose pixels the boxes are


def whole(size: tuple[int, int]) -> dict[str, Any]:
    """Settings by which a batch has all of an image of this size, twice as large."""
    return {"image_buckets": [[2 * size[0], 2 * size[1]]]}


def turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return size[::-1] if orientation >= 5 else size


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("beside", [{}, {"height": 48, "width": 64}])
def test_boxes_of_the_file_are_turned_with_it(tmp_path: Path, orientation: int, beside: dict[str, int]):
    one = sample(content(**beside), image=picture(SIZE, BOXES, orientation=orientation))
    batch, _ = load({**settings_of(tmp_path, {"0": one}), **whole(turned(SIZE, orientation)), "targets": NAMED})
    assert_seen(batch, 0, [0, 1, 2])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [SIZE, SQUARE_SIZE])
@pytest.mark.parametrize("beside", ["nothing", "stored", "upright"])
def test_boxes_of_the_image_as_displayed_are_not_turned(
    tmp_path: Path, orientation: int, size: tuple[int, int], beside: str
):
    sides = {"nothing": (None, None), "stored": turned(size, orientation), "upright": size}[beside]
    one = sample(content(height=sides[0], width=sides[1]), image=displayed(size, orientation))
    data = {**settings_of(tmp_path, {"0": one}), **whole(size)}
    batch, _ = load({**data, "targets": {**NAMED, "box_pixels": "upright"}})
    assert_seen(batch, 0, [0, 1, 2])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("pixels", ["original", "file"])
def test_boxes_of_a_square_image_are_those_of_the_file(tmp_path: Path, orientation: int, pixels: str):
    boxes = content(height=SQUARE_SIZE[0], width=SQUARE_SIZE[1])
    one = sample(boxes, image=picture(SQUARE_SIZE, BOXES, orientation=orientation))
    data = {**settings_of(tmp_path, {"0": one}), **whole(SQUARE_SIZE)}
    batch, _ = load({**data, "targets": {**NAMED, "box_pixels": pixels}})
    assert_seen(batch, 0, [0, 1, 2])


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
@pytest.mark.parametrize("pixels", ["original", "file"])
def test_boxes_whose_size_is_that_of_the_image_as_displayed_are_refused_by_name(
    tmp_path: Path, orientation: int, pixels: str
):
    one = sample(content(height=48, width=64), image=displayed(SIZE, orientation))
    samples = {**rows(None, number=2), "1": one}
    batch, loader = load({**settings_of(tmp_path, samples), "targets": {**NAMED, "box_pixels": pixels}})
    assert batch["valid"].tolist() == [True, True, False]
    assert [entry.detail for entry in loader.ledger] == [
        "data.targets.boxes: member '1.json': boxes are of an image of 48 × 64 pixels (height × width), and the image "
        "has 64 × 48 before its EXIF orientation: box_pixels: upright is for what is of the image as displayed"
    ]


def displayed(size: tuple[int, int], orientation: int) -> bytes:
    """An image with the three objects that looks the same whatever its orientation."""
    turned_back = {6: 8, 8: 6}.get(orientation, orientation)
    return _stored(picture(size, BOXES), turned_back, orientation)


def _stored(image: bytes, turn: int, orientation: int) -> bytes:
    """An image turned by Pillow as an orientation says, and stored with another one."""
    opened = Image.open(io.BytesIO(image))
    opened.getexif()[0x0112] = turn
    moved = ImageOps.exif_transpose(opened)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    moved.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_boxes_of_the_original_follow_an_image_that_was_shrunk(tmp_path: Path, orientation: int | None):
    original, boxes = (96, 128), [tuple(2 * side for side in box) for box in BOXES]
    height, width = turned(original, orientation or 1)
    sizes: dict[str, Any] = {"original_height": height, "original_width": width}
    if orientation is not None:
        sizes["original_orientation"] = orientation
    image = picture(SIZE, BOXES)
    if orientation is not None:
        image = _stored(image, orientation, 1)
    one = sample({"boxes": objects(boxes, category=NAMES), **sizes, "height": 1, "width": 1}, image=image)
    batch, _ = load({**settings_of(tmp_path, {"0": one}), **whole(turned(SIZE, orientation or 1)), "targets": NAMED})
    assert_seen(batch, 0, [0, 1, 2])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_the_file_stay_where_they_are_though_the_original_was_larger(tmp_path: Path, orientation: int):
    sizes = {"original_height": 96, "original_width": 128, "height": 48, "width": 64}
    one = sample(content(**sizes), image=picture(SIZE, BOXES, orientation=orientation))
    data = {**settings_of(tmp_path, {"0": one}), **whole(turned(SIZE, orientation))}
    batch, _ = load({**data, "targets": {**NAMED, "box_pixels": "file"}})
    assert_seen(batch, 0, [0, 1, 2])
    if orientation == 1:
        of_original, _ = load({**data, "targets": NAMED})
        assert torch.allclose(of_original["boxes"], batch["boxes"] / 2)


def test_boxes_of_the_file_are_refused_where_it_had_another_size(tmp_path: Path):
    boxes = content(height=96, width=128, original_height=96, original_width=128)
    message = "boxes are of an image of 96 × 128 pixels .height × width., and the image has 48 × 64"
    assert_masked(tmp_path, boxes, {**NAMED, "box_pixels": "file"}, message)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", [None, 40])
def test_boxes_follow_an_image_that_a_blur_turned_upright(tmp_path: Path, orientation: int, resize: int | None):
    (tmp_path / "it.png").write_bytes(picture(SIZE, BOXES, orientation=orientation))
    row = {"image": "it.png", "caption": "x", "faces": [[0.45, 0.0, 0.46, 0.01]], "boxes": content()["boxes"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "height": SIZE[0], "width": SIZE[1]}) + "\n")
    keep = ("boxes", "height", "width")
    config = ConvertConfig(blur_boxes="faces", keep=keep, resize=resize, quality=100)
    convert(tmp_path / "rows.jsonl", tmp_path / "shards", config, engine=threads(1))
    loading = {"num_workers": 0, "num_processes": 0}
    data = {"shards": str(tmp_path / "shards"), "global_batch_size": 1, "tokenizer": None, "transform": "eval"}
    batch, _ = load(
        {**data, "shuffle": False, "loading": loading, **whole(turned(SIZE, orientation)), "targets": NAMED}
    )
    assert_seen(batch, 0, [0, 1, 2])


@pytest.mark.parametrize("others", [{}, {"box_labels": "json:classes"}])
def test_relative_boxes_of_another_images_size_mask_their_row(tmp_path: Path, others: dict[str, str]):
    boxes = [[left / 64, top / 48, (left + width) / 64, (top + height) / 48] for left, top, width, height in BOXES]
    image, sizes = picture(SIZE, BOXES), [{}, {"height": 3, "width": 5}, {"height": 48, "width": 64}]
    samples = {
        str(k): sample({"boxes": boxes, "classes": [0, 1, 2], **size}, image=image) for k, size in enumerate(sizes)
    }
    targets = {"boxes": "json:boxes", "box_format": "relative", **others}
    batch, loader = load({**settings_of(tmp_path, samples), "targets": targets})
    assert batch["valid"].tolist() == [True, False, True]
    assert_seen(batch, 0, [0, 1, 2])
    assert_seen(batch, 2, [0, 1, 2])
    (entry,) = loader.ledger
    assert "boxes are of an image of 3 × 5 pixels (height × width), and the image has 48 × 64" in entry.detail


@pytest.mark.parametrize("source", ["json:boxes", "npy", "join:other:json:boxes"])
def test_boxes_lie_in_lists_in_arrays_and_in_joined_tars(tmp_path: Path, source: str):
    corners = [[left, top, left + width, top + height] for left, top, width, height in BOXES]
    members = {"npy": npy(np.array(corners, np.float32)), "image": picture(SIZE, BOXES)}
    samples = {f"{row:03d}": sample({"boxes": corners}, **members) for row in range(4)}
    data = settings_of(tmp_path / "tars", samples)
    if source.startswith("join"):
        write_tar(tmp_path / "other/a.tar", {key: {"json": one["json"]} for key, one in samples.items()})
        build_index(tmp_path / "other")
        data["join"] = [{"shards": str(tmp_path / "other"), "name": "other"}]
    batch, _ = load({**data, "targets": {"boxes": source, "box_format": "xyxy"}})
    for row in range(4):
        assert_seen(batch, row, [0, 1, 2])


# What the first rows say


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            {"box_texts": "json:boxes.phrsae"},
            'box_texts: no object of the first rows has "phrsae" .did you mean \'phrase',
        ),
        (
            {"box_labels": "json:boxes.catgory"},
            'box_labels: no object of the first rows has "catgory" .did you mean \'cat',
        ),
        ({"masks": "json:boxes.segmentatoin"}, 'masks: no object of the first rows has "segmentatoin"'),
        ({"keypoints": "json:boxes.points", "keypoint_swaps": [[0, 2]]}, "there is no key point 2; they are 0 to 1"),
    ],
)
def test_a_source_without_a_value_in_the_first_rows_is_refused(tmp_path: Path, targets: dict[str, Any], message: str):
    values = {"phrase": ["a dog"] * 3, "category": NAMES, "points": [[1, 2, 2, 3, 4, 2]] * 3}
    one = sample({"boxes": objects(BOXES, **values)}, image=picture(SIZE, BOXES))
    data = settings_of(tmp_path, {"000": one}, tokenizer="clip")
    with pytest.raises(ConfigError, match=message):
        load({**data, "targets": {"boxes": "json:boxes", **targets}})


def test_boxes_that_look_like_those_of_another_format_or_of_other_classes_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    corners = [[left, top, left + width, top + height] for left, top, width, height in BOXES]
    one = sample({"boxes": objects(corners, category=NAMES)}, image=picture(SIZE, BOXES))
    data = settings_of(tmp_path, {"000": one})
    xyxy = {"boxes": "json:boxes", "box_format": "xyxy"}
    load({**data, "targets": xyxy})
    assert not caplog.records
    load({**data, "targets": {**xyxy, "box_format": "xywh"}})
    assert "boxes reach beyond their image: is data.targets.box_format right, which is xywh?" in caplog.text
    load({**data, "targets": {**xyxy, "box_labels": "json:boxes.category", "box_classes": NAMES[:1]}})
    assert "boxes are of classes that are not in data.targets.box_classes, and are left out: " in caplog.text


# Boxes that are left out, cut, or too many


@pytest.mark.parametrize(
    ("box", "category", "counted", "shown"),
    [
        ([4, 6, 0, 16], "dog", {"left_out": 1}, [0, 1, 2]),
        ([70, 6, 10, 10], "dog", {"left_out": 1}, [0, 1, 2]),
        ([-30, 6, 20, 10], "dog", {"left_out": 1}, [0, 1, 2]),
        ([6, 28, 18, 14], "car", {"left_out": 1}, [0, 1, 2]),
        ([30, 10, 24, 30], "dog", {}, [0, 1, 2, 1]),
        ([-9, 43, 20, 5], "dog", {"clipped": 1}, [0, 1, 2, 3]),
    ],
)
def test_a_box_without_area_or_of_another_class_is_left_out_and_one_that_reaches_out_is_clipped(
    tmp_path: Path, box: list[float], category: str, counted: dict[str, int], shown: list[int]
):
    listed = objects([*BOXES, box], category=[*NAMES, category])
    one = sample({"boxes": listed}, image=picture(SIZE, [*BOXES, (0, 43, 11, 5)]))
    batch, loader = load({**settings_of(tmp_path, rows(one)), **whole(SIZE), "targets": NAMED})
    assert batch["valid"].all()
    assert_seen(batch, 0, [0, 1, 2])
    assert_seen(batch, 1, shown)
    assert loader.stats.boxes == {"shown": 9 + len(shown), **counted}


def test_boxes_that_a_crop_leaves_out_are_counted(tmp_path: Path):
    one = sample({"boxes": objects([(0, 10, 4, 20), *BOXES[1:]])}, image=picture(SIZE, [(0, 10, 4, 20), *BOXES[1:]]))
    batch, loader = load(
        {**settings_of(tmp_path, {"000": one}), "global_batch_size": 1, "targets": {"boxes": "json:boxes"}}
    )
    assert_seen(batch, 0, [1, 2])  # the square in the middle begins at column 8
    assert loader.stats.boxes == {"shown": 2, "cropped": 1}


def test_of_more_boxes_than_a_batch_has_room_for_the_largest_are_kept_in_their_order(tmp_path: Path):
    boxes: list[Box] = [(20, 2, 6, 6), (10, 10, 20, 20), (34, 4, 4, 4), (34, 30, 12, 14)]
    one = sample({"boxes": objects(boxes)}, image=picture(SIZE, boxes))
    data = {**settings_of(tmp_path, {"000": one}), "global_batch_size": 1}
    batch, loader = load({**data, "targets": {"boxes": "json:boxes", "box_buckets": [2]}})
    assert batch["boxes"].shape == (1, 2, 4)
    assert_seen(batch, 0, [1, 3])
    assert loader.stats.boxes == {"shown": 2, "over": 2}


def test_phrases_are_cut_and_counted_and_an_empty_one_is_none(tmp_path: Path):
    listed = objects(BOXES, phrase=["a dog" + " and a dog" * 20, "\x00 ", None])
    data = settings_of(tmp_path, rows(sample({"boxes": listed}, image=picture(SIZE, BOXES))), tokenizer="clip")
    batch, loader = load({**data, "targets": {"boxes": "json:boxes", "box_texts": "json:boxes.phrase"}})
    tokenizer = loader.builder.spec.tokenizer
    assert tokenizer is not None
    assert batch["box_attention_mask"][1].sum(dim=1).tolist() == [16, 1, 1]
    assert batch["box_input_ids"][1][0].tolist() == tokenizer.encode_cut([listed[0]["phrase"]], 16)[0][0].tolist()
    assert (batch["box_input_ids"][1][1:] == tokenizer.pad_id).all()
    assert batch["box_text_hash"][1].ne(0).tolist() == [True, False, False]
    assert batch["boxes_valid"][1].all()
    assert loader.stats.cut == 1


def test_phrases_of_equal_tokens_are_equal(tmp_path: Path):
    common = "a red cube beside a green ball"
    listed = objects(BOXES, phrase=["Red cube", "red cube", "red cubes"])
    long = objects(BOXES, phrase=[f"{common} and a dog", f"{common} and a cat", "red  cube"])
    samples = {str(k): sample({"boxes": one}, image=picture(SIZE, BOXES)) for k, one in enumerate([listed, long])}
    targets = {"boxes": "json:boxes", "box_texts": "json:boxes.phrase", "box_text_length": 8}
    batch, _ = load({**settings_of(tmp_path, samples, tokenizer="clip"), "targets": targets})
    hashes = batch["box_text_hash"].flatten().tolist()
    assert [hashes.index(one) for one in hashes] == [0, 0, 2, 3, 3, 0]
    assert 0 not in hashes


def test_an_object_without_a_class_or_key_points_is_kept(tmp_path: Path):
    listed = objects(BOXES, category=NAMES, keypoints=KEYPOINTS)
    del listed[1]["category"], listed[1]["keypoints"]
    data = settings_of(tmp_path, rows(sample({"boxes": listed}, image=picture(SIZE, BOXES))))
    targets = {**NAMED, "keypoints": "json:boxes.keypoints"}
    batch, _ = load({**data, "targets": targets})
    assert_seen(batch, 1, [0, 1, 2])
    assert batch["box_labels"][1].tolist() == [1, -1, 2]
    assert batch["keypoints"][1, :, :, 2].tolist() == [[2, 1], [0, 0], [2, 0]]


def test_key_points_lie_on_their_objects(tmp_path: Path):
    middles = [[left + width / 2, top + height / 2, 2] for left, top, width, height in BOXES]
    one = sample({"boxes": objects(BOXES, keypoints=middles)}, image=picture(SIZE, BOXES))
    batch, _ = load(
        {
            **settings_of(tmp_path, {"000": one}),
            "global_batch_size": 1,
            "targets": {"boxes": "json:boxes", "keypoints": "json:boxes.keypoints"},
        }
    )
    for k in range(3):
        x, y, visibility = batch["keypoints"][0, k, 0].tolist()
        assert visibility == 2
        assert (batch["pixel_values"][0, :, int(y), int(x)] - torch.tensor(COLOURS[k])).abs().max() < 12


# Bad input: the row is masked with its reason, and never has other boxes


def changed(place: int = 1, **values: Any) -> list[dict[str, Any]]:
    """The three objects, of which one has other values."""
    listed = content()["boxes"]
    listed[place] = {**listed[place], **values}
    return listed


NOT_A_NUMBER = float("nan")
BAD: dict[str, tuple[Any, str, str]] = {
    "nan": (changed(bbox=[1, 2, NOT_A_NUMBER, 4]), "boxes", r"box 1 is \[1, 2, nan, 4\]; expected four numbers"),
    "infinite": (changed(bbox=[1, 2, float("inf"), 4]), "boxes", "expected four numbers"),
    "a boolean": (changed(bbox=[1, 2, True, 4]), "boxes", "expected four numbers"),
    "a text": (changed(bbox=[1, 2, "3", 4]), "boxes", "expected four numbers"),
    "three numbers": (changed(bbox=[1, 2, 3]), "boxes", "expected four numbers"),
    "no box": (changed(bbox=None), "boxes", "box 1 is None; expected four numbers"),
    "a number that no float holds": (changed(bbox=[1, 2, 10**400, 4]), "boxes", "expected four numbers"),
    "negative width": (changed(bbox=[9, 2, -3, 4]), "boxes", r"box 1 is \[9, 2, -3, 4\] .xywh.: its width or height"),
    "a text for boxes": ("1, 2", "boxes", "'1, 2'; expected a list with one for each box"),
    "shares": ([{"bbox": [0.1, 0.2, 0.5, 0.5]}], "boxes", "all boxes lie from 0 to 1: shares of the image"),
    "class of another type": (
        changed(category=3),
        "box_labels",
        "class 3; expected a name of data.targets.box_classes",
    ),
    "key points of another number": (changed(keypoints=[1, 2, 2]), "keypoints", "expected x, y and visibility of 2"),
    "key points that are none": (changed(keypoints=[1, 2, 2, 3, 4, None]), "keypoints", "visibility of 2"),
    "a phrase that is none": (changed(phrase=7), "box_texts", "phrase 7: caption is int, not a string"),
    "run lengths that do not add up": (
        changed(segmentation={**RUNS, "counts": [100, 20]}),
        "masks",
        "run lengths add up to 120 pixels, and the image has 3,072",
    ),
    "run lengths of another image": (
        changed(segmentation={**RUNS, "size": [64, 48]}),
        "masks",
        r"run lengths of size .*, and the image has 48 × 64 pixels",
    ),
    "a polygon of two corners": (changed(segmentation=[[1, 2, 3, 4]]), "masks", "expected x and y of three or more"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_objects_mask_their_row(tmp_path: Path, kind: str):
    boxes, name, message = BAD[kind]
    targets = EVERYTHING if isinstance(boxes, list) else {"boxes": "json:boxes"}
    assert_masked(tmp_path, {"boxes": boxes}, targets, f"data.targets.{name}: member '001.json': .*{message}")


def assert_masked(folder: Path, one: dict[str, Any] | dict[str, bytes], targets: dict[str, Any], message: str) -> None:
    """A sample of this JSON, or of these members, is masked, and those beside it are not."""
    is_json = "png" not in one
    samples = rows(sample(one, image=picture(SIZE, BOXES)) if is_json else one)
    batch, loader = load({**settings_of(folder, samples, tokenizer="clip"), "targets": targets})
    (entry,) = loader.ledger
    assert (entry.row, entry.stage, entry.reason) == (1, "field", "bad_field")
    assert re.search(message, entry.detail), entry.detail
    assert batch["valid"].tolist() == [True, False, True, True]
    assert not batch["pixel_values"][1].any()
    assert not batch["crop"][1].any()
    if "boxes" in batch:
        assert not batch["boxes"][1].any()
        assert not batch["boxes_valid"][1].any()
        assert_seen(batch, 2, [0, 1, 2])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"height": 480, "width": 640},
            r"boxes are of an image of 480 × 640 pixels .height × width., and the image has",
        ),
        ({"height": 64, "width": 48}, "of 64 × 48 pixels .height × width., and the image has 48 × 64"),
        ({"original_height": 640, "original_width": 480}, "of 640 × 480 pixels"),
        ({"original_height": 480, "original_width": 600}, "of 480 × 600 pixels"),
        ({"original_height": 480, "original_width": 640, "original_orientation": 9}, "original_orientation is 9"),
        ({"height": "48", "width": 64}, "height and width are .'48', 64.; expected numbers of pixels"),
        ({"height": -48, "width": 64}, "expected numbers of pixels"),
        ({"original_height": 75_000, "original_width": 100_000}, "more than 178956970"),
    ],
)
def test_boxes_of_another_image_mask_their_row(tmp_path: Path, sizes: dict[str, Any], message: str):
    assert_masked(tmp_path, {**content(), **sizes}, NAMED, f"data.targets.boxes: member '001.json': .*{message}")


@pytest.mark.parametrize(
    ("box_format", "good", "bad", "message"),
    [
        ("xyxy", [4, 6, 24, 22], [24, 6, 4, 22], r"box 0 is \[24, 6, 4, 22\] .xyxy.: it ends before it begins"),
        ("xyxy", [4, 6, 24, 22], [0.1, 0.1, 1, 1], "shares of the image. box_format: relative"),
        ("relative", [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 1.01, 0.4], "relative boxes lie from 0 to 1: see box_format"),
        ("relative", [0.1, 0.2, 0.3, 0.4], [4, 6, 24, 22], "relative boxes lie from 0 to 1"),
    ],
)
def test_boxes_in_another_format_mask_their_row(
    tmp_path: Path, box_format: str, good: list[float], bad: list[float], message: str
):
    image = picture(SIZE, [])
    samples = {f"{row}": sample({"boxes": [bad if row == 1 else good]}, image=image) for row in range(3)}
    targets = {"boxes": "json:boxes", "box_format": box_format}
    batch, loader = load({**settings_of(tmp_path, samples), "targets": targets})
    (entry,) = loader.ledger
    assert batch["valid"].tolist() == [True, False, True]
    assert re.search(message, entry.detail), entry.detail


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0, 1], "data.targets.box_labels: member '1.json': 2 for 1 boxes"),
        ([1.0], "class 1.0; expected a whole number from 0 on"),
        ([True], "class True; expected a whole number"),
        (["dog"], "class 'dog'; expected a whole number"),
        ([-1], "class -1; expected a whole number"),
        ([2**70], "expected a whole number from 0 on"),
    ],
)
def test_classes_that_are_no_numbers_mask_their_row(tmp_path: Path, bad: list[Any], message: str):
    image = picture(SIZE, [])
    samples = {
        f"{row}": sample({"boxes": [[4, 6, 24, 22]], "classes": bad if row == 1 else [7]}, image=image)
        for row in range(3)
    }
    targets = {"boxes": "json:boxes", "box_labels": "json:classes"}
    batch, loader = load({**settings_of(tmp_path, samples), "targets": targets})
    (entry,) = loader.ledger
    assert message in entry.detail
    assert batch["box_labels"].tolist() == [[7], [-1], [7]]


def test_a_sample_without_boxes_is_masked_and_named(tmp_path: Path):
    one = sample({}, image=picture(SIZE, []))
    batch, loader = load({**settings_of(tmp_path, rows(one)), "targets": NAMED})
    (entry,) = loader.ledger
    assert (entry.row, entry.stage, entry.reason) == (1, "field", "missing_field")
    assert entry.detail == "data.targets.boxes: member '001.json': no 'boxes'; it has caption"
    assert batch["valid"].tolist() == [True, False, True, True]


# Masks of all classes


def where(size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The class of each pixel: 0 on grey, and k + 1 on the k-th object."""
    classes = np.zeros(size, np.uint8)
    for k, (left, top, width, height) in enumerate(BOXES):
        classes[top : top + height, left : left + width] = k + 1
    return classes


@pytest.mark.parametrize("mode", [None, "P", "I;16"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("size", "pixels"), [(SIZE, "original"), (SIZE, "upright"), (SQUARE_SIZE, "upright")])
def test_masks_follow_their_images(
    tmp_path: Path, mode: str | None, orientation: int, size: tuple[int, int], pixels: str
):
    classes = where(size)
    png = classes_png(classes.astype(np.uint16) if mode == "I;16" else classes, mode)
    is_upright = pixels == "upright"
    image = displayed(size, orientation) if is_upright else picture(size, BOXES, orientation=orientation)
    samples = {f"{row}": {**sample({}, image=image), "seg.png": png} for row in range(3)}
    data = {**settings_of(tmp_path, samples), "transform": "train", "crop_scale": [0.4, 0.9], "global_batch_size": 2}
    batch, _ = load({**data, "targets": {"masks": "seg.png", "box_pixels": pixels}})
    assert "boxes" not in batch
    assert batch["masks"].dtype == torch.uint8
    assert (batch["masks"][3] == 255).all()  # padding
    palette = torch.tensor([(128, 128, 128), *COLOURS[:3]])
    for row in range(3):
        distance = (batch["pixel_values"][row].permute(1, 2, 0)[:, :, None] - palette).abs().sum(dim=3)
        is_clear = distance.min(dim=2).values < 10  # not on an edge
        agreed = distance.argmin(dim=2)[is_clear] == batch["masks"][row][is_clear]
        assert is_clear.float().mean() > 0.5
        assert agreed.float().mean() > 0.99


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (classes_png(where((40, 64))), "a mask of 40 × 64 pixels .height × width., and the image has 48 × 64"),
        (classes_png(where(SIZE), "RGB"), "a PNG of mode RGB; expected one number for each pixel"),
        (classes_png(where(SIZE).astype(np.uint16) * 100), "a PNG with the number 300; they are at most 255"),
        (classes_png(where(SIZE))[:-30], "not a PNG: "),
        (b"no image", "not a PNG: "),
    ],
)
def test_masks_that_are_none_mask_their_row(tmp_path: Path, mask: bytes, message: str):
    good = {**sample({}, image=picture(SIZE, BOXES)), "seg.png": classes_png(where(SIZE))}
    samples = {f"{row}": {**good, "seg.png": mask} if row == 1 else good for row in range(3)}
    batch, loader = load({**settings_of(tmp_path, samples), "targets": {"masks": "seg.png"}})
    (entry,) = loader.ledger
    assert re.search(f"data.targets.masks: member '1.seg.png': {message}", entry.detail), entry.detail
    assert batch["valid"].tolist() == [True, False, True]
    assert (batch["masks"][1] == 255).all()


@pytest.mark.parametrize("pixels", ["original", "file"])
def test_a_mask_of_the_size_as_displayed_is_refused_by_name(tmp_path: Path, pixels: str):
    good = {**sample({}, image=picture(SIZE, BOXES)), "seg.png": classes_png(where(SIZE))}
    bad = {**good, "png": displayed(SIZE, 6)}
    data = settings_of(tmp_path, {"0": good, "1": bad})
    batch, loader = load({**data, "targets": {"masks": "seg.png", "box_pixels": pixels}})
    (entry,) = loader.ledger
    assert batch["valid"].tolist() == [True, False]
    assert entry.detail == (
        "data.targets.masks: member '1.seg.png': a mask of 48 × 64 pixels (height × width), and the image has 64 × 48 "
        "before its EXIF orientation: box_pixels: upright is for what is of the image as displayed"
    )


# Settings


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"boxes": "json:boxs"}, "data.targets.boxes: none of the first 4 rows has a value: .*did you mean 'boxes'"),
        ({"boxes": "txt"}, "data.targets.boxes: member 'txt' is none of json, npy, npz"),
        ({"boxes": "boxes"}, "data.targets.boxes: no source 'boxes'"),
        ({"masks": "json:boxes.segmentation"}, "are outlines of boxes: set data.targets.boxes"),
        ({"boxes": "json:boxes", "masks": "npy"}, "data.targets.masks: member 'npy' is none of json, png"),
        ({"boxes": "json:boxes", "box_labels": "json:boxes.category"}, "names, such as .'cat', 'dog', 'tree'.: list"),
        ({"boxes": "json:boxes", "keypoints": "json:boxes.category"}, "none of the first rows has x, y and visibility"),
        ({"boxes": "json:boxes", "box_texts": "json:boxes.phrase"}, "targets.box_texts are tokenized: set tokenizer"),
    ],
)
def test_sources_that_cannot_be_are_refused(tmp_path: Path, targets: dict[str, Any], message: str):
    data = settings_of(tmp_path, rows(None))
    with pytest.raises(ConfigError, match=message):
        Loader.from_config({**data, "targets": targets})


def test_masks_of_images_in_patches_are_refused(tmp_path: Path):
    data = settings_of(tmp_path, rows(None), image_patches=[16])
    with pytest.raises(
        ConfigError, match=r"images in patches keep their own: leave image_patches or targets.masks out"
    ):
        Loader.from_config({**data, "targets": {"masks": "seg.png"}})


def test_a_state_of_other_targets_is_refused(tmp_path: Path):
    data = settings_of(tmp_path, rows(None))
    with Loader.from_config({**data, "targets": NAMED}) as loader:
        state = loader.state_dict()
    with (
        Loader.from_config({**data, "targets": {**NAMED, "box_classes": CLASSES[::-1]}}) as other,
        pytest.raises(ConfigError, match=r"this loader state belongs to other batches: targets was .* and is"),
    ):
        other.load_state_dict(state)


def test_joined_tars_without_a_row_decide_what_becomes_of_it(tmp_path: Path):
    samples = rows(None)
    data = settings_of(tmp_path / "tars", samples)
    others = {key: {"json": json_of(content())} for key in list(samples)[:3]}
    write_tar(tmp_path / "other/a.tar", others)
    build_index(tmp_path / "other")
    join = {"shards": str(tmp_path / "other"), "name": "other"}
    targets = {"boxes": "join:other:json:boxes"}
    for missing, number in (("mask", 3), ("keep", 4)):
        batch, _ = load({**data, "join": [{**join, "missing": missing}], "targets": targets})
        assert int(batch["valid"].sum()) == number
        assert not batch["boxes_valid"][3].any()


def test_patches_have_boxes_in_pixels_of_the_resized_image(tmp_path: Path):
    data = settings_of(tmp_path, rows(None), image_patches=[48], patch_size=8)
    batch, _ = load({**data, "targets": NAMED})
    assert batch["spatial_shapes"].tolist() == [[6, 8]] * 4
    expected = [[left, top, left + width, top + height] for left, top, width, height in BOXES]
    assert (batch["boxes"][0] - torch.tensor(expected)).abs().max() <= 1e-3


def test_blank_batches_have_the_entries(tmp_path: Path):
    data = settings_of(tmp_path, rows(None), tokenizer="clip")
    with Loader.from_config({**data, "targets": EVERYTHING}) as loader:
        made, blank = dict(next(iter(loader))), dict(loader.blank_batches()[0][1]())
    assert {name: value.shape for name, value in blank.items() if hasattr(value, "shape")} == {
        name: value.shape for name, value in made.items() if hasattr(value, "shape")
    }
    assert not blank["boxes_valid"].any()


def test_a_stream_has_the_objects_of_its_samples(tmp_path: Path):
    data = settings_of(tmp_path, rows(None, number=9), tokenizer="clip", targets=EVERYTHING)
    given = {key: value for key, value in data.items() if key != "shards"}
    with mmdata.stream(tmp_path, given) as stream:
        for batch in islice(stream, 2):
            for row in range(4):
                assert_seen(dict(batch), row, [0, 1, 2])


def test_a_member_that_changed_masks_its_row(tmp_path: Path):
    data = settings_of(tmp_path, rows(None))
    with Loader.from_config({**data, "targets": NAMED}):
        pass  # counts the boxes
    tar = tmp_path / "a.tar"
    tar.write_bytes(tar.read_bytes().replace(b'"bbox": [4, 6', b'"bbox": [5, 6', 1))
    batch, loader = load({**data, "targets": NAMED})
    (entry,) = loader.ledger
    assert entry.detail == (
        "data.targets.boxes: member '000.json': its bytes are not those that were indexed; see `mmdata verify`"
    )
    assert batch["boxes_valid"].any(dim=1).tolist() == [False, True, True, True]


def test_an_evaluation_on_shards_without_boxes_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = settings_of(tmp_path / "tars", rows(None), targets=NAMED)
    settings_of(tmp_path / "val", {"0": sample({}, image=picture(SIZE, []))})
    data["val"] = {"shards": str(tmp_path / "val")}
    batch, _ = load(dict(evaluation_data(DataConfig.model_validate(data))))
    assert batch["valid"].tolist() == [True, False, False, False]
    assert "boxes" not in batch
    (warning,) = [record.getMessage() for record in caplog.records if "data.targets" in record.getMessage()]
    assert warning.startswith(f"shards '{tmp_path}/val' are evaluated without data.targets: data.targets.boxes: none")
    with pytest.raises(ConfigError, match=r"data\.targets\.boxes: none of the first 1 rows has a value"):
        Loader.from_config({**data, "shards": str(tmp_path / "val"), "val": {}})


@pytest.mark.parametrize("shards", [None, "other"])
def test_an_evaluation_keeps_boxes_but_not_those_of_tars_that_it_does_not_join(tmp_path: Path, shards: str | None):
    val = {"share": 0.1} if shards is None else {"shards": shards}
    data = DataConfig.model_validate(
        {"shards": "x", "global_batch_size": 4, "tokenizer": None, "val": val, "targets": {**NAMED, "keep_boxes": True}}
    )
    kept = evaluation_data(data).targets
    assert kept is not None
    assert (kept.boxes, kept.keep_boxes) == ("json:boxes", False)
    joined = data.model_copy(update={"targets": data.targets.model_copy(update={"boxes": "join:other:json:boxes"})})  # pyright: ignore
    assert (evaluation_data(joined).targets is None) == (shards is not None)
