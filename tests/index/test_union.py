"""Several folders as one index: whatever it says is what the folders say, one after the other."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds

from mmdata.errors import ConfigError, DataError
from mmdata.images import probe
from mmdata.index import Index, Manifest, ShardStore, build_index
from mmdata.index.columns import FIXED, LISTS
from mmdata.storage.folder import LocalFolder
from mmdata.tars import captions_of
from mmdata.tars.write import Sample
from tests.index.synthetic import write_synthetic_manifest
from tests.shard_writer import ShardWriter

EMPTY_TAR = bytes(1024)


def write(folder: Path, samples: list[Sample], count, *, shard_rows: int = 4, tokenizer: str = "characters") -> Path:
    with ShardWriter(folder, shard_rows=shard_rows, count_tokens=count, tokenizer=tokenizer) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def others(photo) -> list[Sample]:
    """Five more samples, one caption each, no labels."""
    images = [photo(40, 20 + i, seed=100 + i) for i in range(5)]
    return [Sample(f"x{i}", image, probe(image), [f"a longer text of number {i}"]) for i, image in enumerate(images)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, samples, others, count, tar) -> list[Path]:
    """Ten rows in three shards; none in no shard; an empty shard, five rows and an empty shard; an empty shard."""
    folder = tmp_path_factory.mktemp("union")
    write(folder / "a", samples, count)
    write(folder / "b", [], count)
    write(folder / "tars", others, count, shard_rows=5)
    for name in ("c", "d"):
        (folder / name).mkdir()
        (folder / name / "0.tar").write_bytes(EMPTY_TAR)
    (folder / "c" / "1.tar").write_bytes((folder / "tars" / "000000.tar").read_bytes())
    (folder / "c" / "2.tar").write_bytes(EMPTY_TAR)
    for name in ("c", "d"):
        build_index(folder / name, count_tokens=count, tokenizer="characters")
    return [folder / name for name in "abcd"]


@pytest.fixture(scope="module")
def parts(folders) -> list[Index]:
    return [Index.open(folder) for folder in folders]


@pytest.fixture(scope="module")
def union(folders) -> Index:
    return Index.open(folders)


def test_union_says_which_shards_are_whose(union, folders):
    assert [tuple(source) for source in union.sources] == [
        (LocalFolder(folders[0]), 0, 3),
        (LocalFolder(folders[1]), 3, 3),
        (LocalFolder(folders[2]), 3, 6),
        (LocalFolder(folders[3]), 6, 7),
    ]
    assert len(union) == 15
    assert union.starts.tolist() == [0, 4, 8, 10, 10, 15, 15, 15]
    assert np.diff(union.starts).tolist() == [4, 4, 2, 0, 5, 0, 0]
    assert [union.shard_path(shard) for shard in (0, 2, 4, 6)] == [
        folders[0] / "000000.tar",
        folders[0] / "000002.tar",
        folders[2] / "1.tar",
        folders[3] / "0.tar",
    ]
    assert union.shard_name(4) == str(folders[2] / "1.tar")


def test_index_of_one_folder_is_a_plain_one(folders):
    plain = Index.open([folders[2]])
    assert plain.fingerprint == Index.open(folders[2]).fingerprint == Manifest.read(folders[2]).root
    assert [tuple(source) for source in plain.sources] == [(LocalFolder(folders[2]), 0, 3)]
    assert plain.shard_name(1) == "1.tar"


def test_union_has_the_rows_of_its_folders_one_after_the_other(union, parts):
    for name, dtype in FIXED.items():
        column = union.column(name)
        assert column.dtype == dtype
        assert column.tolist() == list(chain.from_iterable(part.column(name).tolist() for part in parts))
    for name in LISTS:
        offsets, values = union.lists(name)
        assert np.diff(offsets).tolist() == [n for part in parts for n in np.diff(part.lists(name)[0])]
        assert values.tolist() == [value for part in parts for value in part.lists(name)[1]]
    assert union.keys(np.arange(15)) == [key for part in parts for key in part.keys(np.arange(len(part)))]
    assert union.column("label")[10:].tolist() == [-1] * 5


def test_union_members_are_read_from_their_folder(union, samples, others):
    store = ShardStore(union)
    rows = np.array([14, 0, 9, 10])
    shards, _ = union.locate(rows)
    places = union.take(rows, list(FIXED))
    for i, sample in enumerate([others[4], samples[0], samples[9], others[0]]):
        shard = int(shards[i])
        assert store.read(shard, int(places["image_offset"][i]), int(places["image_bytes"][i])) == sample.image
        caption = store.read(shard, int(places["caption_offset"][i]), int(places["caption_bytes"][i]))
        assert captions_of(caption, int(places["caption_format"][i])) == sample.captions


def test_union_sums_up_its_folders(union, folders):
    manifests = [Manifest.read(folder) for folder in folders]
    assert union.manifests == manifests
    assert len(union) == sum(manifest.rows for manifest in manifests)
    for name in ("bytes", "num_shards", "captions"):
        assert getattr(union, name) == sum(getattr(manifest, name) for manifest in manifests)
    assert union.has_labels
    assert [union.listed(shard).name for shard in range(7)] == [entry.name for each in manifests for entry in each]
    histogram = union.token_histogram()
    assert histogram.tolist() == np.bincount(union.lists("caption_tokens")[1]).tolist()


def test_index_names_classes_if_its_folders_agree(tmp_path: Path, photo):
    two, three = ["cat", "dog"], ["cat", "dog", "emu"]
    classes: dict[str, list[Any]] = {
        "none": [None],
        "a": two,
        "same": two,
        "other": ["dog", "cat"],
        "more": three,
        "numbers": [0, 1],
    }
    for folder, names in classes.items():
        (tmp_path / folder).mkdir()
        with wds.TarWriter(str(tmp_path / folder / f"{folder}.tar")) as tar:
            for i, name in enumerate(names):
                label = {"txt": "x"} if name is None else {"cls": str(name)}
                tar.write({"__key__": f"{folder}-{i}", "jpg": photo(8, 8 + i), **label})
        build_index(tmp_path / folder)

    def names_of(*folders: str) -> list[str] | None:
        return Index.open([tmp_path / folder for folder in folders]).class_names

    assert names_of("a") == names_of("a", "same") == ["cat", "dog"]
    assert names_of("a", "more") == names_of("more", "a") == ["cat", "dog", "emu"]
    assert names_of("none", "a") == ["cat", "dog"]
    assert names_of("none") is None
    assert names_of("a", "other") is names_of("numbers") is names_of("a", "numbers") is None


@pytest.mark.parametrize("shard", [-1, 7])
def test_union_shard_outside_it_is_refused(union, shard):
    with pytest.raises(IndexError, match=f"shard {shard} asked of an index of 7"):
        union.listed(shard)
    with pytest.raises(IndexError, match="rows 15 to 15 asked of an index of 15"):
        union.keys(np.array([15]))


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> list[Manifest]:
    """Manifests of 1,030, 3 and 1,024 shards: one page and a bit, a bit, a page."""
    folder = tmp_path_factory.mktemp("large")
    sizes = [1030, 3, 1024]
    return [write_synthetic_manifest(folder / str(n), n, 8, seed) for seed, n in enumerate(sizes)]


def test_union_of_many_pages_has_the_entries_of_each_shard(large):
    union = Index(*large)
    expected = list(chain.from_iterable(large))
    for shard in (0, 1029, 1030, 1032, 1033, 2056):
        part, local = union.part(shard)
        assert part.listed(local).sha256 == expected[shard].sha256
    cells = [np.split(cells, offsets[1:-1]) for offsets, cells, _ in union.cells()]
    counts = [np.split(counts, offsets[1:-1]) for offsets, _, counts in union.cells()]
    for found, wanted in ((cells, "cells"), (counts, "counts")):
        together = list(chain.from_iterable(found))
        assert len(together) == 2057
        assert all(np.array_equal(a, getattr(b, wanted)) for a, b in zip(together, expected, strict=True))


def test_union_fingerprint_follows_the_folders_and_their_order_not_their_place(folders, tmp_path):
    fingerprint = Index.open(folders).fingerprint
    assert Index.open([*reversed(folders)]).fingerprint != fingerprint
    assert Index.open(folders[:3]).fingerprint != fingerprint
    moved = folders[0].rename(folders[0].with_name("moved"))
    try:
        assert Index.open([moved, *folders[1:]]).fingerprint == fingerprint
    finally:
        moved.rename(folders[0])


def test_union_tokenizer_is_the_one_of_all_rows(samples, others, count, tmp_path, union):
    assert union.tokenizer == "characters"
    a = write(tmp_path / "a", samples, count)
    b = write(tmp_path / "b", others, count, tokenizer="words")
    empty = write(tmp_path / "empty", [], None, tokenizer="none of them")
    assert Index.open([a, b]).tokenizer is None
    assert Index.open([a, empty]).tokenizer == "characters"


@pytest.mark.parametrize("again", ["a", "./a/", "link"])
def test_union_with_a_folder_twice_is_refused(samples, others, count, tmp_path, monkeypatch, again):
    monkeypatch.chdir(tmp_path)
    write(Path("a"), samples, count)
    write(Path("b"), others, count)
    Path("link").symlink_to("a")
    with pytest.raises(
        ConfigError, match=rf"^shards '{Path(again)}': the same folder as 'a'; use weight or repeat instead of listing"
    ):
        Index.open(["a", "b", again])


def test_union_of_folders_with_the_same_shard_is_refused(samples, others, count, tmp_path):
    a = write(tmp_path / "a", samples, count)
    b = write(tmp_path / "b", [*others[:4], *samples[4:]], count)  # 000001.tar and 000002.tar are those of a
    message = (
        f"shards '{b}': '000001.tar' is the same shard as '000001.tar' in '{a}', the first of 2 that two datasets "
        "share; leave them out of one, or use weight or repeat instead of listing a dataset twice"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Index.open([a, b])


def test_union_of_no_folder_is_refused():
    with pytest.raises(ConfigError, match=r"^an index of no folder: give one with a manifest, or several$"):
        Index.open([])


def test_union_with_a_folder_that_has_no_manifest_names_it(folders, tmp_path):
    with pytest.raises(DataError, match=f"folder '{tmp_path}': no manifest.json"):
        Index.open([folders[0], tmp_path])
