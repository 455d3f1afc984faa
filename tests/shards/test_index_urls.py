"""An index of tars behind URLs: each is read once as a stream, and the index is that of the same tars on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

import mmdata.shards.remote.fetch as fetch_module
from mmdata.shards import Index, IndexReport, ShardCache, build_index
from tests.shards.servers import Server, serve

NUM_TARS = 6


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=10**7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between requests."""
    monkeypatch.setattr(fetch_module, "WAIT_S", 0.01)


@pytest.fixture
def tars(tmp_path: Path, tar, photo) -> Path:
    """Six tars of three samples each, x-0000.tar to x-0005.tar."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for shard in range(NUM_TARS):
        members = []
        for i in range(3):
            members += [(f"{shard}{i}.jpg", photo(20, 30 + i, seed=3 * shard + i)), (f"{shard}{i}.txt", b"dog %d" % i)]
        (folder / f"x-{shard:04d}.tar").write_bytes(tar(members))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """What is published in a folder, without manifest.json, which says where the tars lie."""
    return {path.name: path.read_bytes() for path in (folder / "__mmdata__").iterdir() if path.name != "manifest.json"}


def pattern(server: Server) -> str:
    return f"{server.url}/x-{{0000..{NUM_TARS - 1:04d}}}.tar"


def of_urls(server: Server, out: Path, cache: ShardCache, **settings) -> IndexReport:
    return build_index(pattern(server), out=out, cache=cache, **settings)


def test_each_tar_is_read_once_with_one_request(tars, tmp_path, cache):
    here = build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        far = of_urls(server, tmp_path / "far", cache)
        assert sorted(server.requests) == [(f"/x-{shard:04d}.tar", None) for shard in range(NUM_TARS)]
        assert far.manifest.location == server.url
    assert files(tmp_path / "far") == files(tmp_path / "here")
    assert (far.accounts, far.manifest.root) == (here.accounts, here.manifest.root)
    assert not cache.folder.exists()


def test_samples_are_fetched_from_where_they_were_indexed(tars, tmp_path, cache):
    build_index(tars, out=tmp_path / "here")
    with serve(tars) as server:
        of_urls(server, tmp_path / "far", cache)
        far, here = Index.open(tmp_path / "far", cache=cache), Index.open(tmp_path / "here")
        assert far.fingerprint == here.fingerprint
        assert [sample.captions for sample in far[:]] == [sample.captions for sample in here[:]]
        assert far.shard_path(0).read_bytes() == (tars / "x-0000.tar").read_bytes()
        assert far.shard_place(1) == f"{server.url}/x-0001.tar"


def test_failed_requests_are_repeated_from_the_byte_where_they_ended(tars, tmp_path, cache):
    build_index(tars, out=tmp_path / "here")
    with serve(tars, fault_every=2) as server:
        of_urls(server, tmp_path / "far", cache)
        assert {"reset", "error", "cut"} <= set(server.faults)
    assert files(tmp_path / "far") == files(tmp_path / "here")
