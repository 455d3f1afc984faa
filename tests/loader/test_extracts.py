"""Of tars behind URLs only the selected rows are fetched, where these are at most half of the bytes."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata import Batch, Index, Loader
from mmdata.config import DataConfig
from mmdata.errors import DataError
from mmdata.images import probe
from mmdata.index import Sample, ShardStore, ShardWriter, build_index
from mmdata.inspect.epoch import epoch_in_words
from mmdata.loader.corpus import open_index
from mmdata.plan import summarize
from mmdata.plan.from_config import build_plan
from mmdata.storage import ShardCache
from mmdata.storage.extract import GAP, Extract
from tests.loader.member_tars import npy, write_tar
from tests.storage.servers import Server, serve, serve_s3

ROWS, SHARD_ROWS, IMAGE_BYTES = 60, 20, 3 * GAP // 2
"""Members of rows that are no neighbours lie further apart than GAP."""

Same = Callable[[Batch, Batch], bool]
Settings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Path:
    """Three shards of 20 rows, indexed."""
    folder = tmp_path_factory.mktemp("extracts") / "shards"
    with ShardWriter(folder, shard_rows=SHARD_ROWS) as writer:
        for row in range(ROWS):
            image = photo(24, 24, seed=row, format="JPEG")
            image += row.to_bytes(2, "big") * ((IMAGE_BYTES - len(image)) // 2)  # decoders ignore what follows the end
            writer.write(Sample(f"{row:04d}", image, probe(image), [f"picture {row}"]))
    return folder


@pytest.fixture
def settings(tars: Path, tmp_path: Path) -> Settings:
    """`settings(url, rows)`: a section `data` for the rows of the tars behind a URL; without a URL, of the folder."""

    def make(url: str, rows: list[int], **loading: Any) -> dict[str, Any]:
        np.save(tmp_path / "rows.npy", np.array(rows))
        if url and not (tmp_path / "far").exists():
            build_index(f"{url}/{{000000..000002}}.tar", out=tmp_path / "far", cache=ShardCache(tmp_path / "unused"))
        return {
            "shards": str(tmp_path / "far" if url else tars),
            "global_batch_size": 4,
            "image_size": 16,
            "add_captions": True,
            "select": {"file": str(tmp_path / "rows.npy")},
            "loading": {"cache_dir": str(tmp_path / "cache"), "num_workers": 2, **loading},
        }

    return make


def epoch(config: dict[str, Any]) -> list[Batch]:
    with Loader.from_config(config) as loader:
        return list(loader)


def equal(found: list[Batch], expected: list[Batch], same: Same) -> bool:
    return len(found) == len(expected) > 0 and all(map(same, found, expected))


def asked(server: Server, since: int) -> list[tuple[str, str | None]]:
    return [(path, span) for path, span in server.requests[since:] if path.endswith(".tar")]


STREWN = [1, 5, 11, 18, 24, 39, 59]


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_strewn_rows_are_fetched_in_ranges(tars: Path, settings: Settings, same: Same, worker_type: str):
    with serve(tars) as server:
        config = settings(server.url, STREWN, worker_type=worker_type)
        before, sent = len(server.requests), server.sent
        assert equal(epoch(config), epoch(settings("", STREWN)), same)
        ranges = asked(server, before)
        assert {path for path, _ in ranges} == {"/000000.tar", "/000001.tar", "/000002.tar"}
        assert len(ranges) == len(STREWN)  # a row's image and caption lie side by side
        assert server.sent - sent < len(STREWN) * (IMAGE_BYTES + 2048)
        before = len(server.requests)
        assert equal(epoch(config), epoch(settings("", STREWN)), same)
        assert asked(server, before) == []


def test_of_a_server_without_ranges_whole_tars_are_fetched(
    tars: Path, settings: Settings, same: Same, caplog: pytest.LogCaptureFixture
):
    with serve(tars, ranges=False) as server:
        config = settings(server.url, STREWN)
        before = len(server.requests)
        assert equal(epoch(config), epoch(settings("", STREWN)), same)
        assert {path for path, _ in asked(server, before)} == {"/000000.tar", "/000001.tar", "/000002.tar"}
        assert any(
            "its server sends no parts of files, so whole shards are fetched" in line for line in caplog.messages
        )
        before = len(server.requests)
        assert equal(epoch(config), epoch(settings("", STREWN)), same)


def test_ranges_hold_the_members_that_fields_name(tars: Path, tmp_path: Path, same: Same):
    more = tmp_path / "more"
    shutil.copytree(tars, more)
    for path in more.glob("*.tar"):
        with tarfile.open(path) as tar:
            members = [(member.name, tar.extractfile(member)) for member in tar]
            samples = {name.partition(".")[0]: {} for name, _ in members}
            for name, file in members:
                key, _, extension = name.partition(".")
                samples[key] |= {extension: file.read() if file else b""}
        write_tar(path, {key: {"a.npy": npy([int(key)]), **one, "z.npy": npy([1])} for key, one in samples.items()})
    shutil.rmtree(more / "__mmdata__")
    build_index(more)
    np.save(tmp_path / "rows.npy", np.array(STREWN))
    with serve(more) as server:
        build_index(f"{server.url}/{{000000..000002}}.tar", out=tmp_path / "far", cache=ShardCache(tmp_path / "unused"))
        near: dict[str, Any] = {
            "shards": str(more),
            "global_batch_size": 4,
            "image_size": 16,
            "select": {"file": str(tmp_path / "rows.npy")},
            "fields": {"a": "a.npy", "z": "z.npy"},
            "loading": {"cache_dir": str(tmp_path / "cache"), "num_workers": 2},
        }
        before, sent = len(server.requests), server.sent
        assert equal(epoch({**near, "shards": str(tmp_path / "far")}), epoch(near), same)
        assert len(asked(server, before)) == len(STREWN)
        assert server.sent - sent < len(STREWN) * (IMAGE_BYTES + 10 * 1024)


def test_a_tar_of_which_more_than_half_is_selected_is_fetched_whole(tars: Path, settings: Settings, same: Same):
    rows = [*range(13), 25]
    with serve(tars) as server:
        config = settings(server.url, rows)
        before, sent = len(server.requests), server.sent
        assert equal(epoch(config), epoch(settings("", rows)), same)
        assert [path for path, _ in asked(server, before)].count("/000001.tar") == 1
        assert {path for path, _ in asked(server, before)} == {"/000000.tar", "/000001.tar"}
        whole = (tars / "000000.tar").stat().st_size
        assert whole < server.sent - sent < whole + IMAGE_BYTES + 4096


def test_a_tar_that_is_in_the_cache_is_not_asked_for(tars: Path, settings: Settings, same: Same, tmp_path: Path):
    with serve(tars) as server:
        epoch(settings(server.url, list(range(20))))  # the first tar, whole
        before = len(server.requests)
        assert equal(epoch(settings(server.url, STREWN)), epoch(settings("", STREWN)), same)
        assert {path for path, _ in asked(server, before)} == {"/000001.tar", "/000002.tar"}


def test_ranges_come_through_faults_and_after_a_kill(tars: Path, settings: Settings, same: Same, tmp_path: Path):
    with serve(tars, fault_every=3) as server:
        config = settings(server.url, STREWN)
        index = Index.open(tmp_path / "far", cache=ShardCache(tmp_path / "cache"))
        store = ShardStore(index)
        store.keep_to(lambda shard: np.array([row for row in STREWN if row // SHARD_ROWS == shard]))
        # What a process that was killed has left: its bytes are of no known hash, so they are fetched again.
        for shard in range(3):
            extract = store.extract(shard)
            assert extract is not None
            (tmp_path / "cache").mkdir(exist_ok=True)
            part = tmp_path / "cache" / f"{extract.key(index.listed(shard).sha256)}.{extract.bytes}.part"
            part.write_bytes(b"damaged" * 99)
        assert equal(epoch(config), epoch(settings("", STREWN)), same)
        assert server.faults


def test_ranges_of_s3(tars: Path, settings: Settings, same: Same):
    with serve_s3(tars) as server:
        config = settings("s3://bucket", STREWN)
        sent = server.sent
        assert equal(epoch(config), epoch(settings("", STREWN)), same)
        assert server.sent - sent < len(STREWN) * (IMAGE_BYTES + 4096)


def test_a_tar_that_was_cut_since_is_an_error(tars: Path, settings: Settings, tmp_path: Path):
    moved = tmp_path / "moved"
    shutil.copytree(tars, moved)
    with serve(moved) as server:
        config = settings(server.url, STREWN)
        data = (moved / "000001.tar").read_bytes()
        (moved / "000001.tar").write_bytes(data[:-512])
        with pytest.raises(DataError, match=r"/000001\.tar'.*indexed"):
            epoch(config)


def test_rows_of_a_tar_that_was_replaced_since_are_masked(tars: Path, settings: Settings, tmp_path: Path):
    moved = tmp_path / "moved"
    shutil.copytree(tars, moved)
    with serve(moved) as server:
        config = settings(server.url, STREWN, max_bad_share=1.0)
        data = bytearray((moved / "000000.tar").read_bytes())
        with tarfile.open(tars / "000000.tar") as tar:
            member = next(member for member in tar if member.name.endswith(".jpg") and member.name.startswith("0005"))
        data[member.offset_data + IMAGE_BYTES // 2] ^= 1  # behind the pixels: it still decodes
        (moved / "000000.tar").write_bytes(data)
        with Loader.from_config(config) as loader:
            masked = [
                key
                for batch in loader
                for key, valid in zip(batch["keys"], batch["valid"], strict=True)
                if key and not valid
            ]
            assert masked == ["0005"]
            assert [entry.reason for entry in loader.ledger] == ["file_changed"]


def test_a_member_of_another_row_is_read_from_the_whole_tar(tars: Path, settings: Settings, tmp_path: Path):
    with serve(tars) as server:
        settings(server.url, STREWN)
        index = Index.open(tmp_path / "far", cache=ShardCache(tmp_path / "cache"))
        store = ShardStore(index)
        store.keep_to(lambda shard: np.array([1, 5]))
        columns = index.take(np.array([1, 2]), ["image_offset", "image_bytes"])
        for offset, size in zip(columns["image_offset"].tolist(), columns["image_bytes"].tolist(), strict=True):
            expected = (tars / "000000.tar").read_bytes()[offset : offset + size]
            assert store.read(0, offset, size) == expected
        assert store.is_here(0)
        with pytest.raises(DataError, match="asked"):
            store.read(0, 10**9, 1)


def test_plan_says_what_is_fetched_of_a_selection(tars: Path, settings: Settings):
    with serve(tars) as server:
        for rows, words in (
            (STREWN, r"1\.4 MB of shards, of 11\.9 MB in all; of 3 of 3 tars only the selected rows"),
            ([*range(13), 25], r"4\.2 MB of shards, of 11\.9 MB in all; of 1 of 2 tars only the selected rows"),
            ([*range(13), *range(20, 40)], r"7\.9 MB of shards, of 11\.9 MB in all"),
        ):
            data = DataConfig.model_validate(settings(server.url, rows))
            index = open_index(data)
            plan: Any = build_plan(data, index, None)
            summary = summarize(plan, hashes=plan.rows.hashes)
            assert re.search(f"^reading: {words}$", [*epoch_in_words(summary, plan, index, data)][-1])


@given(
    members=st.lists(st.tuples(st.integers(0, 2**22), st.integers(1, 2**18)), min_size=1, max_size=20),
    data=st.data(),
)
def test_extract_holds_each_member_in_its_place(members: list[tuple[int, int]], data: st.DataObject):
    offsets, sizes = (np.array(column, np.int64) for column in zip(*members, strict=True))
    tar = np.random.default_rng(0).integers(0, 256, 2**22 + 2**18, dtype=np.uint8).tobytes()
    extract = Extract(offsets, sizes, of=len(tar))
    pieces = list(extract.pieces())
    content = b"".join(tar[piece.start : piece.end] for piece in pieces)
    assert len(content) == extract.bytes
    assert all(piece.size == len(tar) for piece in pieces)
    assert all(0 < piece.end - piece.start <= 2**20 for piece in pieces)
    for offset, size in members:
        place = extract.place(offset, size)
        assert place is not None
        assert content[place : place + size] == tar[offset : offset + size]
    offset, size = data.draw(st.tuples(st.integers(0, 2**22), st.integers(1, 2**18)))
    place = extract.place(offset, size)
    if place is not None:
        assert content[place : place + size] == tar[offset : offset + size]
    else:
        assert not any(o <= offset and offset + size <= o + s for o, s in members)


def test_extract_joins_members_that_are_near_each_other():
    near = Extract(np.array([2000 + GAP, 1000]), np.array([10, 1000]), of=10**7)
    assert [(piece.start, piece.end) for piece in near.pieces()] == [(1000, 2010 + GAP)]
    far = Extract(np.array([2001 + GAP, 1000]), np.array([10, 1000]), of=10**7)
    assert [(piece.start, piece.end) for piece in far.pieces()] == [(1000, 2000), (2001 + GAP, 2011 + GAP)]
    assert far.bytes == 1010
    assert far.key("0" * 64) != near.key("0" * 64)
