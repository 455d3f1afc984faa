"""Streams over HTTP go on after a failed request, and with skip_damaged after a shard that cannot be read."""

from __future__ import annotations

import shutil
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError

import mmdata
from mmdata.errors import DataError
from mmdata.shards.remote import fetch, http
from mmdata.streaming import resumed_http
from tests.shards.servers import Answer, Server, running
from tests.shards.servers import serve as serve_with_faults


class Ranges(Server):
    """Also answers "bytes=N-", and says a version of each file."""

    version = "one"

    def of_folder(self, path: str, range_: str | None) -> Answer:
        start = None if range_ is None or not range_.endswith("-") else int(range_[6:-1])
        answer = super().of_folder(path, None if start is not None else range_)
        if start is None or not self.ranges or answer.status != 200:
            return answer._replace(headers={**answer.headers, "ETag": self.version})
        size = len(answer.body)
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}", "ETag": self.version}
        return Answer(206, headers, answer.body[start:])


@pytest.fixture(autouse=True)
def _no_slow_starts(monkeypatch):
    monkeypatch.setattr("tests.shards.servers.SLOW_S", 0.01)


def keys_of(stream) -> list[str]:
    return [key for batch in stream for key in batch["keys"] if key]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_stream_survives_a_server_that_fails_every_second_time(shards, config, ranges, caplog):
    data = config(shuffle=False, loading={"num_workers": 0})
    names = sorted(path.name for path in shards.glob("*.tar"))
    expected = keys_of(mmdata.stream([str(shards / name) for name in names], data))
    with running(Ranges(folder=shards, fault_every=2, ranges=ranges)) as server:
        found = keys_of(mmdata.stream([f"{server.url}/{name}" for name in names], data))
        assert {"reset", "error", "cut"} <= set(server.faults)
    assert found == expected
    assert any("reading goes on at byte" in record.getMessage() for record in caplog.records)


def test_reading_goes_on_where_the_request_before_ended(shards, monkeypatch):
    """Each request brings a chunk: there are more requests than attempts, and none asks for a byte again."""
    monkeypatch.setattr(fetch, "ATTEMPTS", 2)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 100)
    whole, starts = (shards / "000000.tar").read_bytes(), []
    piece = len(whole) // 4 + 1

    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        starts.append(start)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(whole) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        handler.end_headers()
        handler.wfile.write(whole[start : start + piece])
        handler.wfile.flush()
        time.sleep(0.2)  # so that the bytes are read before the connection ends

    with running(Ranges(folder=shards)) as server:
        server.answers["/000000.tar"] = answer
        file = resumed_http.ResumedHttpFile(f"{server.url}/000000.tar", "x")
        assert file.read() == whole
    assert starts == [0, piece, 2 * piece, 3 * piece]
    monkeypatch.setattr(fetch, "CHUNK_BYTES", len(whole))  # the second failure in one chunk is the last
    with running(Ranges(folder=shards)) as server:
        server.answers["/000000.tar"] = answer
        file = resumed_http.ResumedHttpFile(f"{server.url}/000000.tar", "x")
        with pytest.raises(ClientPayloadError):
            file.read()
    assert starts[4:] == [0, piece]


def test_a_file_that_changes_between_two_requests_is_an_error(shards, config):
    with running(Ranges(folder=shards)) as server:
        url = f"{server.url}/000000.tar"
        file = resumed_http.ResumedHttpFile(url, url)
        assert len(file.read(1000)) == 1000
        file._drop()
        server.version = "two"
        with pytest.raises(http.WrongAnswer, match="the file changed on the server while it was read"):
            file.read(1000)


def test_a_server_that_stays_down_is_an_error_after_the_attempts(shards, config, monkeypatch):
    monkeypatch.setattr(fetch, "ATTEMPTS", 3)
    with serve_with_faults(shards) as server:
        server.answers["/000000.tar"] = 500
        stream = mmdata.stream(f"{server.url}/000000.tar", config(loading={"num_workers": 0}))
        with pytest.raises(DataError, match=r"cannot be read \(.*\); is it whole, and its server up\? data\.skip_d"):
            list(stream)
        assert len(server.requests) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_damaged_counts_the_shards_that_were_lost(shards, tmp_path, config, num_workers, caplog):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in shards.glob("*.tar"):
        shutil.copy(path, folder)
    data = (folder / "000001.tar").read_bytes()
    (folder / "000001.tar").write_bytes(data[: len(data) // 2])
    (folder / "000002.tar").write_bytes(b"<html>login</html>" + bytes(600))
    settings = config(shuffle=False, loading={"num_workers": num_workers, "max_bad_share": 0.2})
    with pytest.raises(DataError, match=r"shard '.*000001\.tar'"):
        list(mmdata.stream(folder, settings))
    stream = mmdata.stream(folder, {**settings, "skip_damaged": True})
    keys = sorted(keys_of(stream))
    whole = [f"{i:04d}" for i in [*range(10), *range(30, 38)]]
    assert set(whole) < set(keys) < {f"{i:04d}" for i in range(38)}
    assert not set(keys) & {f"{i:04d}" for i in range(20, 30)}
    assert stream.lost["damaged_shard"] == 2
    lost = [entry for entry in stream.ledger if entry.reason == "damaged_shard"]
    assert [Path(entry.shard).name for entry in lost] == ["000001.tar", "000002.tar"]
    assert "is an HTML page, not a tar" in lost[1].detail
    assert sum("the stream goes on with the next shard" in r.getMessage() for r in caplog.records) == 2
