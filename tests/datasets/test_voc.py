"""datasets/voc/convert.py: the images of a list, their boxes from pixel 0, and XML that is not to be trusted."""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import VOCDetection
from torchvision.ops import box_convert

from mmdata import Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import BadSample, ConfigError
from tests.convert.conftest import left_out
from tests.programs import run_program

PROGRAM = Path(__file__).parents[2] / "datasets/voc/convert.py"
spec = importlib.util.spec_from_file_location("voc_program", PROGRAM)
assert spec is not None
assert spec.loader is not None
voc_program: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(voc_program)

XML = """<annotation>
\t<folder>VOC2012</folder>
\t<filename>{stem}.jpg</filename>
\t<source><database>The VOC2007 Database</database><annotation>PASCAL VOC2007</annotation></source>
\t<size><width>64</width><height>48</height><depth>3</depth></size>
\t<segmented>1</segmented>
{objects}</annotation>
"""
OBJECT = """\t<object>
\t\t<name>{name}</name>
\t\t<pose>Left</pose>
\t\t<truncated>1</truncated>
\t\t<difficult>0</difficult>
\t\t<bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>
{more}\t</object>
"""
HEAD = "\t\t<part><name>head</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></part>\n"
LAUGHS = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'


def voc_object(name: str, *corners: float, more: str = "") -> str:
    return OBJECT.format(*corners, name=name, more=more)


def voc_xml(stem: str, *objects: str) -> str:
    return XML.format(stem=stem, objects="".join(objects))


@pytest.fixture
def voc(tmp_path: Path, photo: Any) -> Path:
    """`VOCdevkit/VOC2012` with three annotated images in `trainval`, and the list of one class."""
    voc = tmp_path / "corpus/VOCdevkit/VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main", "ImageSets/Segmentation"):
        (voc / name).mkdir(parents=True)
    said = {
        "2007_000027": [voc_object("person", 1, 1, 64, 48, more=HEAD)],
        "2007_000032": [voc_object("diningtable", 4, 5, 20, 30), voc_object("person", 8.5, 9, 30.25, 40)],
        "2007_000033": [voc_object("dog", 20, 5, 10, 9), voc_object("dog", 10, 10, 40, 40)],
    }
    for seed, (stem, objects) in enumerate(said.items()):
        (voc / f"JPEGImages/{stem}.jpg").write_bytes(photo(48, 64, seed=10 + seed))
        (voc / f"Annotations/{stem}.xml").write_text(voc_xml(stem, *objects))
    stems = list(said)
    for part, names in (("train", stems[:2]), ("val", stems[2:]), ("trainval", stems)):
        (voc / f"ImageSets/Main/{part}.txt").write_text("".join(f"{name}\n" for name in names))
    (voc / "ImageSets/Main/dog_train.txt").write_text("".join(f"{name} -1\n" for name in stems[:2]))
    return voc


def samples(out: Path) -> dict[str, Any]:
    with tarfile.open(out / "000000.tar") as tar:
        return {one.name: json.load(tar.extractfile(one)) for one in tar if one.name.endswith(".json")}  # type: ignore[arg-type]


def converted(voc: Path, out: Path, split: str) -> dict[str, Any]:
    config = ConvertConfig(images=str(voc / "JPEGImages"), max_bad_share=0.9)
    convert(voc_program.rows(voc, split), out, config, engine=threads(1))
    return samples(out)


def test_program_converts_a_split(tmp_path: Path, voc: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(PROGRAM), str(voc), str(out), "--split", "train"]
    done = run_program([*command, "train_tokenizer=300"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'rows': 2, 'written': 2" in done.stdout
    assert (out / "tokenizer").is_dir()
    facts = {"pose": "Left", "truncated": 1, "difficult": 0}
    assert samples(out)["2007_000032.json"] == {
        "captions": ["a photo of diningtable, person."],
        "boxes": [
            {"bbox": [3, 4, 17, 26], "category": "diningtable", **facts},
            {"bbox": [7.5, 8, 22.75, 32], "category": "person", **facts},
        ],
        "filename": "2007_000032.jpg",
    }
    wrong = run_program([*command[:-1], "trian"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "error: split 'trian': no such list in" in wrong.stderr
    wrong = run_program([*command, "resise=256"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")
    assert "resise" in wrong.stderr
    assert wrong.stderr.count("\n") == 1


def test_boxes_and_names_come_with_the_batches(tmp_path: Path, voc: Path) -> None:
    said = converted(voc, tmp_path / "out", "trainval")
    names = ["person", "diningtable"]
    targets = {"boxes": "json:boxes", "box_labels": "json:boxes.category", "box_classes": names}
    data = {"shards": str(tmp_path / "out"), "tokenizer": None, "image_buckets": [[48, 64]], "transform": "eval"}
    with Loader.from_config({**data, "global_batch_size": 3, "targets": targets}) as loader:
        (batch,) = [dict(batch) for batch in loader]
        assert not loader.ledger
        assert loader.stats.boxes == {"shown": 3, "left_out": 1}  # the dog, which is none of the classes
    for row, key in enumerate(batch["keys"]):
        boxes = [one for one in said[f"{key}.json"]["boxes"] if one["category"] in names]
        valid = batch["boxes_valid"][row]
        assert batch["box_labels"][row][valid].tolist() == [names.index(one["category"]) for one in boxes]
        corners = torch.tensor([one["bbox"] for one in boxes], dtype=torch.float32).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        assert torch.allclose(batch["boxes"][row][valid], corners, atol=1e-3)


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_are_those_that_torchvision_reads(tmp_path: Path, voc: Path, split: str) -> None:
    theirs = [target["annotation"] for _, target in VOCDetection(str(tmp_path / "corpus"), "2012", split)]
    ours = converted(voc, tmp_path / "out", split)
    assert [sample["filename"] for sample in ours.values()] == [said["filename"] for said in theirs]
    for sample, said in zip(ours.values(), theirs, strict=True):
        usable = [one for one in said["object"] if int(float(one["bndbox"]["xmax"])) != 10]
        assert [box["category"] for box in sample["boxes"]] == [one["name"] for one in usable]
        corners = [[float(one["bndbox"][k]) for k in ("xmin", "ymin", "xmax", "ymax")] for one in usable]
        from_zero = torch.tensor(corners) - torch.tensor([1.0, 1.0, 0.0, 0.0])  # the last pixel is included
        boxes = torch.tensor([box["bbox"] for box in sample["boxes"]], dtype=torch.float32)
        assert torch.equal(box_convert(boxes, "xywh", "xyxy"), from_zero)
        assert ("boxes_left_out" in sample) == (split == "val")


def test_broken_xml_costs_its_row(tmp_path: Path, voc: Path) -> None:
    (voc / "Annotations/2007_000027.xml").write_text(f"{LAUGHS}<annotation/>")
    (voc / "ImageSets/Main/trainval.txt").write_text("2007_000027\n2007_000033\n2007_000033\n../../../gone\nnone\n")
    (voc / "Annotations/none.xml").write_text(voc_xml("none"))
    assert list(converted(voc, tmp_path / "out", "trainval")) == ["2007_000033.json"]
    assert [(line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("broken_row", "XML with a document type declaration (<!DOCTYPE …>), which is not read"),
        ("duplicate_image", "'2007_000033' is in the list twice"),
        ("outside_root", "'../../../gone.xml' leads out of the corpus's folder"),
        ("missing_caption", "'none.xml' has no object with a name and a box"),
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (f"{LAUGHS}<annotation><filename>&c;</filename></annotation>".encode(), "a document type declaration"),
        (f"{LAUGHS}<annotation/>".encode("utf-16"), "a document type declaration"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "a document type declaration"),
        (b"<annotation><filename>&c;</filename></annotation>", "not XML: undefined entity"),
        (b"", "not XML: no element found"),
        (b'<?xml version="1.0" encoding="no-such"?><annotation/>', "not XML: unknown encoding"),
        (b"<annotation/><annotation/>", "not XML: junk after document element"),
        (b"<a>" * 100_000, "not XML: no element found"),
        (b"<annotations/>", "XML of <annotations>, and <annotation> is expected"),
    ],
)
def test_xml_that_is_not_vocs_is_a_broken_row(data: bytes, said: str) -> None:
    with pytest.raises(BadSample, match=f"^broken_row: .*{said}"):
        voc_program.parse_xml(data, "a.xml")


def test_split_that_is_not_there_is_an_error_that_names_the_lists(voc: Path) -> None:
    with pytest.raises(ConfigError, match=r"split 'test': no such list in '.*Main'; there are: train, trainval, val"):
        next(voc_program.rows(voc, "test"))
