"""Where tables are found, and what is no table, or not one table."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.sources.table_source import TableSource
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index
from tests.convert.conftest import left_out

TABLE = "image,caption\na.jpg,photo a\n"


def test_table_may_be_absolute_climb_or_be_a_link(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/[1] t.csv").write_text(TABLE)
    (corpus / "link.csv").symlink_to(tmp_path / "tables/[1] t.csv")
    tables = tmp_path / "tables"
    for number, table in enumerate((f"{tables}/[1] t.csv", f"{tables}/*.csv", "../tables/*.csv", "link.csv", "l*.csv")):
        report = convert(corpus, tmp_path / f"out{number}", ConvertConfig(table=table), engine=threads(1))
        assert report.accounts["written"] == 1


def test_pattern_of_tables_follows_no_links_to_folders(corpus: Path, make: Any) -> None:
    (corpus / "below").mkdir()
    (corpus / "below/t.csv").write_text(TABLE)
    (corpus / "loop").symlink_to(".")
    (corpus / ".t.csv").write_text("image,caption\nb.jpg,photo b\n")
    report = make(corpus, table="**/*.csv")
    assert [file["name"] for file in report.source["files"]] == [".t.csv", "t.csv"]


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("none.csv", DataError, "no table 'none.csv' in it$"),
        ("{here}/none*.csv", DataError, r"no table '.*/none\*.csv' in it$"),
        ("corpus/t.csv", DataError, "relative to the source: 'corpus/t.csv' of the current folder needs an absolute"),
        ("sub", DataError, "no table 'sub' in it; that is no regular file"),
        ("a\0b/*.csv", DataError, "no table 'a.*b/.*.csv' in it$"),
        ("**a.csv", (ConfigError, DataError), r"'\*\*a.csv': not a path or a pattern|no table"),  # Python 3.13 takes it
        ("", ConfigError, "table '': empty; name a table in the source, or leave --table out"),
    ],
)
def test_table_that_is_not_found_says_where_it_was_looked_for(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, error: type[Exception], message: str
) -> None:
    (corpus / "t.csv").write_text(TABLE)
    (corpus / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        convert(corpus, tmp_path / "out", ConvertConfig(table=table.format(here=tmp_path)))


def test_parquet_schemas_that_differ_say_which_column_and_types(corpus: Path, make: Any) -> None:
    first = {"image": pa.array(["a.jpg"]), "caption": pa.array(["x"]), "url": pa.array(["u"])}
    pq.write_table(pa.table(first), corpus / "p0.parquet")
    pq.write_table(pa.table({"image": ["a.jpg"], "caption": [["x"]], "sha": [1]}), corpus / "p1.parquet")
    with pytest.raises(DataError) as caught:
        make(corpus, table="p*.parquet")
    assert str(caught.value).removeprefix(f"tables '{corpus}/p0.parquet' and '{corpus}/p1.parquet' ") == (
        "differ in their columns: 'caption' is string in the first and list<element: string> in the second; "
        "'url' is string in the first and missing in the second; 'sha' is missing in the first and int64 in the "
        "second; make them alike, or convert them one by one"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{\n"image":\n"a.jpg"}', "an object with the keys image, in which no table of images is known"),
        ("t.json", "{}", "dict, in which no table of images is known; write its rows as JSON Lines"),
        ("t.json", "7", "int, in which no table of images is known"),
        ("t.json", '{"images": [', "t.json': not JSON: Expecting value"),
        ("t.jsonl", '{"a": 1\n{"b": 2\n', r"no line of it is a JSON object \(t.jsonl, line 1: .*format=json"),
        (
            "t.json",
            '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "segments_info": []}]}',
            r"COCO annotations without captions \(their keys: image_id, segments_info\); give the file of captions",
        ),
        ("t.txt", "a photo\nof a dog\n", "a text file whose lines have no fields; .* delimiter=tab format=csv"),
        ("t.tgz", "x", r"a compressed tar, which is not read; unpack it to a plain .tar first \(gunzip 't.tgz'"),
        ("t.tar.zst", "x", "a compressed tar, which is not read"),
        ("t.csv.xz", "x", "a packed file, which is not read; unpack it, and give the table or folder that comes out"),
        ("t.xlsx", "x", "unknown kind '.xlsx'; known: .csv .tsv .txt .jsonl .json .parquet .arrow"),
        (
            "t.arrow",
            "x" * 100,
            r"t.arrow': not a whole Arrow file \(.*\); write it again .*to_parquet",
        ),
    ],
)
def test_what_is_no_table_is_told_for_what_it_is(
    corpus: Path, make: Any, name: str, content: str, message: str
) -> None:
    (corpus / name).write_text(content)
    with pytest.raises(DataError, match=message):
        make(corpus / name)


def test_dataset_on_disk_that_lacks_a_part_is_an_error(tmp_path: Path, make: Any) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=r"saved': not whole, as save_to_disk writes it .*train/state.json.*write it"):
        make(tmp_path / "saved")


@pytest.mark.parametrize("name", ["t.csv", "t.tar"])
def test_fifo_is_no_table_and_is_not_opened(tmp_path: Path, make: Any, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        DataError,
        match="is a FIFO, and only regular files are read; it was not opened; write what comes out of it to a file",
    ):
        make(tmp_path / name)


def test_headers_of_a_wrong_file_are_not_printed_whole(corpus: Path, make: Any) -> None:
    (corpus / "t.csv").write_text(",".join(f"c{i}" + "x" * 5000 for i in range(500)) + "\n" + "1," * 499 + "1\n")
    with pytest.raises(ConfigError, match=r"no image column of a usual name .* and 480 more; name them with") as caught:
        make(corpus / "t.csv")
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("a", "said"), r"no image column .*url.* and no caption column .*; there are: a, said; name them with {}"),
        (("photo", "said"), r"no caption column of a usual name \(.*\); there are: photo, said; name it with {}"),
        (("a", "alt_text"), r"no image column of a usual name \(.*\); there are: a, alt_text; name it with {}"),
    ],
)
@pytest.mark.parametrize(("suffix", "end"), [("csv", ", or, if the table has no header line, all.*"), ("parquet", "")])
def test_missing_columns_are_named_in_one_message(
    corpus: Path, make: Any, columns: tuple[str, str], message: str, suffix: str, end: str
) -> None:
    first, second = columns
    frame({first: ["a.jpg"], second: ["x"]}, corpus / f"t.{suffix}")
    flags = [f"--{name}-column" for name in ("image", "caption") if f"no {name} column" in message]
    with pytest.raises(ConfigError, match=message.format(" and ".join(flags)) + end + "$"):
        make(corpus / f"t.{suffix}")


@pytest.mark.parametrize("caption", ["description", "alt_text"])
def test_photo_and_its_description_are_usual_names(corpus: Path, make: Any, caption: str) -> None:
    frame({"photo": ["a.jpg"], caption: ["x"]}, corpus / "t.csv")
    assert make(corpus / "t.csv").source["captions"] == [caption]


def frame(columns: dict[str, list[str]], path: Path) -> None:
    """Write a table."""
    table = pa.table(columns)
    pq.write_table(table, path) if path.suffix == ".parquet" else csv.write_csv(table, path)


def hugging_face(images: list[dict[str, Any] | None]) -> pa.Array:
    """A column as `datasets` writes images into Parquet."""
    return pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def test_images_in_a_binary_column_are_read_as_images(corpus: Path, tmp_path: Path) -> None:
    images = [(corpus / f"{name}.jpg").read_bytes() for name in "abc"]
    captions = {"caption": ["x", "y", "z"]}
    oracle = corpus / "t.csv"
    oracle.write_text("image,caption\na.jpg,x\nb.jpg,y\nc.jpg,z\n")
    columns = {
        "binary": pa.array(images, pa.binary()),
        "fixed": pa.array([data.ljust(4000, b"\0") for data in images], pa.binary(4000)),
        "struct": hugging_face([{"bytes": data, "path": "p"} for data in images]),
        "struct_paths": hugging_face([{"bytes": None, "path": f"{name}.jpg"} for name in "abc"]),
    }
    convert(oracle, tmp_path / "csv")
    expected = Index.open(tmp_path / "csv").column("image_hash").tolist()
    for name, column in columns.items():
        pq.write_table(pa.table({"image": column, **captions}), corpus / f"{name}.parquet")
        report = convert(corpus / f"{name}.parquet", tmp_path / name)
        assert report.accounts["written"] == 3
        if name != "fixed":
            assert Index.open(tmp_path / name).column("image_hash").tolist() == expected


def test_binary_that_is_no_image_is_quarantined_and_never_printed(corpus: Path, tmp_path: Path, make: Any) -> None:
    secret = b"\x01\x02" + b"secret" * 9999
    good = (corpus / "a.jpg").read_bytes()
    page = b"<!DOCTYPE html><title>404</title>"
    images = [(good, None), (secret, None), (page, "data/x.jpg"), (None, None)]
    column = hugging_face([{"bytes": data, "path": path} for data, path in images])
    pq.write_table(pa.table({"image": column, "caption": list("wxyz")}), corpus / "t.parquet")
    make(corpus / "t.parquet")
    expected = [
        ("a value of type bytes (59996 bytes)", "not_an_image"),
        ("data/x.jpg", "not_an_image"),
        ("", "missing_image"),
    ]
    assert [(line["path"], line["reason"]) for line in left_out(tmp_path / "out")] == expected
    listed = pq.read_table(tmp_path / "out/__mmdata__/rows").column("path").to_pylist()
    assert listed[1:] == [path for path, _ in expected]
    rows = [{"image": one, "caption": "x"} for one in column.to_pylist()]
    convert(rows, tmp_path / "given", ConvertConfig(max_bad_share=1))
    assert [(line["path"], line["reason"]) for line in left_out(tmp_path / "given")] == expected
    assert len((tmp_path / "out/__mmdata__/quarantine.jsonl").read_bytes()) < 500


@pytest.mark.parametrize("first", [b"photos/\xc3\xa4.jpg", b"https://example.org/1?size=2"])
def test_binary_column_of_paths_is_an_error(corpus: Path, make: Any, first: bytes) -> None:
    pq.write_table(pa.table({"image": [None, first, b"b.jpg"], "caption": ["x", "y", "z"]}), corpus / "t.parquet")
    with pytest.raises(ConfigError, match=r"'image' is binary and holds paths or URLs, such as '.*'; cast it to str"):
        make(corpus / "t.parquet")


def test_page_in_place_of_an_image_costs_its_row(corpus: Path, tmp_path: Path, make: Any) -> None:
    images = [b"<html>404</html>", b"b.jpg", (corpus / "c.jpg").read_bytes()]
    pq.write_table(pa.table({"image": images, "caption": ["x", "y", "z"]}), corpus / "t.parquet")
    make(corpus / "t.parquet")
    assert [line["reason"] for line in left_out(tmp_path / "out")] == ["not_an_image", "not_an_image"]


def test_image_larger_than_the_limit_in_a_binary_column_is_quarantined(corpus: Path, tmp_path: Path, make: Any) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "BMP")
    images = pa.array([(corpus / "a.jpg").read_bytes(), buffer.getvalue()], pa.binary())
    pq.write_table(pa.table({"image": images, "caption": ["x", "y"]}), corpus / "t.parquet")
    make(corpus / "t.parquet", max_image_bytes=5000)
    (line,) = left_out(tmp_path / "out")
    assert (line["reason"], line["detail"]) == ("image_too_large", "image of 12342 bytes; the limit is 5000")


@pytest.mark.parametrize(
    ("column", "settings", "message"),
    [
        (
            pa.array([[b"x"]]),
            {},
            r"column 'image' is of type list<element: binary>; the image column holds paths \(string",
        ),
        (pa.array([7]), {}, "column 'image' is of type int64; the image column holds paths"),
        (pa.array([b"x"]), {"keep": ["path"]}, r"column 'image' holds images \(type binary\), and no path to keep"),
    ],
)
def test_image_column_of_another_type_is_an_error_that_names_it(
    corpus: Path, make: Any, column: pa.Array, settings: dict[str, Any], message: str
) -> None:
    pq.write_table(pa.table({"image": column, "caption": ["x"]}), corpus / "t.parquet")
    with pytest.raises(ConfigError, match=message):
        make(corpus / "t.parquet", **settings)


def test_path_that_is_no_path_is_not_repeated_whole(corpus: Path, tmp_path: Path, make: Any) -> None:
    rows = [{"image": "a.jpg", "caption": "x"}, {"image": "data:" + "A" * 10**6, "caption": "y"}]
    (corpus / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make(corpus / "t.jsonl")
    (line,) = left_out(tmp_path / "out")
    assert (line["reason"], len(line["path"])) == ("missing_image", 4096)
    assert line["detail"].startswith("the image's path has 1000005 characters: 'data:AAA")
    assert len(line["detail"]) < 200


def test_parquet_file_is_not_held_in_memory_while_it_is_read(tmp_path: Path) -> None:
    schema = pa.schema([("image", pa.binary()), ("caption", pa.string())])
    with pq.ParquetWriter(tmp_path / "t.parquet", schema) as writer:
        for _ in range(12):
            images = [os.urandom(50_000) for _ in range(100)]
            writer.write_table(pa.table([images, ["a photo"] * 100], schema=schema))
    source = TableSource.open(tmp_path, [tmp_path / "t.parquet"], ConvertConfig())
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() for _ in source.rows()) - before
    assert most < (tmp_path / "t.parquet").stat().st_size // 3


def test_guessed_column_of_numbers_is_no_caption(corpus: Path, make: Any) -> None:
    (corpus / "t.csv").write_text("image,text\na.jpg,17\nb.jpg,18 0.5\nc.jpg,a photo\n")
    message = r"t.csv': most of its captions are numbers only \(t.csv, line 2: '17'\); name what holds the captions"
    with pytest.raises(DataError, match=message):
        make(corpus / "t.csv")
    assert make(corpus / "t.csv", caption_columns=["text"]).accounts["written"] == 3


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "old/1.jpg",
            "; the table's paths are relative to '{root}', and '{root}/old/1.jpg' does not exist: name the folder that "
            "they are relative to with --images FOLDER",
        ),
        (
            "/away/1.jpg",
            "; '/away/1.jpg' does not exist: give the table paths that exist on this machine, absolute ones or",
        ),
    ],
)
def test_a_table_without_any_image_is_told_where_they_were_looked_for(tmp_path: Path, path: str, said: str):
    (tmp_path / "list.csv").write_text(f"image,caption\n{path},one\n")
    with pytest.raises(DataError, match=re.escape(said.format(root=tmp_path))):
        convert(tmp_path / "list.csv", tmp_path / "out", ConvertConfig(images="."))
