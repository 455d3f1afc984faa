"""PASCAL VOC: its lists, its boxes, and XML that is not to be trusted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import VOCDetection
from torchvision.ops import box_convert

from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.convert.sources.layouts import find_parts
from mmdata.convert.sources.open import open_source
from mmdata.convert.sources.voc_xml import boxes_of, parse_xml
from mmdata.convert.units.engines import threads
from mmdata.errors import BadSample, ConfigError, DataError
from tests.convert.annotations.corpora import make_voc, samples, texts, voc_object, voc_xml
from tests.convert.conftest import left_out

TEMPLATE = ConvertConfig(caption_templates=["a photo of {}."], max_bad_share=0.9)


@pytest.fixture
def voc(tmp_path: Path, photo: Any) -> Path:
    return make_voc(tmp_path / "corpus", photo)


@pytest.mark.parametrize("below", [".", "..", "../.."])
def test_recipe_takes_a_part_with_boxes_from_pixel_0(tmp_path: Path, voc: Path, below: str) -> None:
    config = load_recipe("voc", {"split": "train"})
    report = convert((voc / below).resolve(), tmp_path / "out", config, engine=threads(1))
    facts = {"pose": "Left", "truncated": 1, "difficult": 0}
    assert samples(tmp_path / "out") == [
        {
            "captions": ["a photo of person."],
            "boxes": [{"bbox": [0, 0, 64, 48], "category": "person", **facts}],  # the head is no object
            "filename": "2007_000027.jpg",
        },
        {
            "captions": ["a photo of diningtable, person."],
            "boxes": [
                {"bbox": [3, 4, 17, 26], "category": "diningtable", **facts},
                {"bbox": [7.5, 8, 22.75, 32], "category": "person", **facts},
            ],
            "filename": "2007_000032.jpg",
        },
    ]
    assert texts(tmp_path / "out") == ["a photo of person.", "a photo of diningtable, person."]
    assert (report.source["form"], report.source["list"]) == ("PASCAL VOC", "train.txt")


@pytest.mark.parametrize("part", ["train", "val", "trainval"])
def test_images_names_and_boxes_are_those_that_torchvision_reads(tmp_path: Path, voc: Path, part: str) -> None:
    theirs = [target["annotation"] for _, target in VOCDetection(str(tmp_path / "corpus"), "2012", part)]
    config = TEMPLATE.model_copy(update={"split": part, "keep": ("*",)})
    convert(voc, tmp_path / "out", config, engine=threads(1))
    ours = samples(tmp_path / "out")
    assert [sample["filename"] for sample in ours] == [said["filename"] for said in theirs]
    for sample, said in zip(ours, theirs, strict=True):
        assert (sample["width"], sample["height"]) == (int(said["size"]["width"]), int(said["size"]["height"]))
        assert [box["category"] for box in sample["boxes"]] == [one["name"] for one in said["object"]]
        corners = [[float(one["bndbox"][k]) for k in ("xmin", "ymin", "xmax", "ymax")] for one in said["object"]]
        from_zero = torch.tensor(corners) - torch.tensor([1.0, 1.0, 0.0, 0.0])  # the last pixel is included
        boxes = torch.tensor([box["bbox"] for box in sample["boxes"]], dtype=torch.float32)
        assert torch.equal(box_convert(boxes, "xywh", "xyxy"), from_zero)


def test_parts_are_lists_of_images_and_not_of_one_class(voc: Path) -> None:
    assert find_parts(voc) == ["train", "trainval", "val"]
    with pytest.raises(DataError, match=r"has 3 parts, .*: train, trainval, val; choose one with --split train"):
        open_source(voc, TEMPLATE)
    with pytest.raises(ConfigError, match=r"split 'dog_train': no such part in '.*VOC2012'; there are: train"):
        open_source(voc, TEMPLATE.model_copy(update={"split": "dog_train"}))


def test_several_years_are_converted_one_by_one(voc: Path) -> None:
    for name in ("Annotations", "JPEGImages"):
        (voc.parent / "VOC2007" / name).mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"has several years, .*: VOC2007, VOC2012; give one as the source, as .*VOC2012"
    ):
        open_source(voc.parent, TEMPLATE)
    with pytest.raises(DataError, match=r"VOC2007': no images in it; the corpus is empty"):
        open_source(voc.parent / "VOC2007", TEMPLATE)


def test_without_lists_all_images_are_rows(tmp_path: Path, voc: Path, photo: Any) -> None:
    (voc / "ImageSets").rename(tmp_path / "away")
    (voc / "JPEGImages/x.png").write_bytes(photo(48, 64, seed=5, format="PNG"))
    (voc / "JPEGImages/alone.jpg").write_bytes(photo(48, 64, seed=6))
    (voc / "Annotations/x.xml").write_text(voc_xml("x", voc_object("cat", 1, 1, 2, 2)))
    (voc / "Annotations/gone.xml").write_text(voc_xml("gone", voc_object("cat", 1, 1, 2, 2)))
    (voc / "Annotations/empty.xml").write_text(voc_xml("empty"))
    convert(voc, tmp_path / "out", TEMPLATE, engine=threads(1))
    assert len(samples(tmp_path / "out")) == 4
    assert [(line["place"], line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        (
            "Annotations/alone.xml",
            "missing_caption",
            "the image has no annotations: 'alone.xml': No such file or directory",
        ),
        (
            "Annotations/empty.xml",
            "missing_caption",
            "the image has no box with a category, so --caption-template has no name for it",
        ),
        ("Annotations/gone.xml", "missing_image", "'JPEGImages/gone.jpg': No such file or directory"),
    ]
    with pytest.raises(ConfigError, match=r"split 'train': '.*VOC2012' has no lists of parts in ImageSets/Main"):
        open_source(voc, TEMPLATE.model_copy(update={"split": "train"}))


def test_list_with_a_name_twice_and_one_that_leads_out(tmp_path: Path, voc: Path) -> None:
    (tmp_path / "secret.xml").write_text(voc_xml("secret", voc_object("cat", 1, 1, 2, 2)))
    names = ["2007_000027", "2007_000027", "../../../../secret"]
    (voc / "ImageSets/Main/train.txt").write_text("\r\n".join(names))
    convert(voc, tmp_path / "out", TEMPLATE.model_copy(update={"split": "train"}), engine=threads(1))
    assert [(line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("duplicate_image", "'2007_000027' is in the list twice: row 0 has it"),
        ("outside_root", "'../../../../secret.xml' leads out of the corpus's folder"),
    ]


def test_captions_need_a_template(voc: Path) -> None:
    with pytest.raises(ConfigError, match=r"boxes and no captions; make a caption of the names of an image's objects"):
        open_source(voc, ConvertConfig(split="train"))


def test_images_may_lie_elsewhere(tmp_path: Path, voc: Path) -> None:
    (voc / "JPEGImages").rename(voc.parent / "photos")
    config = TEMPLATE.model_copy(update={"split": "val", "images": "photos", "keep": ("path",)})
    convert(voc, tmp_path / "out", config, engine=threads(1))
    assert [sample["path"] for sample in samples(tmp_path / "out")] == ["2007_000033.jpg"]


def test_source_is_read_alike_each_time_and_can_be_sent(voc: Path) -> None:
    source = open_source(voc, TEMPLATE.model_copy(update={"split": "trainval"}))
    rows = list(source.rows())
    assert rows == list(source.rows()) == list(pickle.loads(pickle.dumps(source)).rows())
    assert len(rows) == source.rows_at_most == 3
    before = source.describe()
    (voc / "Annotations/2007_000027.xml").write_text("<annotation/>")
    assert open_source(voc, TEMPLATE.model_copy(update={"split": "trainval"})).describe() != before


LAUGHS = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (f"{LAUGHS}<annotation><filename>&c;</filename></annotation>".encode(), "a document type declaration"),
        (f"{LAUGHS}<annotation/>".encode("utf-16"), "a document type declaration"),
        (b'<?xml version="1.0"?><!doctype a SYSTEM "file:///etc/passwd"><annotation/>', "not XML"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "a document type declaration"),
        (b"<annotation><filename>&c;</filename></annotation>", "not XML: undefined entity"),
        (b"", "not XML: no element found"),
        (b"\xff\xd8\xff\xe0", "not XML: not well-formed"),
        (b'<?xml version="1.0" encoding="no-such"?><annotation/>', "not XML: unknown encoding"),
        (b"<annotation><object>", "not XML: no element found"),
        (b"<annotation/><annotation/>", "not XML: junk after document element"),
        (b"<a>" * 100_000, "XML with more than 32 elements within each other"),
        (b"<annotations/>", "XML of <annotations>, and <annotation> is expected"),
    ],
)
def test_xml_that_is_not_vocs_is_a_broken_row(data: bytes, said: str) -> None:
    with pytest.raises(BadSample, match=f"^broken_row: .*{said}"):
        parse_xml(data)


def test_broken_xml_costs_its_row(tmp_path: Path, voc: Path) -> None:
    (voc / "Annotations/2007_000027.xml").write_text(f"{LAUGHS}<annotation/>")
    (voc / "Annotations/2007_000032.xml").write_bytes(b"<annotation>" + b" " * 2**20)
    convert(voc, tmp_path / "out", TEMPLATE.model_copy(update={"split": "trainval"}), engine=threads(1))
    assert [(line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("broken_row", "XML with a document type declaration (<!DOCTYPE …>), which is not read; remove it"),
        ("broken_row", "'2007_000032.xml' has 1048588 bytes; the limit is 1048576"),
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (voc_object("dog", 20, 5, 10, 9), "object 1: its box of -9 × 5 pixels has no area"),
        (voc_object("dog", float("nan"), 5, 10, 9), "object 1: its box is 'nan, 5, 10, 9', not [x, y, width, height]"),
        ("<object><name>dog</name></object>", "object 1: its box is None, not [x, y, width, height]"),
        (voc_object(" ", 1, 2, 3, 4), "object 1: its name cannot be used (caption is empty after cleaning: '"),
        ("<object/>", "object 1: its name cannot be used (caption is NoneType, not a string)"),
    ],
)
def test_object_without_a_box_or_a_name_is_left_out(found: str, said: str) -> None:
    boxes = boxes_of(parse_xml(voc_xml("a", found, voc_object("cat", 1, 2, 3, 4)).encode()))
    assert [box["category"] for box in boxes.entries] == ["cat"]
    (loss,) = boxes.losses.values()
    assert loss.startswith(f"1 box left out; the first is {said}")
