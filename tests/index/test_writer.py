from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import webdataset

from mmdata.errors import BadSample, Reason
from mmdata.images import ImageInfo
from mmdata.index import Index, Manifest, build_index
from mmdata.index.columns import aspect_bin, unpack_cells
from mmdata.tars.write import Sample
from tests.index.rewrite import content
from tests.shard_writer import ShardWriter


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
        "__mmdata__/index-00000.arrow",
        "__mmdata__/manifest.json",
    ]


def test_indexing_written_shards_anew_gives_the_same_index(shards, count, tmp_path):
    report = build_index(shards, out=tmp_path / "out", count_tokens=count, tokenizer="characters")
    assert report.manifest.root == Index.open(shards).fingerprint
    name = "__mmdata__/index-00000.arrow"
    assert (tmp_path / "out" / name).read_bytes() == (shards / name).read_bytes()


def test_manifest_says_what_lies_there(shards, samples):
    manifest = Manifest.read(shards)
    assert [entry.bytes for entry in manifest] == [(shards / entry.name).stat().st_size for entry in manifest]
    assert manifest.bytes == sum(entry.bytes for entry in manifest)
    assert (manifest.rows, manifest.num_shards, manifest.captions, manifest.has_labels) == (10, 3, 19, True)
    assert [entry.labels for entry in manifest] == [1, 1, 1]
    assert manifest.tokenizer == "characters"
    entry = next(iter(manifest))
    expected = Counter(
        (len(caption), int(aspect_bin(sample.info.height, 30))) for sample in samples[:4] for caption in sample.captions
    )
    cells = zip(*(part.tolist() for part in unpack_cells(entry.cells)), strict=True)
    assert dict(zip(cells, entry.counts.tolist(), strict=True)) == expected


def test_aspect_ratios_are_of_the_image_as_displayed(samples, tmp_path):
    turned = replace(samples[0], info=ImageInfo("JPEG", 20, 40, orientation=6))
    manifest = Manifest.read(write(tmp_path, [turned]))
    entry = next(iter(manifest))
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


def test_a_count_of_another_length_is_refused(samples, tmp_path):
    with pytest.raises(ValueError, match="count_tokens returned 0 lengths for 1 captions"):
        write(tmp_path, samples[:1], count_tokens=lambda captions: [])
