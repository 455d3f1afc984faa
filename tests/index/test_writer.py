from __future__ import annotations

import json
import os
import re
import signal
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import webdataset

from mmdata.errors import BadSample, DataError, Reason
from mmdata.images import ImageInfo
from mmdata.index import Index, Manifest, Sample, ShardWriter, build_index
from mmdata.index.histogram import aspect_bin, unpack_cells
from tests.programs import run_program


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".mmdata.lock"
    }


def write(folder: Path, samples: Iterable[Sample], **settings) -> Path:
    with ShardWriter(folder, **settings) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def test_webdataset_reads_back_every_byte(shards, samples):
    urls = [str(shards / f"{i:06d}.tar") for i in range(3)]
    read = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in read] == [sample.key for sample in samples]
    for found, sample in zip(read, samples, strict=True):
        extension = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[sample.info.format]
        assert found[extension] == sample.image
        assert found["txt"] == sample.captions[0].encode()
        more = len(sample.captions) > 1 or sample.label is not None or sample.extra
        assert ("json" in found) == bool(more)
        if more:
            label = {} if sample.label is None else {"label": sample.label}
            assert json.loads(found["json"]) == {"captions": sample.captions, **label, **(sample.extra or {})}


def test_json_members_are_compact_and_sorted(shards):
    with tarfile.open(shards / "000001.tar") as tar:
        data = tar.extractfile("0007.json").read()
    assert data.decode() == '{"captions":["picture 7","picture 7 again"],"source":"ü"}'


def test_same_samples_give_same_bytes(shards, samples, count, tmp_path):
    again = write(tmp_path / "again", samples, shard_rows=4, count_tokens=count, tokenizer="characters")
    assert content(again) == content(shards)
    assert sorted(content(shards)) == [
        *(f"{i:06d}.tar" for i in range(3)),
        *(f"__mmdata__/{i:06d}.index.arrow" for i in range(3)),
        "__mmdata__/manifest-00000.arrow",
        "__mmdata__/manifest.json",
    ]


def test_indexing_written_shards_anew_gives_the_same_index(shards, count, tmp_path):
    report = build_index(shards, out=tmp_path / "out", count_tokens=count, tokenizer="characters")
    assert report.manifest.root == Index.open(shards).fingerprint
    for i in range(3):
        name = f"__mmdata__/{i:06d}.index.arrow"
        assert (tmp_path / "out" / name).read_bytes() == (shards / name).read_bytes()


def test_shards_are_cut_by_rows_and_by_bytes(samples, tmp_path):
    by_rows = write(tmp_path / "rows", samples, shard_rows=3)
    assert [entry.rows for entry in Manifest.read(by_rows)] == [3, 3, 3, 1]
    by_bytes = Manifest.read(write(tmp_path / "bytes", samples, shard_bytes=8192))
    assert all(entry.bytes <= 8192 for entry in by_bytes)
    assert by_bytes.rows == 10
    assert by_bytes.num_shards > 3
    single = Manifest.read(write(tmp_path / "single", samples[:2], shard_bytes=1))
    assert [entry.rows for entry in single] == [1, 1]


def test_manifest_says_what_lies_there(shards, samples):
    manifest = Manifest.read(shards)
    assert [entry.bytes for entry in manifest] == [(shards / entry.name).stat().st_size for entry in manifest]
    assert manifest.bytes == sum(entry.bytes for entry in manifest)
    assert (manifest.rows, manifest.num_shards, manifest.captions, manifest.has_labels) == (10, 3, 19, True)
    assert [entry.labels for entry in manifest] == [1, 1, 1]
    assert manifest.tokenizer == "characters"
    entry = manifest.entry(0)
    expected = Counter(
        (len(caption), int(aspect_bin(sample.info.height, 30))) for sample in samples[:4] for caption in sample.captions
    )
    cells = zip(*(part.tolist() for part in unpack_cells(entry.cells)), strict=True)
    assert dict(zip(cells, entry.counts.tolist(), strict=True)) == expected


def test_aspect_ratios_are_of_the_image_as_displayed(samples, tmp_path):
    turned = replace(samples[0], info=ImageInfo("JPEG", 20, 40, orientation=6))
    manifest = Manifest.read(write(tmp_path, [turned]))
    entry = manifest.entry(0)
    assert [part.tolist() for part in (*unpack_cells(entry.cells), entry.counts)] == [[0], [96], [1]]
    assert manifest.token_histogram().tolist() == [1]  # no tokenizer counted: all captions are of 0 tokens


def test_accounts_lie_in_the_manifest(samples, tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write(samples[0])
        manifest = writer.close({"rows": 2, "written": 1, "quarantined": 1})
    assert Manifest.read(tmp_path) == manifest
    assert manifest.accounts == {"rows": 2, "written": 1, "quarantined": 1}


def test_no_samples_make_an_empty_index(tmp_path):
    index = Index.open(write(tmp_path, []))
    assert len(index) == 0
    assert index.column("height").tolist() == []
    assert index.keys(index.column("image_offset")) == []


def test_an_exception_publishes_nothing(samples, tmp_path):
    def failing_source():
        yield from samples[:2]
        raise RuntimeError("the caller's")

    with pytest.raises(RuntimeError, match="the caller's"):
        write(tmp_path, failing_source(), shard_rows=1)
    assert content(tmp_path) == {}
    write(tmp_path, samples)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_a_failing_sync_publishes_nothing(samples, tmp_path, monkeypatch, fails_at):
    calls = 0
    sync = os.fsync

    def failing(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, samples, shard_rows=6)
    assert content(tmp_path) == {}


def test_a_full_disk_publishes_nothing(samples, tmp_path):
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        + WRITE.format(folder=str(tmp_path / "out"), after="pass")
    )
    run = run_program([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "OSError: [Errno 27] File too large" in run.stderr
    assert content(tmp_path / "out") == {}


WRITE = """
from mmdata.images import ImageInfo
from mmdata.index import Sample, ShardWriter
with ShardWriter({folder!r}, shard_rows=2) as writer:
    for i in range(5):
        writer.write(Sample(f"{{i:04d}}", bytes([i]) * 3000, ImageInfo("JPEG", 9, 9), [f"caption {{i}}"]))
    {after}
"""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
KILL_AT_RENAME = """
import os, signal
rename, count = os.rename, 0
def killing(source, target):
    global count
    if count == {renames}:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    rename(source, target)
os.rename = killing
"""


@pytest.mark.parametrize("renames", [None, 0, 3, 6, 7])
def test_after_a_kill_at_any_moment_a_rerun_is_as_if_undisturbed(tmp_path, renames):
    """Killed in mid-shard (None), or while publishing, after so many of the eight renames into place."""
    good, killed = tmp_path / "good", tmp_path / "killed"
    exec(WRITE.format(folder=str(good), after="pass"))
    if renames is None:
        program = WRITE.format(folder=str(killed), after=KILL)
    else:
        program = KILL_AT_RENAME.format(renames=renames) + WRITE.format(folder=str(killed), after="pass")
    assert run_program([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    with pytest.raises(DataError, match=r"no manifest\.json"):
        Index.open(killed)
    exec(WRITE.format(folder=str(killed), after="pass"))
    assert content(killed) == content(good)


def test_a_second_writer_is_refused(samples, tmp_path):
    with ShardWriter(tmp_path) as writer:
        with pytest.raises(DataError, match="another process is writing here; wait for it or choose another folder"):
            ShardWriter(tmp_path)
        writer.write(samples[0])
    assert len(Index.open(tmp_path)) == 1


@pytest.mark.parametrize("name", ["000000.tar", "mine.tar", "manifest.json", "x.index.arrow", "manifest-00000.arrow"])
def test_foreign_shards_are_refused_and_kept(tmp_path, name):
    name = name if name.endswith(".tar") else f"__mmdata__/{name}"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(DataError, match=re.escape(f"already holds '{name}' (1 such files); choose an empty folder")):
        ShardWriter(tmp_path)
    assert content(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": ""}, "a key may not be empty"),
        ({"key": "a.b"}, "readers would cut or skip it"),
        ({"key": "/a"}, "a key may not be empty, absolute"),
        ({"key": "__a__/b"}, "or be __meta__"),
        ({"key": "../b"}, "climb out of its folder"),
        ({"captions": [], "label": None}, "sample '0000': neither a caption nor a label"),
        ({"captions": [" a"]}, "caption ' a' was not cleaned"),
        ({"extra": {"label": 3}}, r"extra may not hold \['label'\]"),
        ({"label": -1}, "label -1 is not a class number"),
    ],
)
def test_samples_that_would_not_be_read_back_are_refused(samples, tmp_path, change, message):
    with pytest.raises(ValueError, match=message), ShardWriter(tmp_path) as writer:
        writer.write(replace(samples[0], **change))


def test_an_empty_caption_is_a_bad_sample_and_the_writer_goes_on(samples, tmp_path):
    with ShardWriter(tmp_path) as writer:
        with pytest.raises(BadSample) as caught:
            writer.write(replace(samples[0], captions=[""]))
        assert caught.value.reason is Reason.EMPTY_CAPTION
        writer.write(samples[0])
    assert len(Index.open(tmp_path)) == 1


def test_a_key_twice_in_a_shard_is_refused(samples, tmp_path):
    with pytest.raises(ValueError, match=r"the key is already in shard '000000\.tar'"):
        write(tmp_path, [samples[0], samples[0]])


def test_a_name_too_long_for_a_header_leaves_the_shard_whole(samples, tmp_path):
    with ShardWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="name is too long"):
            writer.write(replace(samples[0], key="x" * 97))  # .jpg still fits in 100 bytes, .json does not
        writer.write(samples[1])
    index = Index.open(tmp_path)
    assert index.keys(index.starts[:1]) == ["0001"]


def test_limits_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="shard_rows and shard_bytes must be positive: got 0, 5"):
        ShardWriter(tmp_path, shard_rows=0, shard_bytes=5)


def test_a_count_of_another_length_is_refused(samples, tmp_path):
    with pytest.raises(ValueError, match="count_tokens returned 0 lengths for 1 captions"):
        write(tmp_path, samples[:1], count_tokens=lambda captions: [])


def test_a_folder_of_others_called_staging_is_kept(tmp_path):
    (tmp_path / ".staging").mkdir()
    (tmp_path / ".staging" / "a").write_bytes(b"a")
    with ShardWriter(tmp_path):
        pass
    assert (tmp_path / ".staging" / "a").read_bytes() == b"a"
