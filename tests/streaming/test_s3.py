"""Streams of s3 read the bytes of the bucket, and their errors name the URL and what the server said."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler

import pytest
import s3fs

from mmdata.errors import DataError
from mmdata.streaming.forward_file import open_shard
from tests.storage.servers import Server, serve_s3

CONTENT = bytes(range(256)) * 5_000
GO_ON = "data.skip_damaged goes on with the next shard, and counts the loss"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "a.tar").write_bytes(CONTENT)
    with serve_s3(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def one_attempt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection of an earlier test, and no waiting for a second attempt."""
    server.answers.clear()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()


def error_of(url: str) -> str:
    with pytest.raises(DataError) as found, open_shard(url) as file:
        file.read(10)
    return str(found.value)


def refusal(status: int, code: str, message: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers a request for bytes with an error in the form of S3; HEAD says that the file is there."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        is_head = handler.command == "HEAD"
        handler.send_response(200 if is_head else status)
        handler.send_header("Content-Length", str(len(CONTENT) if is_head else len(body)))
        handler.end_headers()
        if not is_head:
            handler.wfile.write(body)

    return answer


def test_a_shard_in_a_bucket_is_read_to_its_end():
    with open_shard("s3://bucket/a.tar") as file:
        assert file.read(2 * len(CONTENT)) == CONTENT


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/none.tar", "FileNotFoundError: bucket/none.tar"),
        ("s3://nobucket/a.tar", "FileNotFoundError: The specified bucket does not exist"),
    ],
)
def test_a_missing_shard_or_bucket_is_named(url: str, said: str):
    assert error_of(url) == f"shard '{url}', byte 0: cannot be read ({said}); upload it, or correct the URL; {GO_ON}"


def test_a_denied_request_and_missing_credentials_name_what_to_set(server: Server, monkeypatch: pytest.MonkeyPatch):
    server.answers["/bucket/a.tar"] = refusal(403, "AccessDenied", "you may not")
    expected = (
        "shard 's3://bucket/a.tar', byte 0: cannot be read (PermissionError: you may not); give the credentials that "
        "this protocol takes from the environment (AWS_PROFILE or AWS_ACCESS_KEY_ID for s3, "
    )
    assert error_of("s3://bucket/a.tar").startswith(expected)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    expected = expected.replace("PermissionError: you may not", "NoCredentialsError: Unable to locate credentials")
    assert error_of("s3://bucket/a.tar").startswith(expected)


def test_a_timeout_of_the_bucket_is_named_and_not_an_index_error(server: Server):
    server.answers["/bucket/a.tar"] = refusal(400, "RequestTimeout", "your socket was idle")
    expected = "shard 's3://bucket/a.tar', byte 0: cannot be read (TimeoutError: your socket was idle); is it whole"
    assert error_of("s3://bucket/a.tar").startswith(expected)


def test_a_server_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the port of "discard", which nothing listens on
    where = 'Could not connect to the endpoint URL: "http://127.0.0.1:9/bucket/a.tar"'
    expected = rf"shard 's3://bucket/a\.tar', byte 0: cannot be read \(EndpointConnectionError: {where}\); is it whole"
    assert re.match(expected, error_of("s3://bucket/a.tar"))
