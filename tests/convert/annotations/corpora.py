"""Miniatures of annotated corpora as their archives unpack: real JPEGs, and the real names of fields."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Photo = Callable[..., bytes]

CATEGORIES = [
    {"supercategory": "person", "id": 1, "name": "person"},
    {"supercategory": "animal", "id": 18, "name": "dog"},
    {"supercategory": "food", "id": 58, "name": "hot dog"},
]
KEYPOINTS = [23, 17, 2, *[0, 0, 0] * 15, 30, 40, 1]
"""Of a person: 17 times x, y, visibility."""


def coco_image(number: int, *, height: int = 48, width: int = 64) -> dict[str, Any]:
    name = f"{number:012d}.jpg"
    return {
        "license": 4,
        "file_name": name,
        "coco_url": f"http://images.example/val2017/{name}",
        "height": height,
        "width": width,
        "date_captured": "2013-11-14 17:02:52",
        "flickr_url": "http://farm7.example/a.jpg",
        "id": number,
    }


def coco_box(number: int, image: int, category: int, bbox: Any, **more: Any) -> dict[str, Any]:
    area = bbox[2] * bbox[3] if isinstance(bbox, list) and len(bbox) == 4 else 1
    polygon = [[5.5, 6.25, 20.0, 6.25, 20.0, 30.0]]
    content = {"segmentation": polygon, "area": area, "iscrowd": 0, "image_id": image, "bbox": bbox}
    return {**content, "category_id": category, "id": number, **more}


def coco_document(images: list[Any], annotations: list[Any], **more: Any) -> dict[str, Any]:
    licenses = [{"url": "http://creativecommons.example/by/2.0/", "id": 4, "name": "Attribution License"}]
    info = {"description": "COCO 2017 Dataset", "year": 2017}
    return {"info": info, "licenses": licenses, "images": images, "annotations": annotations, **more}


def make_coco(root: Path, photo: Photo) -> Path:
    """`coco/annotations/` with instances, person_keypoints and captions, and `coco/val2017/`; image 285 has no box."""
    (root / "coco/annotations").mkdir(parents=True)
    (root / "coco/val2017").mkdir()
    images = [coco_image(139), coco_image(285), coco_image(632)]
    for seed, image in enumerate(images):
        (root / "coco/val2017" / image["file_name"]).write_bytes(photo(48, 64, seed=seed))
    person = coco_box(230831, 139, 1, [3.5, 4, 20.25, 40])
    crowd = {"iscrowd": 1, "segmentation": {"counts": [272, 2, 4], "size": [48, 64]}}
    boxes = [
        coco_box(1768, 632, 18, [0, 1, 10, 12]),
        person,
        coco_box(1773, 139, 58, [30.0, 8.5, 9.5, 7.0]),
        coco_box(900100, 139, 1, [0, 0, 64, 48], **crowd),
    ]
    said = [{"image_id": n, "id": 10 * n + k, "caption": f"photo {n}, {k}"} for k in range(2) for n in (139, 285, 632)]
    points = {**CATEGORIES[0], "keypoints": ["nose"], "skeleton": [[16, 14]]}
    files = {
        "instances": coco_document(images, boxes, categories=CATEGORIES),
        "person_keypoints": coco_document(
            images, [{**person, "num_keypoints": 2, "keypoints": KEYPOINTS}], categories=[points]
        ),
        "captions": coco_document(images, said),
    }
    for kind, content in files.items():
        (root / f"coco/annotations/{kind}_val2017.json").write_text(json.dumps(content))
    return root / "coco"


VOC_XML = """<annotation>
\t<folder>VOC2012</folder>
\t<filename>{stem}.jpg</filename>
\t<source><database>The VOC2007 Database</database><annotation>PASCAL VOC2007</annotation></source>
\t<size><width>64</width><height>48</height><depth>3</depth></size>
\t<segmented>1</segmented>
{objects}</annotation>
"""
VOC_OBJECT = """\t<object>
\t\t<name>{name}</name>
\t\t<pose>Left</pose>
\t\t<truncated>1</truncated>
\t\t<difficult>0</difficult>
\t\t<bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>
{more}\t</object>
"""
HEAD = "\t\t<part><name>head</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></part>\n"


def voc_object(name: str, *corners: float, more: str = "") -> str:
    return VOC_OBJECT.format(*corners, name=name, more=more)


def voc_xml(stem: str, *objects: str) -> str:
    return VOC_XML.format(stem=stem, objects="".join(objects))


def make_voc(root: Path, photo: Photo) -> Path:
    """`VOCdevkit/VOC2012` with three annotated images in `trainval`, and the list of one class."""
    voc = root / "VOCdevkit/VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main", "ImageSets/Segmentation"):
        (voc / name).mkdir(parents=True)
    said = {
        "2007_000027": [voc_object("person", 1, 1, 64, 48, more=HEAD)],
        "2007_000032": [voc_object("diningtable", 4, 5, 20, 30), voc_object("person", 8.5, 9, 30.25, 40)],
        "2007_000033": [voc_object("dog", 2, 2, 2, 2), voc_object("dog", 10, 10, 40, 40)],
    }
    for seed, (stem, objects) in enumerate(said.items()):
        (voc / f"JPEGImages/{stem}.jpg").write_bytes(photo(48, 64, seed=10 + seed))
        (voc / f"Annotations/{stem}.xml").write_text(voc_xml(stem, *objects))
    stems = list(said)
    for part, names in (("train", stems[:2]), ("val", stems[2:]), ("trainval", stems)):
        (voc / f"ImageSets/Main/{part}.txt").write_text("".join(f"{name}\n" for name in names))
    (voc / "ImageSets/Main/dog_train.txt").write_text("".join(f"{name} -1\n" for name in stems[:2]))
    return voc


def region(number: int, image: int, phrase: Any, x: Any, y: Any, width: Any, height: Any) -> dict[str, Any]:
    box = {"width": width, "height": height, "x": x, "y": y}
    return {"region_id": number, "image_id": image, "phrase": phrase, **box}


def make_visual_genome(root: Path, photo: Photo) -> Path:
    """`vg/{region_descriptions,image_data}.json`, one image in VG_100K_2 and one in VG_100K."""
    vg = root / "vg"
    places = {1: "VG_100K_2/1.jpg", 2315375: "VG_100K/2315375.jpg"}
    for seed, place in enumerate(places.values()):
        (vg / place).parent.mkdir(parents=True)
        (vg / place).write_bytes(photo(60, 80, seed=20 + seed))
    data = [
        {"width": 80, "url": f"https://example.com/rak248/{place}", "height": 60, "image_id": number}
        | {"coco_id": None if number == 1 else 63, "flickr_id": None}
        for number, place in places.items()
    ]
    regions = [
        {
            "regions": [
                region(1382, 1, "the clock is green in colour", 42, 7, 20, 13),
                region(1383, 1, "shade is along the street ", 9, 37, 18, 10),
                region(1384, 1, "the clock is green in colour", 40, 5, 25, 18),
            ],
            "id": 1,
        },
        {"regions": [region(5, 2315375, "a man ", 0, 0, 30, 50)], "id": 2315375},
    ]
    (vg / "image_data.json").write_text(json.dumps(data))
    (vg / "region_descriptions.json").write_text(json.dumps(regions))
    return vg


def samples(out: Path) -> list[dict[str, Any]]:
    """The JSON of each sample, in the order of the shard."""
    with tarfile.open(out / "000000.tar") as tar:
        return [json.load(tar.extractfile(one)) for one in tar if one.name.endswith(".json")]  # type: ignore[arg-type]


def texts(out: Path) -> list[str]:
    """The .txt of each sample that has one."""
    with tarfile.open(out / "000000.tar") as tar:
        return [tar.extractfile(one).read().decode() for one in tar if one.name.endswith(".txt")]  # type: ignore[union-attr]
