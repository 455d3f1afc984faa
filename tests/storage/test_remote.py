from __future__ import annotations

import os
import re
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import mmdata.storage.attempts as attempts_module
import mmdata.storage.remote as remote_module
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, Manifest, ShardStore, build_index, verify
from mmdata.index.columns import FIXED
from mmdata.storage import ShardCache
from mmdata.storage.folder import find_folder
from tests.storage.servers import serve, serve_s3


@pytest.fixture
def cache(tmp_path) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=10**6)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Pieces of 1 KiB, and short waits."""
    monkeypatch.setattr(remote_module, "RANGE_BYTES", 1024)
    monkeypatch.setattr(remote_module, "READ_BYTES", 1024)
    monkeypatch.setattr(attempts_module, "WAIT_S", 0.01)


def images(index: Index) -> list[bytes]:
    rows = np.arange(len(index))
    places, (shards, _), store = (
        index.take(rows, ["image_offset", "image_bytes"]),
        index.locate(rows),
        ShardStore(index),
    )
    return [
        store.read(int(s), int(o), int(n))
        for s, o, n in zip(shards, places["image_offset"], places["image_bytes"], strict=True)
    ]


def same(far: Index, here: Index) -> bool:
    columns = all(far.column(name).tolist() == here.column(name).tolist() for name in FIXED)
    keys = far.keys(np.arange(len(far))) == here.keys(np.arange(len(here)))
    return columns and keys and far.fingerprint == here.fingerprint and images(far) == images(here)


def test_an_index_behind_http_is_the_local_one(shards, cache):
    with serve(shards) as server:
        assert same(Index.open(server.url, cache=cache), Index.open(shards))
        asked = len(server.requests)
        assert same(Index.open(f"{server.url}/", cache=cache), Index.open(shards))
        assert server.requests[asked:] == [("/__mmdata__/manifest.json", None)]


def test_a_slow_disk_is_cached_as_a_file_url(shards, cache):
    far, here = Index.open(f"file://{shards}", cache=cache), Index.open(shards)
    assert same(far, here)
    assert far.shard_path(0) == cache.path(here.manifests[0].listed(0).sha256)
    assert far.shard_path(0).read_bytes() == here.shard_path(0).read_bytes()
    assert far.shard_place(0) == f"file://{shards}/000000.tar"


def test_tars_may_lie_beside_the_index(shards, tmp_path, cache, count):
    build_index(shards, out=tmp_path / "index #1", count_tokens=count, tokenizer="characters")
    with serve(tmp_path) as server:
        index = Index.open(f"{server.url}/index%20%231?token=secret", cache=cache)
        assert index.manifests[0].location == "../shards"
        assert images(index) == images(Index.open(shards))
        assert index.shard_place(1) == f"{server.url}/shards/000001.tar"


def test_tars_elsewhere_are_refused(shards, cache):
    manifest = Manifest.read(shards)
    manifest.moved("../../far")
    with serve(shards) as server:
        with pytest.raises(
            DataError, match=r"its tars lie in '\.\./\.\./far', which leads out of 'http://127\.0\.0\.1"
        ):
            images(Index.open(server.url, cache=cache))
        manifest.moved("https://example.org/far")
        with pytest.raises(DataError, match="is not a folder; commands and URLs are never followed"):
            Index.open(server.url, cache=cache)


def test_a_folder_and_a_url_are_one_index(shards, tmp_path, cache, samples, count):
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    with pytest.raises(ConfigError, match=r"is the same shard as '000000\.tar' in 'file://.*/shards', the first of 3"):
        Index.open([f"file://{shards}", other], cache=cache)
    with pytest.raises(ConfigError, match="the same folder as 'file://"):
        Index.open([f"file://{shards}", f"file://{shards}/"], cache=cache)


@pytest.mark.parametrize(
    ("behind", "faults"),
    [
        (serve_s3, set()),
        (partial(serve, ranges=False), set()),
        (partial(serve, fault_every=2), {"reset", "error", "cut", "slow"}),  # failed requests are repeated
    ],
)
def test_an_index_behind_any_server_is_the_local_one(shards, cache, behind, faults):
    with behind(shards) as server:
        far = Index.open("s3://bucket" if behind is serve_s3 else server.url, cache=cache)
        assert same(far, Index.open(shards))
        assert far.manifests[0] == Manifest.read(shards)
        assert set(server.faults) == faults


def test_a_manifest_is_fetched_even_when_all_else_is_cached(shards, cache):
    with serve(shards) as server:
        images(Index.open(server.url, cache=cache))
        server.answers["/__mmdata__/manifest.json"] = 500
        with pytest.raises(DataError, match=r"/manifest\.json': cannot be fetched, 8 attempts from byte 0 on"):
            Index.open(server.url, cache=cache)


@pytest.mark.parametrize("status", [401, 403])
def test_missing_credentials_are_an_error_at_once(shards, cache, status):
    with serve(shards) as server:
        server.answers["/__mmdata__/manifest.json"] = status
        with pytest.raises(
            ConfigError, match=rf"'{server.url}/__mmdata__/manifest\.json': access denied .*{status}.*give the"
        ):
            Index.open(server.url, cache=cache)
        assert len(server.requests) == 1


def test_missing_credentials_of_s3_are_an_error_at_once(shards, cache, monkeypatch):
    with serve_s3(shards):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        with pytest.raises(
            ConfigError, match=r"'s3://bucket/__mmdata__/manifest\.json': access denied \(NoCredentialsError: .*AW"
        ):
            Index.open("s3://bucket", cache=cache)


def test_a_file_that_is_not_there_is_named(shards, cache):
    with serve(shards) as server:
        with pytest.raises(
            DataError, match=rf"'{server.url}/none/__mmdata__/manifest\.json': no such file; upload it, or"
        ):
            Index.open(f"{server.url}/none", cache=cache)
        server.answers["/__mmdata__/index-00000.arrow"] = 404
        with pytest.raises(DataError, match=r"/index-00000\.arrow': no such file; upload"):
            Index.open(server.url, cache=cache).shard(0)


def test_what_is_no_manifest_is_refused(shards, cache):
    with serve(shards) as server:
        server.answers["/__mmdata__/manifest.json"] = b"<html>log in</html>"
        with pytest.raises(DataError, match=rf"'{server.url}/__mmdata__/manifest\.json': not JSON: Expecting value"):
            Index.open(server.url, cache=cache)


def test_other_content_than_indexed_is_refused(shards, cache):
    size = (shards / "000000.tar").stat().st_size
    with serve(shards) as server:
        index = Index.open(server.url, cache=cache)
        for content, message in (
            (b"x" * size, r"its SHA-256 is [0-9a-f]{64}, and the manifest says [0-9a-f]{64}: the file changed since"),
            (b"x" * 1500, r"000000\.tar': the server sends 1,500 bytes .*, and 14,848 were indexed: another answer"),
        ):
            server.answers["/000000.tar"] = content
            with pytest.raises(DataError, match=message):
                ShardStore(index).read(0, 0, 1)
        server.answers["/__mmdata__/index-00000.arrow"] = b"y"
        with pytest.raises(DataError, match=r"/index-00000\.arrow': ends before byte \d+: shorter than indexed"):
            Index.open(server.url, cache=ShardCache(cache.folder.parent / "other")).keys(np.arange(1))
    assert not list(cache.folder.glob("*.part"))


def test_a_cached_index_that_was_damaged_is_fetched_again(shards, cache):
    index = Index.open(f"file://{shards}", cache=cache)
    index.column("height")
    path = cache.path(index.manifests[0].listed(0).index_sha256)
    path.write_bytes(b"\0" * path.stat().st_size)
    again = Index.open(f"file://{shards}", cache=cache)
    assert again.column("height").tolist() == Index.open(shards).column("height").tolist()


def test_protocols_that_are_not_known_are_refused(cache):
    with pytest.raises(ConfigError, match=r"'nope://x': Protocol not known: nope; `pip install 'mmdata\[remote\]'`"):
        Index.open("nope://x", cache=cache)
    with pytest.raises(ConfigError, match="'zip://x::http://y': a chain of protocols is not followed; give one URL"):
        Index.open("zip://x::http://y", cache=cache)


def test_verifying_from_afar_is_refused():
    with pytest.raises(ConfigError, match="'s3://bucket': a folder on this disk is needed here, no URL and no command"):
        verify("s3://bucket")


@pytest.mark.parametrize(
    ("open_it", "name"),
    [
        (find_folder, "pipe:curl https://user:pw@host/a?signature=s"),
        (verify, "pipe:curl https://user:pw@host/a?signature=s"),
        (verify, "https://user:pw@host/a?signature=s"),
    ],
)
def test_name_that_is_refused_is_shown_without_its_secrets(open_it, name):
    with pytest.raises(ConfigError, match=r"^'(pipe:curl )?https://host/a': ") as caught:
        open_it(name)
    assert not re.search("pw|signature", str(caught.value))


def test_a_shard_cut_while_it_is_open_is_an_error(shards):
    store = ShardStore(Index.open(shards))
    store.read(0, 0, 512)
    size = Path(shards / "000000.tar").stat().st_size
    os.truncate(shards / "000000.tar", 600)
    with pytest.raises(DataError, match=rf"000000\.tar': is shorter than indexed, {size} bytes; the shard changed"):
        store.read(0, 512, 512)


def test_the_columns_of_a_shard_are_asked_for_alone(shards, cache):
    with serve(shards) as server:
        index = Index.open(server.url, cache=cache)
        assert sum(len(index.shard(shard)) for shard in range(index.num_shards)) == len(index)
        asked = [range_ for path, range_ in server.requests if path == "/__mmdata__/index-00000.arrow"]
    spans = [[int(word) for word in (range_ or "").removeprefix("bytes=").split("-")] for range_ in asked]
    assert len(spans) == 1 + index.num_shards > 2
    assert all(before[1] + 1 == after[0] for before, after in pairwise(spans[1:]))
    assert spans[-1][1] < spans[0][0]  # the list of the shards, which is behind them
