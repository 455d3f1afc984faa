"""`mmdata verify` of tars without an index."""

from __future__ import annotations

import gzip
import os
import re

import pytest

from mmdata.index.verify import verify_tars
from tests.index.test_programs import program


@pytest.fixture
def members(photo) -> list[tuple[str, bytes]]:
    """Four samples of a photo and a caption."""
    made = []
    for i in range(4):
        made += [(f"{i}.jpg", photo(20, 30, seed=i)), (f"{i}.txt", b"a dog %d" % i)]
    return made


def place(data: bytes, name: str) -> int:
    return data.index(name.encode() + b"\0")


def test_verify_says_what_is_wrong_in_each_tar_and_goes_on(tmp_path, tar, members):
    data = tar(members)
    flipped = bytearray(data)
    flipped[place(data, "1.txt")] ^= 1
    for name, content in {
        "a-cut.tar": data[: place(data, "2.jpg") + 700],
        "b-flipped.tar": bytes(flipped),
        "c-packed.tar.gz": gzip.compress(data),
        "d-joined.tar": data + data,
        "e-no-caption.tar": tar([*members, ("9.jpg", members[0][1])]),
        "f-good.tar": data,
        "g-split.tar": tar([("7.jpg", members[0][1])]),
        "h-split.tar": tar([("7.txt", b"a dog")]),
        "i-page.tar": b"<html>" + bytes(600),
    }.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "z.tar")
    run = program("verify", tmp_path)
    assert run.returncode == 1
    *lines, closing = run.stdout.splitlines()
    told = [re.match(r"shard '(.)\S*': (.*)", line).groups() for line in lines]
    assert [name for name, _ in told] == ["a", "b", "c", "d", "e", "g", "h", "h", "i", "z"]
    by_name = dict(told)
    assert re.match(r"byte \d+: a member of \d+ bytes, and the file ends after 188: cut; .*: fetch", by_name["a"])
    assert re.match(r"byte \d+: header checksum does not match: damaged, or not a tar; .*: fetch", by_name["b"])
    assert by_name["c"] == "compressed, which has no random access; unpack it first"
    assert re.match(r"byte \d+: data behind the end blocks, which other readers never see", by_name["d"])
    assert re.match(r"byte \d+: sample '9' cannot be used: missing_caption", by_name["e"])
    assert "sample '7' ends shard 'g-split.tar' and starts shard 'h-split.tar': split over two" in str(told)
    assert by_name["i"].startswith("is an HTML page, not a tar")
    assert by_name["z"].endswith(
        "is a FIFO, and only regular files are read; it was not opened; write what comes out of it to a file first"
    )
    assert closing == "10 problems in 9 of 10 shards: fetch these again, or `mmdata index --skip-damaged`"
    good = program("verify", tmp_path / "f-good.tar")
    assert (good.returncode, good.stdout) == (
        0,
        f"ok: 1 shard, 4 samples, {len(data):,} bytes; no index, so payloads were not compared with hashes\n",
    )


def test_verify_of_an_index_without_its_manifest_is_an_error(shards):
    (shards / "__mmdata__/manifest.json").unlink()
    run = program("verify", shards)
    assert (run.returncode, run.stdout) == (2, "")
    assert "no manifest.json; `mmdata index" in run.stderr


def test_tars_without_any_image_are_no_problem(tmp_path, tar):
    data = tar([("0.npy", bytes(100)), ("1.npy", bytes(100)), ("1.json", b"{}")])
    (tmp_path / "a.tar").write_bytes(data)
    assert verify_tars([tmp_path]).problems == []
    (tmp_path / "b.tar").write_bytes(data[:700])
    (problem,) = verify_tars([tmp_path]).problems
    assert (problem.shard, ": cut; " in problem.detail) == ("b.tar", True)
