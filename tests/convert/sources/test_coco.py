"""COCO's boxes and keypoints, alone and joined with captions."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.convert.sources.open import open_source
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from mmdata.loader import Loader
from tests.convert.conftest import left_out
from tests.convert.sources.corpora import (
    CATEGORIES,
    KEYPOINTS,
    coco_box,
    coco_document,
    coco_image,
    samples,
    texts,
)

TEMPLATE = ConvertConfig(caption_templates=["a photo of {}."], max_bad_share=0.9)


def test_recipe_stores_boxes_and_makes_a_caption_of_the_names_in_them(tmp_path: Path, coco: Path) -> None:
    source = coco / "annotations/instances_val2017.json"
    config = load_recipe("coco-instances", {"max_bad_share": 0.5})
    report = convert(source, tmp_path / "out", config, engine=threads(1))
    assert samples(tmp_path / "out") == [
        {
            "captions": ["a photo of person, hot dog."],
            "boxes": [
                {"bbox": [3.5, 4, 20.25, 40], "category": "person", "id": 230831, "area": 810.0, "iscrowd": 0},
                {"bbox": [30.0, 8.5, 9.5, 7.0], "category": "hot dog", "id": 1773, "area": 66.5, "iscrowd": 0},
                {"bbox": [0, 0, 64, 48], "category": "person", "id": 900100, "area": 3072, "iscrowd": 1},
            ],
            "id": 139,
            "license": 4,
        },
        {
            "captions": ["a photo of dog."],
            "boxes": [{"bbox": [0, 1, 10, 12], "category": "dog", "id": 1768, "area": 120, "iscrowd": 0}],
            "id": 632,
            "license": 4,
        },
    ]
    assert texts(tmp_path / "out") == ["a photo of person, hot dog.", "a photo of dog."]
    assert [file["name"] for file in report.source["files"]] == ["instances_val2017.json"]
    assert left_out(tmp_path / "out") == [
        {
            "row": 1,
            "place": "instances_val2017.json, image 285",
            "path": "000000000285.jpg",
            "reason": "missing_caption",
            "detail": "the image has no box with a category, so --caption-template has no name for it",
        }
    ]


def test_keypoints_alone_are_boxes_of_people(tmp_path: Path, coco: Path) -> None:
    convert(coco / "annotations/person_keypoints_val2017.json", tmp_path / "out", TEMPLATE, engine=threads(1))
    (sample,) = samples(tmp_path / "out")
    (box,) = sample["boxes"]
    assert (box["category"], box["keypoints"], box["num_keypoints"]) == ("person", KEYPOINTS, 2)


@pytest.mark.parametrize(
    ("below", "settings"),
    [("", {"split": "val2017"}), ("annotations", {}), ("", {"table": "annotations/*_val2017.json"})],
)
def test_part_of_a_folder_joins_captions_boxes_and_keypoints(
    tmp_path: Path, coco: Path, below: str, settings: dict[str, Any]
) -> None:
    report = convert(coco / below, tmp_path / "out", ConvertConfig(**settings), engine=threads(1))
    found = samples(tmp_path / "out")
    assert [sample["captions"] for sample in found] == [[f"photo {n}, 0", f"photo {n}, 1"] for n in (139, 285, 632)]
    assert [[box["category"] for box in sample["boxes"]] for sample in found] == [
        ["person", "hot dog", "person"],
        [],
        ["dog"],
    ]
    assert found[0]["boxes"][0] == {
        "bbox": [3.5, 4, 20.25, 40],
        "category": "person",
        "id": 230831,
        "area": 810.0,
        "iscrowd": 0,
        "keypoints": KEYPOINTS,
        "num_keypoints": 2,
    }
    assert not any("keypoints" in box for sample in found for box in sample["boxes"][1:])
    assert [file["name"].split("_val")[0] for file in report.source["files"]] == [
        "instances",
        "person_keypoints",
        "captions",
    ]


def test_boxes_without_captions_say_what_makes_some(tmp_path: Path, coco: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r'boxes and no captions; make a caption .* --caption-template "a photo of \{\}.", or give the folder of '
        "the corpus with --split, which takes its file of captions as well",
    ):
        convert(coco / "annotations/instances_val2017.json", tmp_path / "out")


def test_images_without_a_caption_need_a_template_too(tmp_path: Path, coco: Path) -> None:
    captions = json.loads((coco / "annotations/captions_val2017.json").read_text())
    captions["annotations"] = [one for one in captions["annotations"] if one["image_id"] == 285]
    root, out = tmp_path / "corpus", tmp_path / "out"
    root.mkdir()
    (root / "captions_val2017.json").write_text(json.dumps(captions))
    for name in ("instances", "person_keypoints"):
        (root / f"{name}_val2017.json").write_bytes((coco / f"annotations/{name}_val2017.json").read_bytes())
    settings = {"images": str(coco / "val2017"), "max_bad_share": 0.9}
    convert(root, out, ConvertConfig(**settings), engine=threads(1))
    assert [(line["row"], line["reason"], line["detail"]) for line in left_out(out)] == [
        (0, "missing_caption", "the image has no caption; --caption-template makes one of the names of its boxes"),
        (2, "missing_caption", "the image has no caption; --caption-template makes one of the names of its boxes"),
    ]
    convert(root, tmp_path / "all", ConvertConfig(**settings, caption_templates=["{}"]), engine=threads(1))
    assert texts(tmp_path / "all") == ["person, hot dog", "photo 285, 0", "dog"]


def test_parts_of_coco_are_those_with_boxes_or_captions(tmp_path: Path, coco: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for name, part in (("captions", "train2017"), ("instances", "val2017")):
        shutil.copy(coco / f"annotations/{name}_val2017.json", tmp_path / f"annotations/{name}_{part}.json")
    (tmp_path / "annotations/instances_0.json").write_text(json.dumps({"caption": "of an image"}))
    with pytest.raises(DataError, match=r"has 2 parts, .*: train2017, val2017; choose one with --split train2017"):
        open_source(tmp_path, TEMPLATE)
    with pytest.raises(ConfigError, match=r"split 'val': no such part in '.*'; there are: train2017, val2017"):
        open_source(tmp_path, ConvertConfig(split="val"))


def test_texts_of_images_named_like_cocos_files_are_no_parts_of_it(tmp_path: Path, photo: Any) -> None:
    for i in range(2):
        (tmp_path / f"instances_{i}.jpg").write_bytes(photo(20, 30, seed=i))
        (tmp_path / f"instances_{i}.json").write_text(json.dumps({"caption": f"photo {i}"}))
    assert open_source(tmp_path, ConvertConfig()).describe()["kind"] == "folder"


def test_kept_values_are_those_of_the_image_and_segmentation_on_request(tmp_path: Path, coco: Path) -> None:
    convert(coco, tmp_path / "out", ConvertConfig(keep=("file_name", "segmentation", "height")), engine=threads(1))
    first, *_ = samples(tmp_path / "out")
    assert set(first) == {"captions", "boxes", "path", "height"}
    assert (first["path"], first["height"]) == ("000000000139.jpg", 48)
    polygon = [[5.5, 6.25, 20.0, 6.25, 20.0, 30.0]]
    crowd = {"counts": [272, 2, 4], "size": [48, 64]}
    assert [box["segmentation"] for box in first["boxes"]] == [polygon, polygon, crowd]
    convert(coco, tmp_path / "all", ConvertConfig(keep=("*",)), engine=threads(1))
    first, *_ = samples(tmp_path / "all")
    named = ["id", "license", "height", "width", "date_captured", "coco_url", "flickr_url"]
    assert sorted(first) == sorted([*named, "boxes", "captions"])
    assert "segmentation" not in first["boxes"][0]
    with pytest.raises(
        ConfigError, match=r"no column 'ident' \(keep\); there are: file_name, captions, boxes, segmentation, lic"
    ):
        convert(coco, tmp_path / "none", ConvertConfig(keep=("ident",)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"image_column": "file_name"}, "settings that are not for it: image_column;"),
        ({"encoding": "latin-1"}, "settings that are not for it: encoding;"),
    ],
)
def test_settings_of_tables_are_refused(coco: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"it is COCO's annotations; {message}"):
        open_source(coco / "annotations/instances_val2017.json", ConvertConfig(**setting))


def test_split_of_one_file_is_refused(coco: Path) -> None:
    with pytest.raises(ConfigError, match=r"split 'val': '.*' is of one part; give the folder above annotations/"):
        open_source(coco / "annotations/instances_val2017.json", ConvertConfig(split="val"))


def test_annotations_before_images_and_lvis_urls_are_read(tmp_path: Path, photo: Any) -> None:
    (tmp_path / "val2017").mkdir()
    (tmp_path / "val2017/1.jpg").write_bytes(photo(48, 64))
    lvis = {
        "annotations": [{"bbox": [1, 2, 3, 4], "category_id": 3, "image_id": 5, "id": 1}],
        "categories": [{"id": 3, "name": "polar_bear", "frequency": "c", "synset": "bear.n.01"}],
        "images": [{"id": 5, "coco_url": "http://images.example/val2017/1.jpg", "neg_category_ids": [2]}],
    }
    (tmp_path / "lvis_v1_val.json").write_text(json.dumps(lvis))
    convert(tmp_path / "lvis_v1_val.json", tmp_path / "out", TEMPLATE, engine=threads(1))
    assert samples(tmp_path / "out") == [
        {
            "captions": ["a photo of polar bear."],
            "boxes": [{"bbox": [1, 2, 3, 4], "category": "polar_bear", "id": 1}],
        }
    ]


def test_annotations_beside_the_images_of_each_part_are_found(tmp_path: Path, photo: Any) -> None:
    for number, part in enumerate(("train", "valid")):
        (tmp_path / "corpus" / part).mkdir(parents=True)
        image = coco_image(number)
        (tmp_path / "corpus" / part / image["file_name"]).write_bytes(photo(48, 64, seed=number))
        boxes = [coco_box(1, number, 1 + 17 * number, [1, 2, 3, 4])]
        content = coco_document([image], boxes, categories=CATEGORIES)
        (tmp_path / "corpus" / part / "_annotations.coco.json").write_text(json.dumps(content))
    for name, below, split, said in (("a", "", "valid", "dog"), ("b", "train", None, "person")):
        config = TEMPLATE.model_copy(update={"split": split})
        convert(tmp_path / "corpus" / below, tmp_path / name, config, engine=threads(1))
        assert texts(tmp_path / name) == [f"a photo of {said}."]


def test_boxes_come_with_a_batch_as_they_are(tmp_path: Path, coco: Path) -> None:
    out = tmp_path / "out"
    convert(coco, out, ConvertConfig(train_tokenizer=300), engine=threads(1))
    data = {"shards": str(out), "tokenizer": str(out / "tokenizer"), "global_batch_size": 3, "image_size": 32}
    data |= {"fields": {"objects": "json:boxes"}}
    with Loader.from_config({"data": data}, rank=0, world_size=1) as loader:
        batch = next(iter(loader))
    assert sorted(batch["objects"], key=len) == sorted([one["boxes"] for one in samples(out)], key=len)


def test_source_is_read_alike_each_time_and_can_be_sent(coco: Path) -> None:
    source = open_source(coco, ConvertConfig())
    rows = list(source.rows())
    assert rows == list(source.rows()) == list(pickle.loads(pickle.dumps(source)).rows())
    assert len(rows) == source.num_rows == 3


def test_captions_alone_are_samples_without_boxes(tmp_path: Path, coco: Path) -> None:
    path = coco / "annotations/captions_val2017.json"
    convert(path, tmp_path / "out", ConvertConfig(keep=["id"]), engine=threads(1))
    assert samples(tmp_path / "out") == [
        {"captions": [f"photo {image}, {number}" for number in range(2)], "id": image} for image in (139, 285, 632)
    ]
    packed = tmp_path / "captions_val2017.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    described = open_source(packed, ConvertConfig(images=str(coco / "val2017"))).describe()
    assert (described["kind"], described["image"], described["captions"]) == ("table", "file_name", ["captions"])


def test_key_of_an_image_called_image_is_kept(tmp_path: Path, photo: Any) -> None:
    (tmp_path / "000000000001.jpg").write_bytes(photo(48, 64))
    said = [{"image_id": 1, "caption": "a photo"}]
    (tmp_path / "t.json").write_text(json.dumps(coco_document([{**coco_image(1), "image": "its own"}], said)))
    convert(tmp_path / "t.json", tmp_path / "out", ConvertConfig(keep=["*"]), engine=threads(1))
    (sample,) = samples(tmp_path / "out")
    assert (sample["image"], sample["captions"]) == ("its own", ["a photo"])


def test_each_of_several_files_is_looked_at_for_changes(tmp_path: Path, coco: Path) -> None:
    shutil.copytree(coco, tmp_path / "coco")
    source = open_source(tmp_path / "coco", TEMPLATE)
    source.check_unchanged()
    (tmp_path / "coco/annotations/captions_val2017.json").write_text("{}")
    with pytest.raises(DataError, match=r"table '.*/captions_val2017.json': has changed since it was opened"):
        source.check_unchanged()


def test_captions_of_coco_are_no_table(coco: Path) -> None:
    with pytest.raises(DataError, match="COCO's captions, which are no table; leave format and encoding out"):
        open_source(coco / "annotations/captions_val2017.json", ConvertConfig(format="json"))


def test_folder_whose_only_table_is_of_captions_is_read_by_it(tmp_path: Path, coco: Path) -> None:
    (tmp_path / "corpus/annotations").mkdir(parents=True)
    shutil.copytree(coco / "val2017", tmp_path / "corpus/val2017")
    shutil.copy(coco / "annotations/captions_val2017.json", tmp_path / "corpus/annotations")
    source = open_source(tmp_path / "corpus", ConvertConfig())
    assert source.num_rows == 3


def test_part_with_captions_alone_is_chosen_by_its_name(tmp_path: Path, coco: Path) -> None:
    (tmp_path / "annotations").mkdir()
    shutil.copytree(coco / "val2017", tmp_path / "val2017")
    for part in ("train2017", "val2017"):
        shutil.copy(coco / "annotations/captions_val2017.json", tmp_path / f"annotations/captions_{part}.json")
    source = open_source(tmp_path, ConvertConfig(split="val2017"))
    assert source.num_rows == 3
