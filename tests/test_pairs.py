"""Compositional test sets, and a model's scores on them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata.config import Config
from mmdata.errors import DataError
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import compositional
from mmdata.trained import TrainedRun
from mmdata.trained.pairs import read_pairs, score_pairs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("pairs") / "tokenizer"
    train_tokenizer(["a red circle left of a blue square"] * 5, folder, vocab_size=320)
    data = {"shards": "unused", "tokenizer": str(folder), "global_batch_size": 1, "image_size": 24}
    config = Config.model_validate({"data": data})
    tokenizer = Tokenizer.load(folder)
    torch.manual_seed(0)
    model = DualEncoder.from_config({"name": "micro"}, vocab_size=tokenizer.vocab_size).eval()
    return TrainedRun(model, config, tokenizer, Path("x.pt"), 0, 0)


@pytest.fixture
def pairs(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Five pairs of images."""
    lines = []
    for i in range(5):
        for side in (0, 1):
            (tmp_path / f"{i}_{side}.jpg").write_bytes(photo(30, 40, seed=10 * i + side))
        lines.append(pair(i, type=f"type {i % 2}", caption_0=f"a red {i}", caption_1=f"a blue {'very ' * i} {i}"))
    return write(tmp_path / "pairs.jsonl", *lines)


def pair(i: int, **changes: Any) -> dict[str, Any]:
    known = {"type": "t", "image_0": f"{i}_0.jpg", "image_1": f"{i}_1.jpg", "caption_0": "a", "caption_1": "b"}
    return {**known, **changes}


def test_pairs_scores_are_those_of_their_images_and_captions(pairs: Path, run: TrainedRun):
    images = run.embed_images([pairs.parent / f"{i}_{side}.jpg" for i in range(5) for side in (0, 1)])
    texts = run.embed_texts([text for i in range(5) for text in (f"a red {i}", f"a blue {'very ' * i} {i}")])
    types = [f"type {i % 2}" for i in range(5)]
    assert score_pairs(run, pairs) == compositional(images, texts, types)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def without(line: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != key}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: line: Invalid JSON: "),
        ("", r"line 2: line: Invalid JSON: "),
        ("[]", r"line 2: line: Input should be an object"),
        (without(pair(0), "caption_1"), r"line 2: caption_1: Field required"),
        (pair(0, caption_1=3), r"line 2: caption_1: Input should be a valid string"),
        (pair(0, caption_1=" "), r"line 2: caption_1: Value error, empty_caption: "),
        (without(pair(0), "type"), r"line 2: type: Field required"),
    ],
)
def test_pairs_line_that_is_no_pair_is_named(tmp_path: Path, line: Any, message: str):
    with pytest.raises(DataError, match=r"^pairs '.*p\.jsonl', " + message):
        read_pairs(write(tmp_path / "p.jsonl", pair(0), line))


def test_pairs_keys_that_are_not_asked_for_are_ignored(tmp_path: Path):
    odd = pair(0, where={"city": "Rome"}, box="none", comment=3)
    (tmp_path / "p.jsonl").write_text(json.dumps(odd) + "\n" + json.dumps(pair(1)) + "\n", encoding="utf-8-sig")
    found = read_pairs(tmp_path / "p.jsonl")  # with the mark at its begin that Windows programs write
    assert {where: each.image_0 for where, each in found.items()} == {"line 1": "0_0.jpg", "line 2": "1_0.jpg"}


def test_pairs_file_that_is_another_json_is_named_without_our_classes(tmp_path: Path):
    (tmp_path / "coco.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(DataError, match=r"^pairs '.*coco\.json', entry 'images': entry: Input should be an object$"):
        read_pairs(tmp_path / "coco.json")
    (tmp_path / "aro.json").write_text('[{"image_path": "1.png", "true_caption": "a", "false_caption": "b"}]')
    with pytest.raises(DataError, match=r"^pairs '.*aro\.json': one JSON list; expected JSONL, one pair a line"):
        read_pairs(tmp_path / "aro.json")


def test_pairs_missing_or_empty_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"^pairs '.*none\.jsonl': no such file; expected JSONL, one pair a line"):
        read_pairs(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"^pairs '.*p\.jsonl': the file is empty$"):
        read_pairs(write(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_1": "none.jpg"},
            r"^pairs '.*p\.jsonl', line 3, side 1: missing_image: 'none\.jpg': No such file or directory",
        ),
        (
            {"image_0": "../pairs.jsonl"},
            r"^pairs '.*p\.jsonl', line 3, side 0: outside_root: '\.\./pairs\.jsonl' leads out of the corpus's folder",
        ),
        ({"image_0": "/dev/zero"}, r"line 3, side 0: outside_root: '/dev/zero' leads out of the corpus's folder"),
        ({"image_0": "fifo"}, r"image '.*fifo': is a FIFO, and only regular files are read"),
        ({"image_0": "pairs.jsonl"}, r"image '.*pairs\.jsonl': not_an_image: starts with"),
        ({"image_0": "cut.jpg"}, r"image '.*cut\.jpg': corrupt_image: JPEG does not decode: "),
    ],
)
def test_pairs_that_cannot_be_used_end_the_evaluation(
    pairs: Path, run: TrainedRun, changes: dict[str, str], message: str
):
    whole = (pairs.parent / "1_0.jpg").read_bytes()
    (pairs.parent / "cut.jpg").write_bytes(whole[:-40])
    os.mkfifo(pairs.parent / "fifo")
    path = write(pairs.parent / "p.jsonl", pair(0), pair(1), pair(2, **changes))
    with pytest.raises(DataError, match=message):
        score_pairs(run, path)


def test_winoground_is_taken_as_it_is(tmp_path: Path, run: TrainedRun, photo: Callable[..., bytes]):
    line = {"id": 0, "image_0": "ex_0_img_0", "image_1": "ex_0_img_1", "caption_0": "a b", "caption_1": "b a"}
    line |= {"tag": "Noun", "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": "Object"}
    (tmp_path / "elsewhere").mkdir()
    for side in (0, 1):
        (tmp_path / "elsewhere" / f"ex_0_img_{side}.png").write_bytes(photo(24, 24, seed=side, format="PNG"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(tmp_path / "elsewhere")  # as unpacked on another disk
    path = write(tmp_path / "data" / "examples.jsonl", line)
    images = run.embed_images([tmp_path / "elsewhere" / f"ex_0_img_{side}.png" for side in (0, 1)])
    assert score_pairs(run, path) == compositional(images, run.embed_texts(["a b", "b a"]), ["Object"])
    assert not read_pairs(path)["line 1"].has_one_image
    write(path, {**line, "image_0": "../elsewhere/ex_0_img_0.png"})
    with pytest.raises(DataError, match=r"line 1, side 0: outside_root: "):
        score_pairs(run, path)


def test_sugarcrepe_is_taken_as_it_is(tmp_path: Path, run: TrainedRun, photo: Callable[..., bytes]):
    entry = {"filename": "000000000139.jpg", "caption": "a red dog", "negative_caption": "a blue dog"}
    (tmp_path / "val2017").mkdir()
    image = tmp_path / "val2017" / "000000000139.jpg"
    image.write_bytes(photo(24, 24))
    path = tmp_path / "swap_att.json"
    path.write_text(json.dumps({"0": entry, "1": entry}, indent=4))
    assert all(pair.has_one_image for pair in read_pairs(path).values())
    texts = run.embed_texts(["a red dog", "a blue dog"] * 2)
    expected = compositional(run.embed_images([image] * 4), texts, ["swap_att"] * 2, one_image=True)
    assert score_pairs(run, path) == expected
    path.write_text(json.dumps({"0": entry, "7": without(entry, "caption")}))
    with pytest.raises(DataError, match=r"^pairs '.*swap_att\.json', entry '7': caption: Field required"):
        read_pairs(path)


def test_pairs_with_one_image_and_with_two_are_not_mixed(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", pair(0), pair(1, image_1="1_0.jpg"))
    with pytest.raises(DataError, match=r"some pairs have two images and some have one: make a file of each kind$"):
        read_pairs(path)
