"""A share of the images goes into OUT/val, by content, and the accounts of both folders balance."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.settle.output import Output
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.hashing import in_share
from mmdata.index import Index, Manifest, verify
from mmdata.recognize import PRIVATE_NAME
from tests.convert.conftest import Killed, content, jsonl, tolerant

ROWS = 60


@pytest.fixture
def table(tmp_path: Path, photo: Any) -> Path:
    """ROWS photos, each in two rows, the second half under another path; a broken row and one without an image."""
    root = tmp_path / "corpus"
    root.mkdir()
    rows: list[dict[str, Any]] = []
    for i in range(ROWS):
        (root / f"{i}.jpg").write_bytes(photo(8, 12, seed=i))
        rows += [{"image": f"{i}.jpg", "caption": f"word{i}"}, {"image": f"{i}.jpg", "caption": f"other{i}"}]
        if i % 2:
            (root / f"copy{i}.jpg").write_bytes(photo(8, 12, seed=i))
            rows.append({"image": f"copy{i}.jpg", "caption": f"word{i}"})
    rows += [{"image": "gone.jpg", "caption": "x"}, {"image": "0.jpg", "caption": ""}]
    return jsonl(root / "t.jsonl", rows)


def test_images_are_divided_by_content_and_accounts_balance(table: Path, tmp_path: Path) -> None:
    report = convert(table, tmp_path / "out", tolerant(val_share=0.3), engine=threads(2))
    train, val = Index.open(tmp_path / "out/train"), Index.open(tmp_path / "out/val")
    assert len(train) + len(val) == ROWS
    assert all(in_share(hash, 0.3) for hash in val.column("image_hash").tolist())
    assert not any(in_share(hash, 0.3) for hash in train.column("image_hash").tolist())
    expected = {"rows": 152, "written": 60, "merged": 60, "duplicate": 30, "quarantined": 2}
    assert {name: report.accounts[name] for name in expected} == expected
    for part in ("train", "val"):
        assert verify(tmp_path / "out" / part) == []
    assert report.val is not None
    assert report.val.rows == len(val) == (report.val.accounts or {})["written"] > 0


def test_parts_are_the_samples_of_the_whole_and_do_not_depend_on_workers(table: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        convert(table, tmp_path / f"out{workers}", tolerant(val_share=0.3), engine=threads(workers))
    assert content(tmp_path / "out1") == content(tmp_path / "out3")
    convert(table, tmp_path / "whole", tolerant())
    whole = Index.open(tmp_path / "whole")
    is_val = np.array([in_share(hash, 0.3) for hash in whole.column("image_hash").tolist()])
    for part, rows in (("train", np.flatnonzero(~is_val)), ("val", np.flatnonzero(is_val))):
        index = Index.open(tmp_path / "out1" / part)
        assert index.keys(np.arange(len(index))) == whole.keys(rows)


def test_larger_share_holds_all_of_a_smaller_one() -> None:
    hashes = np.random.default_rng(0).integers(-(2**63), 2**63, 1000).tolist()
    shares = [sum(in_share(hash, share) for hash in hashes) for share in (0.0, 0.1, 0.5, 1.0)]
    assert shares[0] == 0
    assert shares[3] == 1000
    assert 60 < shares[1] < 140 < 440 < shares[2] < 560
    assert all(in_share(hash, 0.5) for hash in hashes if in_share(hash, 0.1))


def test_tokenizer_learns_from_training_captions_only_and_counts_both(table: Path, tmp_path: Path) -> None:
    lines = table.read_text().splitlines()
    convert(table, tmp_path / "plain", tolerant(val_share=0.3))
    val = {int(key) for key in Index.open(tmp_path / "plain/val").keys(np.arange(4))}  # numbers of rows
    rows = [json.loads(line) for line in lines]
    images = {rows[number]["image"] for number in val}
    for row in rows:
        row["caption"] = row["caption"] and ("zebra " * 9 if row["image"] in images else "apple " * 9)
    convert(jsonl(table, rows), tmp_path / "out", tolerant(val_share=0.3, train_tokenizer=300))
    vocabulary = json.loads((tmp_path / "out/train/tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    assert any("apple" in token for token in vocabulary)
    assert not any("zeb" in token for token in vocabulary)
    assert content(tmp_path / "out/train/__mmdata__/tokenizer") == content(tmp_path / "out/val/__mmdata__/tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/val/tokenizer")
    counted = Index.open(tmp_path / "out/val").lists("caption_tokens")[1].max()
    assert counted == len(tokenizer(("zebra " * 9).strip())["input_ids"])


def test_share_that_leaves_a_part_empty_is_an_error_and_publishes_nothing(table: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"val_share 1e-09 of 60 samples leaves none for validation; nothing is publ"):
        convert(table, tmp_path / "out", tolerant(val_share=1e-9))
    assert not list((tmp_path / "out").rglob("manifest.json"))


def test_same_command_again_has_nothing_to_do_and_another_one_is_an_error(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out", tolerant(val_share=0.3))
    assert convert(table, tmp_path / "out", tolerant(val_share=0.3)).was_complete
    with pytest.raises(DataError, match=r"holds another conversion \(val_share: was 0.3, is 0.4\)"):
        convert(table, tmp_path / "out", tolerant(val_share=0.4))
    with pytest.raises(DataError, match=r"holds 2 file\(s\) that are not a conversion's \(train, val\)"):
        convert(table, tmp_path / "out", tolerant())
    convert(table, tmp_path / "out", tolerant(val_share=0.4), overwrite=True)
    assert Manifest.read(tmp_path / "out/val").rows > 10
    convert(table, tmp_path / "whole", tolerant())
    with pytest.raises(DataError, match=r"whole': holds .* file\(s\) that are not a conversion's"):
        convert(table, tmp_path / "whole", tolerant(val_share=0.4))


@pytest.mark.parametrize("calls", [0, 1])
def test_kill_while_publishing_is_finished_by_the_next_run(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    config = ConvertConfig(max_bad_share=0.9, val_share=0.3)
    convert(table, tmp_path / "expected", config)
    published: list[Path] = []
    publish = Output.publish

    def publish_or_die(output: Output) -> None:
        if len(published) == calls:
            raise Killed
        published.append(output.folder)
        publish(output)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "publish", publish_or_die)
        with pytest.raises(Killed):
            convert(table, tmp_path / "out", config)
    assert not os.path.exists(tmp_path / "out/val/__mmdata__/manifest.json")
    assert convert(table, tmp_path / "out", config).was_complete
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_kill_while_replacing_leaves_no_old_part_beside_a_new_one(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old val may hold images of the new train: a run on such a pair would evaluate on what it learned."""
    config = ConvertConfig(max_bad_share=0.9, val_share=0.3)
    convert(table, tmp_path / "expected", config)
    convert(table, tmp_path / "out", tolerant(val_share=0.6))
    publish = Output.publish

    def publish_train_and_die(output: Output) -> None:
        if output.folder.name == "val":
            raise Killed
        publish(output)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "publish", publish_train_and_die)
        with pytest.raises(Killed):
            convert(table, tmp_path / "out", config, overwrite=True)
    assert Manifest.read(tmp_path / "out/train").rows == Manifest.read(tmp_path / "expected/train").rows
    with pytest.raises(DataError, match="out/val"):
        Index.open(tmp_path / "out/val")
    assert convert(table, tmp_path / "out", config).was_complete
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_part_that_was_not_finished_is_made_anew_with_the_other(table: Path, tmp_path: Path) -> None:
    config = ConvertConfig(max_bad_share=0.9, val_share=0.3)
    convert(table, tmp_path / "expected", config)
    convert(table, tmp_path / "out", config)
    for name, stays in (("train", True), ("val", False)):  # killed when the first part was complete and not the second
        folder = tmp_path / "out" / name
        private = tmp_path / "private"
        os.rename(folder, private)
        if not stays:
            (private / "__mmdata__/manifest.json").unlink()
        folder.mkdir()
        os.rename(private, folder / PRIVATE_NAME)
    assert not convert(table, tmp_path / "out", config).was_complete
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_what_a_failed_conversion_left_is_no_obstacle(table: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows are unusable"):
        convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.0))
    convert(table, tmp_path / "out", tolerant(val_share=0.3))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".mmdata.lock", "train", "val"]
