"""COCO's files with something wrong in them: what it costs, and what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.sources.open import open_source
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from tests.convert.conftest import left_out
from tests.convert.sources.corpora import (
    CATEGORIES,
    coco_box,
    coco_document,
    coco_image,
    samples,
)

TEMPLATE = ConvertConfig(caption_templates=["a photo of {}."], max_bad_share=0.9)


@pytest.fixture
def broken(tmp_path: Path, photo: Any) -> Any:
    """`broken(images, annotations, **settings)`: the report of a corpus with the image 1 and what is given."""

    def run(images: list[Any], annotations: list[Any], categories: Any = CATEGORIES, **settings: Any) -> Report:
        (tmp_path / "val2017").mkdir()
        (tmp_path / "val2017/000000000001.jpg").write_bytes(photo(48, 64))
        images, boxes = [coco_image(1), *images], [coco_box(10, 1, 18, [1, 2, 3, 4]), *annotations]
        (tmp_path / "annotations").mkdir()
        path = tmp_path / "annotations/instances_val2017.json"
        path.write_text(json.dumps(coco_document(images, boxes, categories=categories)))
        config = TEMPLATE.model_copy(update=settings)
        return convert(path, tmp_path / "out", config, engine=threads(1))

    return run


def test_files_of_other_kinds_are_not_joined(tmp_path: Path, coco: Path) -> None:
    (tmp_path / "instances_val2017.json").write_bytes((coco / "annotations/instances_val2017.json").read_bytes())
    panoptic = coco_document([coco_image(139)], [{"image_id": 139, "segments_info": []}])
    (tmp_path / "panoptic_val2017.json").write_text(json.dumps(panoptic))
    with pytest.raises(
        ConfigError, match=r"table '\*.json': '.*/panoptic_val2017.json' has neither boxes nor captions of COCO's form"
    ):
        open_source(tmp_path, ConvertConfig(table="*.json"))


def test_ids_written_as_floats_are_those_of_whole_numbers(tmp_path: Path, broken: Any) -> None:
    broken([], [coco_box(11, 1, 1.0, [1, 2, 3, 4], image_id=1.0)])
    assert [box["category"] for box in samples(tmp_path / "out")[0]["boxes"]] == ["dog", "person"]


@pytest.mark.parametrize(
    ("bbox", "said"),
    [
        ([1, 2, 0, 4], "its box of 0 × 4 pixels has no area"),
        ([1, 2, 3, -4.5], "its box of 3 × -4.5 pixels has no area"),
        ([1, 2, 3], r"its box is a value of type list \(3 items\), not \[x, y, width, height\]"),
        (None, r"its box is None, not \[x, y, width, height\]"),
        ([1, float("nan"), 3, 4], "its box holds nan, and numbers of pixels are expected"),
        ([1, float("inf"), 3, 4], "its box holds inf, and numbers"),
        ([1, 10**400, 3, 4], r"its box holds 10+… \(401 characters\), and numbers"),
        ([True, 2, 3, 4], "its box holds True, and numbers"),
        (["1", 2, 3, 4], "its box holds '1', and numbers"),
    ],
)
def test_box_that_is_none_is_left_out_and_counted(
    tmp_path: Path, broken: Any, caplog: pytest.LogCaptureFixture, bbox: Any, said: str
) -> None:
    report = broken([], [coco_box(11, 1, 1, bbox), coco_box(12, 1, 1, [5, 6, 700, 800])])
    (sample,) = samples(tmp_path / "out")
    assert [(box["category"], box["bbox"]) for box in sample["boxes"]] == [
        ("dog", [1, 2, 3, 4]),
        ("person", [5, 6, 700, 800]),  # beyond the image, as given
    ]
    assert report.accounts["lost"] == {"box_unusable": 1}
    assert caplog.text.count("box_unusable") == 1
    assert re.search(f"1 box left out; the first is annotation 11: {said}", caplog.text)


def test_box_with_a_value_that_json_cannot_hold_is_left_out(tmp_path: Path, broken: Any) -> None:
    report = broken([], [coco_box(11, 1, 1, [1, 2, 3, 4], area=float("nan"))])
    (box,) = samples(tmp_path / "out")[0]["boxes"]
    assert box["area"] == 12
    assert report.accounts["lost"] == {"box_unusable": 1}


def test_category_that_is_not_listed_costs_the_box(tmp_path: Path, broken: Any, caplog: Any) -> None:
    report = broken([], [coco_box(11, 1, 99, [1, 2, 3, 4]), coco_box(12, 1, [7], [1, 2, 3, 4])])
    assert [box["category"] for box in samples(tmp_path / "out")[0]["boxes"]] == ["dog"]
    assert report.accounts["lost"] == {"box_unusable": 1}
    assert "2 boxes left out; the first is annotation 11: category 99 is not among the file's categories" in caplog.text


def test_images_and_annotations_without_each_other_are_rows_with_a_reason(tmp_path: Path, broken: Any) -> None:
    again = coco_image(1)
    other = {**coco_image(1), "file_name": "other.jpg"}
    nameless = {"id": 8, "height": 4}
    images = [coco_image(2), again, other, {"file_name": "x.jpg"}, nameless, 7]
    boxes = [coco_box(20, 2, 1, [1, 2, 3, 4]), coco_box(21, 77, 1, [1, 2, 3, 4]), coco_box(22, 8, 1, [1, 2, 3, 4])]
    report = broken(images, boxes)
    assert (report.accounts["rows"], report.accounts["written"]) == (8, 1)
    found = [(line["place"].split(", ")[1], line["reason"], line["detail"]) for line in left_out(tmp_path / "out")]
    assert found == [
        ("image 2", "missing_image", "'000000000002.jpg': No such file or directory"),
        ("image 1", "duplicate_image", "the image id of row 0 again, with the same path"),
        (
            "image 1",
            "broken_row",
            "the image id of row 0 again, with the path 'other.jpg' and not '000000000001.jpg'; that row has the "
            "annotations",
        ),
        ("image None", "broken_row", "entry 5 of images has no id"),
        ("image 8", "missing_image", "the image's path is null"),
        ("image None", "broken_row", "entry 7 of images has no id"),
        ("image 77", "missing_image", "1 annotation of image 77, which is not among the file's images"),
    ]


def test_boxes_of_an_image_are_bounded(tmp_path: Path, broken: Any, caplog: Any) -> None:
    many = [coco_box(100 + i, 1, 1, [1, 2, 3, 4], segmentation=[[0.123456] * 2000]) for i in range(40)]
    report = broken([], many, keep=("segmentation",))
    (sample,) = samples(tmp_path / "out")
    assert 20 < len(sample["boxes"]) < 40
    assert report.accounts["lost"] == {"box_unusable": 1}
    assert "boxes up to it have more than 524288 bytes of JSON" in caplog.text


@pytest.mark.parametrize(
    ("categories", "said"),
    [
        ([], 'boxes, and no "categories" that name what is in them'),
        ([{"id": 18, "name": ""}], "entry 1 of categories: no usable name"),
        ([{"id": 18}], "entry 1 of categories: no usable name"),
        ([{"id": 18, "name": "dog"}, {"id": 18, "name": "cat"}], "entry 2 of categories: id 18 is 'cat', and 'dog'"),
    ],
)
def test_categories_that_name_nothing_are_an_error(broken: Any, categories: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"annotations '.*instances_val2017.json'.*{said}"):
        broken([], [], categories)


def test_annotation_of_no_image_is_an_error(broken: Any) -> None:
    with pytest.raises(DataError, match="entry 2 of annotations: no image_id"):
        broken([], [{"bbox": [1, 2, 3, 4], "category_id": 1}])


def test_file_that_is_cut_is_an_error_that_names_it(tmp_path: Path, coco: Path) -> None:
    whole = (coco / "annotations/instances_val2017.json").read_text()
    (tmp_path / "val2017").symlink_to(coco / "val2017")
    cut = tmp_path / "instances_val2017.json"
    cut.write_text(whole[: whole.index('"categories"') + 30])
    with pytest.raises(DataError, match=r"annotations '.*instances_val2017.json': not JSON at character \d+: .*whole"):
        convert(cut, tmp_path / "out", TEMPLATE)
    cut.write_text(whole[:300])
    with pytest.raises(DataError, match=r"table '.*instances_val2017.json': not JSON"):
        convert(cut, tmp_path / "out", TEMPLATE)


def test_no_image_found_says_where_it_looked(tmp_path: Path, coco: Path) -> None:
    (tmp_path / "i.json").write_bytes((coco / "annotations/instances_val2017.json").read_bytes())
    with pytest.raises(DataError, match=r"the table's paths are relative to '.*does not exist: name the folder"):
        convert(tmp_path / "i.json", tmp_path / "out", TEMPLATE)
    report = convert(
        tmp_path / "i.json", tmp_path / "out", TEMPLATE.model_copy(update={"images": str(coco / "val2017")})
    )
    assert report.accounts["written"] == 2
