"""Compositional test sets as batches."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from mmdata.config import DataConfig
from mmdata.errors import DataError
from mmdata.images.crop import Crop, resize_crop
from mmdata.images.decode import decode
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.text.tokenizer import train_tokenizer
from mmdata.trained.pairs import load_pairs, read_pairs
from tests.images.placed import patches


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "tokenizer"
    train_tokenizer(["a red circle left of a blue square"] * 5, folder, vocab_size=320)
    return folder


@pytest.fixture
def data(tokenizer: Path) -> DataConfig:
    return DataConfig(
        shards="unused", tokenizer=str(tokenizer), global_batch_size=1, image_size=24, max_length=40, transform="train"
    )


@pytest.fixture
def pairs(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Five pairs of images of 30 × 40 pixels, the first lying on its side."""
    lines = []
    for i in range(5):
        for side in (0, 1):
            (tmp_path / f"{i}_{side}.jpg").write_bytes(photo(30, 40, seed=10 * i + side))
        lines.append(pair(i, type=f"type {i % 2}", caption_0=f"a red {i}", caption_1=f"a blue {'very ' * i} {i}"))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(photo(30, 40, seed=0))).save(tmp_path / "0_0.jpg", exif=exif, quality=95)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "pairs.jsonl"


def pair(i: int, **changes: Any) -> dict[str, Any]:
    known = {"type": "t", "image_0": f"{i}_0.jpg", "image_1": f"{i}_1.jpg", "caption_0": "a", "caption_1": "b"}
    return {**known, **changes}


def test_pairs_batches_hold_both_sides_in_turn(pairs: Path, data: DataConfig, tokenizer: Path):
    batches = list(load_pairs(pairs, data, batch_size=2))
    assert [types for _, types in batches] == [["type 0", "type 1"], ["type 0", "type 1"], ["type 0"]]
    assert torch.cat([batch["rows"] for batch, _ in batches]).tolist() == list(range(10))
    assert [key for batch, _ in batches for key in batch["keys"]] == [
        f"{i}_{side}" for i in range(5) for side in (0, 1)
    ]
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    for batch, types in batches:
        count = 2 * len(types)
        assert batch["valid"].tolist() == [True] * count
        assert tuple(batch["pixel_values"].shape) == (count, 3, 24, 24)
        for place in range(count):
            i, side = divmod(int(batch["rows"][place]), 2)
            caption = f"a blue {'very ' * i} {i}" if side else f"a red {i}"
            ids = batch["input_ids"][place][batch["attention_mask"][place].bool()]
            assert ids.tolist() == theirs(caption)["input_ids"]
            expected = torch.empty(3, 24, 24, dtype=torch.uint8)
            encoded = (pairs.parent / f"{i}_{side}.jpg").read_bytes()
            turned = (i, side) == (0, 0)
            image = decode(encoded, format="JPEG", orientation=6 if turned else 1)
            # The eval transform, whatever the settings say.
            resize_crop(image, Crop(5, 0, 30, 30) if turned else Crop(0, 5, 30, 30), expected)
            assert torch.equal(batch["pixel_values"][place], expected)


def test_pairs_at_native_resolution_have_the_most_patches(pairs: Path, data: DataConfig):
    native = data.model_copy(update={"image_patches": [4, 12], "patch_size": 8})
    ((batch, _),) = load_pairs(pairs, native)
    image = EncodedImage((pairs.parent / "1_0.jpg").read_bytes(), "JPEG", 1, 0)
    shape, expected = patches(PixelTransform("eval", patch_size=8), image, 12)
    assert shape == (3, 4)
    assert torch.equal(batch["pixel_values"][2], expected)
    assert batch["spatial_shapes"].tolist() == [[4, 3]] + [[3, 4]] * 9  # the first is turned
    assert batch["pixel_attention_mask"].sum(1).tolist() == [12] * 10


def test_pairs_text_is_as_long_as_the_longest_caption(pairs: Path, data: DataConfig):
    for batch, _ in load_pairs(pairs, data, batch_size=2):
        assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1]
    short = data.model_copy(update={"max_length": 5})
    ((batch, _),) = load_pairs(pairs, short)
    assert batch["input_ids"].shape == (10, 5)


def test_pairs_are_the_same_every_time(pairs: Path, data: DataConfig):
    (first, _), (second, _) = next(load_pairs(pairs, data)), next(load_pairs(pairs, data))
    assert torch.equal(first["pixel_values"], second["pixel_values"])


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
    assert [(each.image_0, each.box, each.where) for each in found] == [
        ("0_0.jpg", None, "line 1"),
        ("1_0.jpg", None, "line 2"),
    ]


def test_pairs_file_that_is_another_json_is_named_without_our_classes(tmp_path: Path):
    (tmp_path / "coco.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(DataError, match=r"^pairs '.*coco\.json', entry 'images': entry: Input should be an object$"):
        read_pairs(tmp_path / "coco.json")


def test_pairs_missing_or_empty_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"^pairs '.*none\.jsonl': no such file; expected JSONL, one pair a line"):
        read_pairs(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"^pairs '.*p\.jsonl': the file is empty$"):
        read_pairs(write(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_1": "none.jpg"}, r"side 1: missing_image: 'none\.jpg': No such file or directory"),
        ({"image_0": "../pairs.jsonl"}, r"side 0: outside_root: '\.\./pairs\.jsonl' leads out of the corpus's folder"),
        ({"image_0": "/dev/zero"}, r"side 0: outside_root: '/dev/zero' leads out of the corpus's folder"),
        ({"image_0": "fifo"}, r"side 0: not_a_file: 'fifo' is no regular file, and was not opened"),
        ({"image_0": "pairs.jsonl"}, r"side 0: not_an_image: starts with b'\{\"type\"'?"),
        ({"image_0": "cut.jpg"}, r"side 0: corrupt_image: JPEG does not decode: "),
        ({"caption_1": " "}, r"side 1: empty_caption: "),
    ],
)
def test_pairs_that_cannot_be_used_end_the_evaluation(
    pairs: Path, data: DataConfig, changes: dict[str, str], message: str
):
    whole = (pairs.parent / "1_0.jpg").read_bytes()
    (pairs.parent / "cut.jpg").write_bytes(whole[:-40])
    os.mkfifo(pairs.parent / "fifo")
    lines = [pair(0), pair(1), pair(2, **changes)]
    path = write(pairs.parent / "p.jsonl", *lines)
    with pytest.raises(DataError, match=r"^pairs '.*p\.jsonl', line 3, " + message):
        list(load_pairs(path, data, batch_size=2))


def test_pairs_batches_before_a_bad_one_are_given(pairs: Path, data: DataConfig):
    path = write(pairs.parent / "p.jsonl", pair(0), pair(1, image_0="none.jpg"))
    batches = load_pairs(path, data, batch_size=1)
    batch, _ = next(batches)
    np.testing.assert_array_equal(batch["rows"], [0, 1])
    with pytest.raises(DataError, match="line 2, side 0"):
        next(batches)


def images_of(batch: Any) -> list[torch.Tensor]:
    return list(batch["pixel_values"])


def test_winoground_is_taken_as_it_is(tmp_path: Path, data: DataConfig, photo: Callable[..., bytes]):
    line = {"id": 0, "image_0": "ex_0_img_0", "image_1": "ex_0_img_1", "caption_0": "a b", "caption_1": "b a"}
    line |= {"tag": "Noun", "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": "Object"}
    (tmp_path / "elsewhere").mkdir()
    for side in (0, 1):
        (tmp_path / "elsewhere" / f"ex_0_img_{side}.png").write_bytes(photo(24, 24, seed=side, format="PNG"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images").symlink_to(tmp_path / "elsewhere")  # as unpacked on another disk
    path = write(tmp_path / "data" / "examples.jsonl", line)
    ((batch, types),) = load_pairs(path, data)
    assert types == ["Object"]
    for side, found in enumerate(images_of(batch)):
        whole = np.asarray(Image.open(tmp_path / "elsewhere" / f"ex_0_img_{side}.png"))
        assert torch.equal(found, torch.from_numpy(whole.copy()).permute(2, 0, 1))
    assert not read_pairs(path)[0].has_one_image
    write(path, {**line, "image_0": "../elsewhere/ex_0_img_0.png"})
    with pytest.raises(DataError, match=r"line 1, side 0: outside_root: "):
        list(load_pairs(path, data))


def test_sugarcrepe_is_taken_as_it_is(tmp_path: Path, data: DataConfig, photo: Callable[..., bytes], tokenizer: Path):
    entry = {"filename": "000000000139.jpg", "caption": "a red dog", "negative_caption": "a blue dog"}
    (tmp_path / "val2017").mkdir()
    (tmp_path / "val2017" / "000000000139.jpg").write_bytes(photo(24, 24))
    path = tmp_path / "swap_att.json"
    path.write_text(json.dumps({"0": entry, "1": entry}, indent=4))
    ((batch, types),) = load_pairs(path, data)
    assert types == ["swap_att"] * 2
    assert all(pair.has_one_image for pair in read_pairs(path))
    first, *others = images_of(batch)
    assert len(others) == 3
    assert all(torch.equal(first, other) for other in others)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert texts == [theirs(text)["input_ids"] for text in ("a red dog", "a blue dog") * 2]
    path.write_text(json.dumps({"0": entry, "7": without(entry, "caption")}))
    with pytest.raises(DataError, match=r"^pairs '.*swap_att\.json', entry '7': caption: Field required"):
        read_pairs(path)


def aro(**changes: Any) -> dict[str, Any]:
    entry = {"image_id": 1, "image_path": "1.png", "true_caption": "a on b", "false_caption": "b on a"}
    box = {"bbox_x": 8, "bbox_y": 4, "bbox_w": 24, "bbox_h": 24}
    return {**entry, **box, "relation_name": "on", "object1_name": "a", "object2_name": "b", **changes}


def test_aro_is_taken_as_it_is_and_cropped_to_its_box(tmp_path: Path, data: DataConfig, photo: Callable[..., bytes]):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(photo(40, 50, format="PNG"))
    attributes = without(aro(attributes=["white", "round"]), "relation_name")
    path = tmp_path / "visual_genome_relation.json"
    path.write_text(json.dumps([aro(), attributes, aro(bbox_x=26, bbox_y=-8, bbox_w=900, bbox_h=32)]))
    ((batch, types),) = load_pairs(path, data)
    assert types == ["on", "white_round", "on"]
    whole = Image.open(tmp_path / "images" / "1.png")
    for pair, box in enumerate([(8, 4, 32, 28), (8, 4, 32, 28), (26, 0, 50, 24)]):  # the last ends at the border
        wanted = torch.from_numpy(np.asarray(whole.crop(box)).copy()).permute(2, 0, 1)
        assert torch.equal(batch["pixel_values"][2 * pair], wanted)
        assert torch.equal(batch["pixel_values"][2 * pair + 1], wanted)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            aro(bbox_x=60),
            r"entry 1, side 0: corrupt_image: the box \[60, 4, 24, 24\] lies outside the image of 50 x 40 pix",
        ),
        (aro(bbox_w=0), r"entry 1: bbox_w: Input should be greater than or equal to 1"),
        (without(aro(), "true_caption"), r"entry 1: true_caption: Field required"),
        (3, r"entry 1: entry: Input should be "),
    ],
)
def test_aro_entry_that_is_no_pair_is_named(
    tmp_path: Path, data: DataConfig, photo: Callable[..., bytes], entry: Any, message: str
):
    (tmp_path / "1.png").write_bytes(photo(40, 50, format="PNG"))
    path = tmp_path / "aro.json"
    path.write_text(json.dumps([aro(), entry]))
    with pytest.raises(DataError, match=r"^pairs '.*aro\.json', " + message):
        list(load_pairs(path, data))


def test_pairs_with_one_image_and_with_two_are_not_mixed(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", pair(0), pair(1, image_1="1_0.jpg"))
    with pytest.raises(DataError, match=r"some pairs have two images and some have one: make a file of each kind$"):
        read_pairs(path)
