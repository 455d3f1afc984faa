"""Boxes of corpora in batches: where they are in the pixels, in layouts of corpora that other libraries ship."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from mmdata import Index, Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from tests.convert.sources.corpora import coco_box, coco_document

DATASETS = Path(__file__).parents[2] / "datasets"
sys.path.insert(0, str(DATASETS / "scenes"))  # as `python datasets/scenes/render.py` does

import draw  # noqa: E402
import render  # noqa: E402
from scene import COLOURS, SHAPES, SIZES  # noqa: E402

Rows = list[tuple[tuple[int, int], list[tuple[list[float], str]]]]
"""Of each sample: (height, width), and bbox (x, y, width, height) and category of each box."""
Photo = Callable[..., bytes]

CLASSES = ["person", "car", "traffic light", "tv", "bus"]
CAPTION = "a photo of {}."


def test_boxes_of_scenes_lie_where_their_colours_are(tmp_path: Path, request: pytest.FixtureRequest):
    count = 4_000 if request.config.getoption("--sweeps") else 500
    folder = tmp_path / "scenes"
    render.render(folder, render.Settings(seed=3, train=count, val=0, pairs=0))
    config = ConvertConfig(image_column="image", caption_columns=["captions"], label_column="label", keep=("boxes",))
    convert(folder / "train/captions.jsonl", tmp_path / "shards", config, engine=threads(1))
    names = [" ".join(words) for words in itertools.product(SIZES, COLOURS, SHAPES)]
    data: dict[str, Any] = {
        "shards": str(tmp_path / "shards"),
        "global_batch_size": 50,
        "image_buckets": [[96, 96], [80, 112]],
        "transform": "train",
        "crop_scale": [0.3, 1.0],
        "augment": {"horizontal_flip_prob": 0.5},
        # Of a shape that is cut, the middle of its box may have no colour.
        "targets": {
            "boxes": "json:boxes",
            "box_labels": "json:boxes.phrase",
            "box_classes": names,
            "min_visible": 0.98,
        },
    }
    right, wrong, flips = 0, list[str](), 0
    batch: Any
    for batch in Loader.from_config(data):
        flips += int(batch["flipped"].sum())
        for row, place in batch["boxes_valid"].nonzero().tolist():
            _, colour, shape = names[int(batch["box_labels"][row, place])].split()
            left, top, right_edge, bottom = batch["boxes"][row, place].tolist()
            # The middle of each shape is filled, but for the ring's.
            x = int(left + (right_edge - left) * (0.875 if shape == "ring" else 0.5))
            y = int((top + bottom) / 2)
            seen = batch["pixel_values"][row, :, y - 1 : y + 2, x - 1 : x + 2].double().mean(dim=(1, 2)).numpy()
            distances = {name: float(np.abs(np.subtract(rgb, seen)).sum()) for name, rgb in draw.RGB.items()}
            nearest = min(distances, key=distances.__getitem__)
            if nearest == colour:
                right += 1
            else:
                wrong.append(f"{colour} {shape}, not {nearest}: {seen.round()}")
    assert right + len(wrong) > 0.8 * count
    assert 0.3 * count < flips < 0.7 * count
    assert right >= 0.995 * (right + len(wrong)), wrong


def mmdetection_coco(root: Path, photo: Photo) -> Rows:
    """As mmdetection's tests/data/coco_dummy: two photos of COCO, with polygons and a crowd as run lengths."""
    crowd = {"segmentation": {"counts": [25_520, 11, 415, 11, 247_323], "size": [427, 640]}, "iscrowd": 1}
    said: dict[tuple[int, int, int], list[tuple[list[float], str, dict[str, Any]]]] = {
        (255_917, 427, 640): [
            ([222.62, 217.82, 19.19, 21.11], "traffic light", {}),
            ([50.5, 329.7, 79.73, 55.26], "car", {}),
            ([352.86, 331.89, 5.4, 6.47], "person", {}),
            ([59, 253, 252, 84], "car", crowd),
        ],
        (139, 426, 640): [([7.03, 167.76, 149.32, 94.87], "tv", {}), ([557.21, 209.19, 81.35, 78.73], "tv", {})],
    }
    numbers = {name: number for number, name in enumerate(CLASSES, start=1)}
    images: list[Any] = [
        {"license": 6, "file_name": f"{number:012d}.jpg", "height": height, "width": width, "id": number}
        for number, height, width in said
    ]
    boxes = [
        coco_box(400_000 + 10 * i + k, number, numbers[category], bbox, **more)
        for i, ((number, _, _), of_image) in enumerate(said.items())
        for k, (bbox, category, more) in enumerate(of_image)
    ]
    names = [{"supercategory": "x", "id": number, "name": name} for name, number in numbers.items()]
    (root / "annotations").mkdir(parents=True)
    (root / "annotations/instances_val2017.json").write_text(json.dumps(coco_document(images, boxes, categories=names)))
    (root / "val2017").mkdir()
    for image in images:
        (root / "val2017" / image["file_name"]).write_bytes(photo(image["height"], image["width"], seed=image["id"]))
    config = ConvertConfig(split="val2017", caption_templates=[CAPTION], keep=("segmentation", "id", "width", "height"))
    convert(root, root.with_name("shards"), config, engine=threads(1))
    return [
        ((height, width), [(bbox, category) for bbox, category, _ in of_image])
        for (_, height, width), of_image in said.items()
    ]


def mmdetection_sample(root: Path, photo: Photo) -> Rows:
    """As mmdetection's tests/data/coco_sample.json: scores, no crowds, and an image without a box."""
    images: list[Any] = [{"file_name": f"fake{i + 1}.jpg", "height": 80, "width": 90, "id": i} for i in range(3)]
    of_box = [(0, 4), (0, 1), (1, 4)]
    boxes: list[Any] = [
        {"bbox": [0, 0, 20, 20], "area": 400.0, "score": 1.0, "category_id": category, "id": i, "image_id": image}
        for i, (image, category) in enumerate(of_box, start=1)
    ]
    names = [{"id": 1, "name": "car", "supercategory": "none"}, {"id": 4, "name": "bus", "supercategory": "none"}]
    document = {"images": images, "annotations": boxes, "categories": names, "licenses": [], "info": None}
    root.mkdir()
    (root / "coco_sample.json").write_text(json.dumps(document, indent=4))
    for image in images:
        (root / image["file_name"]).write_bytes(photo(80, 90, seed=image["id"]))
    config = ConvertConfig(caption_templates=[CAPTION], max_bad_share=0.5)
    convert(root / "coco_sample.json", root.with_name("shards"), config, engine=threads(1))
    box = [0.0, 0, 20, 20]
    return [((80, 90), [(box, "bus"), (box, "car")]), ((80, 90), [(box, "bus")])]


def torchvision_gallery(root: Path, photo: Photo) -> Rows:
    """As torchvision's gallery/assets/coco: two images, and nothing in the file but images and annotations."""
    images: list[Any] = [
        {"file_name": "000000000001.jpg", "height": 512, "width": 512, "id": 1},
        {"file_name": "000000000002.jpg", "height": 500, "width": 500, "id": 2},
    ]
    of_box = [(1, 1, [17.0, 16.0, 344.0, 495.0]), (2, 2, [0.0, 139.0, 457.0, 359.0])]
    boxes: list[Any] = [
        {"segmentation": [[40.0, 511.0, 26.0, 487.0, 28.0, 438.0]], "iscrowd": 0, "image_id": image, "bbox": bbox}
        | {"category_id": category, "id": image}
        for image, category, bbox in of_box
    ]
    (root / "images").mkdir(parents=True)
    for image in images:
        path = root / "images" / image["file_name"]
        path.write_bytes(photo(image["height"], image["width"], seed=image["id"]))
    file = root / "instances.json"
    config = ConvertConfig(images=str(root / "images"), caption_templates=[CAPTION], keep=("segmentation",))
    file.write_text(json.dumps({"images": images, "annotations": boxes}))
    with pytest.raises(DataError, match=r'boxes, and no "categories" that name what is in them$'):
        convert(file, root.with_name("shards"), config, engine=threads(1))
    names = [{"id": number, "name": name} for number, name in enumerate(CLASSES[:2], start=1)]
    file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": names}))
    convert(file, root.with_name("shards"), config, engine=threads(1))
    sizes = {1: (512, 512), 2: (500, 500)}
    return [(sizes[i], [(bbox, CLASSES[category - 1])]) for i, category, bbox in of_box]


def mmdetection_voc(root: Path, photo: Photo) -> Rows:
    """As mmdetection's tests/data/VOCdevkit: an XML that names another file than the one beside which it lies."""
    voc = root / "VOCdevkit/VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (voc / name).mkdir(parents=True)
    corners = "<xmin>139</xmin><ymin>200</ymin><xmax>207</xmax><ymax>301</ymax>"
    (voc / "Annotations/000001.xml").write_text(
        "<annotation>\n\t<folder>VOC2007</folder>\n\t<filename>000002.jpg</filename>\n"
        "\t<size><width>335</width><height>500</height><depth>3</depth></size>\n\t<segmented>0</segmented>\n"
        "\t<object><name>car</name><pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult>"
        f"<bndbox>{corners}</bndbox></object>\n</annotation>\n"
    )
    (voc / "ImageSets/Main/trainval.txt").write_text("000001\n")
    (voc / "JPEGImages/000001.jpg").write_bytes(photo(500, 335, seed=1))
    spec = importlib.util.spec_from_file_location("voc_program", DATASETS / "voc/convert.py")
    assert spec is not None
    assert spec.loader is not None
    program: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    config = ConvertConfig(images=str(voc / "JPEGImages"))
    convert(program.rows(voc, "trainval"), root.with_name("shards"), config, engine=threads(1))
    return [((500, 335), [([138.0, 199, 69, 102], "car")])]


def moved(size: tuple[int, int], boxes: list[list[float]], crop: list[int], to: Any, flipped: bool) -> torch.Tensor:
    """Boxes (n, 4) as torchvision moves them through a crop in whole pixels, a resize and a flip, and clips them."""
    found: Any = tv_tensors.BoundingBoxes(torch.tensor(boxes, dtype=torch.float64), format="XYWH", canvas_size=size)  # type: ignore[call-overload]
    found = functional.convert_bounding_box_format(found, new_format=tv_tensors.BoundingBoxFormat.XYXY)
    found = functional.resize(functional.crop(found, *crop), list(to))
    found = functional.horizontal_flip(found) if flipped else found
    return functional.clamp_bounding_boxes(found).as_subclass(torch.Tensor)


@pytest.mark.parametrize("layout", [mmdetection_coco, mmdetection_sample, torchvision_gallery, mmdetection_voc])
def test_boxes_of_real_layouts_are_those_of_torchvision(layout: Callable[..., Rows], tmp_path: Path, photo: Photo):
    rows = layout(tmp_path / "corpus", photo)
    shards = tmp_path / "shards"
    assert len(Index.open(shards)) == len(rows)
    data: dict[str, Any] = {
        "shards": str(shards),
        "global_batch_size": len(rows),
        "image_buckets": [[48, 64]],
        "transform": "train",
        "decode": "exact",  # crops are then whole pixels, as torchvision's
        "crop_scale": [0.2, 1.0],
        "augment": {"horizontal_flip_prob": 0.5},
        "targets": {
            "boxes": "json:boxes",
            "box_labels": "json:boxes.category",
            "box_classes": CLASSES,
            "min_visible": 0.25,
        },
    }
    batch: Any
    loader, seen, left_out = Loader.from_config(data), 0, 0
    for epoch in range(20):
        loader.set_epoch(epoch)
        for batch in loader:
            assert batch["valid"].all()
            for i, row in enumerate(batch["rows"].tolist()):
                size, said = rows[row]
                crop = batch["crop"][i]
                assert torch.equal(crop, crop.round())
                whole = torch.tensor([box for box, _ in said], dtype=torch.float64)
                scale = 48 / float(crop[2]) * 64 / float(crop[3])
                expected = moved(size, whole.tolist(), crop.int().tolist(), (48, 64), bool(batch["flipped"][i]))
                area = (expected[:, 2:] - expected[:, :2]).prod(dim=1)
                share = area / (whole[:, 2:].prod(dim=1) * scale)
                valid = batch["boxes_valid"][i]
                if ((share - 0.25).abs() < 1e-4).any():
                    continue  # rounding decides
                kept = share >= 0.25
                assert int(valid.sum()) == int(kept.sum())
                torch.testing.assert_close(batch["boxes"][i][valid].double(), expected[kept], rtol=0, atol=1e-3)
                labels = [CLASSES.index(said[k][1]) for k in kept.nonzero().squeeze(1).tolist()]
                assert batch["box_labels"][i][valid].tolist() == labels
                seen, left_out = seen + len(labels), left_out + int((~kept).sum())
    assert seen > 5
    assert left_out > 0
