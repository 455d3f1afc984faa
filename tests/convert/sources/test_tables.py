"""What tables may hold, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import convert, preview
from mmdata.convert.sources.arrow import ArrowFile
from mmdata.convert.sources.columns import LABELS_SEEN
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, ShardStore
from mmdata.tars import captions_of
from tests.convert.conftest import jsonl
from tests.logs import messages


def captions(out: Path) -> list[list[str]]:
    index = Index.open(out)
    store = ShardStore(index)
    columns = index.take(
        list(range(len(index))),  # type: ignore[arg-type]
        ["caption_offset", "caption_bytes", "caption_format"],
    )
    return [
        captions_of(store.read(0, int(offset), int(size)), int(kind))
        for offset, size, kind in zip(*columns.values(), strict=True)
    ]


def bad(out: Path) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in (out / "__mmdata__/quarantine.jsonl").read_text().splitlines()]
    return [(line["place"], line["reason"], line["detail"]) for line in lines]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"image": "gone.jpg", "caption": "x"}, "missing_image", "'gone.jpg': No such file or directory"),
        ({"image": None, "caption": "x"}, "missing_image", "the image's path is null"),
        ({"image": "", "caption": "x"}, "missing_image", "no usable path: ''"),
        ({"image": 7, "caption": "x"}, "missing_image", "the image's path is int, not a string"),
        ({"image": "https://127.0.0.1/c.jpg", "caption": "x"}, "refused_address", "address 127.0.0.1 is loopback"),
        ({"image": "a.jpg"}, "missing_caption", "the row has no caption"),
        ({"image": "a.jpg", "caption": None}, "missing_caption", "the row has no caption"),
        ({"image": "a.jpg", "caption": []}, "missing_caption", "the row has no caption"),
        ({"image": "a.jpg", "caption": ""}, "empty_caption", "empty"),
        ({"image": "a.jpg", "caption": " \t\x00\u200e"}, "empty_caption", "empty"),
        ({"image": "a.jpg", "caption": "ab\ud800"}, "bad_caption", "a lone surrogate at byte 2 of the caption"),
        ({"image": "a.jpg", "caption": 5}, "bad_caption", "caption is int, not a string"),
        ({"image": "a.jpg", "caption": {"en": "x"}}, "bad_caption", "caption is dict, not a string"),
        ({"image": "a.jpg", "caption": ["good", 5]}, "bad_caption", "caption is int, not a string"),
        ({"image": "a.jpg", "caption": "x" * 10_000_000}, "caption_too_long", "10000000 characters"),
    ],
)
def test_row_is_quarantined_with_its_reason(outcome: Any, row: dict[str, Any], reason: str, detail: str) -> None:
    got = outcome(row)
    assert got[0] == reason
    assert detail in got[1]


@pytest.mark.parametrize("label", [-5, 1.5])
def test_row_whose_named_label_is_none_is_quarantined(outcome: Any, label: float) -> None:
    row = {"image": "a.jpg", "caption": "x", "label": label}
    reason, detail = outcome(row, label_column="label")
    assert (reason, f"label {label} is neither" in detail) == ("broken_row", True)


def test_captions_are_cleaned(outcome: Any, tmp_path: Path) -> None:
    row = {"image": "d.jpg", "caption": "\ufeffa\x00 \u202edog\u202c\x07"}
    (tmp_path / "corpus/d.jpg").write_bytes((tmp_path / "corpus/a.jpg").read_bytes())
    assert outcome(row, keep_duplicates=True) == ("", "")
    assert captions(tmp_path / "out")[3] == ["a dog"]


def test_all_captions_of_a_list_are_kept(outcome: Any, tmp_path: Path) -> None:
    row = {"image": "a.jpg", "caption": ["one", "", None, "two"]}
    assert outcome(row, keep_duplicates=True) == ("", "")
    assert captions(tmp_path / "out")[3] == ["one", "two"]


def test_several_caption_columns_are_joined(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.csv"
    table.write_text("image,short,long\na.jpg,s a,l a\nb.jpg,s b,\n")
    make(table, caption_columns=["short", "long"])
    assert captions(tmp_path / "out") == [["s a", "l a"], ["s b"]]


def test_csv_reads_quoted_newlines_and_a_byte_order_mark(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.csv"
    table.write_bytes(b'\xef\xbb\xbfimage,caption\r\na.jpg,"two\nlines, ""quoted"""\r\n\r\nb.jpg,plain\r\n')
    report = make(table)
    assert report.accounts["rows"] == 2
    assert captions(tmp_path / "out") == [['two\nlines, "quoted"'], ["plain"]]


def test_csv_rows_that_break_cost_one_row_each(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.csv"
    table.write_bytes(
        b'image,caption\na.jpg,x\nb.jpg\nb.jpg,x,y\nb.jpg,"x"y\nb.jpg,\xc3\xa9\xff\nb.jpg,n\x00ul\nc.jpg,last\n'
    )
    make(table)
    assert bad(tmp_path / "out") == [
        ("t.csv, line 3", "broken_row", "1 fields where the header has 2"),
        ("t.csv, line 4", "broken_row", "3 fields where the header has 2"),
        ("t.csv, line 5", "broken_row", "',' expected after '\"'"),
        (
            "t.csv, line 6",
            "bad_caption",
            "invalid UTF-8 (0xff) at byte 2 of the caption; "
            "a table in another encoding needs its encoding, such as encoding=latin-1",
        ),
    ]
    assert captions(tmp_path / "out") == [["x"], ["nul"], ["last"]]


def test_csv_with_an_unclosed_quote_is_an_error(corpus: Path, make: Any) -> None:
    table = corpus / "t.csv"
    table.write_text('image,caption\na.jpg,"never closed\nb.jpg,x\nc.jpg,y\n')
    with pytest.raises(DataError, match=r"t.csv', line 2: a quotation mark opened there is not closed .* quotes=false"):
        make(table)


def test_csv_without_quoting_takes_quotes_as_text(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.tsv"
    table.write_text('image\tcaption\na.jpg\t"never closed\nb.jpg\t5" disk\n')
    make(table, quotes=False)
    assert captions(tmp_path / "out") == [['"never closed'], ['5" disk']]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_table_is_an_error(corpus: Path, make: Any, encoding: str) -> None:
    table = corpus / "t.csv"
    table.write_bytes("image,caption\na.jpg,x\n".encode(encoding))
    with pytest.raises(DataError, match=r"t.csv': looks like UTF-16; .* iconv -f UTF-16 -t UTF-8 't.csv'"):
        make(table)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("a.jpg", ConfigError, r"no image column of a usual name .* there are: a.jpg, photo a; .* header"),
        ("http://a.example/1", DataError, r"its first line holds a URL, so it is a row and no header; name the col"),
    ],
)
def test_table_without_header_is_an_error(
    corpus: Path, make: Any, image: str, error: type[Exception], message: str
) -> None:
    table = corpus / "t.csv"
    table.write_text(f"{image},photo a\nb.jpg,photo b\n")
    with pytest.raises(error, match=message):
        make(table)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_column": "img"}, r"no column 'img' \(image\); there are: image, caption"),
        ({"caption_columns": ["alt"]}, r"no column 'alt' \(caption\); there are: image, caption"),
        ({"label_column": "kind"}, r"no column 'kind' \(label\); there are: image, caption"),
        ({"keep": ["licence"]}, r"no column 'licence' \(keep\); there are: image, caption"),
    ],
)
def test_unknown_column_is_an_error_that_names_those_there(
    corpus: Path, make: Any, settings: dict[str, Any], message: str
) -> None:
    table = corpus / "t.csv"
    table.write_text("image,caption\na.jpg,x\n")
    with pytest.raises(ConfigError, match=message):
        make(table, **settings)


def test_same_column_twice_is_an_error(corpus: Path, make: Any) -> None:
    table = corpus / "t.csv"
    table.write_text("image,caption,caption\na.jpg,x,y\n")
    with pytest.raises(DataError, match=r"column names that are there twice: caption; rename"):
        make(table)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_table_without_rows_is_an_error(corpus: Path, make: Any, name: str) -> None:
    table = corpus / name
    if name == "t.parquet":
        pq.write_table(pa.table({"image": pa.array([], pa.string()), "caption": pa.array([], pa.string())}), table)
    else:
        table.write_text("image,caption\n" if name == "t.csv" else "\n")
    with pytest.raises(DataError, match=f"{name}': no rows; the corpus is empty"):
        make(table)


def test_jsonl_lines_that_break_cost_one_row_each(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.jsonl"
    good = b'{"image": "a.jpg", "caption": "x"}\n'
    lines = [b'{"image": "b.jpg", \n', b"[1]\n", b'{"image": NaN}\n', b'{"image": "b", "image": "c"}\n', b"[" * 9999]
    table.write_bytes(good + b"".join(lines) + b'\n\n{"image": "b.jpg", "caption": "a\xff"}\n')
    make(table)
    places_and_reasons = [(place, reason) for place, reason, _ in bad(tmp_path / "out")]
    assert places_and_reasons == [(f"t.jsonl, line {n}", "broken_row") for n in range(2, 7)] + [
        ("t.jsonl, line 8", "bad_caption")
    ]
    details = [detail for *_, detail in bad(tmp_path / "out")]
    assert details[1] == "a JSON object is expected, got list"
    assert details[2] == "not JSON: NaN is not JSON"
    assert details[3] == "not JSON: key 'image' is there twice"


def test_parquet_reads_text_lists_and_bad_utf8(corpus: Path, tmp_path: Path, make: Any) -> None:
    table = corpus / "t.parquet"
    raw = pa.array([b"a.jpg", b"b.jpg", b"\xff.jpg", None], pa.binary()).cast(pa.binary())
    content = {
        "image": pa.Array.from_buffers(pa.string(), 4, raw.buffers()),
        "captions": pa.array([["one", "two"], ["three"], ["x"], ["y"]], pa.list_(pa.string())),
        "label": pa.array([1.0, None, 0.0, 0.0]),
        "unread": pa.array([None] * 4, pa.null()),
    }
    pq.write_table(pa.table(content), table)
    make(table)
    assert captions(tmp_path / "out") == [["one", "two"], ["three"]]
    assert Index.open(tmp_path / "out").column("label").tolist() == [1, -1]
    assert [(place, reason) for place, reason, _ in bad(tmp_path / "out")] == [
        ("t.parquet, row 3", "missing_image"),
        ("t.parquet, row 4", "missing_image"),
    ]


def test_truncated_parquet_is_an_error(corpus: Path, make: Any) -> None:
    table = corpus / "t.parquet"
    pq.write_table(pa.table({"image": ["a.jpg"] * 999, "caption": ["x"] * 999}), table)
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"t.parquet': not a whole Parquet file"):
        make(table)


def test_parquet_damaged_inside_is_an_error_with_its_place(corpus: Path, make: Any) -> None:
    table = corpus / "t.parquet"
    pq.write_table(pa.table({"image": [f"{i}.jpg" for i in range(3000)], "caption": ["x"] * 3000}), table)
    data = bytearray(table.read_bytes())
    data[200:260] = b"\xff" * 60
    table.write_bytes(data)
    with pytest.raises(DataError, match=r"t.parquet', after row \d+: not readable as Parquet"):
        make(table)


def test_arrow_whose_offsets_leave_the_file_is_an_error_with_its_place(tmp_path: Path) -> None:
    """Arrow trusts offsets: without a check the program would read memory that is not the file's."""
    table = pa.table({"image": [f"{i}.jpg" for i in range(40)], "caption": ["x"] * 40})
    path = tmp_path / "t.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    whole = path.read_bytes()
    names = "".join(f"{i}.jpg" for i in range(40)).encode()
    start = whole.index(names) - 168  # 41 offsets, as int32, end at a multiple of 8
    offsets = np.frombuffer(whole, np.int32, count=41, offset=start)
    assert (offsets[0], offsets[-1]) == (0, len(names))

    assert len(list(ArrowFile(path).rows(["image", "caption"]))) == 40
    data = bytearray(whole)
    data[start + 4 * 20 : start + 4 * 21] = (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"t.arrow', after row 0: not readable as Arrow"):
        list(ArrowFile(path).rows(["image", "caption"]))
    read = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with suppress(DataError):
            read += len(list(ArrowFile(path).rows(["image", "caption"]))) == 40
    assert 0 < read < len(whole)


def test_several_tables_are_read_in_name_order(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "part-1.csv").write_text("image,caption\nb.jpg,second\n")
    (corpus / "part-0.csv").write_text("caption,image\nfirst,a.jpg\n")
    make(corpus, table="part-*.csv")
    assert captions(tmp_path / "out") == [["first"], ["second"]]


def test_class_names_are_numbered_in_order_of_appearance(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption,class\na.jpg,x,dog\nb.jpg,y,cat\nc.jpg,z,dog\n")
    report = make(corpus / "t.csv")
    assert report.accounts["classes"] == ["dog", "cat"]
    assert Index.open(tmp_path / "out").column("label").tolist() == [0, 1, 0]


def test_class_of_a_row_that_is_left_out_has_its_number(corpus: Path, tmp_path: Path, make: Any) -> None:
    lines = ["image,caption,class", "gone.jpg,v,emu", "a.jpg,,ape", "b.jpg,x,dog", "c.jpg,y,emu"]
    (corpus / "t.csv").write_text("\n".join(lines))
    report = make(corpus / "t.csv")
    assert report.accounts["classes"] == ["emu", "ape", "dog"]
    assert Index.open(tmp_path / "out").column("label").tolist() == [2, 0]


def test_label_that_comes_after_classes_were_numbered_costs_its_row(
    corpus: Path, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file of labels changes while it is read."""
    (corpus / "t.csv").write_text("image,caption,class\na.jpg,x,dog\nb.jpg,y,cat\nc.jpg,z,dog\n")
    monkeypatch.setattr(TableSource, "rows_with_labels", lambda self: islice(self.rows(), 1))
    report = make(corpus / "t.csv")
    assert report.accounts["classes"] == ["dog"]
    assert bad(tmp_path / "out") == [
        ("t.csv, line 3", "file_changed", "label 'cat' was not there when classes were numbered")
    ]


def test_class_name_among_numbers_is_quarantined(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption,class\na.jpg,x,3\nb.jpg,y,cat\nc.jpg,z,-1\n")
    make(corpus / "t.csv", label_column="class")
    assert bad(tmp_path / "out") == [
        ("t.csv, line 3", "broken_row", "label 'cat' is not a number, as other labels are")
    ]
    assert Index.open(tmp_path / "out").column("label").tolist() == [3, -1]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("t.jsonl", [0.3, 1, 0.55], "some of its values, such as 0.3, are"),
        ("t.jsonl", [["dog", "grass"], ["cat"], []], "all of its values, such as a value of type list (2 items), are"),
        ("t.csv", ["0.3", "1", "cat"], "some of its values, such as '0.3', are"),
        ("t.csv", ["['dog', 'grass']", "['cat']", ""], "all of its values, such as \"['dog', 'grass']\", are"),
        ("t.parquet", [0.25, 0.5, None], "all of its values, such as 0.25, are"),
        ("rows", [0.3, 0.7, 0.1], "all of its values, such as 0.3, are"),
    ],
)
def test_guessed_label_column_of_something_else_is_dropped(
    corpus: Path, make: Any, name: str, values: list[Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = zip("abc", values, strict=True)
    rows = [{"image": f"{image}.jpg", "caption": "x", "label": value} for image, value in pairs]
    source: Any = corpus / name
    if name == "rows":
        source = [{**row, "image": str(corpus / str(row["image"]))} for row in rows]
    elif name == "t.jsonl":
        jsonl(source, rows)
    elif name == "t.csv":
        lines = [f'{row["image"]},x,"{row["label"]}"\n' for row in rows]
        source.write_text("image,caption,label\n" + "".join(lines))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    report = make(source, keep_duplicates=True)
    assert (report.accounts["written"], report.manifest.has_labels, report.source["label"]) == (3, False, None)
    assert messages(caplog)[0].split(": ", 1)[1] == (
        f"column 'label' is not taken for labels: {said} neither class numbers nor names; --label-column names "
        "another column, or this one all the same"
    )


@pytest.mark.parametrize(("late", "label"), [(0.5, None), (2, "label")])
def test_labels_that_begin_late_are_looked_at(corpus: Path, make: Any, late: float, label: str | None) -> None:
    rows = [{"image": "a.jpg", "caption": f"photo {number % 9}"} for number in range(LABELS_SEEN)]
    jsonl(corpus / "1.jsonl", rows)
    jsonl(corpus / "2.jsonl", [*rows, {"image": "b.jpg", "caption": "x", "label": late}])
    assert make(corpus, table="*.jsonl").source["label"] == label


@pytest.mark.parametrize("name", [None, "label"])
def test_class_numbers_that_pandas_wrote_beside_none_are_numbers(
    corpus: Path, tmp_path: Path, make: Any, name: str | None
) -> None:
    (corpus / "t.csv").write_text("image,caption,label\na.jpg,x,0.0\nb.jpg,y,12.0\nc.jpg,z,\n")
    report = make(corpus / "t.csv", label_column=name)
    assert Index.open(tmp_path / "out").column("label").tolist() == [0, 12, -1]
    assert "classes" not in report.accounts


def test_guessed_label_that_is_none_does_not_cost_the_row(corpus: Path, tmp_path: Path, make: Any) -> None:
    labels = [3, "cat", -5]
    rows = [{"image": f"{name}.jpg", "caption": "x", "label": label} for name, label in zip("abc", labels, strict=True)]
    table = jsonl(corpus / "t.jsonl", rows)
    assert not preview(table).bad.likely
    report = make(table, keep_duplicates=True)
    assert report.accounts["written"] == 3
    assert report.accounts["lost"] == {"label_name": 1, "label_unusable": 1}
    assert Index.open(tmp_path / "out").column("label").tolist() == [3, -1, -1]


def test_row_that_has_nothing_but_a_guessed_label_needs_it(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [{"image": f"{name}.jpg", "label": label} for name, label in zip("abc", [3, 4, -5], strict=True)]
    make(jsonl(corpus / "t.jsonl", rows), keep_duplicates=True)
    assert bad(tmp_path / "out") == [
        ("t.jsonl, line 3", "broken_row", "label -5 is neither a class number from 0 nor a name")
    ]


def test_kept_columns_go_into_the_json(corpus: Path, tmp_path: Path, make: Any) -> None:
    row = {"image": "a.jpg", "caption": "x", "licence": {"name": "CC0"}, "unasked": 1}
    (corpus / "t.jsonl").write_text(json.dumps(row) + "\n")
    make(corpus / "t.jsonl", keep=["path", "licence"])
    tar = (tmp_path / "out/000000.tar").read_bytes()
    assert b'{"captions":["x"],"licence":{"name":"CC0"},"path":"a.jpg"}' in tar


@pytest.mark.parametrize(
    ("labels", "classes", "found"),
    [
        ([7, "cat", "dog", "cat"], ["7", "cat", "dog"], [0, 1, 2, 1]),
        (["cat", 7, 0, 7], None, [-1, 7, 0, 7]),
        (["cat", 7], ["cat", "7"], [0, 1]),
        ([7, "cat"], None, [7, -1]),
    ],
)
def test_most_of_the_first_labels_decide_whether_labels_are_names(
    tmp_path: Path, photo: Callable[..., bytes], labels: list[Any], classes: list[str] | None, found: list[int]
) -> None:
    for number in range(len(labels)):
        (tmp_path / f"{number}.jpg").write_bytes(photo(16, 16, seed=number))
    rows = [{"image": f"{n}.jpg", "caption": f"photo {n}", "label": label} for n, label in enumerate(labels)]
    report = convert(jsonl(tmp_path / "t.jsonl", rows), tmp_path / "out", engine=threads(1))
    assert (report.accounts.get("classes"), report.accounts["written"]) == (classes, len(labels))
    assert Index.open(tmp_path / "out").column("label").tolist() == found
