"""Boxes of a column that are blurred: what is covered, what stays, and that nothing goes unblurred for a bad cell."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.row.blur import MAX_BOXES, BlurBox, blur, parse_boxes
from mmdata.convert.units.engines import threads
from mmdata.errors import BadSample, ConfigError, DataError, Reason
from mmdata.hashing import hash64
from mmdata.index import Index
from tests.convert.conftest import content, jsonl, left_out, tolerant
from tests.convert.test_resize import members

Outcome = Callable[..., tuple[str, str]]
FACE = [0.25, 0.25, 0.5, 0.75]
"""160 × 240 pixels of the 640 × 480 of `checks`; with its margin it covers 136 to 344 across and 96 to 384 down."""
COVERED = (slice(96, 384), slice(136, 344))


def checks(height: int = 480, width: int = 640) -> Image.Image:
    """Black and white squares of 8 pixels, each side another colour, so that every turn of the image shows."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.where((rows // 8 + columns // 8) % 2, 255, 0)[..., None] * np.ones(3)
    pixels[: height // 8] *= (1, 0, 0)
    pixels[:, : width // 8] *= (0, 1, 0)
    return Image.fromarray(pixels.astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 95, "subsampling": 0, **options})
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int64)


@pytest.fixture
def stored(outcome: Outcome, corpus: Path, tmp_path: Path) -> Callable[..., bytes]:
    """`stored(data, boxes, **settings)`: what is stored of an image."""

    def run(data: bytes, boxes: Any, **settings: Any) -> bytes:
        (corpus / "it").write_bytes(data)
        row = {"image": "it", "caption": "x", "face_bboxes": boxes}
        assert outcome(row, **{"blur_boxes": "face_bboxes", **settings}) == ("", "")
        return next(data for name, data in members(tmp_path / "out").items() if name.startswith("000000003.j"))

    return run


# The blur


def test_blur_covers_box_and_margin_and_nothing_else() -> None:
    image = checks()
    before, after = np.asarray(image, np.int64), np.asarray(blur(image, [BlurBox(*FACE)]), np.int64)
    changed = (before != after).any(axis=2)
    assert not changed[: COVERED[0].start].any()
    assert not changed[COVERED[0].stop :].any()
    assert not changed[:, : COVERED[1].start].any()
    assert not changed[:, COVERED[1].stop :].any()
    assert changed[COVERED].mean() > 0.99
    inside = (slice(120, 360), slice(160, 320))
    assert before[inside].std() > 120
    assert after[inside].std() < 3


@settings(max_examples=25)
@given(
    st.tuples(*[st.integers(0, 79)] * 2, *[st.integers(1, 80)] * 2),
    st.sampled_from([(40, 60), (61, 33), (5, 90), (1, 1)]),
)
def test_blurred_pixels_are_those_of_the_whole_image_blurred(box: tuple[int, ...], size: tuple[int, int]) -> None:
    left, top, width, height = (number / 80 for number in box)
    found = BlurBox(left, top, min(1.0, left + width), min(1.0, top + height))
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8))
    longer = max((found.right - found.left) * image.width, (found.bottom - found.top) * image.height)
    whole = np.asarray(image.filter(ImageFilter.GaussianBlur(max(1.0, 0.1 * longer))))
    before, after = np.asarray(image), np.asarray(blur(image, [found]))
    same, blurred = (before == after).all(axis=2), (whole == after).all(axis=2)
    assert (same | blurred).all()
    rows = slice(int(found.top * image.height), int(np.ceil(found.bottom * image.height)))
    assert blurred[rows, int(found.left * image.width) : int(np.ceil(found.right * image.width))].all()


def test_larger_blur_holds_where_boxes_overlap_in_any_order() -> None:
    small, large = BlurBox(0.4, 0.4, 0.5, 0.5), BlurBox(0.1, 0.1, 0.9, 0.9)
    image = checks()
    alone = np.asarray(blur(image, [large]))
    for boxes in ([small, large], [large, small], [large, small, large]):
        assert np.array_equal(np.asarray(blur(image, boxes)), alone)


# Cells


@pytest.mark.parametrize("cell", [None, "", " ", [], "[]", "null"])
def test_empty_cell_is_no_box(cell: Any) -> None:
    assert parse_boxes(cell) == []


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ([FACE], [BlurBox(*FACE)]),
        (json.dumps([FACE, [0, 0, 1, 1]]), [BlurBox(*FACE), BlurBox(0, 0, 1, 1)]),
        ([[-0.2, 0.5, 1.01, 1.5]], [BlurBox(0, 0.5, 1, 1)]),
        ([[0.5, 0.5, 0.50001, 0.9]], [BlurBox(0.5, 0.5, 0.50001, 0.9)]),
    ],
)
def test_cell_is_a_list_of_boxes_or_its_json(cell: Any, expected: list[BlurBox]) -> None:
    assert parse_boxes(cell) == expected


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("[[0, 0, 1, 1]", r"'\[\[0, 0, 1, 1\]' is no JSON"),
    "deep JSON": ("[" * 100_000, "is no JSON"),
    "a long number": ("[[" + "9" * 5000 + ", 0, 1, 1]]", "is no "),
    "an object": ({"boxes": []}, "is no list of boxes"),
    "a number": (0.5, "0.5 is no list of boxes"),
    "bytes": (b"[]", "is no list of boxes"),
    "one box": (FACE, "0.25 is no box of four numbers"),
    "three numbers": ([[0, 0, 1]], r"'\[0, 0, 1\]' is no box of four numbers, \[left, top, right, bottom\]"),
    "five numbers": ([[0, 0, 1, 1, 0.9]], "is no box of four numbers"),
    "text": ([["0", "0", "1", "1"]], "is no box of four numbers"),
    "a truth value": ([[False, 0, 1, 1]], "is no box of four numbers"),
    "null": ([[None, 0, 1, 1]], "is no box of four numbers"),
    "null for a box": ([None, FACE], "None is no box of four numbers"),
    "NaN": ([[float("nan"), 0, 1, 1]], "is no box in shares of the image's width and height, 0 to 1; pixels are not"),
    "NaN in JSON": ("[[0, 0, NaN, 1]]", "is no box in shares"),
    "infinity": ("[[0, 0, Infinity, 1]]", "is no box in shares"),
    "pixels": ([[120, 80, 360, 200]], "is no box in shares"),
    "right before left": ([[0.5, 0, 0.4, 1]], "is an empty box: its right must be beyond its left, and its bottom bel"),
    "no height": ([[0, 0.5, 1, 0.5]], "is an empty box"),
    "beside the image": ([[1.1, 0, 1.5, 1]], r"'\[1.1, 0, 1.5, 1\]' is a box outside the image"),
    "touching it": ([[-0.5, 0, 0, 1]], "is a box outside the image"),
    "too many": ([FACE] * (MAX_BOXES + 1), f"holds {MAX_BOXES + 1} boxes; at most {MAX_BOXES} are blurred"),
    "one good, one bad": ([FACE, [0, 0, 0, 0]], "is an empty box"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_cell_is_a_broken_row(name: str) -> None:
    cell, message = BAD[name]
    with pytest.raises(BadSample, match=f"^broken_row: boxes to blur: .*{message}") as caught:
        parse_boxes(cell)
    assert caught.value.reason is Reason.BROKEN_ROW


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
CELLS = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=5), max_leaves=12)


@settings(max_examples=200)
@given(CELLS | CELLS.map(repr) | st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), max_size=3))
def test_any_cell_gives_boxes_within_the_image_or_a_broken_row(cell: Any) -> None:
    try:
        boxes = parse_boxes(cell)
    except BadSample:
        return
    assert boxes or not cell or str(cell).strip() in ("", "null", "[]")
    assert all(0 <= box.left < box.right <= 1 and 0 <= box.top < box.bottom <= 1 for box in boxes)


# Conversions


def test_image_with_a_box_is_stored_blurred_and_the_rest_is_within_jpegs_loss(stored: Any, tmp_path: Path) -> None:
    original = jpeg(checks())
    got = stored(original, [FACE])
    loss = np.abs(pixels(jpeg(Image.open(io.BytesIO(original)))) - pixels(original)).max()
    outside = np.ones((480, 640), bool)
    outside[88:392, 128:352] = False  # a block of 8 × 8 that the margin lies in is coded anew
    assert np.abs(pixels(got) - pixels(original))[outside].max() <= loss
    assert pixels(original)[120:360, 160:320].std() > 120
    assert pixels(got)[120:360, 160:320].std() < 3
    assert got == jpeg(blur(Image.open(io.BytesIO(original)), [BlurBox(*FACE)]))
    index = Index.open(tmp_path / "out")
    assert index.column("image_hash").tolist()[3] == hash64(got)
    assert json.loads(members(tmp_path / "out")["000000003.json"]) == {"captions": ["x"], "blurred": 1}


@pytest.mark.parametrize("boxes", [None, [], "", "[]"])
@pytest.mark.parametrize("check", ["full", "header"])
def test_image_without_boxes_is_stored_byte_for_byte(stored: Any, tmp_path: Path, boxes: Any, check: str) -> None:
    original = jpeg(checks(), quality=70)
    assert stored(original, boxes, check=check) == original
    assert json.loads(members(tmp_path / "out")["000000003.json"]) == {"captions": ["x"], "blurred": 0}


def test_headers_alone_do_not_keep_a_box_from_being_blurred(stored: Any) -> None:
    assert pixels(stored(jpeg(checks()), [FACE], check="header"))[120:360, 160:320].std() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_of_the_image_as_displayed(stored: Any, tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = checks(320, 480) if orientation < 5 else checks(480, 320)
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    kept = shown.transpose(back[orientation]) if orientation > 1 else shown
    got = pixels(stored(jpeg(kept, exif=exif), [[0.0, 0.0, 0.4, 0.2]]))
    height, width = shown.height, shown.width
    assert got.shape == (height, width, 3)
    assert got[4 : height // 5 - 4, 4 : width * 2 // 5 - 4].std(axis=(0, 1)).max() < 60
    assert np.abs(got - np.asarray(shown, np.int64))[height // 2 :].mean() < 8
    index = Index.open(tmp_path / "out")
    row = [index.column(name).tolist()[3] for name in ("height", "width", "orientation")]
    assert row == [height, width, 1]


def test_image_is_blurred_before_it_is_shrunk(stored: Any, tmp_path: Path) -> None:
    original = jpeg(checks())
    blurred = blur(Image.open(io.BytesIO(original)), [BlurBox(*FACE)])
    small = blurred.resize((160, 120), Image.Resampling.LANCZOS)
    assert stored(original, [FACE], resize=120, quality=80) == jpeg(small, quality=80)
    said = json.loads(members(tmp_path / "out")["000000003.json"])
    assert said == {"captions": ["x"], "blurred": 1, "original_height": 480, "original_width": 640}


def test_image_too_small_to_be_shrunk_is_blurred_all_the_same(stored: Any, tmp_path: Path) -> None:
    original = jpeg(checks(48, 64))
    got = stored(original, [FACE, [0, 0, 0.1, 0.1]], resize=400)
    assert got == jpeg(blur(Image.open(io.BytesIO(original)), [BlurBox(0, 0, 0.1, 0.1), BlurBox(*FACE)]))
    assert json.loads(members(tmp_path / "out")["000000003.json"]) == {"captions": ["x"], "blurred": 2}


@pytest.mark.parametrize("cell", ["[[0, 0, 2, NaN]]", "0.1 0.1 0.2 0.2", [[7, 7, 9, 9]], [[0.1, 0.2, 0.3]]])
def test_row_with_a_bad_cell_is_left_out_and_says_why(outcome: Outcome, corpus: Path, cell: Any) -> None:
    (corpus / "it").write_bytes(jpeg(checks()))
    row = {"image": "it", "caption": "x", "boxes": cell}
    reason, detail = outcome(row, blur_boxes="boxes")
    assert reason == "broken_row"
    assert detail.startswith("boxes to blur: ")


def test_arrow_lists_and_texts_of_a_table_are_boxes(corpus: Path, tmp_path: Path) -> None:
    (corpus / "it.jpg").write_bytes(jpeg(checks()))
    columns: dict[str, Any] = {
        "lists": pa.array([[FACE]], pa.list_(pa.list_(pa.float64()))),
        "fixed": pa.array([[FACE]], pa.list_(pa.list_(pa.float32(), 4))),
        "text": pa.array([json.dumps([FACE])]),
        "none": pa.array([None], pa.list_(pa.list_(pa.float64()))),
    }
    table = pa.table({"image": ["it.jpg"], "caption": ["x"], **columns})
    pq.write_table(table, corpus / "t.parquet")
    (corpus / "t.csv").write_text(f'image,caption,text\nit.jpg,x,"{json.dumps([FACE])}"\n')
    got = {}
    for number, (source, name) in enumerate([("t.parquet", name) for name in columns] + [("t.csv", "text")]):
        convert(corpus / source, tmp_path / str(number), ConvertConfig(blur_boxes=name), engine=threads(1))
        got[source, name] = members(tmp_path / str(number))["000000000.jpg"]
    assert got.pop(("t.parquet", "none")) == jpeg(checks())
    assert len(set(got.values())) == 1
    assert pixels(got["t.csv", "text"])[120:360, 160:320].std() < 3


def run(table: Path, out: Path, *, overwrite: bool = False, **settings: Any) -> Report:
    config = tolerant(blur_boxes="boxes", **settings)
    return convert(table, out, config, engine=threads(1), overwrite=overwrite)


OTHER = [0.75, 0.0, 1.0, 0.25]


@pytest.fixture
def blurred_rows(corpus: Path, tmp_path: Path) -> Callable[..., Report]:
    """`blurred_rows(rows, **settings)`: convert rows (image, caption, boxes) of one.jpg and two.jpg, equal files."""
    for name in ("one.jpg", "two.jpg"):
        (corpus / name).write_bytes(jpeg(checks()))

    def make(rows: list[tuple[str, str, Any]], **settings: Any) -> Report:
        listed = [{"image": f"{name}.jpg", "caption": said, "boxes": boxes} for name, said, boxes in rows]
        return run(jsonl(corpus / "t.jsonl", listed), tmp_path / "out", **settings)

    return make


def counts(report: Report) -> list[int]:
    return [report.accounts[name] for name in ("written", "merged", "duplicate", "quarantined")]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_boxes_of_all_rows_of_an_image_are_blurred(blurred_rows: Any, tmp_path: Path, order: tuple[int, ...]) -> None:
    cells: list[Any] = [[], [FACE], json.dumps([FACE, OTHER]), [FACE]]
    report = blurred_rows([("one", f"caption {i}", cells[i]) for i in order])
    assert counts(report) == [1, 3, 0, 0]
    stored = members(tmp_path / "out")
    original = Image.open(io.BytesIO(jpeg(checks())))
    assert stored["000000000.jpg"] == jpeg(blur(original, [BlurBox(*FACE), BlurBox(*OTHER)]))
    said = json.loads(stored["000000000.json"])
    assert said == {"captions": [f"caption {i}" for i in order], "blurred": 2}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_boxes_of_a_row_without_a_usable_caption_are_blurred_too(
    blurred_rows: Any, tmp_path: Path, order: tuple[int, ...]
) -> None:
    rows = [("one", "a", []), ("one", "", [FACE]), ("one", "b", [])]
    report = blurred_rows([rows[i] for i in order])
    assert counts(report) == [1, 1, 0, 1]
    (data,) = (data for name, data in members(tmp_path / "out").items() if name.endswith(".jpg"))
    assert data == jpeg(blur(Image.open(io.BytesIO(jpeg(checks()))), [BlurBox(*FACE)]))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_bad_boxes_of_one_row_keep_the_image_from_being_published(
    blurred_rows: Any, tmp_path: Path, order: tuple[int, ...]
) -> None:
    rows = [("one", "a", [FACE]), ("one", "b", []), ("one", "c", [[0.5, 0.5]])]
    report = blurred_rows([*(rows[i] for i in order), ("two", "d", [FACE])])
    assert counts(report) == [1, 0, 0, 3]
    assert report.accounts["reasons"] == {"broken_row": 3}
    assert all("is no box of four numbers" in line["detail"] for line in left_out(tmp_path / "out"))


def test_equal_files_of_other_paths_are_duplicates_or_merged_by_content(blurred_rows: Any, tmp_path: Path) -> None:
    rows = [("one", "a", [FACE]), ("two", "a", [OTHER]), ("two", "b", [OTHER])]
    assert counts(blurred_rows(rows)) == [1, 0, 2, 0]  # of the originals: the blurred ones differ
    assert json.loads(members(tmp_path / "out")["000000000.json"]) == {"captions": ["a"], "blurred": 1}
    assert counts(blurred_rows(rows, group_by="content", overwrite=True)) == [1, 1, 1, 0]
    assert json.loads(members(tmp_path / "out")["000000000.json"]) == {"captions": ["a", "b"], "blurred": 2}


def test_column_is_in_the_manifest_and_another_one_is_another_conversion(corpus: Path, tmp_path: Path) -> None:
    (corpus / "it.jpg").write_bytes(jpeg(checks()))
    table = jsonl(corpus / "t.jsonl", [{"image": "it.jpg", "caption": "x", "boxes": [FACE], "others": []}])
    settings = run(table, tmp_path / "out").accounts["run"]["settings"]
    assert (settings["blur_boxes"], settings["quality"]) == ("boxes", 95)
    assert run(table, tmp_path / "out").was_complete
    with pytest.raises(DataError, match=r'blur_boxes: was "boxes", is "others"\);'):
        convert(table, tmp_path / "out", ConvertConfig(blur_boxes="others"))
    with pytest.raises(DataError, match=r'blur_boxes: was "boxes", is not set; quality: was 95, is not set'):
        convert(table, tmp_path / "out", ConvertConfig())
    assert convert(table, tmp_path / "plain").accounts["run"]["settings"]["blur_boxes"] is None


def test_column_must_be_there_and_the_source_a_table(corpus: Path, tmp_path: Path) -> None:
    table = jsonl(corpus / "t.jsonl", [{"image": "a.jpg", "caption": "x"}])
    with pytest.raises(ConfigError, match=r"no column 'faces' \(boxes\); there are: image, caption"):
        convert(table, tmp_path / "out", ConvertConfig(blur_boxes="faces"))
    table.unlink()
    (corpus / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="blur_boxes only for a table; leave out what is not for it"):
        convert(corpus, tmp_path / "out", ConvertConfig(blur_boxes="faces"))


def test_bytes_are_the_same_in_another_process_and_on_any_number_of_threads(corpus: Path, tmp_path: Path) -> None:
    for number, size in enumerate([(48, 64), (480, 640), (333, 77)]):
        (corpus / f"{number}.jpg").write_bytes(jpeg(checks(*size)))
    rows = [
        {"image": f"{i % 3}.jpg", "caption": "x", "boxes": [[i / 40, 0.1, i / 40 + 0.2, 0.5], FACE]} for i in range(24)
    ]
    table = jsonl(corpus / "t.jsonl", rows)
    run(table, tmp_path / "here", keep_duplicates=True, resize=100)
    config = tolerant(blur_boxes="boxes", keep_duplicates=True, resize=100)
    convert(table, tmp_path / "threads", config, engine=threads(3))
    command = [sys.executable, "-m", "mmdata", "convert", str(table), str(tmp_path / "there"), "blur_boxes=boxes"]
    options = ["keep_duplicates=true", "--resize", "100", "--max-bad-share", "0.9"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    expected = content(tmp_path / "here")
    assert expected == content(tmp_path / "threads") == content(tmp_path / "there")
    said = [json.loads(data) for name, data in members(tmp_path / "here").items() if name.endswith(".json")]
    assert [one["blurred"] for one in said] == [2] * 24
