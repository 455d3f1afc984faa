from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmdata.errors import ConfigError, DataError
from mmdata.images import FORMATS
from mmdata.index import Index, ShardStore
from mmdata.index import index as index_module
from mmdata.index.columns import FIXED
from tests.shard_writer import ShardWriter


@pytest.fixture(scope="module")
def index(tmp_path_factory, samples, count) -> Index:
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, shard_rows=4, count_tokens=count, tokenizer="characters") as writer:
        for sample in samples:
            writer.write(sample)
    return Index.open(folder)


def short_hash(data: bytes) -> int:
    return int(np.frombuffer(hashlib.sha256(data).digest()[:8], "<i8")[0])


def test_columns_say_what_was_written(index, samples):
    assert len(index) == 10
    assert index.starts.tolist() == [0, 4, 8, 10]
    assert index.keys(np.arange(10)) == [sample.key for sample in samples]
    assert index.column("height").tolist() == [sample.info.height for sample in samples]
    assert index.column("width").tolist() == [30] * 10
    assert index.column("orientation").tolist() == [1] * 10
    assert [FORMATS[i] for i in index.column("image_format")] == [sample.info.format for sample in samples]
    assert index.column("label").tolist() == [-1 if sample.label is None else sample.label for sample in samples]
    assert index.column("image_hash").tolist() == [short_hash(sample.image) for sample in samples]
    offsets, hashes = index.lists("caption_hash")
    assert np.diff(offsets).tolist() == [len(sample.captions) for sample in samples]
    assert hashes.tolist() == [short_hash(c.encode()) for sample in samples for c in sample.captions]
    offsets, lengths = index.lists("caption_tokens")
    assert np.diff(offsets).tolist() == [len(sample.captions) for sample in samples]
    assert lengths.tolist() == [len(c) for sample in samples for c in sample.captions]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(st.integers(0, 9), max_size=30)
    | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10)), max_size=4).map(
        lambda runs: [row for begin, end in runs for row in range(begin, end)]
    ),
    st.sampled_from(["sorted", "as they stand"]),
)
def test_take_is_indexing_of_whole_columns(index, rows, read):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "LONG_RUN", 16 if read == "sorted" else 0)
        check_take(index, rows)


def check_take(index: Index, rows: list[int]) -> None:
    wanted = np.array(rows, np.int64)
    taken = index.take(wanted, list(FIXED))
    for name, dtype in FIXED.items():
        assert taken[name].dtype == dtype
        assert taken[name].tolist() == index.column(name)[wanted].tolist()
    offsets, values = index.lists("caption_hash")
    taken_offsets, taken_values = index.take_lists(wanted, "caption_hash")
    parts = np.split(taken_values, taken_offsets[1:-1]) if rows else []
    assert [part.tolist() for part in parts] == [values[offsets[r] : offsets[r + 1]].tolist() for r in rows]
    assert index.keys(wanted) == [f"{row:04d}" for row in rows]


def test_without_a_tokenizer_lengths_are_empty(samples, tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write(samples[2])
    index = Index.open(tmp_path)
    offsets, lengths = index.lists("caption_tokens")
    assert (offsets.tolist(), lengths.tolist()) == ([0, 0], [])
    assert index.take_lists(np.zeros(2, np.int64), "caption_tokens")[0].tolist() == [0, 0, 0]
    assert np.diff(index.lists("caption_hash")[0]).tolist() == [3]


@pytest.mark.parametrize("row", [-1, 10])
def test_rows_outside_the_index_are_refused(index, row):
    with pytest.raises(IndexError, match=f"rows {row} to {row} asked of an index of 10"):
        index.take(np.array([row]), ["height"])


def test_unknown_columns_are_refused(index):
    with pytest.raises(ValueError, match=re.escape("no column ['depth']; there are ['image_offset',")):
        index.take(np.array([0]), ["height", "depth"])
    with pytest.raises(ValueError, match=re.escape("there are ['caption_hash', 'caption_tokens']")):
        index.lists("height")


def test_opening_reads_no_columns(shards):
    (shards / "__mmdata__/index-00000.arrow").unlink()
    index = Index.open(shards)
    assert len(index) == 10
    with pytest.raises(DataError, match=r"index-00000\.arrow': no such file, and the manifest names it"):
        index.take(np.array([5]), ["height"])


def test_columns_in_memory_are_bounded_and_views_outlive_them(index):
    fresh = Index.open(index.sources[0].folder)
    fresh.held_rows = 1
    first = fresh.shard(0).fixed("height")
    assert fresh.shard(1) is fresh.shard(1)
    assert fresh.shard(0).fixed("height") is not first
    assert fresh.take(np.array([9, 0, 5]), ["height"])["height"].tolist() == [29, 20, 25]
    assert first.tolist() == [20, 21, 22, 23]


def test_threads_share_an_index_and_a_store(index, samples):
    store = ShardStore(index)

    def read(seed: int) -> bool:
        rows = np.random.default_rng(seed).permutation(10)
        places = index.take(rows, ["image_offset", "image_bytes"])
        shards, _ = index.locate(rows)
        images = [
            store.read(int(s), int(o), int(n))
            for s, o, n in zip(shards, places["image_offset"], places["image_bytes"], strict=True)
        ]
        return images == [samples[row].image for row in rows]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))


def test_a_changed_index_file_is_refused(shards):
    path, index = shards / "__mmdata__/index-00000.arrow", Index.open(shards)
    data, shard = bytearray(path.read_bytes()), index.listed(1)
    data[shard.index_offset + shard.index_bytes // 2] ^= 1
    path.write_bytes(data)
    assert index.take(np.array([0]), ["height"])["height"].tolist() == [20]
    with pytest.raises(DataError, match=r"arrow', shard '000001\.tar': XXH3 differs from the manifest's; fetch"):
        index.column("height")


def test_commands_are_refused():
    with pytest.raises(ConfigError, match="'pipe:cat shards': pipe: would run a command, and nothing in data may"):
        Index.open("pipe:cat shards")


def test_a_shard_of_another_size_is_never_read(shards):
    with (shards / "000001.tar").open("ab") as file:
        file.write(b"\0")
    size = (shards / "000001.tar").stat().st_size
    store = ShardStore(Index.open(shards))
    store.read(0, 0, 1)
    with pytest.raises(
        DataError, match=rf"000001\.tar': {size} bytes, and its index was made of {size - 1}; the shard"
    ):
        store.read(1, 0, 1)


def test_a_missing_shard_is_named(shards):
    (shards / "000000.tar").unlink()
    with pytest.raises(DataError, match=r"000000\.tar': no such file, and the manifest names it; put it back, or"):
        ShardStore(Index.open(shards)).read(0, 0, 1)


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, -1), (0, 10**9)])
def test_ranges_outside_a_shard_are_refused(index, offset, size):
    with pytest.raises(DataError, match=rf"bytes {offset} to {offset + size} of \d+ asked"):
        ShardStore(index).read(0, offset, size)
