"""Where the files of a folder lie: in `__mmdata__`, or beside the tars, where earlier versions wrote them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmdata.errors import DataError
from mmdata.index import Index, Manifest, ShardStore, build_index, verify
from mmdata.storage import ShardCache
from tests.index.earlier import beside, version_2
from tests.storage.servers import serve


def read_all(index: Index) -> list[bytes]:
    rows = np.arange(len(index))
    columns, store = index.take(rows, ["image_offset", "image_bytes"]), ShardStore(index)
    shards, _ = index.locate(rows)
    return [store.read(int(s), int(o), int(n)) for s, o, n in zip(shards, *columns.values(), strict=True)]


def test_a_folder_with_its_index_beside_the_tars_is_read_by_all(shards, tmp_path, samples, count):
    old = beside(version_2(Path(shutil.copytree(shards, tmp_path / "old"))))
    images = [sample.image for sample in samples]
    assert read_all(Index.open(old)) == images
    assert verify(old) == []
    before = sorted(path.name for path in old.iterdir())
    build_index(old, count_tokens=count, tokenizer="characters")  # the same index is left where it is
    assert sorted(path.name for path in old.iterdir()) == before
    with serve(old) as server:
        assert read_all(Index.open(server.url, cache=ShardCache(tmp_path / "cache"))) == images
        assert [path for path, _ in server.requests[:2]] == ["/__mmdata__/manifest.json", "/manifest.json"]
    build_index(shards / "000002.tar", out=tmp_path / "one", count_tokens=count, tokenizer="characters")
    for path in old.glob("000002.*"):
        path.unlink()
    for path in old.glob("manifest*"):
        path.unlink()
    build_index(old, out=tmp_path / "two", count_tokens=count, tokenizer="characters")
    assert read_all(Index.open([beside(tmp_path / "two"), tmp_path / "one"])) == images


def test_a_moved_index_of_an_earlier_version_is_written_where_it_lies(shards, tmp_path):
    build_index(shards, out=tmp_path / "index")
    old = beside(tmp_path / "index")
    shards.rename(tmp_path / "moved")
    assert build_index(tmp_path / "moved", out=old).manifest.location == "../moved"
    assert not (old / "__mmdata__").exists()
    assert Manifest.read(old).location == "../moved"


def test_a_folder_denied_by_its_bucket_is_looked_for_beside_the_tars(shards, tmp_path, samples):
    with serve(beside(shards)) as server:
        server.answers["/__mmdata__/manifest.json"] = 403  # S3 answers so for what is not there, without s3:ListBucket
        index = Index.open(server.url, cache=ShardCache(tmp_path / "cache"))
        assert read_all(index) == [sample.image for sample in samples]


def test_the_inner_folder_is_not_taken_for_the_folder(shards):
    with pytest.raises(DataError, match=r"__mmdata__': what mmdata keeps about the shards in '.*shards': give that f"):
        Index.open(shards / "__mmdata__")


def test_only_tars_are_visible_to_those_who_skip_special_folders(shards):
    assert sorted(name for name in os.listdir(shards) if not name.startswith(("__", "."))) == [
        f"{i:06d}.tar" for i in range(3)
    ]
