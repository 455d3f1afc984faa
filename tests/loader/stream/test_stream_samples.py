"""What a stream makes of shards: the same samples as webdataset, errors for damage, a ledger for bad samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mmdata
from mmdata.errors import DataError, Reason
from mmdata.storage.urls import display_name


@pytest.fixture
def members(photo) -> list[tuple[str, bytes]]:
    """Three samples of two members each."""
    captions = ["a dog", "a red cat", "two trees"]
    return [
        member
        for i, caption in enumerate(captions)
        for member in ((f"a/{i}.jpg", photo(24, 24, seed=i)), (f"a/{i}.txt", caption.encode()))
    ]


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_stream_accepts_an_empty_shard_but_not_only_empty_ones(tmp_path, tar, members, config):
    empty = write(tmp_path / "empty.tar", bytes(1024))
    path = write(tmp_path / "x.tar", tar(members))
    keys = [key for batch in mmdata.stream([empty, path], config()) for key in batch["keys"]]
    assert sorted(filter(None, keys)) == ["a/0", "a/1", "a/2"]
    with pytest.raises(DataError, match=r"no sample in any of 1 shard; the first is '.*empty\.tar'"):
        list(mmdata.stream(empty, config()))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_counts_bad_samples_and_keeps_the_others(tmp_path, tar, members, photo, config, num_workers):
    bad = [
        ("b/0.jpg", photo(24, 24)),  # no caption
        ("b/1.txt", b"no image"),
        ("b/2.jpg", b"<html>"),
        ("b/2.txt", b"not an image"),
        ("b/3.jpg", photo(24, 24)),
        ("b/3.json", json.dumps({"caption": 7}).encode()),
        ("b/4.jpg", photo(24, 24)[:-300]),  # its header is good
        ("b/4.txt", b"cut photo"),
    ]
    path = write(tmp_path / "x.tar", tar([*members, *bad]))
    stream = mmdata.stream(path, config(max_bad_share=0.7, num_workers=num_workers))
    batches = list(stream)
    valid = {key for batch in batches for key, ok in zip(batch["keys"], batch["valid"].tolist(), strict=True) if ok}
    assert valid == {"a/0", "a/1", "a/2"}
    assert all(entry.shard == path and entry.epoch == 0 for entry in stream.ledger)
    (cut_row,) = [row for b in batches for row, key in zip(b["rows"].tolist(), b["keys"], strict=True) if key == "b/4"]
    assert {(entry.key, entry.reason, entry.row) for entry in stream.ledger} == {
        ("b/0", Reason.MISSING_CAPTION.value, -1),
        ("b/1", Reason.MISSING_IMAGE.value, -1),
        ("b/2", Reason.NOT_AN_IMAGE.value, -1),
        ("b/3", Reason.BAD_CAPTION.value, -1),
        ("b/4", Reason.CORRUPT_IMAGE.value, cut_row),
    }
    assert (stream.stats.rows, stream.stats.masked) == (3, 5)


def test_stream_tells_once_of_each_kind_what_its_samples_have_lost(tmp_path, tar, members, config, caplog):
    odd = [("a/0.json", b"["), ("a/1.json", b'["x"]'), ("a/2.cls", b"cat")]
    path = write(tmp_path / "x.tar", tar(sorted([*members, *odd])))
    stream = mmdata.stream(path, config())
    (batch,) = stream
    assert (sorted(filter(None, batch["keys"])), stream.ledger.masked.total()) == (["a/0", "a/1", "a/2"], 0)
    assert ["json_unreadable" in line for line in caplog.messages] == [True, False]
    told = caplog.messages[1]
    assert told == (
        f"shard '{path}', sample 'a/2': label 'cat' is a name; `mmdata index` numbers names (label_name); "
        "this sample and later ones with the same fault are used without it"
    )


def test_stream_ends_when_too_many_samples_are_bad(tmp_path, tar, members, config):
    path = write(tmp_path / "x.tar", tar([*members, ("b.txt", b"no image")]))
    with pytest.raises(
        DataError, match=r"1 of 4 rows could not be used \(missing_image 1\), more than max_bad_share 5"
    ) as caught:
        list(mmdata.stream(path, config()))
    assert "replay" not in str(caught.value), "the sample has no row"
    assert "`mmdata verify` checks the shards" in str(caught.value)
    path = write(tmp_path / "y.tar", tar([("b.txt", b"no image")]))
    with pytest.raises(DataError, match=r"none of 1 sample of 1 shard can be used: .* missing_image"):
        mmdata.stream(path, config())


def test_display_name_keeps_secrets_out_of_messages():
    assert display_name("https://user:pw@host:8080/a/x.tar?signature=s") == "https://host:8080/a/x.tar"
    assert display_name("s3://bucket/x.tar") == "s3://bucket/x.tar"
    assert display_name("/data/what?/x.tar") == "/data/what?/x.tar"
