"""Streams of servers go on after a failed request."""

from __future__ import annotations

import os

import pytest

import mmdata
from mmdata.errors import DataError
from tests.storage.servers import serve as serve_with_faults
from tests.storage.servers import serve_s3


@pytest.fixture(autouse=True)
def _no_slow_starts(monkeypatch):
    monkeypatch.setattr("tests.storage.servers.SLOW_S", 0.01)


def keys_of(stream) -> list[str]:
    return [key for batch in stream for key in batch["keys"] if key]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_stream_survives_a_server_that_fails_every_second_time(shards, config, ranges, caplog):
    data = config(shuffle=False, loading={"num_workers": 0})
    names = sorted(path.name for path in shards.glob("*.tar"))
    expected = keys_of(mmdata.stream([str(shards / name) for name in names], data))
    with serve_with_faults(shards, fault_every=2, ranges=ranges) as server:
        found = keys_of(mmdata.stream([f"{server.url}/{name}" for name in names], data))
        assert {"reset", "error", "cut"} <= set(server.faults)
    assert found == expected
    assert any("attempt 1 of 8 failed" in message for message in caplog.messages)


def test_reading_a_tar_keeps_it_in_the_cache(uneven, config, serve, tmp_path):
    """The cache removes what was used longest ago."""
    url, cache = serve(uneven(*[5] * 12)), tmp_path / "cache"
    loading = {"num_workers": 0, "prefetch_batches": 1, "cache_dir": str(cache)}
    settings = config(global_batch_size=2, shuffle_window_rows=8, shuffle=False, loading=loading)
    stream = mmdata.stream([f"{url}/{i}.tar" for i in range(12)], settings)
    keys_of(stream)
    files = [path for path in cache.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (0, 0))
    stream.builder.store.read(3, 0, 512)
    assert sum(path.stat().st_mtime > 0 for path in files) == 1


def test_tars_on_this_machine_keep_their_times(uneven, config):
    folder = uneven(5, 5)
    for path in folder.glob("*.tar"):
        os.utime(path, (1, 1))
    keys_of(mmdata.stream(folder, config(global_batch_size=2)))
    assert {path.stat().st_mtime for path in folder.glob("*.tar")} == {1.0}


def test_shards_in_a_bucket_give_the_batches_of_those_on_the_disk(shards, config):
    names = [f"{i:06d}.tar" for i in range(4)]
    near = [batch["keys"] for batch in mmdata.stream([shards / name for name in names], config())]
    with serve_s3(shards):
        far = [batch["keys"] for batch in mmdata.stream([f"s3://bucket/{name}" for name in names], config())]
        with pytest.raises(DataError, match=r"'s3://bucket/none\.tar': no such file; upload it, or correct the URL"):
            mmdata.stream("s3://bucket/none.tar", config())
    assert far == near
