"""Pushing to S3: a real server of its protocol (moto), behind a proxy that fails, waits and counts."""

from __future__ import annotations

import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import moto.s3.models
import numpy as np
import pytest
import s3fs

import mmdata.push.s3
import mmdata.storage.attempts
import mmdata.storage.s3
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, Manifest, ShardStore
from mmdata.push import PushConfig, open_store, plan_push, push
from mmdata.storage import ShardCache
from tests.programs import PATIENCE_S, Program, run_program
from tests.storage.servers import Server

URL = "s3://bucket/a/photos"


def push_now(folder: Path, url: str = URL, *, threads: int = 4, **settings) -> list[str]:
    """Push, and give the names of the files that were sent."""
    store = open_store(url)
    plan = plan_push(folder, store, PushConfig(**settings))
    push(plan, store, threads=threads)
    return [file.name for file in [*plan.files, *plan.last]]


def rows_of(location: str | Path, cache: Path) -> list[tuple[str, bytes]]:
    """Key and image of each row."""
    index = Index.open(location, cache=ShardCache(cache))
    rows = np.arange(len(index))
    places, (shards, _) = index.take(rows, ["image_offset", "image_bytes"]), index.locate(rows)
    spans = zip(shards, places["image_offset"], places["image_bytes"], strict=True)
    store = ShardStore(index)
    return [(key, store.read(*map(int, span))) for key, span in zip(index.keys(rows), spans, strict=True)]


def written(server: Server) -> list[str]:
    """Names of the files that were written, in order."""
    found = (re.fullmatch(r"PUT /bucket/a/photos/([^?]+).*", command) for command in server.commands)
    return [match[1] for match in found if match]


@pytest.fixture
def there(client):
    """`there() -> names`: of the files that are in the bucket."""

    def there() -> list[str]:
        found = client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return [item["Key"].removeprefix("a/photos/") for item in found]

    return there


ALL = [
    *("000000.tar", "000001.tar", "000002.tar", "README.md", "__mmdata__/index-00000.arrow"),
    *("__mmdata__/manifest.json", "croissant.json"),
]


def test_push_reads_back_the_same_rows_and_sends_the_manifest_last(s3, shards, tmp_path, there):
    assert push_now(shards)[-1] == "__mmdata__/manifest.json"
    assert there() == ALL
    assert written(s3)[-3:] == ["README.md", "croissant.json", "__mmdata__/manifest.json"]
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")
    assert Manifest.read(URL).root == Manifest.read(shards).root


def test_push_of_parts_sends_each_under_its_name(s3, write, tmp_path, there):
    write(tmp_path / "out" / "train", 5)
    write(tmp_path / "out" / "val", 2, seed=100)
    (tmp_path / "out" / "notes.txt").write_text("not pushed")
    push_now(tmp_path / "out")
    inner = ["__mmdata__/index-00000.arrow", "__mmdata__/manifest.json"]
    expected = [f"{part}/{name}" for part in ("train", "val") for name in ("000000.tar", *inner)]
    expected += ["README.md", "croissant.json", "train/000001.tar"]
    assert there() == sorted(expected)
    tops = [f"{part}/__mmdata__/manifest.json" for part in ("train", "val")]
    assert written(s3)[-4:] == ["README.md", "croissant.json", *tops]
    for part in ("train", "val"):
        assert rows_of(f"{URL}/{part}", tmp_path / "cache") == rows_of(tmp_path / "out" / part, tmp_path / "cache")


def test_push_again_sends_nothing_and_says_so(s3, shards):
    command = [sys.executable, "-m", "mmdata", "push", str(shards), URL]
    first = run_program(command, capture_output=True)
    sent = written(s3)
    again = run_program(command, capture_output=True)
    size = sum(path.stat().st_size for path in shards.rglob("*") if path.is_file())
    assert (first.returncode, first.stderr) == (0, b"")
    assert re.match(rb"7 files \([\d,]+ bytes\) sent to s3://bucket/a/photos\n", first.stdout)
    assert int(re.search(rb"\(([\d,]+) bytes", first.stdout)[1].replace(b",", b"")) > size
    assert again.stdout.startswith(b"s3://bucket/a/photos holds this folder already: nothing was sent\n")
    assert written(s3) == sent


def test_dry_run_prints_the_plan_and_sends_nothing(s3, shards, there):
    done = run_program([sys.executable, "-m", "mmdata", "push", str(shards), URL, "--dry-run"], capture_output=True)
    lines = done.stdout.decode().splitlines()
    assert lines[0] == f"send    000000.tar ({(shards / '000000.tar').stat().st_size:,} bytes)"
    assert re.fullmatch(r"7 files, [\d,]+ bytes to send to s3://bucket/a/photos; 0 are there already", lines[-1])
    assert (len(lines), there()) == (8, [])


@pytest.mark.parametrize("held", ["000002.tar", "__mmdata__/manifest.json"])
def test_push_killed_anywhere_shows_nothing_and_goes_on_with_the_rest(s3, shards, tmp_path, held, there):
    s3.held = f"/bucket/a/photos/{held}"
    command = [sys.executable, "-m", "mmdata", "push", str(shards), URL, "--threads", "1"]
    with Program(command) as program:
        assert s3.holding.wait(PATIENCE_S)
        program.send_signal(signal.SIGKILL)
    s3.held = ""
    before = there()
    assert held not in before
    with pytest.raises(DataError, match=r"__mmdata__/manifest\.json': no such file"):
        Manifest.read(URL)
    s3.commands.clear()
    assert sorted(push_now(shards)) == sorted(written(s3)) == sorted(set(ALL) - set(before))
    s3.release.set()
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")


def test_failed_requests_are_repeated(s3, shards, tmp_path):
    s3.fault_every = 3
    push_now(shards)
    assert {"reset", "error", "cut"} <= set(s3.faults)
    s3.fault_every = 0
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")


def test_wrong_bytes_end_the_push_before_the_manifest(s3, shards, there):
    tar = shards / "000001.tar"
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    with pytest.raises(DataError, match=r"'\S*/photos/000001\.tar': its SHA-256 is not the one that the manifest n"):
        push_now(shards)
    assert not {"000001.tar", "__mmdata__/manifest.json"} & set(there())


def test_wrong_bytes_of_a_shard_in_parts_leave_nothing(s3, shards, in_parts, there, client):
    test_wrong_bytes_end_the_push_before_the_manifest(s3, shards, there)
    assert client.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []


def test_other_shards_there_are_refused_and_replaced_if_asked(s3, shards, write, tmp_path, there):
    push_now(shards)
    other, sent = write(tmp_path / "other", 5, seed=50), written(s3)
    message = (
        r"'s3://bucket/a/photos': holds other shards: '__mmdata__/manifest\.json' differs \(rows 10 there, 5 here, "
        r"num_shards 3 there, 2 here, bytes \d+ there, \d+ here\); another URL, or --overwrite replaces it"
    )
    with pytest.raises(DataError, match=message):
        push_now(other)
    assert written(s3) == sent
    s3.commands.clear()
    push_now(other, overwrite=True)
    changes = [command for command in s3.commands if command.startswith(("PUT", "DELETE"))]
    removed = ("__mmdata__/manifest.json", "000002.tar")  # the manifest first
    assert changes[:2] == [f"DELETE /bucket/a/photos/{name}" for name in removed]
    assert changes[-1] == "PUT /bucket/a/photos/__mmdata__/manifest.json"
    assert there() == [name for name in ALL if "02." not in name]
    assert rows_of(URL, tmp_path / "cache") == rows_of(other, tmp_path / "cache")


def test_overwrite_killed_shows_nothing_of_both_and_is_ended_by_the_next(s3, shards, write, tmp_path):
    push_now(shards)
    other = write(tmp_path / "other", 9, seed=50)
    s3.held = "/bucket/a/photos/000002.tar"
    command = [sys.executable, "-m", "mmdata", "push", str(other), URL, "--threads", "1", "--overwrite"]
    with Program(command) as program:
        assert s3.holding.wait(PATIENCE_S)
        program.send_signal(signal.SIGKILL)
    s3.held = ""
    assert s3.commands[-1] == "PUT /bucket/a/photos/000002.tar"
    with pytest.raises(DataError, match=r"__mmdata__/manifest\.json': no such file"):
        Manifest.read(URL)
    with pytest.raises(DataError, match=r"holds other files: '000002\.tar' differs, .*; another URL, or --overwrite r"):
        push_now(other)
    push_now(other, overwrite=True)
    s3.release.set()  # what the killed push had asked comes too late
    assert rows_of(URL, tmp_path / "cache") == rows_of(other, tmp_path / "cache")


def test_a_push_that_another_one_overtakes_ends_without_a_manifest(s3, shards, write, tmp_path):
    store = open_store(URL)
    late = plan_push(shards, store, PushConfig())
    push_now(write(tmp_path / "other", 5, seed=50))
    with pytest.raises(
        DataError, match=r"'s3://bucket/a/photos/\S+': another push wrote or removed this file since thi"
    ):
        push(late, store)
    assert rows_of(URL, tmp_path / "cache") == rows_of(tmp_path / "other", tmp_path / "cache")


def test_two_pushes_of_one_folder_are_one(s3, shards, tmp_path):
    store = open_store(URL)
    late = plan_push(shards, store, PushConfig())
    push_now(shards)
    push(late, store)
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")


def test_a_store_without_conditions_is_written_all_the_same(s3, shards, tmp_path):
    refused = []

    def refuse_once(handler: BaseHTTPRequestHandler) -> None:
        refused.append(handler.headers["If-None-Match"])
        del s3.answers["/bucket/a/photos/000001.tar"]
        handler.send_error(501)

    s3.answers["/bucket/a/photos/000001.tar"] = refuse_once
    push_now(shards)
    assert refused == ["*"]
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")


def test_files_that_another_program_copied_are_not_taken_for_ours(s3, shards, client):
    client.put_object(Bucket="bucket", Key="a/photos/000001.tar", Body=(shards / "000001.tar").read_bytes())
    with pytest.raises(
        DataError, match=r"holds other files: '000001\.tar' differs; another URL, or --overwrite replace"
    ):
        push_now(shards)
    assert sorted(push_now(shards, overwrite=True)) == ALL


def test_a_tar_there_that_no_manifest_lists_is_refused(s3, shards, there, client):
    for key in ("a/photos/stray.tar", "a/photos/below/other.tar", "a/photos/notes.txt"):
        client.put_object(Bucket="bucket", Key=key, Body=b"x")
    with pytest.raises(
        DataError, match=r"holds other files: 'stray\.tar' is in no manifest here; another URL, or --ov"
    ):
        push_now(shards)
    push_now(shards, overwrite=True)
    assert set(there()) - set(ALL) == {"below/other.tar", "notes.txt"}


def test_a_card_that_was_edited_there_stays(s3, shards, tmp_path, client):
    push_now(shards)
    client.put_object(Bucket="bucket", Key="a/photos/README.md", Body=b"edited")
    plan = plan_push(shards, open_store(URL), PushConfig())
    assert (plan.is_done, plan.keeps_card) == (True, True)
    assert push_now(shards, license="mit") == ["croissant.json"]
    assert push_now(shards) == []
    (tmp_path / "card.md").write_text("own")
    assert push_now(shards, card=tmp_path / "card.md", license="mit") == ["README.md"]
    assert client.get_object(Bucket="bucket", Key="a/photos/README.md")["Body"].read() == b"own"


@pytest.fixture
def in_parts(monkeypatch):
    """Files of more than 4 KiB go up in parts of as much."""
    monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 256)
    monkeypatch.setattr(mmdata.push.s3, "PART_BYTES", 4096)
    monkeypatch.setattr(mmdata.storage.s3, "PART_BYTES", 4096)


def parts_sent(server: Server, name: str) -> list[int]:
    pattern = rf"PUT /bucket/a/photos/{name}\?.*partNumber=(\d+).*"
    return [int(match[1]) for command in server.commands if (match := re.fullmatch(pattern, command))]


def test_a_large_file_goes_up_in_parts_and_goes_on_where_it_ended(s3, shards, tmp_path, in_parts, client):
    content = (shards / "000000.tar").read_bytes()
    place = {"Bucket": "bucket", "Key": "a/photos/000000.tar"}
    digest = Manifest.read(shards).listed(0).sha256
    begun = client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256", Metadata={"sha256": digest})["UploadId"]
    for number, part in ((1, content[:4096]), (2, b"x" * 4096)):
        client.upload_part(**place, UploadId=begun, PartNumber=number, Body=part, ChecksumAlgorithm="SHA256")
    s3.commands.clear()
    push_now(shards)
    assert parts_sent(s3, "000000.tar") == list(range(2, -(-len(content) // 4096) + 1))
    assert parts_sent(s3, "000001.tar")[0] == 1
    assert rows_of(URL, tmp_path / "cache") == rows_of(shards, tmp_path / "cache")
    assert push_now(shards) == []


def test_parts_stay_for_the_next_push_when_the_server_fails(s3, shards, in_parts, monkeypatch):
    monkeypatch.setattr(mmdata.storage.attempts, "ATTEMPTS", 1)
    with monkeypatch.context() as broken:
        broken.setattr(s3, "next_fault", lambda path, range_: "reset" if "partNumber=2" in s3.commands[-1] else None)
        with pytest.raises(DataError, match=r"\.tar': failed, 1 attempt"):
            push_now(shards, threads=1)
    s3.commands.clear()
    push_now(shards)
    assert parts_sent(s3, "000000.tar")[0] == 2


def test_an_unfinished_upload_of_another_file_does_not_pass_for_this_one(s3, shards, tmp_path, in_parts, client):
    place = {"Bucket": "bucket", "Key": "a/photos/000000.tar"}
    client.create_multipart_upload(**place, Metadata={"sha256": "0" * 64})
    push_now(shards)
    assert client.head_object(**place)["Metadata"]["sha256"] == Manifest.read(shards).listed(0).sha256
    assert push_now(shards) == []


def test_missing_credentials_and_denied_writes_are_one_line(s3, shards, monkeypatch):
    def deny(handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(403)

    s3.answers["/bucket/a/photos/000000.tar"] = deny
    with pytest.raises(
        ConfigError, match=r"'s3://bucket/a/photos/000000\.tar': access denied \(ClientError: .*403.*giv"
    ):
        push_now(shards)
    with pytest.raises(
        ConfigError, match=r"'s3://none': no such bucket; make it with `aws s3 mb s3://none`, or correct the URL"
    ):
        push_now(shards, "s3://none/x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"'s3://bucket/a/photos': access denied \(NoCredentialsError: .*AWS_PROFILE"):
        push_now(shards)


def test_a_server_that_stays_away_is_named_with_the_remedy(s3, shards, monkeypatch):
    monkeypatch.setattr(mmdata.storage.attempts, "ATTEMPTS", 1)
    s3.answers["/bucket/a/photos/000000.tar"] = lambda handler: None  # the connection is closed without an answer
    with pytest.raises(
        DataError, match=r"'s3://bucket/a/photos/000000\.tar': failed, 1 attempt, the last one: Conn.*run this"
    ):
        push_now(shards)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(
        DataError, match=r"'s3://bucket/a/photos': failed, 1 attempt, the last one: EndpointConnectionError: .*ru"
    ):
        push_now(shards)
