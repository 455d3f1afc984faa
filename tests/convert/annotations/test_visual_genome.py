"""Visual Genome: phrases are captions, and boxes with their phrase."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.convert.sources.open import open_source
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from tests.convert.annotations.corpora import make_visual_genome, region, samples, texts
from tests.convert.conftest import left_out

CLOCK = "the clock is green in colour"


@pytest.fixture
def vg(tmp_path: Path, photo: Any) -> Path:
    return make_visual_genome(tmp_path / "corpus", photo)


def regions_of(vg: Path) -> list[Any]:
    return json.loads((vg / "region_descriptions.json").read_text())


def write(vg: Path, entries: list[Any]) -> None:
    (vg / "region_descriptions.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("name", ["", "region_descriptions.json"])
def test_recipe_takes_all_phrases_and_keeps_their_boxes(tmp_path: Path, vg: Path, name: str) -> None:
    report = convert(vg / name, tmp_path / "out", load_recipe("visual-genome"), engine=threads(1))
    assert samples(tmp_path / "out") == [
        {
            "captions": [CLOCK, "shade is along the street"],
            "boxes": [
                {"bbox": [42, 7, 20, 13], "phrase": CLOCK, "id": 1382},
                {"bbox": [9, 37, 18, 10], "phrase": "shade is along the street", "id": 1383},
                {"bbox": [40, 5, 25, 18], "phrase": CLOCK, "id": 1384},
            ],
            "image_id": 1,
            "coco_id": None,
        },
        {
            "captions": ["a man"],
            "boxes": [{"bbox": [0, 0, 30, 50], "phrase": "a man", "id": 5}],
            "image_id": 2315375,
            "coco_id": 63,
        },
    ]
    assert texts(tmp_path / "out") == [CLOCK, "a man"]
    assert (report.source["form"], len(report.source["files"])) == ("Visual Genome", 2)


def test_images_are_found_without_image_data_and_in_one_folder(tmp_path: Path, vg: Path) -> None:
    (vg / "image_data.json").unlink()
    (vg / "VG_100K_2/1.jpg").rename(vg / "VG_100K/1.jpg")
    convert(vg, tmp_path / "out", ConvertConfig(keep=("path", "width")), engine=threads(1))
    found = [(sample["path"], sample["width"]) for sample in samples(tmp_path / "out")]
    assert found == [("VG_100K/1.jpg", None), ("VG_100K/2315375.jpg", None)]


def test_images_may_lie_elsewhere(tmp_path: Path, vg: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for path in list(vg.glob("VG_100K*/*.jpg")):
        path.rename(photos / path.name)
    config = ConvertConfig(images=str(photos), keep=("path",))
    convert(vg, tmp_path / "out", config, engine=threads(1))
    assert [sample["path"] for sample in samples(tmp_path / "out")] == ["1.jpg", "2315375.jpg"]
    with pytest.raises(
        DataError, match=r"the annotations' paths are relative to '.*/vg', and '.*/VG_100K_2/1.jpg' does"
    ):
        convert(vg, tmp_path / "none")


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path: Path, vg: Path) -> None:
    entries = regions_of(vg)
    entries[0]["regions"] += [region(7, 1, "no area", 1, 2, 0, 4), region(8, 1, None, 1, 2, 3, 4), 9]
    write(vg, entries)
    report = convert(vg, tmp_path / "out", engine=threads(1))
    first, _ = samples(tmp_path / "out")
    assert first["captions"] == [CLOCK, "shade is along the street", "no area"]  # the phrase is about the image
    assert [box["id"] for box in first["boxes"]] == [1382, 1383, 1384]
    assert report.accounts["lost"] == {"box_unusable": 1}


def test_images_without_regions_and_regions_without_images_are_rows(tmp_path: Path, vg: Path) -> None:
    entries = regions_of(vg)
    more = [{"regions": [], "id": 3}, entries[0], {"regions": [region(9, 4, "a dog", 1, 2, 3, 4)], "id": 4}, {}, 5]
    write(vg, [*entries, *more])
    data = json.loads((vg / "image_data.json").read_text())
    (vg / "image_data.json").write_text(json.dumps([*data, {"image_id": 77, "url": None}]))
    report = convert(vg, tmp_path / "out", ConvertConfig(max_bad_share=0.9), engine=threads(1))
    assert (report.accounts["rows"], report.accounts["written"]) == (8, 2)
    assert [(line["place"].split(", ")[1], line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("image 3", "missing_caption", "the image has no region with a phrase"),
        ("image 1", "duplicate_image", "the regions of image 1 again: row 0 has it"),
        ("image 4", "missing_image", "'VG_100K/4.jpg': No such file or directory"),
        ("entry 6", "broken_row", 'no "id" of an image, or no list of "regions"'),
        ("entry 7", "broken_row", 'no "id" of an image, or no list of "regions"'),
        ("image 77", "missing_caption", "the image is in image_data.json, and has no regions"),
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("region_descriptions.json", r"annotations '.*region_descriptions.json': not JSON at character"),
        ("image_data.json", r"annotations '.*image_data.json': not JSON at character"),
    ],
)
def test_file_that_is_cut_is_an_error_that_names_it(tmp_path: Path, vg: Path, name: str, said: str) -> None:
    (vg / name).write_text((vg / name).read_text()[:-5])
    with pytest.raises(DataError, match=said):
        convert(vg, tmp_path / "out")
    assert not (tmp_path / "out/__mmdata__/manifest.json").exists()


def test_image_data_of_another_form_and_a_split_are_errors(vg: Path) -> None:
    with pytest.raises(ConfigError, match=r"split 'train': '.*' is of one part; --val-share sets images aside"):
        open_source(vg, ConvertConfig(split="train"))
    (vg / "image_data.json").write_text('[{"url": "x"}]')
    with pytest.raises(DataError, match=r"image_data.json', entry 1: no image_id; an array of images is expected"):
        open_source(vg, ConvertConfig())


def test_source_is_read_alike_each_time_and_can_be_sent(vg: Path) -> None:
    source = open_source(vg, ConvertConfig())
    rows = list(source.rows())
    assert rows == list(source.rows()) == list(pickle.loads(pickle.dumps(source)).rows())
    assert len(rows) == source.rows_at_most == 2
