"""`keep: "*"`: all that a row has besides image, captions and label, in the JSON of its sample."""

from __future__ import annotations

import datetime
import io
import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import ConvertConfig, convert


def stored(out: Path) -> list[dict[str, Any]]:
    """The JSON of each sample, without its captions."""
    with tarfile.open(out / "000000.tar") as tar:
        texts = [tar.extractfile(member).read() for member in tar if member.name.endswith(".json")]  # type: ignore[union-attr]
    return [{k: v for k, v in json.loads(text).items() if k != "captions"} for text in texts]


def test_all_columns_of_a_csv_are_kept(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption,label,author,year\na.jpg,x,cat,Ann,1999\nb.jpg,y,dog,,2000\n")
    make(corpus / "t.csv", keep=["*"])
    assert stored(tmp_path / "out") == [
        {"label": 0, "author": "Ann", "year": "1999"},
        {"label": 1, "author": "", "year": "2000"},
    ]


def test_path_is_kept_besides_if_it_is_named_too(corpus: Path, tmp_path: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,caption,path\na.jpg,x,other\n")
    make(corpus / "t.csv", keep=["*", "path"])
    assert stored(tmp_path / "out") == [{"path": "a.jpg", "path_": "other"}]


def test_keys_that_only_some_rows_have_are_kept(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [{"image": "a.jpg", "caption": "x", "a": [1, None]}, {"image": "b.jpg", "caption": "y", "b": {"c": 1.5}}]
    (corpus / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make(corpus / "t.jsonl", keep=["*"])
    assert stored(tmp_path / "out") == [{"a": [1, None]}, {"b": {"c": 1.5}}]


def test_names_that_the_json_uses_itself_are_stored_with_an_underscore(
    corpus: Path, tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "t.csv").write_text("image,caption,raw,caption_,label\na.jpg,x,y,z,7\n")
    make(corpus / "t.csv", keep=["*"], caption_columns=["raw"], label_column="")
    assert stored(tmp_path / "out") == [{"caption_": "x", "caption__": "z", "label_": "7"}]
    assert "t.csv': keep '*' stores the column 'label' as 'label_': a sample's JSON uses the name itself" in caplog.text


def table_of(corpus: Path) -> Any:
    when = datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    return pa.table(
        {
            "image": pa.array([(corpus / f"{name}.jpg").read_bytes() for name in "ab"]),
            "caption": ["x", "y"],
            "thumb": pa.array([b"\xff", b"\xfe"]),
            "masks": pa.array([[b"x"], []], pa.list_(pa.binary())),
            "when": pa.array([when, None]),
            "day": pa.array([datetime.date(2020, 1, 2), None]),
            "price": pa.array([Decimal("1.50"), None]),
            "similarity": pa.array([0.25, float("nan")]),
            "scores": pa.array([[1.0, float("nan")], [2.0, 3.0]]),
            "box": pa.array([{"x": 1}, None]),
        }
    )


def test_parquet_keeps_all_but_bytes_and_says_so_once(
    corpus: Path, tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pq.write_table(table_of(corpus), corpus / "t.parquet")
    report = make(corpus / "t.parquet", keep=["*"])
    assert stored(tmp_path / "out") == [
        {
            "when": "2020-01-02T03:04:05+00:00",
            "day": "2020-01-02",
            "price": "1.50",
            "similarity": 0.25,
            "box": {"x": 1},
        },
        {"when": None, "day": None, "price": None, "similarity": None, "scores": [2.0, 3.0], "box": None},
    ]
    assert caplog.text.count("keep '*' leaves out masks, thumb, whose cells are bytes, which JSON does not hold") == 1
    assert report.accounts["lost"] == {"metadata_unusable": 1}  # NaN in a list


def test_dates_and_decimal_numbers_are_kept_where_they_are_named(corpus: Path, tmp_path: Path, make: Any) -> None:
    pq.write_table(table_of(corpus), corpus / "t.parquet")
    make(corpus / "t.parquet", keep=["day", "price"])
    assert stored(tmp_path / "out")[0] == {"day": "2020-01-02", "price": "1.50"}


def test_all_keys_of_the_json_of_files_and_of_tars_are_kept(corpus: Path, tmp_path: Path) -> None:
    content = {"caption": "of the json", "label": 3, "author": "Ann", "url": "u"}
    (corpus / "a.json").write_text(json.dumps(content))
    for name in "bc":
        (corpus / f"{name}.txt").write_text("x")
    convert(corpus, tmp_path / "files", ConvertConfig(keep=("*", "path")))
    assert stored(tmp_path / "files")[0] == {"label": 3, "author": "Ann", "url": "u", "path": "a.jpg"}
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in {"a.jpg": (corpus / "a.jpg").read_bytes(), "a.json": json.dumps(content).encode()}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    convert(tmp_path / "t.tar", tmp_path / "tars", ConvertConfig(keep=("*", "path")))
    assert stored(tmp_path / "tars") == [{"label": 3, "author": "Ann", "url": "u", "path": "t.tar/a"}]
