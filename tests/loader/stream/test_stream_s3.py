"""Streams of s3 read the tars of a bucket, and their errors name the URL and what the server said."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import s3fs

import mmdata
from mmdata.errors import ConfigError, DataError
from tests.storage.servers import Server, serve_s3


@pytest.fixture(scope="module")
def server(shards: Path) -> Generator[Server, None, None]:
    with serve_s3(shards) as server:
        yield server


@pytest.fixture(autouse=True)
def one_attempt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection of an earlier test, and no waiting for a second attempt."""
    server.answers.clear()
    monkeypatch.setattr("mmdata.storage.attempts.ATTEMPTS", 1)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()


def refusal(status: int, code: str, message: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers a request with an error in the form of S3."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    return answer


def test_shards_in_a_bucket_give_the_batches_of_those_on_the_disk(shards: Path, config: Any):
    names = [f"{i:06d}.tar" for i in range(4)]
    near = [batch["keys"] for batch in mmdata.stream([shards / name for name in names], config())]
    far = [batch["keys"] for batch in mmdata.stream([f"s3://bucket/{name}" for name in names], config())]
    assert far == near


@pytest.mark.parametrize("url", ["s3://bucket/none.tar", "s3://nobucket/a.tar"])
def test_a_missing_shard_or_bucket_is_named(url: str, config: Any):
    with pytest.raises(DataError, match=f"'{url}': no such file; upload it, or correct the URL"):
        mmdata.stream(url, config())


def test_a_denied_request_and_missing_credentials_name_what_to_set(
    server: Server, config: Any, monkeypatch: pytest.MonkeyPatch
):
    server.answers["/bucket/000000.tar"] = refusal(403, "AccessDenied", "you may not")
    with pytest.raises(ConfigError, match=r"'s3://bucket/000000\.tar': access denied \(.*AWS_PROFILE or AWS_ACC"):
        mmdata.stream("s3://bucket/000000.tar", config())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"access denied \(NoCredentialsError: Unable to locate credentials\)"):
        mmdata.stream("s3://bucket/000000.tar", config())
