from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from open_clip import zero_shot_metadata as theirs

from mmdata import cli
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
from mmdata.train.evaluation.prompts import read_classes


def test_classes_imagenet_are_those_of_open_clip():
    shipped = read_classes("imagenet")
    assert shipped.classes == list(theirs.IMAGENET_CLASSNAMES)
    prompts = [template("tench") for template in theirs.OPENAI_IMAGENET_TEMPLATES]
    assert shipped.prompts[:80] == prompts
    assert len(shipped.templates) == 80


def test_classes_of_ones_own_in_the_templates_of_imagenet(tmp_path: Path):
    path = tmp_path / "classes.json"
    path.write_text('{"classes": ["dog"], "templates": "imagenet"}')
    assert read_classes(path).prompts == [template("dog") for template in theirs.OPENAI_IMAGENET_TEMPLATES]
    path.write_text('{"classes": ["dog"], "templates": "a photo of a {}"}')
    with pytest.raises(DataError, match=r"templates: .*'a photo of a \{\}' is no shipped list \(imagenet\): write a"):
        read_classes(path)


@pytest.fixture(scope="module")
def labelled(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of labels, with names and without captions."""
    folder = tmp_path_factory.mktemp("labelled")
    for line in map(json.loads, (photos / "raw/captions.jsonl").read_text().splitlines()):
        (folder / "raw" / line["label"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "raw" / line["path"], folder / "raw" / line["label"])
    convert(folder / "raw", folder / "shards", ConvertConfig())
    return folder / "shards"


@pytest.fixture
def train(photos: Path, tmp_path: Path):
    """`train(val)` of one step; returns the exit code."""

    def run(val: dict[str, Any]) -> int:
        shards = str(photos / "shards")
        data = {"shards": shards, "val": val, "tokenizer": f"{shards}/tokenizer", "loading": {"num_workers": 0}}
        data |= {"global_batch_size": 4, "image_size": 32, "max_length": 16}
        settings = {"output": str(tmp_path / "run"), "steps": 1, "warmup_steps": 0}
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}, "train": settings}))
        return cli.main(["train", str(tmp_path / "c.yaml")])

    return run


def test_train_scores_classes_of_shards_of_labels_as_evaluate_does(train: Any, labelled: Path, tmp_path: Path):
    assert train({"shards": str(labelled), "classes": "shards"}) == 0
    scores = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert scores.keys() == {"step", "epochs_done", "rows", "zero_shot_top1", "zero_shot_top5", "zero_shot_chance"}
    assert (scores["rows"], scores["zero_shot_chance"]) == (12, 0.5)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [scores.items() <= line.items() for line in lines if line["kind"] == "evaluation"] == [True]
    assert cli.main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0  # by the run's data.val.classes
    again = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert scores.items() <= again.items()
    assert again["templates"] == ["{}"]
    assert cli.main(["evaluate", str(tmp_path / "run"), "--shards", str(labelled), "--device", "cpu"]) == 0
    other = json.loads((tmp_path / "run/evaluation-shards.json").read_text())
    assert other["shards"] == str(labelled)
    assert json.loads((tmp_path / "run/evaluation.json").read_text()) == again, "those of the run's own rows stay"


@pytest.mark.parametrize(
    ("val", "expected"),
    [
        ({"shards": "labelled", "classes": "none.json"}, "data.val.classes: classes 'none.json': no such file; it is"),
        ({"shards": "labelled", "classes": "imagenet"}, "data.val.classes has 1000 classes, and shards '"),
        ({"shards": "labelled"}, "nothing to retrieve: give data.val.classes FILE for zero-shot accuracy"),
        (
            {"shards": "unnamed", "classes": "imagenet"},
            "have none: `mmdata convert` makes shards with labels of a table with the columns filepath and label; give "
            "them with data.val.shards",
        ),
        ({"shards": "unnamed", "classes": "shards"}, "do not name the classes of all labels: give a file"),
        ({"classes": "imagenet"}, "classes are those of the rows of val.shards or val.share: set one of them"),
    ],
)
def test_train_tells_a_mistake_about_classes_before_it_begins(
    val: dict[str, str], expected: str, train: Any, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if val.get("shards") == "unnamed":
        table = labelled.parent / "raw" / "captions.jsonl"
        table.write_text('{"path": "dog/00.jpg", "caption": "a dog"}')
        convert(table, tmp_path / "shards", ConvertConfig())
    places = {"labelled": str(labelled), "unnamed": str(tmp_path / "shards")}
    assert train({name: places.get(value, value) for name, value in val.items()}) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()
