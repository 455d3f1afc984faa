"""Rows of one image become one sample with all their captions."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mmdata.convert import convert, convert_part
from mmdata.convert.row.examine import Examiner
from mmdata.convert.settle import repeats
from mmdata.convert.sources.rows import InputRow
from mmdata.convert.units.engines import local, threads
from mmdata.index import Index
from tests.convert.conftest import content, jsonl, left_out, tolerant
from tests.convert.sources.test_tables import captions


def counts(accounts: dict[str, Any]) -> dict[str, int]:
    names = ("rows", "written", "merged", "duplicate", "quarantined")
    return {name: accounts[name] for name in names if accounts[name]}


def test_rows_of_an_image_become_one_sample_in_the_order_of_the_rows(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [("a", "one"), ("b", "two"), ("a", "three"), ("a", "one"), ("c", "four"), ("b", "five")]
    table = jsonl(corpus / "t.jsonl", [{"image": f"{name}.jpg", "caption": said} for name, said in rows])
    report = make(table)
    assert captions(tmp_path / "out") == [["one", "three"], ["two", "five"], ["four"]]
    assert Index.open(tmp_path / "out").keys([0, 1, 2]) == ["000000000", "000000001", "000000004"]
    assert counts(report.accounts) == {"rows": 6, "written": 3, "merged": 2, "duplicate": 1}
    (line,) = left_out(tmp_path / "out")
    assert (line["row"], line["reason"]) == (3, "duplicate_image")
    assert line["detail"] == "the image of row 0 again, with no caption that is new"


def test_grouping_does_not_depend_on_workers_or_distance(corpus: Path, tmp_path: Path) -> None:
    names = itertools.cycle("abc")
    rows = [{"image": f"{next(names)}.jpg", "caption": f"caption {i}"} for i in range(200)]
    table = jsonl(corpus / "t.jsonl", rows)
    for workers in (1, 3):
        convert(table, tmp_path / f"out{workers}", engine=threads(workers))
    assert content(tmp_path / "out1") == content(tmp_path / "out3")
    by_image = pd.DataFrame(rows).groupby("image", sort=False)["caption"].apply(list).tolist()
    assert captions(tmp_path / "out1") == by_image


def test_group_by_none_writes_the_first_row_only(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption\na.jpg,one\na.jpg,two\n")
    report = make(corpus / "t.csv", group_by="none")
    assert captions(tmp_path / "out") == [["one"]]
    assert counts(report.accounts) == {"rows": 2, "written": 1, "duplicate": 1}
    assert report.accounts["differing"] == 1


def test_keep_duplicates_writes_each_row(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption\na.jpg,one\na.jpg,two\n")
    make(corpus / "t.csv", keep_duplicates=True)
    assert captions(tmp_path / "out") == [["one"], ["two"]]


def test_first_row_that_can_be_used_takes_the_captions(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows: list[dict[str, Any]] = [{"image": "a.jpg", "caption": said} for said in ("", "one", 5, "two")]
    report = make(jsonl(corpus / "t.jsonl", rows))
    assert captions(tmp_path / "out") == [["one", "two"]]
    assert Index.open(tmp_path / "out").keys([0]) == ["000000001"]
    assert counts(report.accounts) == {"rows": 4, "written": 1, "merged": 1, "quarantined": 2}


def test_rows_of_an_image_that_cannot_be_used_are_all_quarantined(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [("a", "good"), ("gone", "one"), ("gone", "two"), ("gone", "one")]
    report = make(jsonl(corpus / "t.jsonl", [{"image": f"{name}.jpg", "caption": said} for name, said in rows]))
    assert counts(report.accounts) == {"rows": 4, "written": 1, "quarantined": 3}
    assert {(line["path"], line["reason"]) for line in left_out(tmp_path / "out")} == {("gone.jpg", "missing_image")}


def test_another_label_of_the_same_image_is_counted(corpus: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption,label\na.jpg,one,cat\na.jpg,two,dog\nb.jpg,x,dog\n")
    accounts = make(corpus / "t.csv").accounts
    assert accounts["lost"] == {"other_label": 1}
    assert accounts["classes"] == ["cat", "dog"]


def test_captions_beyond_a_sample_are_quarantined(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [{"image": "a.jpg", "caption": f"{number}" + "x" * 60_000} for number in range(12)]
    report = make(jsonl(corpus / "t.jsonl", rows))
    assert counts(report.accounts) == {"rows": 12, "written": 1, "merged": 7, "quarantined": 4}
    detail = left_out(tmp_path / "out")[0]["detail"]
    assert detail == "the rows before it have given row 0 more than 524288 bytes of captions"


def test_equal_images_under_other_paths_are_merged_by_content(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "copy.jpg").write_bytes((corpus / "a.jpg").read_bytes())
    (corpus / "t.csv").write_text("image,caption\na.jpg,one\ncopy.jpg,two\nb.jpg,three\na.jpg,four\n")
    report = make(corpus / "t.csv", group_by="content")
    assert captions(tmp_path / "out") == [["one", "two", "four"], ["three"]]
    assert counts(report.accounts) == {"rows": 4, "written": 2, "merged": 2}


def test_all_rows_of_a_differing_copy_are_counted(corpus: Path, make: Any) -> None:
    (corpus / "copy.jpg").write_bytes((corpus / "a.jpg").read_bytes())
    (corpus / "t.csv").write_text("image,caption\na.jpg,one\ncopy.jpg,two\ncopy.jpg,three\ncopy.jpg,two\n")
    accounts = make(corpus / "t.csv").accounts
    assert counts(accounts) == {"rows": 4, "written": 1, "duplicate": 3}
    assert accounts["differing"] == 2  # rows with "two" and "three"; the last row brings no caption that is new


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [["photo a", "photo copy"], ["photo b"], ["photo c"]]),
        ({"group_by": "none"}, [["photo a"], ["photo b"], ["photo c"]]),
        ({"keep_duplicates": True}, [["photo a"], ["photo b"], ["photo c"], ["photo copy"]]),
    ],
    ids=["default", "none", "keep"],
)
def test_equal_images_of_a_folder_become_one_sample(
    corpus: Path, tmp_path: Path, make: Any, settings: dict[str, Any], expected: list[list[str]]
) -> None:
    (corpus / "copy.jpg").write_bytes((corpus / "a.jpg").read_bytes())
    for name in ("a", "b", "c", "copy"):
        (corpus / f"{name}.txt").write_text(f"photo {name}")
    make(corpus, **settings)
    assert captions(tmp_path / "out") == expected


def test_only_images_that_may_be_equal_are_read_twice(
    corpus: Path, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c.jpg and d.jpg end alike and are as long, but are no equal files."""
    for name in ("copy", "other/copy"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / f"{name}.jpg").write_bytes((corpus / "a.jpg").read_bytes())
    for name, byte in (("c", b"c"), ("d", b"d")):
        data = (corpus / "b.jpg").read_bytes()
        (corpus / f"{name}.jpg").write_bytes(data[:2] + b"\xff\xfe\0\x03" + byte + data[2:] + bytes(8192))
    (corpus / "loop.jpg").symlink_to("loop.jpg")
    for name in ("a", "b", "c", "d", "copy", "other/copy", "loop"):
        (corpus / f"{name}.txt").write_text(f"photo {name}")
    read: list[str] = []
    read_image = Examiner.read_image

    def counted(examiner: Examiner, row: InputRow, *more: Any) -> bytes:
        read.append(row.image)
        return read_image(examiner, row, *more)

    monkeypatch.setattr(Examiner, "read_image", counted)
    make(corpus)
    assert captions(tmp_path / "out") == [
        ["photo a", "photo copy", "photo other/copy"],
        ["photo b"],
        ["photo c"],
        ["photo d"],
    ]
    assert {name: read.count(name) for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg")} == {
        "a.jpg": 2,
        "b.jpg": 1,
        "c.jpg": 2,
        "d.jpg": 2,
    }


def test_rows_of_tars_are_divided_over_files_of_keys(
    tmp_path: Path, make: Any, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-four samples, of which the first and the last have one image, with keys for four at once."""
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(24):
            for end, data in (("jpg", photo(20, 30, seed=number % 23)), ("txt", f"photo {number}".encode())):
                member = tarfile.TarInfo(f"{number:02d}.{end}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    sizes: list[int] = []
    find = repeats._repeats
    monkeypatch.setattr(repeats, "BUCKET_ROWS", 4)
    monkeypatch.setattr(repeats, "_repeats", lambda records: sizes.append(len(records)) or find(records))
    make(tmp_path / "tars", group_by="content")
    assert captions(tmp_path / "out")[0] == ["photo 0", "photo 23"]
    assert len(captions(tmp_path / "out")) == 23
    assert max(sizes) < 12


def test_folder_is_grouped_alike_by_any_workers_and_parts(corpus: Path, tmp_path: Path) -> None:
    for number in range(20):
        (corpus / f"{number:02}.jpg").write_bytes((corpus / f"{'abc'[number % 3]}.jpg").read_bytes())
        (corpus / f"{number:02}.txt").write_text(f"photo {number}")
    config = tolerant(shard_rows=4)
    convert(corpus, tmp_path / "one", config, engine=threads(1))
    convert(corpus, tmp_path / "four", config, engine=local(4))
    for number in (1, 2):
        convert_part(corpus, tmp_path / "parts", config, part=(number, 2), engine=local(2))
    convert(corpus, tmp_path / "parts", config, finish=True)
    assert content(tmp_path / "one") == content(tmp_path / "four") == content(tmp_path / "parts")
    assert captions(tmp_path / "one")[1] == [f"photo {number}" for number in range(1, 20, 3)]


@pytest.fixture
def no_leftover(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("tmp*"))


@pytest.mark.usefixtures("no_leftover")
def test_tokenizer_is_trained_on_all_captions_of_a_group(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [{"image": f"{'abc'[i % 3]}.jpg", "caption": "zebra " * (i + 1)} for i in range(9)]
    make(jsonl(corpus / "t.jsonl", rows), train_tokenizer=300)
    vocabulary = json.loads((tmp_path / "out/tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    assert any("zebra" in token for token in vocabulary)
