"""The Croissant description: its parts name one another, and its hashes are those of the files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmdata.images import probe
from mmdata.index import build_index
from mmdata.push import open_store
from mmdata.push.croissant import croissant
from mmdata.push.files import dataset_name, read_parts
from mmdata.tars.write import Sample
from tests.made_shards import make_tar
from tests.shard_writer import ShardWriter


def described(folder: Path, url: str = "s3://bucket/photos", license: str = "mit") -> dict[str, Any]:
    return json.loads(content(folder, url, license))


def content(folder: Path, url: str, license: str) -> bytes:
    store = open_store(url)
    return croissant(read_parts(folder), url=store.url, page=store.page, base=store.base, license=license)


def named(content: Any) -> Iterator[str]:
    """The ids that something refers to."""
    if isinstance(content, list):
        for item in content:
            yield from named(item)
    elif isinstance(content, dict):
        if set(content) == {"@id"}:
            yield content["@id"]
        for value in content.values():
            yield from named(value)


def defined(content: Any) -> Iterator[str]:
    """The ids of things with a type."""
    if isinstance(content, list):
        for item in content:
            yield from defined(item)
    elif isinstance(content, dict):
        if "@type" in content and "@id" in content:
            yield content["@id"]
        for value in content.values():
            yield from defined(value)


def check_ids(found: dict[str, Any]) -> None:
    parts = [found["distribution"], found["recordSet"]]
    ids = list(defined(parts))
    assert len(ids) == len(set(ids))
    assert set(named(parts)) <= set(ids)


def test_files_have_the_hashes_and_sizes_of_the_disk(shards):
    found = described(shards)
    check_ids(found)
    files = {item["@id"]: item for item in found["distribution"] if item["@type"] == "cr:FileObject"}
    assert list(files) == ["000000.tar", "000001.tar", "000002.tar", "__mmdata__/manifest.json"]
    for name, item in files.items():
        content = (shards / name).read_bytes()
        assert (item["contentUrl"], item["contentSize"]) == (name, f"{len(content)} B")
        assert item["sha256"] == hashlib.sha256(content).hexdigest()
    assert (found["@type"], found["conformsTo"]) == ("sc:Dataset", "http://mlcommons.org/croissant/1.1")
    assert (found["name"], found["url"], found["license"]) == ("photos", "s3://bucket/photos", "mit")


def test_members_are_sets_in_the_shards_and_fields_of_a_record(shards):
    found = described(shards)
    sets = {item["@id"]: item for item in found["distribution"] if item["@type"] == "cr:FileSet"}
    assert list(sets) == ["train-images", "train-captions"]
    assert "*.jpg" in sets["train-images"]["includes"]
    assert sets["train-captions"]["includes"] == ["*.txt"]
    assert sets["train-captions"]["containedIn"] == [{"@id": f"00000{i}.tar"} for i in range(3)]
    records = {item["@id"]: [field["@id"] for field in item["field"]] for item in found["recordSet"]}
    assert records == {
        "train/images": ["train/images/key", "train/images/image"],
        "train/captions": ["train/captions/key", "train/captions/caption"],
    }


def test_the_key_of_a_sample_is_taken_from_the_names_of_its_members(shards):
    found = described(shards)
    (pattern,) = {
        field["source"].get("transform", {}).get("regex") for record in found["recordSet"] for field in record["field"]
    } - {None}
    assert [re.match(pattern, name)[1] for name in ("0007.jpg", "0007.caption.txt", "0007")] == ["0007"] * 3


def test_parts_and_labels_are_described(tmp_path, photo):
    for name in ("train", "val"):
        with ShardWriter(tmp_path / name) as writer:
            for row in range(3):
                image = photo(20, 30, seed=row, format="JPEG")
                writer.write(Sample(f"{row}", image, probe(image), [], row))
    found = described(tmp_path)
    check_ids(found)
    sets = {item["@id"]: item["field"] for item in found["recordSet"]}
    assert list(sets) == ["train/images", "train/labels", "validation/images", "validation/labels"]
    assert [field["@id"] for field in sets["validation/labels"]] == ["validation/labels/key", "validation/labels/label"]
    assert sets["train/labels"][1]["source"]["fileSet"] == {"@id": "train-labels"}


def test_captions_in_json_say_which_value_they_are(tmp_path, photo):
    members = [("1.jpg", photo(20, 30, format="JPEG")), ("1.json", b'{"TEXT": "a dog"}')]
    (tmp_path / "0.tar").write_bytes(make_tar(members))
    build_index(tmp_path)
    found = described(tmp_path)
    check_ids(found)
    captions = next(item for item in found["recordSet"] if item["@id"] == "train/captions")
    assert captions["field"][1]["source"] == {
        "fileSet": {"@id": "train-captions"},
        "extract": {"fileProperty": "content"},
    }
    assert captions["field"][1]["description"] == 'JSON; the caption is the value of "TEXT"'
    assert found["distribution"][-1]["includes"] == ["*.json"]


def test_mlcroissant_reads_each_image_and_caption_by_its_key(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("CROISSANT_CACHE", str(tmp_path / "cache"))  # read when the package is imported
    mlcroissant = pytest.importorskip("mlcroissant")
    (shards / "croissant.json").write_bytes(content(shards, "s3://bucket/photos", "https://spdx.org/licenses/MIT"))
    dataset = mlcroissant.Dataset(shards / "croissant.json")
    captions = {row["train/captions/key"]: row["train/captions/caption"] for row in dataset.records("train/captions")}
    assert captions == {f"{row:04d}".encode(): f"picture {row}".encode() for row in range(10)}
    sizes = {row["train/images/key"]: row["train/images/image"].size for row in dataset.records("train/images")}
    assert sizes == {f"{row:04d}".encode(): (30, 20 + row) for row in range(10)}


def test_files_of_the_hub_have_urls(shards, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://huggingface.co")
    found = described(shards, "hf://datasets/me/photos@draft")
    assert found["url"] == "https://huggingface.co/datasets/me/photos"
    assert found["distribution"][0]["contentUrl"] == (
        "https://huggingface.co/datasets/me/photos/resolve/draft/000000.tar"
    )


@pytest.mark.parametrize(
    ("url", "name"), [("s3://b", "b"), ("s3://b/a/photos", "photos"), ("hf://datasets/me/x@draft", "x")]
)
def test_the_name_is_the_last_word_of_the_url(url, name):
    assert dataset_name(url) == name
