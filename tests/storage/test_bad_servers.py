"""Servers that answer with something else, without end, or at a crawl: an error that says so, within bounds."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event

import pytest

import mmdata
import mmdata.storage.attempts as attempts_module
import mmdata.storage.folder as folder_module
import mmdata.storage.remote as remote_module
import mmdata.storage.urls as urls_module
from mmdata.errors import DataError
from mmdata.index import Index, ShardStore
from mmdata.storage import ShardCache
from mmdata.storage.remote import RemoteFile
from mmdata.storage.urls import FileSystem
from tests.logs import messages, of_mmdata
from tests.storage.servers import Server, serve, serve_s3
from tests.waiting import wait_until

Answer = Callable[[BaseHTTPRequestHandler], None]
SHARD = "/000000.tar"
END = 2**30
"""An endless body ends here all the same, so that a test fails and does not hang."""
MOST = 2**28
"""Bytes that may be on their way in sockets and buffers (of some systems 40 MB a connection) when one is closed."""


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1 KiB, and short waits."""
    monkeypatch.setattr(remote_module, "READ_BYTES", 1024)
    monkeypatch.setattr(remote_module, "RANGE_BYTES", 1024)
    monkeypatch.setattr(attempts_module, "WAIT_S", 0.001)


@pytest.fixture
def server(shards: Path) -> Iterator[Server]:
    with serve(shards) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=10**6)


def open_stream(server: Server, cache: ShardCache) -> mmdata.Loader:
    """A stream of the shard, which is fetched to begin with."""
    loading = {"cache_dir": str(cache.folder), "num_workers": 0}
    return mmdata.stream(f"{server.url}{SHARD}", {"image_size": 16, "global_batch_size": 4, "loading": loading})


def asked(server: Server, path: str = SHARD) -> int:
    """Requests for a path, by default the shard."""
    return [asked for asked, _ in server.requests].count(path)


def headers(handler: BaseHTTPRequestHandler, status: int, **values: str) -> None:
    handler.send_response(status)
    for name, value in values.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Connection", "close")
    handler.end_headers()


def body(data: bytes, status: int = 200, **values: str) -> Answer:
    """This body with these headers."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        headers(handler, status, **values)
        handler.wfile.write(data)

    return answer


def endless(sent: list[int], status: int = 200, **values: str) -> Answer:
    """A body that goes on; `sent` gets the bytes that could be sent of it."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        headers(handler, status, **values)
        done = 0
        try:
            while done < END:
                done += handler.connection.send(bytes(2**16))
        except OSError:
            pass
        sent.append(done)

    return answer


def eventually(sent: list[int], count: int) -> list[int]:
    """`sent` once so many answers have ended."""
    wait_until(lambda: len(sent) >= count)
    return sent


PAGE = b"<!doctype html><title>Log in</title>"
WRONG: dict[str, tuple[Answer, str]] = {
    "a page of HTML": (
        body(PAGE, Content_Type="text/html; charset=utf-8", Content_Length=str(len(PAGE))),
        r"the server answered with a page of HTML \(status 200\), as for a login or an error; open the URL in a",
    ),
    "a short 200": (
        body(PAGE, Content_Length=str(len(PAGE))),
        r"the server sends 36 bytes of type application/octet-stream, and 14,848 were indexed: another answer than",
    ),
    "compressed": (
        body(gzip.compress(bytes(2**26)), Content_Encoding="gzip"),
        "the server sends it with Content-Encoding 'gzip', though identity was asked for; have the server send the",
    ),
    "no content": (body(b"", 204), "the server answered with status 204"),
    "a circle": (
        body(b"", 302, Location=f"{SHARD}?signature=secret", Content_Length="0"),
        "the server redirects in a circle, or more than 10 times",
    ),
    "another protocol": (
        body(b"", 302, Location="file:///etc/passwd", Content_Length="0"),
        "the URL, or what it is redirected to, is not HTTP",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_is_an_error_at_once(server: Server, cache: ShardCache, kind: str):
    answer, message = WRONG[kind]
    assert (server.folder / SHARD[1:]).stat().st_size == 14_848
    store = ShardStore(Index.open(server.url, cache=cache))
    server.answers[SHARD] = answer
    with pytest.raises(DataError, match=re.escape(f"'{server.url}{SHARD}': ") + f".*{message}") as caught:
        store.read(0, 0, 1)
    assert "secret" not in str(caught.value)
    assert asked(server) == (remote_module.MAX_REDIRECTS if kind == "a circle" else 1)
    assert list(cache.folder.glob("*.part")) == []


ASKED = "the bytes from 1024 on were asked for, and the server answered with Content-Range"
WRONG_PART: dict[str, tuple[Answer, str]] = {
    "no Content-Range": (body(bytes(1024), 206), f"{ASKED} '' and an unknown number of bytes"),
    "another part": (
        body(bytes(1024), 206, Content_Range="bytes 1025-2048/14848", Content_Length="1024"),
        f"{ASKED} 'bytes 1025-2048/14848' and 1,024 bytes",
    ),
    "another length": (
        body(bytes(1), 206, Content_Range="bytes 1024-14847/14848", Content_Length="1"),
        f"{ASKED} 'bytes 1024-14847/14848' and 1 bytes",
    ),
    "a larger file": (
        body(bytes(1024), 206, Content_Range="bytes 1024-19999/20000", Content_Length="18976"),
        "has 20,000 bytes, and 14,848 were indexed: the file changed since it was indexed; index it anew, or put back",
    ),
    "a size of thousands of digits": (
        body(bytes(1024), 206, Content_Range=f"bytes 1024-2047/{'9' * 5_000}", Content_Length="1024"),
        f"{ASKED} 'bytes 1024-2047/9999",
    ),
    "the end of the file": (
        body(b"", 416),
        "ends before byte 1024: shorter than indexed; upload it again, or",
    ),
    "an endless part": (
        endless([], 206, Content_Range="bytes 1024-14847/14848"),
        "the answer goes on after the 14,848 bytes that it may have; the file changed since",
    ),
}


@pytest.mark.parametrize("kind", WRONG_PART)
def test_a_wrong_part_after_a_cut_answer_is_an_error_at_once(server: Server, cache: ShardCache, kind: str):
    answer, message = WRONG_PART[kind]

    def first(handler: BaseHTTPRequestHandler) -> None:
        server.answers[SHARD] = answer
        body(bytes(1024), Content_Length="14848")(handler)
        handler.wfile.flush()
        # aiohttp drops what was not read when the connection ends.
        wait_until(lambda: any(part.stat().st_size >= 1024 for part in cache.folder.glob("*.part")))

    store = ShardStore(Index.open(server.url, cache=cache))
    server.answers[SHARD] = first
    with pytest.raises(DataError, match=re.escape(f"'{server.url}{SHARD}': ") + f".*{message}"):
        store.read(0, 0, 1)
    assert asked(server) == 2


def test_an_endless_answer_is_not_read_beyond_what_the_manifest_says(server: Server, cache: ShardCache):
    sent: list[int] = []
    store = ShardStore(Index.open(server.url, cache=cache))
    server.answers[SHARD] = endless(sent)
    with pytest.raises(DataError, match=f"{SHARD}': the answer goes on after the 14,848 bytes that it may have; the"):
        store.read(0, 0, 1)
    assert eventually(sent, 1)[0] < MOST
    assert len(sent) == 1


def test_an_endless_manifest_and_an_endless_index_are_not_read_to_the_end(
    server: Server, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
):
    sent: list[int] = []
    monkeypatch.setattr(folder_module, "MAX_MANIFEST_BYTES", 2**16)
    goes_on = "the answer goes on after the 65,536 bytes that it may have"
    cut = "its SHA-256 is"  # of the bytes that the manifest names: no others are read
    for path, why in (("/__mmdata__/index-00000.arrow", cut), ("/__mmdata__/manifest.json", goes_on)):
        server.answers[path] = endless(sent)
        with pytest.raises(DataError, match=rf"{path}': {why}"):
            Index.open(server.url, cache=cache).shard(0)
    assert max(eventually(sent, 2)) < MOST


def test_a_large_manifest_behind_another_protocol_is_refused(shards, cache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(
        DataError,
        match=r"/manifest\.json': the answer goes on after the 100 bytes that it may have; is it what mmdata wrote\?",
    ):
        Index.open(f"file://{shards}", cache=cache)


def test_an_answer_that_ends_early_is_asked_for_again_within_the_budget(server: Server, cache: ShardCache):
    store = ShardStore(Index.open(server.url, cache=cache))
    server.answers[SHARD] = body(PAGE)  # of no stated length or type
    with pytest.raises(DataError, match=r"8 attempts from byte 36 on, .*: the answer ended at byte 36 of 14,848;"):
        store.read(0, 0, 1)
    assert asked(server) == 8


def trickle(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then."""
    headers(handler, 200, Content_Length="14848")
    try:
        for _ in range(600):
            handler.wfile.write(b"x")
            time.sleep(0.05)
    except OSError:
        pass


def test_a_slow_answer_is_given_up(server: Server, cache: ShardCache, monkeypatch, caplog):
    store = ShardStore(index := Index.open(server.url, cache=cache))
    index.listed(0)
    monkeypatch.setattr(remote_module, "SLOW_S", 0.2)
    monkeypatch.setattr(attempts_module, "ATTEMPTS", 2)
    server.answers[SHARD] = trickle
    too_slow = r"\d+ bytes a second came for 0\.2 s, fewer than 1,000"
    with pytest.raises(DataError, match=f"2 attempts .* {too_slow}"):
        store.read(0, 0, 1)
    with pytest.raises(DataError, match=f"2 attempts .* {too_slow}"):
        open_stream(server, cache)
    assert [bool(re.search(rf"attempt 1 of 2 failed \(Failed: {too_slow}", text)) for text in messages(caplog)] == [
        True
    ] * 2


def test_a_consumer_that_takes_its_time_is_not_a_slow_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [0.0]
    monkeypatch.setattr(remote_module, "monotonic", lambda: now[0])
    whole = (server.folder / SHARD[1:]).read_bytes()
    monkeypatch.setattr(remote_module, "READ_BYTES", 10)
    url = f"{server.url}{SHARD}"
    file = RemoteFile(FileSystem(url), url, Event())
    read = [file.read()]
    for _ in range(8):
        now[0] += remote_module.SLOW_S
        read.append(file.read())
    assert b"".join([*read, *iter(file.read, b"")]) == whole
    assert of_mmdata(caplog) == []


def test_statuses_that_pass_are_asked_again_and_hold_no_secrets(server: Server, cache: ShardCache):
    store = ShardStore(Index.open(f"{server.url}?signature=secret", cache=cache))
    server.answers[SHARD] = 429
    with pytest.raises(DataError, match=r"8 attempts .*: Failed: status 429 .*is the server up") as caught:
        store.read(0, 0, 1)
    assert "secret" not in str(caught.value)
    assert asked(server) == 8


def test_a_server_that_says_no_size_is_an_error_at_once(server: Server, cache: ShardCache):
    sent: list[int] = []
    server.answers[SHARD] = endless(sent)
    with pytest.raises(DataError, match=r"the server does not say how many bytes it has \(Content-Length\)"):
        open_stream(server, cache)
    assert eventually(sent, 1)[0] < MOST


def pieces(begin: bytes, piece: bytes) -> Answer:
    """Raw bytes, and then a piece now and then, until the client goes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(begin)
            for _ in range(1200):
                handler.wfile.write(piece)
                time.sleep(0.05)
        except OSError:
            pass

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "headers": (pieces(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"), r"Failed: no answer for 0\.3 s"),
    "100 Continue": (pieces(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), r"Failed: no answer for 0\.3 s"),
    "a body that is not ended": (pieces(CHUNKED + b"24\r\n" + PAGE + b"\r\n", b""), r"Failed: no byte came for 0\.3 s"),
    "an extension of a chunk": (pieces(CHUNKED + b"24;", b"x"), r"Failed: no byte came for 0\.3 s"),
}


@pytest.mark.parametrize("path", [SHARD, "/__mmdata__/manifest.json"])
@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.sweep(keep=2)
def test_what_never_ends_is_given_up_with_a_line_for_each_attempt(
    server: Server,
    cache: ShardCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    path: str,
):
    answer, cause = ENDLESS[kind]
    index = Index.open(server.url, cache=cache)
    index.listed(0)
    monkeypatch.setattr(remote_module, "ANSWER_S" if "no answer" in cause else "SILENCE_S", 0.3)
    monkeypatch.setattr(attempts_module, "ATTEMPTS", 3)
    caplog.clear()
    server.answers[path] = answer
    before = asked(server, path)
    with pytest.raises(
        DataError, match=rf"'{server.url}{path}': cannot be fetched, 3 attempts from byte (0|36) on, .*{cause}"
    ):
        ShardStore(index).read(0, 0, 1) if path == SHARD else Index.open(server.url, cache=cache)
    wait_until(lambda: asked(server, path) >= before + 3)  # the server may be later than the client, who gave up
    assert asked(server, path) == before + 3
    said = [text for text in caplog.messages if text.startswith(f"'{server.url}{path}': attempt ")]
    assert len(said) == 2  # the last one is the error
    for number, text in enumerate(said, 1):
        assert re.fullmatch(rf".*: attempt {number} of 3 failed \({cause}\); the next one in \d+\.\d s", text)


def test_no_attempt_is_begun_when_the_time_for_a_file_is_over(
    server: Server, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
):
    store = ShardStore(index := Index.open(server.url, cache=cache))
    index.listed(0)
    monkeypatch.setattr(remote_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(attempts_module, "BUDGET_S", 0.2)
    server.answers[SHARD] = ENDLESS["headers"][0]
    with pytest.raises(DataError, match=r"000000\.tar': cannot be fetched, 2 attempts from byte 0 on, the last one: "):
        store.read(0, 0, 1)
    wait_until(lambda: asked(server) >= 2)  # as above
    assert asked(server) == 2


def test_a_slow_answer_costs_nothing_of_the_time_for_failures(
    server: Server,
    shards: Path,
    cache: ShardCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(attempts_module, "BUDGET_S", 0.2)
    store, content = ShardStore(Index.open(server.url, cache=cache)), (shards / "000000.tar").read_bytes()

    def slow_and_cut(handler: BaseHTTPRequestHandler) -> None:
        del server.answers[SHARD]  # the next request is answered well
        time.sleep(0.4)  # longer than the time for failures
        # How much of a body that is cut counts depends on the moment: what has come is kept.
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content[:4])

    server.answers[SHARD] = slow_and_cut
    assert len(store.read(0, 0, 1)) == 1
    assert [text.partition(" (")[0] for text in messages(caplog)] == [f"'{server.url}{SHARD}': attempt 1 of 8 failed"]


def test_a_file_of_unknown_size_that_goes_on_and_on_is_given_up(
    server: Server, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_module, "WHOLE_S", 0.5)
    monkeypatch.setattr(folder_module, "MAX_MANIFEST_BYTES", 100_000)
    monkeypatch.setattr(attempts_module, "ATTEMPTS", 2)
    server.answers["/__mmdata__/manifest.json"] = pieces(CHUNKED, b"80\r\n" + b" " * 128 + b"\r\n")
    with pytest.raises(DataError, match=r"2 attempts .*, the last one: Failed: the answer did not end within 1 s"):
        Index.open(server.url, cache=cache)


def test_an_answer_of_s3_that_never_ends_is_given_up(shards: Path, cache: ShardCache, monkeypatch: pytest.MonkeyPatch):
    with serve_s3(shards) as server:
        index = Index.open("s3://bucket", cache=cache)
        store = ShardStore(index)
        index.listed(0)
        monkeypatch.setattr(urls_module, "ATTEMPT_S", 0.5)
        monkeypatch.setattr(attempts_module, "ATTEMPTS", 2)
        server.answers["/bucket/000000.tar"] = pieces(b"HTTP/1.1 200 OK\r\n", b"x: y\r\n")
        with pytest.raises(
            DataError, match=r"'s3://bucket/000000\.tar': cannot be fetched, 2 attempts .*: no whole answer for 0.5 s"
        ):
            store.read(0, 0, 1)
