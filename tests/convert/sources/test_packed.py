"""Shards to shards: what a tar says of its samples is kept."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sources.tars import PackedSource
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.index import Index, build_index
from tests.convert.conftest import left_out, members, shards, tolerant


def pack(tar: Path, files: dict[str, bytes | str], **options: Any) -> None:
    """A tar as Python's own writer makes it."""
    tar.parent.mkdir(exist_ok=True)
    with tarfile.open(tar, "w", **options) as file:
        for name, data in files.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def test_shards_of_a_conversion_come_out_the_same(raw_corpus: Path, tmp_path: Path) -> None:
    settings = ConvertConfig(shard_rows=16)
    convert(raw_corpus / "captions.jsonl", tmp_path / "a", settings)
    report = convert(tmp_path / "a", tmp_path / "b", settings)
    assert report.accounts["written"] == 40
    assert shards(tmp_path / "b") == shards(tmp_path / "a")
    assert convert(tmp_path / "a", tmp_path / "b", settings).was_complete


def test_shrinking_shards_is_shrinking_while_converting(raw_corpus: Path, tmp_path: Path) -> None:
    settings = ConvertConfig(shard_rows=16, resize=44)
    convert(raw_corpus / "captions.jsonl", tmp_path / "whole", ConvertConfig(shard_rows=7))
    convert(raw_corpus / "captions.jsonl", tmp_path / "direct", settings)
    convert(tmp_path / "whole", tmp_path / "through", settings, engine=threads(3))
    assert shards(tmp_path / "through") == shards(tmp_path / "direct")
    assert Index.open(tmp_path / "through").column("height").max() <= 64


def test_keys_captions_labels_and_metadata_are_kept(tmp_path: Path, photo: Any) -> None:
    images = [photo(20, 30, seed=seed) for seed in range(4)]
    pack(
        tmp_path / "in/a.tar",
        {
            "dog/1.jpg": images[0],
            "dog/1.txt": "a dog\n",
            "dog/1.cls": "7",
            "x2.json": json.dumps({"captions": ["one", "two"], "caption": "unread", "url": "u", "label": 3}),
            "x2.jpeg": images[1],
            "x2.txt": "unread",
        },
    )
    pack(
        tmp_path / "in/b.tar",
        {
            "y.png": images[2],
            "y.json": '{"caption": "from json", "label": 0.5, "score": NaN}',
            "z.jpg": images[3],
            "z.txt": "z",
            "z.npy": b"\x93NUMPY",
            "__meta__/info.txt": "x",
        },
    )
    report = convert(tmp_path / "in", tmp_path / "out")
    assert members(tmp_path / "out") == {
        "dog/1.jpg": images[0],
        "dog/1.txt": b"a dog",
        "dog/1.json": b'{"captions":["a dog"],"label":7}',
        "x2.jpg": images[1],
        "x2.txt": b"one",
        "x2.json": b'{"captions":["one","two"],"label":3,"url":"u"}',
        "y.jpg": images[2],
        "y.txt": b"from json",
        "y.json": b'{"captions":["from json"],"score":null}',
        "z.jpg": images[3],
        "z.txt": b"z",
    }
    assert report.source["kind"] == "shards"
    assert (report.source["shards"], report.source["ignored_members"]) == (2, 2)  # z.npy and __meta__


def test_keep_says_which_metadata_stays(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "a.tar", {"k.jpg": photo(20, 30), "k.json": '{"caption": "x", "url": "u", "other": 1}'})
    convert(tmp_path / "a.tar", tmp_path / "out", ConvertConfig(keep=("url", "path")))
    assert members(tmp_path / "out")["k.json"] == b'{"captions":["x"],"path":"a.tar/k","url":"u"}'


def test_names_of_classes_are_kept(tmp_path: Path, photo: Any) -> None:
    samples = {f"{i}.jpg": photo(20, 30, seed=i) for i in range(3)}
    texts = {f"{i}.json": json.dumps({"caption": "x", "label": name}) for i, name in enumerate(("cat", "dog", "cat"))}
    pack(tmp_path / "in/a.tar", dict(sorted({**samples, **texts}.items())))
    for source, out in (("in", "once"), ("once", "twice")):
        report = convert(tmp_path / source, tmp_path / out)
        assert report.accounts["classes"] == ["cat", "dog"]
        assert Index.open(tmp_path / out).column("label").tolist() == [0, 1, 0]


@pytest.mark.parametrize("text", ["txt", "caption.txt"])
def test_label_column_of_nothing_takes_no_label(tmp_path: Path, photo: Any, text: str) -> None:
    samples = {f"{i}.jpg": photo(20, 30, seed=i) for i in range(2)}
    texts = {f"{i}.{kind}": content for i in range(2) for kind, content in ((text, f"photo {i}"), ("json", '{"n": 1}'))}
    labels = {"1.cls": "cat"} if text == "txt" else {}
    pack(tmp_path / "in/a.tar", dict(sorted({**samples, **texts, **labels}.items())))
    report = convert(tmp_path / "in", tmp_path / "out", ConvertConfig(label_column=""))
    assert (report.accounts["written"], report.accounts.get("classes"), report.accounts.get("lost")) == (2, None, None)
    assert Index.open(tmp_path / "out").column("label").tolist() == [-1, -1]
    assert not report.manifest.has_labels


def test_label_column_of_nothing_drops_the_classes_of_an_index(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "in/a.tar", {"0.cls": "cat", "0.jpg": photo(20, 30), "0.txt": "x"})
    convert(tmp_path / "in", tmp_path / "once")
    report = convert(tmp_path / "once", tmp_path / "twice", ConvertConfig(label_column=""))
    assert ("classes" in report.accounts, report.manifest.has_labels) == (False, False)


def test_tars_without_a_member_for_labels_are_not_read_for_them(
    tmp_path: Path, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(tmp_path / "in/a.tar", {"0.jpg": photo(20, 30), "0.txt": "x"})
    source = PackedSource(tmp_path / "in", ConvertConfig())
    monkeypatch.setattr(PackedSource, "rows", None)
    assert list(source.rows_with_labels()) == []


def test_keys_that_come_in_two_tars_take_the_tars_name(tmp_path: Path, photo: Any) -> None:
    for seed, name in enumerate(("a.v1", "b")):
        pack(tmp_path / f"in/{name}.tar", {"0.jpg": photo(20, 30, seed=seed), "0.txt": name})
    convert(tmp_path / "in", tmp_path / "out")
    assert list(members(tmp_path / "out")) == ["a.v1/0.jpg", "a.v1/0.txt", "b/0.jpg", "b/0.txt"]


def test_keys_that_no_plain_tar_can_name_take_the_rows_number(tmp_path: Path, photo: Any) -> None:
    long = "k" * 120
    files = {"./a.jpg": photo(20, 30), "./a.txt": "a", f"{long}.jpg": photo(20, 30, seed=1), f"{long}.txt": "long"}
    pack(tmp_path / "in/a.tar", files, format=tarfile.PAX_FORMAT)
    convert(tmp_path / "in", tmp_path / "out")
    assert list(members(tmp_path / "out")) == ["a.jpg", "a.txt", "row-000000001.jpg", "row-000000001.txt"]


def test_unusable_samples_are_quarantined_with_their_place(tmp_path: Path, photo: Any) -> None:
    good = photo(20, 30)
    files = {"good.jpg": good, "good.txt": "x", "cut.jpg": photo(64, 64)[:-300], "cut.txt": "x", "mute.jpg": good}
    files |= {"blind.txt": "x", "../up.jpg": good, "../up.txt": "x", "again.jpg": good, "again.txt": "y"}
    pack(tmp_path / "in/a.tar", files)
    accounts = convert(tmp_path / "in", tmp_path / "out", tolerant()).accounts
    assert (accounts["rows"], accounts["written"]) == (6, 1)
    assert [(line["place"], line["reason"]) for line in left_out(tmp_path / "out")] == [
        ("a.tar, sample 'cut'", "corrupt_image"),
        ("a.tar, sample 'mute'", "missing_caption"),
        ("a.tar, sample 'blind'", "missing_image"),
        ("a.tar, sample '../up'", "outside_root"),
        ("a.tar, sample 'again'", "duplicate_image"),
    ]


def test_member_that_is_too_large_is_quarantined(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "a.tar", {"a.jpg": photo(90, 90), "a.txt": "x", "b.jpg": photo(8, 8), "b.txt": "y"})
    convert(tmp_path / "a.tar", tmp_path / "out", tolerant(max_image_bytes=1000))
    (line,) = left_out(tmp_path / "out")
    assert line["reason"] == "image_too_large"
    assert line["detail"].endswith("bytes; the limit is 1000")


@pytest.mark.parametrize("end", [-1024, -1025, 3000])
def test_damaged_tar_is_an_error_before_anything_is_written(tmp_path: Path, photo: Any, end: int) -> None:
    for name in "ab":
        pack(
            tmp_path / f"in/{name}.tar", {f"{name}.jpg": photo(20, 30), f"{name}.txt": "x"}, format=tarfile.USTAR_FORMAT
        )
    path = tmp_path / "in/b.tar"
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:end])
    instead = f"; or leave the tars as they are and index what can be read: `mmdata index {path.parent} --skip-damaged`"
    with pytest.raises(DataError, match=rf"shard 'b.tar', byte \d+: .*cut.*{re.escape(instead)}$"):
        convert(tmp_path / "in", tmp_path / "out")
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {".mmdata.lock"}


def test_sample_split_over_two_tars_is_an_error(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "in/a.tar", {"0.jpg": photo(20, 30), "0.txt": "x", "1.jpg": photo(20, 30, seed=1)})
    pack(tmp_path / "in/b.tar", {"1.txt": "y"})
    with pytest.raises(
        DataError, match=r"sample '1' ends shard 'a.tar' and starts shard 'b.tar': split over two shards"
    ):
        convert(tmp_path / "in", tmp_path / "out")


def test_tar_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "a.tar", {"a.jpg": photo(20, 30), "a.txt": "x"})
    source = PackedSource(tmp_path / "a.tar", ConvertConfig())
    (row,) = source.rows()
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:600])
    with pytest.raises(DataError, match=r"a.tar': became shorter while it was read; convert again when it is whole"):
        Examiner.from_config(source, ConvertConfig())(row)


def test_row_can_be_sent_to_another_process(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "a.tar", {"a.jpg": photo(20, 30), "a.txt": "x"})
    source = PackedSource(tmp_path / "a.tar", ConvertConfig())
    (row,) = source.rows()
    examiner = Examiner.from_config(source, ConvertConfig(resize=10))
    assert pickle.loads(pickle.dumps(examiner))(pickle.loads(pickle.dumps(row))) == examiner(row)


def test_image_that_changed_since_it_was_indexed_is_quarantined(tmp_path: Path, photo: Any) -> None:
    image = photo(20, 30)
    pack(tmp_path / "in/x.tar", {"a.jpg": photo(20, 30, seed=1), "a.txt": "x", "b.jpg": image, "b.txt": "y"})
    build_index(tmp_path / "in")
    data = (tmp_path / "in/x.tar").read_bytes()
    (tmp_path / "in/x.tar").write_bytes(data.replace(image, image[:-3] + bytes([image[-3] ^ 1]) + image[-2:]))
    convert(tmp_path / "in", tmp_path / "out", tolerant())
    (line,) = left_out(tmp_path / "out")
    assert (line["path"], line["reason"]) == ("b", "file_changed")
    assert line["detail"] == "'b.jpg' is not the image indexed; `mmdata verify` tells what changed"


def test_tars_without_samples_are_an_error(tmp_path: Path) -> None:
    pack(tmp_path / "in/a.tar", {"README": "x"})
    with pytest.raises(DataError, match="no samples in its tars; the corpus is empty"):
        convert(tmp_path / "in", tmp_path / "out")


def test_compressed_tar_beside_tars_is_an_error(tmp_path: Path, photo: Any) -> None:
    pack(tmp_path / "in/a.tar", {"a.jpg": photo(20, 30), "a.txt": "x"})
    (tmp_path / "in/b.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"'b.tar.gz' is compressed, which has no random access; unpack it first"):
        convert(tmp_path / "in", tmp_path / "out")


def test_folder_of_images_may_hold_a_tar(corpus: Path, tmp_path: Path) -> None:
    for name in "abc":
        (corpus / f"{name}.txt").write_text(name)
    pack(corpus / "originals.tar", {"a.jpg": b"x"})
    assert convert(corpus, tmp_path / "out").source["kind"] == "folder"


def test_texts_of_numbers_in_tars_are_no_captions(tmp_path: Path, photo: Any) -> None:
    files = {f"{n}.jpg": photo(20, 30, seed=n) for n in range(3)} | {f"{n}.txt": "0 0.5 0.5 0.1 0.2" for n in range(3)}
    pack(tmp_path / "a.tar", dict(sorted(files.items())))
    with pytest.raises(DataError, match=r"most of its captions are numbers only .* with --caption-column"):
        convert(tmp_path / "a.tar", tmp_path / "out")
    report = convert(tmp_path / "a.tar", tmp_path / "out", ConvertConfig(caption_columns=["txt"]))
    assert report.accounts["written"] == 3
