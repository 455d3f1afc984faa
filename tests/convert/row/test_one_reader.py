"""Index and convert read a foreign sample alike: the same captions and label, or the same refusal.

A stream indexes its tars with the reader of the index.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sources.folder import FolderSource
from mmdata.convert.units.engines import threads
from mmdata.index import Index, ShardStore, build_index, verify
from mmdata.storage.folder import find_ledger
from mmdata.tars import captions_of
from mmdata.tars.texts import Loss
from tests.conftest import make_photo
from tests.convert.sources.test_packed import pack

GOOD = make_photo(20, 30)


class Reading(NamedTuple):
    """What one reader made of a sample: its captions and label, or the reason it was refused; and the losses."""

    captions: list[str] | None
    label: int | str | None
    refused: str | None
    lost: dict[str, int]


def published(folder: Path, accounts: dict[str, Any]) -> Reading:
    """What a folder holds of its first sample, its captions read as the loader reads them."""
    lost = accounts.get("lost", {})
    lines = find_ledger(folder).read_text().splitlines()
    if lines:
        (line,) = map(json.loads, lines)
        return Reading(None, None, line["reason"], lost)
    index = Index.open(folder)
    row = index.take([0], ["caption_offset", "caption_bytes", "caption_format", "label"])  # type: ignore[arg-type]
    offset, size, kind, number = (int(column[0]) for column in row.values())
    captions = captions_of(ShardStore(index).read(0, offset, size), kind)
    classes = accounts.get("classes")
    return Reading(captions, None if number < 0 else classes[number] if classes else number, None, lost)


def by_index(folder: Path) -> Reading:
    report = build_index(folder / "both", out=folder / "index", max_bad_share=1.0)
    assert report.accounts["samples"] == report.accounts["indexed"] + report.accounts["quarantined"] == 2
    assert verify(folder / "index") == []
    return published(folder / "index", report.accounts)


def by_convert(folder: Path) -> Reading:
    config = ConvertConfig(max_bad_share=1.0, shard_rows=1)
    report = convert(folder / "both", folder / "out", config, engine=threads(1))
    accounts = report.accounts
    assert accounts["rows"] == accounts["written"] + accounts["quarantined"] == 2
    assert verify(folder / "out") == []
    return published(folder / "out", accounts)


def readings(members: dict[str, bytes]) -> tuple[Reading, Reading]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(folder / "in/a.tar", members)
        # A second sample, because a conversion must write one, and because in a corpus without any caption an index
        # takes labels alone. Its own tar comes after the first.
        pack(folder / "both/a.tar", {})
        (folder / "both/a.tar").write_bytes((folder / "in/a.tar").read_bytes())
        pack(folder / "both/b.tar", {"z.jpg": make_photo(9, 9, seed=3), "z.txt": "z"})
        return by_index(folder), by_convert(folder)


def check_folder(members: dict[str, bytes], expected: Reading) -> None:
    """The same files, unpacked into a folder, say the same; it knows no .cls, and a text without image comes last."""
    with tempfile.TemporaryDirectory() as name:
        # With the second sample of `readings`: a folder in which no image has a caption or a label is refused.
        for file, data in {**members, "z.jpg": make_photo(9, 9, seed=3), "z.txt": b"z"}.items():
            (Path(name) / file).write_bytes(data)
        source = FolderSource(Path(name), ConvertConfig())
        row = next(iter(source.rows()))
        found = Examiner.from_config(source, ConvertConfig())(row)
    if found.fault or expected.refused:
        assert found.fault is not None
        assert str(found.fault[0]) == expected.refused
        return
    assert found.sample is not None
    lost = {str(loss): 1 for loss in found.losses if loss is not Loss.METADATA_UNUSABLE}
    assert (found.sample.captions, found.label, lost) == (expected.captions, expected.label, expected.lost)


def check_alike(members: dict[str, bytes]) -> Reading:
    index, converted = readings(members)
    # Only convert stores metadata, so only there can some of it be lost.
    assert index == converted._replace(lost={k: v for k, v in converted.lost.items() if k != "metadata_unusable"})
    if "k.jpg" in members and "k.cls" not in members:
        check_folder(members, index)
    return index


texts = st.one_of(
    st.sampled_from(["a dog", "", " \n", "x" * 70_000, "\ufeffa", "a\ud800", "\x00", "7"]), st.text(max_size=8)
)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**63, 1.0, 0.5, float("nan"), float("inf")]), texts
)
values = st.one_of(plain_values, st.lists(plain_values, max_size=3), st.dictionaries(texts, plain_values, max_size=2))
documents = st.dictionaries(
    st.sampled_from(["captions", "caption", "label", "url", "width", "a\ud800"]), values, max_size=5
).map(lambda content: json.dumps(content).encode())
odd_json = st.sampled_from(
    [
        b"",
        b"{",
        b"[]",
        b'["a"]',
        b"null",
        b"\xff{}",
        b'{"caption": "a", "caption": "b"}',
        b'{"caption": "a", "x": {"y": 1, "y": 2}}',
        b'{"captions": ["a"], "x": "%s"}' % (b"y" * 2**20),
        b'{"caption": "a", "x": %s}' % (b"9" * 5000),
        b"[" * 100_000,
        b'\xef\xbb\xbf{"caption": "a"}',
    ]
)
txt = st.one_of(
    texts.map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from([b"\xff\xfea\0", b"x" * (2**20 + 1), b"gr\xf6\xdfe"]),
    st.binary(max_size=6),
)
cls = st.one_of(
    st.sampled_from(
        [b"cat", b"-1", b"7\n", b"007", b"", b"9" * 30, b"-5", b"1.0", b"\xff", b"a\x1bb", b"-0", b"c" * 1001]
    ),
    st.binary(max_size=4),
)
images = st.sampled_from([GOOD] * 8 + [b"", b"<html>", make_photo(1, 9), None])


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {},
        optional={"txt": txt, "json": st.one_of(documents, odd_json), "cls": cls},
    ),
    images,
    st.booleans(),
)
def test_index_and_convert_read_any_foreign_sample_alike(
    members: dict[str, bytes], image: bytes | None, last: bool
) -> None:
    named = {f"k.{kind}": data for kind, data in members.items()}
    picture = {} if image is None else {"k.jpg": image}
    together = {**named, **picture} if last else {**picture, **named}
    check_alike(together or {"k.jpg": GOOD})


@pytest.mark.parametrize(
    ("members", "captions", "label", "lost"),
    [
        ({"json": b'{"captions": ["a", "", null]}'}, ["a"], None, {"empty_caption": 1}),
        ({"json": b'{"captions": null}', "txt": b"t"}, ["t"], None, {}),
        ({"json": b'{"captions": []}', "txt": b"t"}, ["t"], None, {}),
        ({"json": b'{"captions": [7], "caption": "c"}', "txt": b"t"}, ["t"], None, {"caption_unusable": 1}),
        ({"json": b'{"caption": "c"}', "txt": b" "}, ["c"], None, {"empty_caption": 1}),
        ({"json": b'{"caption": "c"}', "txt": b"\xff"}, ["c"], None, {"caption_unusable": 1}),
        ({"json": b"{", "txt": b"t"}, ["t"], None, {"json_unreadable": 1}),
        ({"json": b'["a"]', "txt": b"t"}, ["t"], None, {"json_unreadable": 1}),
        ({"json": b'{"caption": "a", "label": 1, "label": 2}', "txt": b"t"}, ["t"], None, {"json_unreadable": 1}),
        ({"json": b'{"x": "%s"}' % bytes(2**20), "txt": b"t"}, ["t"], None, {"json_too_large": 1}),
        ({"txt": b"t", "cls": b"cat"}, ["t"], "cat", {}),
        ({"txt": b"t", "cls": b"-1", "json": b'{"label": 3}'}, ["t"], None, {}),
        ({"txt": b"t", "cls": b"\xff", "json": b'{"label": 3}'}, ["t"], 3, {"label_unusable": 1}),
        ({"txt": b"t", "cls": b"%d" % 2**63}, ["t"], None, {"label_unusable": 1}),
        ({"txt": b"t", "cls": b"%d" % (2**63 - 1)}, ["t"], 2**63 - 1, {}),
        ({"txt": b"t", "json": b'{"label": 3.0}'}, ["t"], 3, {}),
        ({"txt": b"t", "json": b'{"label": true}'}, ["t"], None, {"label_unusable": 1}),
    ],
)
def test_what_is_lost_beside_a_usable_caption_is_counted(
    members: dict[str, bytes], captions: list[str], label: int | str | None, lost: dict[str, int]
) -> None:
    named = {"k.jpg": GOOD, **{f"k.{kind}": data for kind, data in members.items()}}
    assert check_alike(named) == Reading(captions, label, None, lost)


@pytest.mark.parametrize("image", [b"<html>", make_photo(1, 9), None])
def test_a_label_without_a_caption_is_told_of_the_caption_whatever_the_image_is(image: bytes | None) -> None:
    """An index reads the image before it knows whether the corpus has captions."""
    picture = {} if image is None else {"k.jpg": image}
    assert check_alike({"k.cls": b"3", **picture}).refused == "missing_caption"


def test_a_name_after_numbers_is_lost_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = {f"{i}.jpg": make_photo(20, 30, seed=i) for i in range(3)}
    pack(
        tmp_path / "in/a.tar", dict(sorted({**samples, **{f"{i}.txt": b"x" for i in range(3)}, "0.cls": b"4"}.items()))
    )
    pack(tmp_path / "in/b.tar", {"9.jpg": make_photo(20, 30, seed=9), "9.txt": b"x", "9.cls": b"cat"})
    report = build_index(tmp_path / "in", out=tmp_path / "index")
    converted = convert(tmp_path / "in", tmp_path / "out")
    assert report.accounts["lost"] == converted.accounts["lost"] == {"label_name": 1}
    detail = "sample '9': label 'cat' is not a number, as other labels are"
    assert report.lost == {Loss.LABEL_NAME: f"shard 'b.tar', {detail}"}
    assert f"b.tar, {detail} (label_name); the sample is written without it, and so are further ones" in caplog.messages
    for folder in ("index", "out"):
        assert Index.open(tmp_path / folder).column("label").tolist() == [4, -1, -1, -1]


def test_metadata_that_cannot_be_stored_is_left_out_and_counted(tmp_path: Path) -> None:
    document = b'{"caption": "c", "score": NaN, "scores": [NaN], "bad": "\\ud800", "good": {"a": 1}}'
    pack(tmp_path / "in/a.tar", {"k.jpg": GOOD, "k.json": document})
    accounts = convert(tmp_path / "in", tmp_path / "out").accounts
    assert (accounts["written"], accounts["lost"]) == (1, {"metadata_unusable": 1})
    assert b'{"captions":["c"],"good":{"a":1},"score":null}' in (tmp_path / "out/000000.tar").read_bytes()
