"""Annotated corpora as `mmdata convert` writes them load with their objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO

from mmdata import Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from tests.convert.sources.corpora import make_coco

CLASSES = ["person", "dog", "hot dog"]
TARGETS = {
    "boxes": "json:boxes",
    "box_labels": "json:boxes.category",
    "box_classes": CLASSES,
    "keypoints": "json:boxes.keypoints",
    "masks": "json:boxes.segmentation",
}
IDS = {"fields": {"id": "json:id"}}
CROWD = {"size": [48, 64], "counts": [272, 20, 28, 20, 48 * 64 - 340]}


@pytest.fixture
def coco(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """COCO in miniature, whose crowd has run lengths of the whole image."""
    coco = make_coco(tmp_path, photo)
    file = coco / "annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    for one in content["annotations"]:
        if one["iscrowd"]:
            one["segmentation"] = CROWD
    file.write_text(json.dumps(content))
    return coco


@pytest.mark.parametrize("resize", [None, 24])
def test_coco_loads_with_boxes_names_key_points_and_masks(tmp_path: Path, coco: Path, resize: int | None):
    settings: dict[str, Any] = {"keep": ("id", "height", "width", "segmentation"), "resize": resize}
    convert(coco, tmp_path / "out", ConvertConfig(**settings), engine=threads(1))
    height, width = (24, 32) if resize else (48, 64)
    data = {"shards": str(tmp_path / "out"), "tokenizer": None, "global_batch_size": 3, "transform": "eval"}
    with Loader.from_config({**data, "image_buckets": [[height, width]], "targets": TARGETS, **IDS}) as loader:
        (batch,) = [dict(batch) for batch in loader]
        assert not loader.ledger
    theirs, scale = COCO(str(coco / "annotations/instances_val2017.json")), height / 48
    people = COCO(str(coco / "annotations/person_keypoints_val2017.json"))
    with_points = {one["id"]: one["keypoints"] for one in people.anns.values()}
    seen = 0
    for row, image in enumerate(batch["id"].tolist()):
        found = theirs.imgToAnns[image]
        assert int(batch["boxes_valid"][row].sum()) == len(found)
        for place, one in enumerate(found):
            left, top, wide, high = one["bbox"]
            expected = torch.tensor([left, top, left + wide, top + high]) * scale
            assert (batch["boxes"][row, place] - expected).abs().max() < 1e-3
            name = theirs.cats[one["category_id"]]["name"]
            assert int(batch["box_labels"][row, place]) == CLASSES.index(name)
            points = np.array(with_points.get(one["id"], [0] * 51)).reshape(17, 3)
            assert batch["keypoints"][row, place, :, 2].tolist() == points[:, 2].tolist()
            assert (batch["keypoints"][row, place, :, :2] - torch.from_numpy(points[:, :2]) * scale).abs().max() < 1e-3
            if not resize:
                mask = theirs.annToMask(one)
                differing = (batch["masks"][row, place].numpy() != mask).sum()
                assert differing <= (0 if one["iscrowd"] else 60)  # pixels on the edges of polygons
            seen += 1
    assert seen == 4
