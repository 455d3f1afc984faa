"""Text tables in gzip and zstd: read as they are, and what is damaged, or no table, is named."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sources.open_table import open_table
from mmdata.errors import DataError


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def gz(data: bytes) -> bytes:
    """Without the time, which would give the tests other names in each process that collects them."""
    return gzip.compress(data, mtime=0)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gz, ".zst": zstd}
TABLES = {
    "t.csv": 'image,caption\na.jpg,one\nb.jpg,"two\nlines"\n',
    "t.tsv": "image\tcaption\na.jpg\tone\nb.jpg\tłódź\n",
    "t.txt": "image|caption\na.jpg|one\nb.jpg|two\n",
    "t.jsonl": '{"image": "a.jpg", "caption": "one"}\n{"image": "b.jpg", "caption": "two"}\n',
    "t.json": json.dumps([{"image": "a.jpg", "caption": "one"}, {"image": "b.jpg", "caption": "two"}]),
}


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("name", TABLES)
def test_compressed_table_is_that_of_the_plain_one(tmp_path: Path, name: str, end: str) -> None:
    data = TABLES[name].encode()
    (tmp_path / name).write_bytes(data)
    (tmp_path / (name + end)).write_bytes(COMPRESS[end](data))
    plain, packed = (open_table(tmp_path / one, ConvertConfig()) for one in (name, name + end))
    assert type(packed) is type(plain)
    assert packed.columns == plain.columns
    assert [row.cells for row in packed.rows(())] == [row.cells for row in plain.rows(())]


def test_parts_of_a_gzip_file_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(b"".join(gz(part) for part in (b"image,cap", b"tion\na.jpg,x\n")))
    table = open_table(tmp_path / "t.csv.gz", ConvertConfig())
    assert [row.cells for row in table.rows(())] == [{"image": "a.jpg", "caption": "x"}]


def test_compressed_table_in_a_folder_of_images_is_found(corpus: Path, make: Any) -> None:
    (corpus / "captions.csv.gz").write_bytes(gz(b"image,caption\na.jpg,x\n"))
    assert make(corpus).accounts["written"] == 1


def noise(rows: int) -> bytes:
    numbers = random.Random(1)
    return b"image,caption\n" + b"".join(b"%d.jpg,%d\n" % (i, numbers.getrandbits(500)) for i in range(rows))


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("rows", [2, 5000])
def test_cut_and_damaged_files_are_errors(tmp_path: Path, make: Any, end: str, rows: int) -> None:
    whole = COMPRESS[end](noise(rows))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for number, data in enumerate((whole[:-3], bytes(flipped))):
        path = tmp_path / f"{number}.csv{end}"
        path.write_bytes(data)
        if end == ".zst" and number == 1:
            continue  # pyarrow writes no checksum into zstd, so that a flipped bit need not be seen
        with pytest.raises(DataError, match=rf"table '.*{number}\.csv{end}': not whole (gzip|zstd) data .*; fetch it"):
            make(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv.gz", b"x", "called a packed file, and its first bytes are not those of one; fetch it again, or rename"),
        (
            "t.gz",
            gz(b"image,caption\n"),
            "a packed file whose name does not say what is in it, as one in .csv",
        ),
        ("t.csv.bz2", bz2.compress(b"image,caption\n"), "a packed file, which is not read; unpack it"),
        ("t.tar.gz", gz(b"x" * 600), "a compressed tar, which is not read; unpack it to a plain .tar"),
        ("t.parquet.gz", gz(b"PAR1PAR1"), "parquet in gzip, and only text is read from a stream; unpack it"),
        ("t.csv.gz", gz("image,caption\n".encode("utf-16")), "looks like UTF-16; say so with encoding=utf-16"),
    ],
)
def test_what_is_no_compressed_table_is_told(
    tmp_path: Path, make: Any, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        make(tmp_path / name)


def test_format_names_what_is_in_a_packed_file(corpus: Path, make: Any) -> None:
    (corpus / "t.gz").write_bytes(gz(b"image,caption\na.jpg,x\n"))
    assert make(corpus / "t.gz", format="csv").accounts["written"] == 1


def test_document_larger_than_the_limit_is_refused_inside_too(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdata.convert.sources.json_tables.MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "t.json.gz").write_bytes(gz(b"[]".ljust(5000)))
    with pytest.raises(
        DataError, match="a JSON document of 101 bytes; it would be held in memory, and at most 100 are"
    ):
        make(tmp_path / "t.json.gz")
