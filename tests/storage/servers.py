"""Real servers on loopback that misbehave now and then: HTTP over a folder, and S3 (moto) behind a proxy."""

from __future__ import annotations

import http.client
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tests.programs import PATIENCE_S

FAULTS = ("reset", "error", "cut", "slow")
SLOW_S = 0.3


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Server(ThreadingHTTPServer):
    """Every `fault_every`-th request meets the next of FAULTS: the connection is reset, status 500, half of the body,
    or a late start. `answers` overrides a path with a status, with other bytes, or with a function that answers;
    `requests` lists (path, range), `commands` "METHOD path?query", and `sent` counts the bytes of the bodies."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *, folder: Path | None = None, behind: str = "", fault_every: int = 0, ranges: bool = True):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.behind, self.fault_every, self.ranges = folder, behind, fault_every, ranges
        self.answers: dict[str, int | bytes | Callable[[BaseHTTPRequestHandler], None]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.commands: list[str] = []
        self.faults: list[str] = []
        self.sent = 0
        self.linger_s = 0.0  # between the last byte of a cut answer and the end of its connection
        self.held = ""  # path whose requests wait until `release` is set
        self.holding, self.release = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._lock = threading.Lock()

    def next_fault(self, path: str, range_: str | None) -> str | None:
        with self._lock:
            self.requests.append((path, range_))
            if not self.fault_every or len(self.requests) % self.fault_every:
                return None
            self.faults.append(FAULTS[len(self.faults) % len(FAULTS)])
            return self.faults[-1]

    def count(self, sent: int) -> None:
        with self._lock:
            self.sent += sent

    def of_folder(self, path: str, range_: str | None) -> Answer:
        found = self.answers.get(path)
        if isinstance(found, int):
            return Answer(found, {}, b"no")
        assert self.folder is not None
        assert not callable(found)
        file = self.folder / path.lstrip("/")
        if found is None and not file.is_file():
            return Answer(404, {}, b"none")
        data = file.read_bytes() if found is None else found
        if range_ is None or not self.ranges:
            return Answer(200, {}, data)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", range_)
        assert match
        first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if first > last:
            return Answer(416, {}, b"")
        return Answer(206, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1])

    def handle_error(self, request, client_address) -> None:
        """Quiet: clients that are killed leave broken connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, range_ = unquote(urlsplit(self.path).path), self.headers.get("Range")
        self.server.commands.append(f"{self.command} {unquote(self.path)}")
        fault = self.server.next_fault(path, range_)
        if self.server.held and path.endswith(self.server.held):
            self.server.holding.set()
            self.server.release.wait(PATIENCE_S)
        time.sleep(SLOW_S if fault == "slow" else 0)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
            self.close_connection = True
            return
        found = self.server.answers.get(path)
        if callable(found):
            self.close_connection = True
            found(self)
            return
        answer = self._forward(content) if self.server.behind else self.server.of_folder(path, range_)
        if fault == "error":
            answer = Answer(500, {}, b"")
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = answer.body[: len(answer.body) // 2] if fault == "cut" else answer.body
        self.close_connection = self.close_connection or fault == "cut"
        self.server.count(len(body))
        self.wfile.write(body)
        time.sleep(self.server.linger_s if fault == "cut" else 0)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _forward(self, content: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.server.behind, timeout=PATIENCE_S)
        try:
            connection.request(self.command, self.path, content or None, dict(self.headers))
            response = connection.getresponse()
            dropped = {"transfer-encoding", "connection", "server", "date"}
            if self.command != "HEAD":  # whose answer has no body, but the size of the file, which s3fs asks for
                dropped.add("content-length")
            headers = {name: value for name, value in response.getheaders() if name.lower() not in dropped}
            return Answer(response.status, headers, response.read())
        finally:
            connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def serve(folder: Path, *, fault_every: int = 0, ranges: bool = True) -> Generator[Server, None, None]:
    """HTTP over a folder."""
    with running(Server(folder=folder, fault_every=fault_every, ranges=ranges)) as server:
        yield server


@contextmanager
def serve_s3(folder: Path, *, fault_every: int = 0) -> Generator[Server, None, None]:
    """The files of a folder in s3://bucket/, on a server that AWS_ENDPOINT_URL names."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="bucket")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                client.put_object(Bucket="bucket", Key=str(path.relative_to(folder)), Body=path.read_bytes())
        with running(Server(behind=f"{host}:{port}", fault_every=fault_every)) as server:
            os.environ["AWS_ENDPOINT_URL"] = server.url
            s3fs.S3FileSystem.clear_instance_cache()
            yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
        moto.stop()


@contextmanager
def running(server: Server) -> Generator[Server, None, None]:
    """Answer requests until the block ends."""
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
