from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import webdataset

from mmdata.errors import ConfigError, DataError
from mmdata.hashing import fast_hash
from mmdata.images import Limits
from mmdata.index import Index, Manifest, build_index, verify
from mmdata.tars.members import Members
from tests.index.rewrite import content
from tests.programs import run_program


@pytest.fixture(scope="module")
def jpeg(photo) -> bytes:
    return photo(20, 30)


@pytest.fixture
def index_of(tmp_path, tar):
    """`index_of([(name, data), …]) -> (Index, quarantined)` of one tar with those members."""

    def build(members, **settings):
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "shard.tar").write_bytes(tar(members))
        report = build_index(tmp_path / "in", max_bad_share=1.0, **settings)
        accounts = report.accounts
        assert accounts["samples"] == accounts["indexed"] + accounts["quarantined"]
        assert accounts["indexed"] == len(Index.open(tmp_path / "in"))
        lines = (tmp_path / "in/__mmdata__/quarantine.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == report.quarantined
        return Index.open(tmp_path / "in"), report

    return build


def test_shards_by_webdatasets_writer_are_indexed(tmp_path, photo):
    images = [photo(16 + i, 24, seed=i) for i in range(5)]
    with webdataset.TarWriter(str(tmp_path / "foreign.tar")) as sink:
        for i, image in enumerate(images):
            sink.write({"__key__": f"sub/{i}", "jpg": image, "json": {"caption": f"number {i}"}, "cls": i})
    report = build_index(tmp_path)
    index = Index.open(tmp_path)
    assert report.accounts == {"samples": 5, "indexed": 5, "quarantined": 0, "ignored_members": 0}
    assert index.keys(np.arange(5)) == [f"sub/{i}" for i in range(5)]
    assert index.column("height").tolist() == [16, 17, 18, 19, 20]
    assert index.column("label").tolist() == [0, 1, 2, 3, 4]
    assert index.column("caption_format").tolist() == [1] * 5


def test_rows_stand_in_the_order_of_shard_names_then_of_the_tar(tmp_path, tar, jpeg):
    for name, keys in (("b.tar", "31"), ("a.tar", "92")):
        (tmp_path / name).write_bytes(tar([(k + e, d) for k in keys for e, d in ((".jpg", jpeg), (".txt", b"a"))]))
    build_index(tmp_path)
    assert Index.open(tmp_path).keys(np.arange(4)) == ["9", "2", "3", "1"]


@pytest.mark.parametrize(
    ("members", "caption_format", "count"),
    [
        ([("a.json", b'{"captions": ["x", "y"], "caption": "z"}'), ("a.txt", b"t")], 1, 2),
        ([("a.json", b'{"caption": "z"}'), ("a.txt", b"t")], 0, 1),
        ([("a.json", b'{"caption": "z"}')], 1, 1),
    ],
)
def test_captions_are_those_of_captions_then_txt_then_caption(index_of, jpeg, members, caption_format, count):
    index, _ = index_of([("a.jpg", jpeg), *members])
    assert index.column("caption_format").tolist() == [caption_format]
    assert np.diff(index.lists("caption_hash")[0]).tolist() == [count]


@pytest.mark.parametrize(
    "names",
    [["a.jpg", "a.seg.png"], ["a.depth", "a.jpeg"], ["a.pyd", "a.left.jpg"], ["a.jpg.bin"], ["a.JPG"], ["a.png"]],
)
def test_the_image_is_found_by_extension_then_by_magic(index_of, jpeg, names):
    members = [(name, b"no image" if name in ("a.depth", "a.pyd") else jpeg) for name in names]
    index, _ = index_of([*members, ("a.txt", b"caption")])
    assert index.column("image_bytes").tolist() == [len(jpeg)]
    assert index.column("image_format").tolist() == [0]


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ([("a.cls", b"7\n"), ("a.json", b'{"label": 3}')], 7),
        ([("a.json", b'{"label": 3}')], 3),
        ([("a.json", b'{"label": "dog"}')], 0),
        ([("a.cls", b"dog"), ("a.json", b'{"label": 3}')], 0),
        ([("a.cls", b"-1"), ("a.json", b'{"label": 3}')], -1),
        ([("a.cls", b"9" * 5000)], -1),
        ([("a.cls", b"\xff"), ("a.json", b'{"label": 3}')], 3),
        ([("a.json", b'{"label": true}')], -1),
        ([("a.json", b'{"label": -5}')], -1),
        ([], -1),
    ],
)
def test_labels_are_class_numbers(index_of, jpeg, members, label):
    index, _ = index_of([("a.jpg", jpeg), ("a.txt", b"caption"), *members])
    assert index.column("label").tolist() == [label]


@pytest.mark.parametrize(
    ("members", "reason", "detail"),
    [
        ([("b.txt", b"t")], "missing_image", "no image among .txt"),
        ([("b.jpg", None), ("b.pkl", b"\x80\x04.")], "missing_caption", 'no .txt and no JSON "captions" or "caption"'),
        ([("b.jpg", None), ("b.txt", b" \n")], "empty_caption", "caption is empty"),
        ([("b.jpg", None), ("b.txt", b"\xff\xfe")], "bad_caption", "not UTF-8 at byte 0"),
        ([("b.jpg", None), ("b.json", b"{")], "bad_caption", "JSON member does not parse"),
        (
            [("b.jpg", None), ("b.json", b'{"caption": "a", "caption": "b"}')],
            "bad_caption",
            "key 'caption' is there twice",
        ),
        ([("b.jpg", None), ("b.txt", b"x" * 2**21)], "caption_too_long", "'b.txt': 2097152 bytes; at most 1048576"),
        ([("b.jpg", b""), ("b.txt", b"t")], "empty_file", "image of 0 bytes"),
        ([("b.jpg", b"<html>"), ("b.txt", b"t")], "not_an_image", "starts with b'<html>'"),
        ([("b.heic", b"\0\0\0\x18ftypheic"), ("b.txt", b"t")], "corrupt_image", "HEIF does not decode"),
        ([("../b.jpg", None), ("../b.txt", b"t")], "outside_root", "climbs out of its folder"),
        ([("/b.jpg", None), ("/b.txt", b"t")], "outside_root", "the key is absolute"),
    ],
)
def test_samples_that_cannot_be_used_are_quarantined_with_their_reason(index_of, jpeg, members, reason, detail):
    good = [("a.jpg", jpeg), ("a.txt", b"t")]
    index, report = index_of(good + [(name, jpeg if data is None else data) for name, data in members])
    assert index.keys(np.arange(1)) == ["a"]
    (line,) = report.quarantined
    assert {name: line[name] for name in ("shard", "key", "reason")} == {
        "shard": "shard.tar",
        "key": members[0][0].split(".txt")[0].split(".jpg")[0].split(".heic")[0].split(".json")[0],
        "reason": reason,
    }
    assert detail in line["detail"]
    assert line["offset"] == Path(index.shard_path(0)).read_bytes().index(members[0][0].encode() + b"\0")


def test_limits_quarantine_images(index_of, jpeg):
    _, report = index_of([("a.jpg", jpeg), ("a.txt", b"t")], limits=Limits(min_side=21))
    assert [line["detail"] for line in report.quarantined] == ["30×20 pixels: shorter side under 21"]


def test_members_of_no_sample_are_ignored_and_counted(index_of, jpeg):
    members = [("README", b"x"), ("__meta__/info.json", b"{}"), ("a.jpg", jpeg), ("LICENSE", b"x"), ("a.txt", b"t")]
    index, report = index_of(members)
    assert report.accounts == {"samples": 1, "indexed": 1, "quarantined": 0, "ignored_members": 3}
    assert len(index) == 1


def refuse(source: Path, message: str, **settings) -> None:
    before = content(source)
    with pytest.raises(DataError, match=re.escape(message)):
        build_index(source, **settings)
    assert content(source) == before


def test_a_key_that_comes_back_is_refused_with_both_offsets(tmp_path, tar):
    (tmp_path / "x.tar").write_bytes(tar([("a.jpg", b""), ("b.jpg", b""), ("a.txt", b"")]))
    refuse(tmp_path, "shard 'x.tar': sample 'a' starts at byte 0 and comes back at byte 1024; other readers make two")


def test_an_extension_twice_in_a_sample_is_refused(tmp_path, tar):
    (tmp_path / "x.tar").write_bytes(tar([("a.jpg", b""), ("a.JPG", b"")]))
    refuse(tmp_path, "shard 'x.tar': sample 'a' has .jpg at byte 0 and again at byte 512; remove one")


def test_a_damaged_shard_publishes_nothing(tmp_path, tar, jpeg):
    good = tar([("a.jpg", jpeg), ("a.txt", b"t")])
    (tmp_path / "0.tar").write_bytes(good)
    (tmp_path / "1.tar").write_bytes(good[:1000])
    refuse(tmp_path, "shard '1.tar', byte 0: a member of")


def test_a_sample_split_over_two_shards_is_refused(tmp_path, tar, jpeg):
    (tmp_path / "0.tar").write_bytes(tar([("a.jpg", jpeg), ("a.txt", b"t"), ("b.jpg", jpeg)]))
    (tmp_path / "1.tar").write_bytes(tar([("b.txt", b"t"), ("c.jpg", jpeg), ("c.txt", b"t")]))
    refuse(tmp_path, "sample 'b' ends shard '0.tar' and starts shard '1.tar': split over two shards", max_bad_share=1.0)


def test_whole_samples_may_share_a_key_across_shards(tmp_path, tar, jpeg):
    for name in ("0.tar", "1.tar"):
        (tmp_path / name).write_bytes(tar([("a.jpg", jpeg), ("a.txt", b"t")]))
    build_index(tmp_path)
    assert Index.open(tmp_path).keys(np.arange(2)) == ["a", "a"]


def test_too_much_quarantine_is_an_error(tmp_path, tar, jpeg):
    members = [("a.jpg", jpeg), ("a.txt", b"t"), ("b.jpg", jpeg), ("c.txt", b"t"), ("d.txt", b"t")]
    (tmp_path / "x.tar").write_bytes(tar(members))
    refuse(
        tmp_path,
        "3 of 4 samples cannot be used (2 missing_image, 1 missing_caption), more than 5% of them; the first is shard "
        "'x.tar', sample 'b': no .txt and no JSON",
    )
    assert build_index(tmp_path, max_bad_share=0.75).accounts["quarantined"] == 3


def test_a_packed_folder_is_named_where_no_sample_can_be_used(tmp_path, tar, jpeg):
    (tmp_path / "x.tar").write_bytes(tar([("a.jpg", jpeg), ("b.jpg", jpeg), ("dev.json", b'[{"file": "a.jpg"}]')]))
    told = "with text in it. If this is a packed folder, with a table beside the pictures, and no WebDataset, unpack it"
    refuse(tmp_path, f"{told} and run `mmdata convert` on the folder; if captions are elsewhere in the samples, name t")


def test_an_empty_shard_is_accepted(tmp_path, tar, jpeg):
    (tmp_path / "0.tar").write_bytes(tar([]))
    (tmp_path / "1.tar").write_bytes(tar([("a.jpg", jpeg), ("a.txt", b"t")]))
    build_index(tmp_path)
    assert Index.open(tmp_path).starts.tolist() == [0, 0, 1]
    assert Index.open(tmp_path).column("width").tolist() == [30]


def test_one_tar_is_indexed_beside_itself_or_elsewhere(shards, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(shards / "000001.tar", alone / "x.tar")
    report = build_index(alone / "x.tar", out=tmp_path / "far" / "index")
    names = ["index-00000.arrow", "manifest.json", "quarantine.jsonl"]
    made = [f"__mmdata__/{name}" for name in names]
    assert sorted(content(tmp_path / "far" / "index")) == made
    assert report.manifest.location == "../../alone"
    assert Index.open(tmp_path / "far" / "index").shard_path(0).read_bytes() == (alone / "x.tar").read_bytes()
    assert sorted(content(alone)) == ["x.tar"]
    build_index(alone / "x.tar")
    assert sorted(content(alone)) == [*made, "x.tar"]


def test_the_same_index_is_left_alone_and_moved_tars_are_found(shards, tmp_path):
    out = tmp_path / "index"
    build_index(shards, out=out)
    before = content(out)
    build_index(shards, out=out)
    assert content(out) == before
    shards.rename(tmp_path / "moved")
    assert build_index(tmp_path / "moved", out=out).manifest.location == "../moved"
    assert Index.open(out).shard_path(0).is_file()


def test_another_index_is_never_replaced(shards, count):
    remedy = "; read all tars again with --overwrite, or give another folder with --out"
    another = f"its manifest.json is of another tokenizer (fingerprint characters; of the one given: another){remedy}"
    refuse(shards, another, count_tokens=count, tokenizer="another")
    refuse(shards, f"its manifest.json is of other members (captions: {{}}){remedy}", members=Members.parse(label="n"))
    assert build_index(shards).unchanged
    assert build_index(shards, count_tokens=count, tokenizer="characters").unchanged  # the same as the writer's
    build_index(shards, out=shards / "one", count_tokens=count, tokenizer="characters")
    with pytest.raises(DataError, match=r"is of other shards \(\d+, and 1 are to be indexed\); read all"):
        build_index(shards / "000001.tar", out=shards / "one", count_tokens=count, tokenizer="characters")
    whole = (shards / "000001.tar").read_bytes()
    (shards / "000001.tar").write_bytes(whole.replace(b"picture", b"Picture"))
    refuse(shards, f"is of other contents: '000001.tar' has another SHA-256 than the tar that was indexed{remedy}")
    (shards / "000001.tar").write_bytes(whole + bytes(512))
    refuse(shards, f"other contents: '000001.tar' has {len(whole) + 512:,} bytes, and {len(whole):,} were indexed")
    (shards / "000001.tar").write_bytes(whole)
    replaced = build_index(shards, count_tokens=count, tokenizer="another", overwrite=True)  # what the message says
    assert replaced.manifest.tokenizer == "another"


def test_a_failure_to_publish_leaves_nothing(shards, tmp_path, monkeypatch):
    def full(self: Manifest) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Manifest, "to_json", full)
    with pytest.raises(OSError, match="No space left"):
        build_index(shards, out=tmp_path / "out")
    assert content(tmp_path / "out") == {}


def test_a_shard_whose_name_no_manifest_follows_is_refused_unread(tmp_path):
    (tmp_path / "a:b.tar").write_bytes(b"not read")
    refuse(tmp_path, "'a:b.tar' is not a plain file name; commands and paths are never followed")


KILL_EACH = """
import os, shutil, sys
from pathlib import Path
from mmdata.index import build_index
from tests.convert.settle.killed import before, die
from tests.index.rewrite import published

shards, good, old, out = map(Path, sys.argv[1:5])

for number in range(int(sys.argv[5]), 1000, 5):
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(old, out)
    child = os.fork()
    if child == 0:
        before(number, die)
        build_index(shards, out=out, overwrite=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if (out / "__mmdata__/manifest.json").exists():
        assert published(out) in (published(good), published(old)), number
    build_index(shards, out=out, overwrite=True)
    assert published(out) == published(good), number
    assert sorted(os.listdir(out)) == [".mmdata.lock", "__mmdata__"], number
    if status == 0:
        break
print(number)
"""


@pytest.mark.parametrize("first", range(5))  # of every fifth moment
@pytest.mark.sweep(keep=1)
def test_an_index_that_is_replaced_is_the_old_or_the_new_one_after_a_kill_at_any_moment(
    shards, count, tmp_path, first: int
):
    good, old = tmp_path / "good", tmp_path / "old"
    build_index(shards, out=good)
    build_index(shards, out=old, count_tokens=count, tokenizer="another")
    (old / "__mmdata__/index-00001.arrow").write_bytes(b"of an index of 1,025 shards")
    places = [str(path) for path in (shards, good, old, tmp_path / "out", first)]
    root = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_program([sys.executable, "-c", KILL_EACH, *places], capture_output=True, text=True, env=root)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # moments at which it was killed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.tar.gz", "'x.tar.gz' is compressed, which has no random access; unpack it first"),
        ("x.jpg", "no .tar in it; `mmdata convert {folder} OUT` makes shards of images and captions"),
        ("a/x.tar", "no .tar in it, but in its folder 'a'; `mmdata convert"),
    ],
)
def test_folders_without_plain_tars_are_refused(tmp_path, name, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    refuse(tmp_path, message.format(folder=tmp_path))


def test_sources_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        build_index(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"'pipe:cat a\.tar': a folder on this disk is needed"):
        build_index("pipe:cat a.tar")
    with pytest.raises(ConfigError, match=f"2 paths given, such as '{tmp_path}': give the folder that holds the tars"):
        build_index([tmp_path, tmp_path / "x.tar"])


def test_pickles_are_bytes(index_of, jpeg):
    bomb = b"cos\nsystem\n(S'touch /tmp/mmdata-was-here'\ntR."
    index, _ = index_of([("a.jpg", jpeg), ("a.txt", b"t"), ("a.pkl", bomb), ("a.pth", bomb)])
    assert len(index) == 1
    assert not Path("/tmp/mmdata-was-here").exists()


def test_a_tar_that_grew_by_a_second_tar_is_refused(tmp_path, tar, jpeg):
    once = io.BytesIO(tar([("a.jpg", jpeg), ("a.txt", b"t")])).getvalue()
    (tmp_path / "x.tar").write_bytes(once + once)
    refuse(tmp_path, "data behind the end blocks, which other readers never see: concatenated tars, or damage")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "c.zip",
            "'{path}': a zip, and a tar or a folder of tars is expected; `mmdata convert {path} OUT` makes shards of "
            "it",
        ),
        ("c.yaml", "'{path}': a YAML file, and a tar or a folder of tars is expected"),
        (
            "c.csv",
            "'{path}': a table, and a tar or a folder of tars is expected; `mmdata convert {path} OUT` makes shards of "
            "it",
        ),
    ],
)
def test_a_file_that_is_plainly_no_tar_is_said_to_be_that(tmp_path: Path, name: str, message: str):
    (tmp_path / name).write_text("data: {}")
    with pytest.raises(DataError) as caught:
        build_index(tmp_path / name)
    assert str(caught.value) == message.format(path=tmp_path / name)


# Tars without images


@pytest.fixture
def features(tmp_path, tar):
    """Two tars of three samples without an image, one of them with a text."""
    members = [(f"{row}.npy", bytes([row]) * 100) for row in range(3)]
    (tmp_path / "0.tar").write_bytes(tar([*members[:2], ("1.txt", b"a dog")]))
    (tmp_path / "1.tar").write_bytes(tar(members[2:]))
    return tmp_path


def test_tars_without_any_image_are_rows_of_members(features):
    report = build_index(features)
    assert (report.accounts["samples"], report.accounts["indexed"], report.quarantined) == (3, 3, [])
    index = Index.open(features)
    assert (index.has_images, index.has_captions, index.keys(np.arange(3))) == (False, False, ["0", "1", "2"])
    members = index.shard(0).members(1)
    data = (features / "0.tar").read_bytes()
    assert {name: data[one.offset : one.offset + one.size] for name, one in members.items()} == {
        "npy": bytes([1]) * 100,
        "txt": b"a dog",
    }
    assert [one.xxh3 for one in members.values()] == [fast_hash(bytes([1]) * 100), fast_hash(b"a dog")]
    assert verify(features) == []


def test_tars_without_images_have_nothing_to_tokenize_and_none_that_is_named(features, count):
    with pytest.raises(ConfigError, match="samples without images, so nothing to tokenize: omit --tokenizer"):
        build_index(features, count_tokens=count, tokenizer="characters")
    with pytest.raises(DataError, match=r"3 of 3 samples cannot be used \(2 missing_caption, 1 missing_image\)"):
        build_index(features, members=Members.parse(image="jpg"))


def test_one_image_in_the_corpus_makes_samples_without_one_unusable(features, tar, jpeg):
    (features / "2.tar").write_bytes(tar([("9.jpg", jpeg), ("9.txt", b"a cat")]))
    report = build_index(features, max_bad_share=1.0)
    reasons = [(line["key"], line["reason"]) for line in report.quarantined]
    assert reasons == [("0", "missing_caption"), ("1", "missing_image"), ("2", "missing_caption")]
    assert (Index.open(features).keys(np.arange(1)), verify(features)) == (["9"], [])
