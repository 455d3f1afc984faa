"""A loader trains from an index of tars behind URLs, as from the same tars in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata import Loader
from mmdata.batch import Batch
from mmdata.errors import DataError
from mmdata.index import build_index
from mmdata.storage import ShardCache
from mmdata.text.tokenizer import Tokenizer
from tests.flat_settings import grouped
from tests.storage.servers import Server, serve

SHARDS = ("/000000.tar", "/000001.tar", "/000002.tar")


@pytest.fixture
def tars(corpus) -> Path:
    return corpus.folder / "shards"


@pytest.fixture
def index_urls(corpus, tmp_path):
    """`index_urls(url, **settings)`: a section `data` for an index of the corpus's tars behind a URL."""
    tokenizer = Tokenizer.load(corpus.folder / "tokenizer")

    def index(url: str, *, fill_cache: bool = False, **changes: Any) -> dict[str, Any]:
        build_index(
            f"{url}/{{000000..000002}}.tar",
            out=tmp_path / "far",
            count_tokens=tokenizer.count,
            tokenizer=tokenizer.fingerprint,
            cache=ShardCache(tmp_path / "cache"),
            fill_cache=fill_cache,
        )
        given = {**corpus.settings, "shards": str(tmp_path / "far"), "cache_dir": str(tmp_path / "cache")}
        return grouped(**{**given, **changes})

    return index


@pytest.fixture
def same_epoch(same):
    """`same_epoch(a, b)`: as many batches, equal bit for bit."""

    def compare(a: Iterable[Batch], b: Iterable[Batch]) -> bool:
        a, b = list(a), list(b)
        return len(a) == len(b) > 0 and all(map(same, a, b))

    return compare


def tars_asked(server: Server, since: int = 0) -> set[str]:
    return {path for path, _ in server.requests[since:] if path.endswith(".tar")}


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.sweep(keep=1)
def test_batches_are_those_of_the_folder_indexed_locally(corpus, tars, index_urls, same_epoch, num_processes):
    with serve(tars, fault_every=9) as server:
        with Loader.from_config(index_urls(server.url, num_processes=num_processes)) as loader:
            assert loader.index.fingerprint == corpus.index.fingerprint
            assert same_epoch(loader, corpus.loader())
        assert tars_asked(server) == set(SHARDS)


def test_a_filled_cache_trains_without_a_request(corpus, tars, index_urls, same_epoch):
    with serve(tars) as server:
        config = index_urls(server.url, fill_cache=True)
        asked = len(server.requests)
        assert asked == 3
        with Loader.from_config(config) as loader:
            assert same_epoch(loader, corpus.loader())
        assert len(server.requests) == asked
    with Loader.from_config(config) as loader:  # nor does it ask whether the server is there
        assert same_epoch(loader, corpus.loader())


def test_shards_without_a_selected_row_are_not_fetched(corpus, tars, index_urls, tmp_path):
    index = corpus.index
    of_shard_1 = np.arange(index.starts[1], index.starts[2])
    np.save(tmp_path / "mask.npy", np.isin(np.arange(50), of_shard_1))
    with serve(tars) as server:
        config = index_urls(server.url, select=str(tmp_path / "mask.npy"))
        asked = len(server.requests)
        with Loader.from_config(config) as loader:
            rows = sorted(row for batch in loader for row in batch["rows"].tolist() if row >= 0)
        assert rows == of_shard_1.tolist()
        assert tars_asked(server, asked) == {"/000001.tar"}


def test_a_tar_that_was_replaced_since_ends_the_loop_with_its_url(tars, index_urls):
    with serve(tars) as server:
        config = index_urls(server.url)
        whole = (tars / "000001.tar").read_bytes()
        server.answers["/000001.tar"] = whole[:-1024] + bytes(512) + b"x" * 512
        place = rf"'{server.url}/000001\.tar': its SHA-256 is .*: the file changed since it was indexed; index it anew"
        with Loader.from_config(config) as loader, pytest.raises(DataError, match=place):
            list(loader)
