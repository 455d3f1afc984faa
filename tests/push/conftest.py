"""Folders of shards to push, and S3 to push them to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs

from mmdata.images import probe
from mmdata.tars.write import Sample
from tests.shard_writer import ShardWriter
from tests.storage.servers import Server, serve_s3


def length_in_characters(captions: list[str]) -> list[int]:
    """Stands in for a tokenizer where only the counts matter."""
    return [len(caption) for caption in captions]


@pytest.fixture(scope="session")
def write(photo):
    """`write(folder, rows, seed=0) -> folder`: JPEGs with a caption each, in shards of four."""

    def write(folder: Path, rows: int, *, seed: int = 0) -> Path:
        with ShardWriter(folder, shard_rows=4, count_tokens=length_in_characters, tokenizer="characters") as writer:
            for row in range(rows):
                image = photo(20 + row, 30, seed=seed + row, format="JPEG")
                writer.write(Sample(f"{row:04d}", image, probe(image), [f"picture {seed + row}"]))
        return folder

    return write


@pytest.fixture
def shards(write, tmp_path: Path) -> Path:
    """Ten rows in three shards."""
    return write(tmp_path / "photos", 10)


@pytest.fixture(scope="module")
def server_of_s3(tmp_path_factory) -> Iterator[Server]:
    with serve_s3(tmp_path_factory.mktemp("empty")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server_of_s3):
    """To look into the bucket."""
    return boto3.client("s3")


@pytest.fixture
def s3(server_of_s3: Server, client) -> Server:
    """A server with an empty bucket, s3://bucket, which has been asked nothing."""
    server = server_of_s3
    server.held, server.fault_every = "", 0
    server.answers.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    for item in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=item["Key"])
    for item in client.list_multipart_uploads(Bucket="bucket").get("Uploads", []):
        client.abort_multipart_upload(Bucket="bucket", Key=item["Key"], UploadId=item["UploadId"])
    server.holding.clear()
    server.release.clear()
    server.commands.clear()
    server.faults.clear()
    return server
