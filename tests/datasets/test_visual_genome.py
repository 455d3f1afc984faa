"""datasets/visual_genome/convert.py: phrases are captions, and boxes with their phrase."""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Loader
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.units.engines import threads
from tests.convert.conftest import left_out
from tests.programs import run_program

PROGRAM = Path(__file__).parents[2] / "datasets/visual_genome/convert.py"
spec = importlib.util.spec_from_file_location("visual_genome_program", PROGRAM)
assert spec is not None
assert spec.loader is not None
program: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)

CLOCK = "the clock is green in colour"


def region(number: int, image: int, phrase: Any, x: Any, y: Any, width: Any, height: Any) -> dict[str, Any]:
    box = {"width": width, "height": height, "x": x, "y": y}
    return {"region_id": number, "image_id": image, "phrase": phrase, **box}


REGIONS: list[Any] = [
    {
        "regions": [
            region(1382, 1, CLOCK, 42, 7, 20, 13),
            region(1383, 1, "shade is along the street ", 9, 37, 18, 10),
            region(1384, 1, CLOCK, 40, 5, 25, 18),
        ],
        "id": 1,
    },
    {"regions": [region(5, 2315375, "a man ", 0, 0, 30, 50)], "id": 2315375},
]


@pytest.fixture
def vg(tmp_path: Path, photo: Any) -> Path:
    """`vg/{region_descriptions,image_data}.json`, one image in VG_100K_2 and one in VG_100K."""
    vg = tmp_path / "vg"
    places = {1: "VG_100K_2/1.jpg", 2315375: "VG_100K/2315375.jpg"}
    for seed, place in enumerate(places.values()):
        (vg / place).parent.mkdir(parents=True)
        (vg / place).write_bytes(photo(60, 80, seed=20 + seed))
    data = [
        {"width": 80, "url": f"https://example.com/rak248/{place}", "height": 60, "image_id": number}
        | {"coco_id": None if number == 1 else 63, "flickr_id": None}
        for number, place in places.items()
    ]
    (vg / "image_data.json").write_text(json.dumps(data))
    (vg / "region_descriptions.json").write_text(json.dumps(REGIONS))
    return vg


def samples(out: Path) -> list[dict[str, Any]]:
    with tarfile.open(out / "000000.tar") as tar:
        return [json.load(tar.extractfile(one)) for one in tar if one.name.endswith(".json")]  # type: ignore[arg-type]


def test_program_takes_all_phrases_and_keeps_their_boxes(tmp_path: Path, vg: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(vg), str(tmp_path / "out")]
    done = run_program([*command, "shard_rows=100"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'rows': 2, 'written': 2" in done.stdout
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


def test_boxes_and_phrases_come_with_the_batches(tmp_path: Path, vg: Path) -> None:
    convert(program.rows(vg), tmp_path / "out", ConvertConfig(images=str(vg)), engine=threads(1))
    targets = {"boxes": "json:boxes", "box_texts": "json:boxes.phrase"}
    data = {"shards": str(tmp_path / "out"), "tokenizer": "clip", "image_buckets": [[60, 80]], "transform": "eval"}
    with Loader.from_config({**data, "global_batch_size": 2, "targets": targets}) as loader:
        (batch,) = [dict(batch) for batch in loader]
    converted = {one["image_id"]: one["boxes"] for one in samples(tmp_path / "out")}
    for row, number in enumerate(batch["rows"].tolist()):
        boxes = list(converted.values())[number]
        said = [one["phrase"] for one in boxes]
        valid = batch["boxes_valid"][row]
        hashes = batch["box_text_hash"][row][valid].tolist()
        assert [hashes.index(one) for one in hashes] == [said.index(one) for one in said]
        corners = torch.tensor([one["bbox"] for one in boxes], dtype=torch.float32)
        corners[:, 2:] += corners[:, :2]
        assert torch.allclose(batch["boxes"][row][valid], corners, atol=1e-3)


def test_what_cannot_be_used_is_left_out_and_counted(tmp_path: Path, vg: Path) -> None:
    first = {
        "id": 1,
        "regions": [*REGIONS[0]["regions"], region(7, 1, "no area", 1, 2, 0, 4), region(8, 1, 0, *"1234"), 9],
    }
    more = [{"regions": [], "id": 3}, first, {"regions": [region(9, 4, "a dog", 1, 2, 3, 4)], "id": 4}, {}, 5]
    (vg / "region_descriptions.json").write_text(json.dumps([first, REGIONS[1], *more]))
    data = json.loads((vg / "image_data.json").read_text())
    (vg / "image_data.json").write_text(json.dumps([*data, {"image_id": 77, "url": None}]))
    config = ConvertConfig(images=str(vg), max_bad_share=0.9)
    report = convert(program.rows(vg), tmp_path / "out", config, engine=threads(1))
    assert (report.accounts["rows"], report.accounts["written"]) == (8, 2)
    sample, _ = samples(tmp_path / "out")
    assert sample["captions"] == [CLOCK, "shade is along the street", "no area"]  # the phrase is about the image
    assert sample["boxes_left_out"] == "3 boxes left out; the first is region 7: its box of 0 × 4 pixels has no area"
    assert [(line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("missing_caption", "the row has no caption"),
        ("duplicate_image", "the regions of image 1 come twice"),
        ("missing_image", "'VG_100K/4.jpg': No such file or directory"),
        ("broken_row", 'entry 6 of region_descriptions.json has no "id", or no list of "regions"'),
        ("broken_row", 'entry 7 of region_descriptions.json has no "id", or no list of "regions"'),
        ("missing_caption", "the image is in image_data.json, and has no regions"),
    ]


def test_file_that_is_cut_is_an_error_that_names_it(tmp_path: Path, vg: Path) -> None:
    (vg / "region_descriptions.json").write_text(json.dumps(REGIONS)[:-5])
    done = run_program([sys.executable, str(PROGRAM), str(vg), str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: annotations '" in done.stderr
    assert "region_descriptions.json': not JSON at character" in done.stderr
    assert not (tmp_path / "out/__mmdata__/manifest.json").exists()
    command = [sys.executable, str(PROGRAM), str(vg), str(tmp_path / "out"), "resise=256"]
    done = run_program(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "resise" in done.stderr
    assert done.stderr.count("\n") == 1
