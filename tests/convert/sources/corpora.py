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


def samples(out: Path) -> list[dict[str, Any]]:
    """The JSON of each sample, in the order of the shard."""
    with tarfile.open(out / "000000.tar") as tar:
        return [json.load(tar.extractfile(one)) for one in tar if one.name.endswith(".json")]  # type: ignore[arg-type]


def texts(out: Path) -> list[str]:
    """The .txt of each sample that has one."""
    with tarfile.open(out / "000000.tar") as tar:
        return [tar.extractfile(one).read().decode() for one in tar if one.name.endswith(".txt")]  # type: ignore[union-attr]
