"""The dataset card: what the hub, `datasets` and people read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard

from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
from mmdata.push.card import dataset_card, size_category
from mmdata.push.files import read_parts


@pytest.fixture(scope="module")
def converted(tmp_path_factory, photo) -> Path:
    """A conversion in two parts, with a row that has no image."""
    root = tmp_path_factory.mktemp("corpus")
    lines = ["filepath,caption"]
    for row in range(30):
        (root / f"{row}.jpg").write_bytes(photo(20, 30, seed=row, format="JPEG"))
        lines.append(f"{row}.jpg,picture {row}")
    (root / "captions.csv").write_text("\n".join([*lines, "none.jpg,lost"]) + "\n")
    convert(root / "captions.csv", root / "out", ConvertConfig(val_share=0.3, train_tokenizer=300, shard_rows=8))
    return root / "out"


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_card_names_the_tars_of_each_split(converted):
    card = dataset_card(read_parts(converted), "hf://datasets/me/photos", license="cc-by-4.0")
    assert head_of(card) == {
        "license": "cc-by-4.0",
        "task_categories": ["image-to-text", "text-to-image"],
        "size_categories": ["n<1K"],
        "tags": ["webdataset", "mmdata"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [
                    {"split": "train", "path": "train/*.tar"},
                    {"split": "validation", "path": "val/*.tar"},
                ],
            }
        ],
    }
    assert DatasetCard(card).data.to_dict()["license"] == "cc-by-4.0"
    assert "## License" not in card


def test_card_has_the_accounts_and_ways_to_load(converted):
    parts = read_parts(converted)
    card = dataset_card(parts, "hf://datasets/me/photos@draft", license="unknown")
    train, val = (part.manifest.rows for part in parts)
    assert train + val == 30
    assert f"| written | {train} | {val} |" in card
    assert "| left out: `missing_image` | 1 | 0 |" in card
    assert 'load_dataset("me/photos", revision="draft", split="train", streaming=True)' in card
    assert "https://huggingface.co/datasets/me/photos/resolve/draft/train/000000.tar" in card
    assert '"shards": "hf://datasets/me/photos@draft/train"' in card
    assert "Not stated. Whoever shares this dataset has to name its license here." in card


def test_card_of_a_bucket_loads_by_patterns(shards):
    card = dataset_card(read_parts(shards), "s3://bucket/photos", license="mit")
    assert 'load_dataset("webdataset", data_files={"train": "s3://bucket/photos/*.tar"}, split="train"' in card
    assert '"pipe:aws s3 cp s3://bucket/photos/000000.tar -"' in card
    assert "Where the rows went" not in card  # a folder without accounts


def test_accounts_that_do_not_fit_are_refused(converted, tmp_path):
    shutil.copytree(converted / "train", tmp_path / "train", symlinks=True)
    (tmp_path / "train" / "__mmdata__" / "quarantine.jsonl").unlink()
    with pytest.raises(DataError, match=r"was not pushed: 'manifest\.json': its ledger .* is gone; it named 1 rows"):
        read_parts(tmp_path / "train")


@pytest.mark.parametrize(
    ("rows", "name"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (12_000_000, "10M<n<100M"), (10**9, "1B<n<10B"), (10**12, "n>1T")],
)
def test_size_category_is_the_hubs(rows, name):
    assert size_category(rows) == name


def test_datasets_reads_the_pushed_layout(converted, tmp_path):
    import datasets

    parts = read_parts(converted)
    for file in (file for part in parts for file in (*part.shards, *part.others, part.top)):
        (tmp_path / file.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.name).write_bytes(file.read())
    (tmp_path / "README.md").write_text(dataset_card(parts, "hf://datasets/me/photos", license="mit"))
    (tmp_path / "croissant.json").write_text("{}")
    found = datasets.load_dataset(str(tmp_path), streaming=True)
    assert sorted(found) == ["train", "validation"]
    rows = [row for split in found.values() for row in split.cast_column("jpg", datasets.Image(decode=False))]
    expected = {f"picture {row}": (converted.parent / f"{row}.jpg").read_bytes() for row in range(30)}
    assert {row["txt"]: row["jpg"]["bytes"] for row in rows} == expected
