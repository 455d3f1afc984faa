"""A file over HTTP goes on, after a failed request, at the byte where it ended; and it is one version of one file."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event

import pytest

from mmdata.errors import DataError
from mmdata.storage import attempts, remote
from mmdata.storage.remote import RemoteFile
from mmdata.storage.urls import FileSystem
from tests.storage.servers import Answer, Server, running
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1,000 bytes, and short waits."""
    monkeypatch.setattr(attempts, "WAIT_S", 0.001)
    monkeypatch.setattr(remote, "READ_BYTES", 1000)


def opened(url: str, **given: int) -> RemoteFile:
    return RemoteFile(FileSystem(url), url, Event(), **given)


def read_all(file: RemoteFile) -> bytes:
    return b"".join(iter(file.read, b""))


class Versions(Server):
    """Also says a version of each file."""

    version = "one"

    def of_folder(self, path: str, range_: str | None) -> Answer:
        answer = super().of_folder(path, range_)
        return answer._replace(headers={**answer.headers, "ETag": self.version})


def test_reading_goes_on_where_the_request_before_ended(shards, monkeypatch):
    """Each request brings a piece: there are more requests than attempts, and none asks for a byte again."""
    monkeypatch.setattr(attempts, "ATTEMPTS", 2)
    monkeypatch.setattr(remote, "PIECE_BYTES", 100)
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
        # aiohttp drops what was not read when the connection ends.
        wait_until(lambda: file.at >= min(start + piece, len(whole)))

    with running(Versions(folder=shards)) as server:
        server.answers["/000000.tar"] = answer
        file = opened(f"{server.url}/000000.tar")
        assert read_all(file) == whole
    assert starts == [0, piece, 2 * piece, 3 * piece]
    monkeypatch.setattr(remote, "PIECE_BYTES", len(whole))  # the second failure in one piece is the last
    with running(Versions(folder=shards)) as server:
        server.answers["/000000.tar"] = answer
        file = opened(f"{server.url}/000000.tar")
        with pytest.raises(DataError, match=r"2 attempts from byte .*ClientPayloadError"):
            read_all(file)
    assert starts[4:] == [0, piece]


def test_a_file_that_changes_between_two_requests_is_an_error(shards):
    with running(Versions(folder=shards)) as server:
        url = f"{server.url}/000000.tar"
        file = opened(url)
        assert len(file.read()) == 1000
        file.close()
        server.version = "two"
        with pytest.raises(DataError, match="the file changed on the server while it was read"):
            file.read()


def served(whole: bytes, tell=lambda start: {}, *, most: int = 2**40, ranges: bool = True):
    """An answer of `whole` from where a request asks for it, `most` bytes in a response, with further headers."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
        end = min(len(whole), start + most) if start else len(whole)
        headers = {"Content-Length": end - start, **tell(start)}
        if start:
            headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(whole)}", **headers}
        handler.send_response(206 if start else 200)
        for name, value in headers.items():
            handler.send_header(name, str(value))
        handler.end_headers()
        handler.wfile.write(whole[start : min(end, start + most)])
        handler.wfile.flush()
        time.sleep(0.2 if start + most < len(whole) else 0)  # so that the bytes are read before the connection ends

    return answer


def read_in_two(shards: Path, answer, *, then=None) -> bytes:
    """A file whose connection is lost after 1,000 bytes; `then` answers the second request."""
    with running(Versions(folder=shards)) as server:
        server.answers["/x.tar"] = answer
        file = opened(f"{server.url}/x.tar")
        data = file.read()
        assert len(data) == 1000
        file.close()
        server.answers["/x.tar"] = then or answer
        with pytest.MonkeyPatch.context() as large:
            large.setattr(remote, "READ_BYTES", 2**20)
            return data + read_all(file)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_changed_file_without_an_etag_is_told_by_its_date(shards, ranges):
    whole = (shards / "000000.tar").read_bytes()
    answers = [
        served(whole, lambda _, day=day: {"Last-Modified": f"Mon, {day} Nov 2026 00:00:00 GMT"}, ranges=ranges)
        for day in (1, 2)
    ]
    with pytest.raises(DataError, match="the file changed on the server while it was read"):
        read_in_two(shards, answers[0], then=answers[1])
    assert read_in_two(shards, answers[0]) == whole


def test_the_size_of_a_changed_file_is_that_of_the_content_range(shards):
    """Without a Content-Length, too: the body ends with the connection."""
    whole = (shards / "000000.tar").read_bytes()

    def chunked(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 1000-{len(whole) + 511}/{len(whole) + 512}")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(whole[1000:] + bytes(512))

    with pytest.raises(DataError, match="the file changed on the server while it was read"):
        read_in_two(shards, served(whole), then=chunked)


def test_a_file_that_is_shorter_by_now_has_changed_also_on_a_server_without_ranges(shards):
    whole = (shards / "000000.tar").read_bytes()
    shorter = served(whole[:500], ranges=False)
    with pytest.raises(DataError, match="the file changed on the server while it was read"):
        read_in_two(shards, served(whole, ranges=False), then=shorter)


@pytest.mark.parametrize("most", [2**18, 10**6])
@pytest.mark.sweep(keep=1)
def test_a_server_that_sends_so_many_bytes_for_a_request_is_read_to_the_end(shards, monkeypatch, most):
    """Each response is a part of the file that ends early, as its Content-Range says."""
    monkeypatch.setattr(attempts, "WAIT_S", 0.001)
    whole = bytes(range(256)) * 2**14  # 4 MiB: sixteen times 2**18, more than ATTEMPTS
    assert read_in_two(shards, served(whole, most=most)) == whole


def test_a_connection_that_breaks_behind_the_last_byte_is_not_asked_again(shards):
    whole = (shards / "000000.tar").read_bytes()
    with running(Versions(folder=shards)) as server:
        file = opened(f"{server.url}/000000.tar")
        data = b""
        while len(data) < len(whole):
            data += file.read()
        file.close()
        assert (data, file.read()) == (whole, b"")
        assert len(server.requests) == 1


def test_mirrors_may_name_the_version_of_an_indexed_file_otherwise(shards):
    whole = (shards / "000000.tar").read_bytes()
    with running(Versions(folder=shards)) as server:
        file = opened(f"{server.url}/000000.tar", size=len(whole))
        data = file.read()
        file.close()
        server.version = "two"
        assert data + read_all(file) == whole


def test_a_small_file_that_is_replaced_between_two_requests_is_read_anew(shards):
    def cut(handler: BaseHTTPRequestHandler) -> None:
        del server.answers["/x.json"]
        handler.send_response(200)
        for name, value in {"Content-Length": "9", "ETag": "one", "Connection": "close"}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(b"old")

    (shards / "x.json").write_bytes(b"new one")
    with running(Versions(folder=shards)) as server:
        server.version = "two"
        server.answers["/x.json"] = cut
        assert opened(f"{server.url}/x.json").read_small(100) == b"new one"
        assert [range_ for _, range_ in server.requests] == [None, None]
