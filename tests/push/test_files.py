"""Which files are pushed, and what is refused before anything is sent."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mmdata.errors import ConfigError, DataError
from mmdata.index import build_index
from mmdata.push import PushPlan, open_store, push
from mmdata.push.files import PushedFile, read_parts


def test_a_folder_is_its_shards_index_pages_and_what_lies_in_the_inner_folder(shards):
    inner = shards / "__mmdata__"
    (inner / "tokenizer").mkdir()
    (inner / "tokenizer" / "tokenizer.json").write_text("{}")
    (inner / "quarantine.jsonl").write_bytes(b"")
    (inner / "joins").mkdir()
    (inner / "joins" / "scores.json").write_text("{}")
    (shards / "notes.txt").write_text("mine")
    (part,) = read_parts(shards)
    assert [file.name for file in (*part.shards, *part.others)] == [
        *(f"{i:06d}.tar" for i in range(3)),
        "__mmdata__/quarantine.jsonl",
        "__mmdata__/tokenizer/tokenizer.json",
        "__mmdata__/index-00000.arrow",
    ]
    assert part.top.source == (inner / "manifest.json").read_bytes()
    assert (part.prefix, part.split) == ("", "train")


def test_a_folder_whose_index_is_gone_or_damaged_is_refused(shards):
    index = shards / "__mmdata__/index-00000.arrow"
    index.write_bytes(index.read_bytes().replace(b"0001", b"0009", 1))
    with pytest.raises(
        DataError, match=r"'index-00000\.arrow': its content is not what the manifest says: it changed; `mm"
    ):
        read_parts(shards)
    index.unlink()
    with pytest.raises(DataError, match=r"index-00000\.arrow': no such file, and the manifest names it"):
        read_parts(shards)


def test_parts_are_the_sub_folders_with_a_manifest(write, tmp_path):
    for name in ("train", "val", "test"):
        write(tmp_path / "out" / name, 2)
    (tmp_path / "out" / "raw").mkdir()
    found = [(part.prefix, part.split, part.top.name) for part in read_parts(tmp_path / "out")]
    assert found == [
        ("test/", "test", "test/__mmdata__/manifest.json"),
        ("train/", "train", "train/__mmdata__/manifest.json"),
        ("val/", "validation", "val/__mmdata__/manifest.json"),
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "000001.tar").unlink(), r"'\S*/000001\.tar' is missing; `mmdata verify` says where"),
        (lambda f: (f / "000001.tar").write_bytes(b"x"), r"'\S*/000001\.tar' has 1 bytes of \d+; `mmdata verify`"),
        (lambda f: shutil.copy(f / "000001.tar", f / "more.tar"), r"shard 'more\.tar': lies in .* does not list it"),
        (
            lambda f: [path.unlink() for path in f.rglob("0*")],
            r"'\S*/000000\.tar' is missing; '\S*/000001\.tar' is missing; '\S*/000002\.tar' is missing; `mmdata verif",
        ),
    ],
)
def test_a_folder_that_is_not_what_its_manifest_says_is_refused(shards, damage, message):
    damage(shards)
    with pytest.raises(DataError, match=rf"'{shards}': is not what its manifest says, and was not pushed: {message}"):
        read_parts(shards)


def test_a_folder_in_a_tars_place_is_refused(shards):
    (shards / "000001.tar").unlink()
    (shards / "000001.tar").mkdir()
    with pytest.raises(DataError, match=r"'\S*/000001\.tar' is not a regular file"):
        read_parts(shards)


def test_an_index_of_tars_elsewhere_is_refused(shards, tmp_path):
    build_index(shards, out=tmp_path / "index")
    with pytest.raises(DataError, match=r"index': an index of tars that lie elsewhere; a push sends a folder with it"):
        read_parts(tmp_path / "index")


def test_what_is_no_folder_of_shards_is_refused(tmp_path):
    with pytest.raises(DataError, match="none': no such folder"):
        read_parts(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty': no manifest\.json; `mmdata index"):
        read_parts(tmp_path / "empty")
    with pytest.raises(ConfigError, match="'s3://a/b': a folder on this disk is needed here"):
        read_parts("s3://a/b")


@pytest.mark.parametrize("content", [b"CONTENT", b"content and more", b"cont", b""])
def test_content_that_changed_is_an_error(tmp_path: Path, content):
    (tmp_path / "a").write_bytes(content)
    file = PushedFile("a", 7, PushedFile.of("a", b"content").sha256, tmp_path / "a")
    with pytest.raises(DataError, match=r"/a': its SHA-256 is not the one that the manifest names, or it changed"):
        file.read()


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("000000.tar", "", True),
        ("__mmdata__/manifest.json", "", True),
        ("train/000000.tar", "", False),
        ("train/000000.tar", "train/", True),
        ("train/__mmdata__/tokenizer/tokenizer.json", "train/", True),
        ("train/below/000000.tar", "train/", False),
        ("README.md", "", False),
        ("notes.txt", "", False),
    ],
)
def test_files_of_others_are_told_apart(shards, name, prefix, expected):
    (part,) = read_parts(shards)
    assert replace(part, name=prefix.rstrip("/")).owns(name) is expected


@pytest.mark.parametrize(
    "url", ["https://host/x", "hf://models/me/x", "hf://datasets/x", "hf://datasets/a/b/c", "s3://", "x"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(
        ConfigError, match=rf"'{url}': a push goes to s3://BUCKET/PREFIX or hf://datasets/OWNER/NAME, th"
    ):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/a/c/", "s3://b/a/c"),
        ("hf://datasets/me/my.set-1/", "hf://datasets/me/my.set-1"),
        ("hf://datasets/me/x@draft", "hf://datasets/me/x@draft"),
    ],
)
def test_urls_are_told_apart(url, expected):
    assert open_store(url).url == expected


def test_a_push_without_threads_is_refused():
    plan = PushPlan(parts=[], files=[PushedFile.of("a", b"")], last=[], present=[])
    with pytest.raises(ConfigError, match="--threads 0: a push needs at least 1"):
        push(plan, open_store("s3://b/x"), threads=0)


def test_a_bucket_cannot_be_private():
    with pytest.raises(ConfigError, match="--private is for hf://; who may read a bucket is a setting of the bucket"):
        open_store("s3://b/x", private=True)
