"""Digests of a table's columns: another byte of a column is another digest of it, and of it alone."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from mmdata.errors import DataError
from mmdata.tables.digests import LAYOUT, digests_of
from mmdata.tables.table import Table

NAMES = ["key", "score", "texts", "a.b"]


def table_of(count: int = 1000, **changes: list[object]) -> pa.Table:
    columns: dict[str, list[object]] = {
        "key": [f"{row:05d}" for row in range(count)],
        "score": [float(row) for row in range(count)],
        "texts": [[f"text {row}"] * (row % 3) for row in range(count)],
        "a.b": list(range(count)),
    }
    return pa.table({**columns, **changes})


def write(file: Path, table: pa.Table) -> None:
    # Uncompressed values of one size, without statistics: the footer and the size say nothing of them.
    pyarrow.parquet.write_table(
        table, file, compression="none", use_dictionary=False, write_statistics=False, row_group_size=300
    )


@pytest.mark.parametrize("name", ["key", "score", "a.b"])
def test_another_value_is_another_digest_of_its_column(tmp_path: Path, name: str):
    file = tmp_path / "table.parquet"
    write(file, table_of())
    before, status = digests_of([file], NAMES), file.stat()
    values = table_of()[name].to_pylist()
    values[700] = values[701]
    write(file, table_of(**{name: values}))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    after = digests_of([file], NAMES)
    assert [one for one in (LAYOUT, *NAMES) if before[one] != after[one]] == [name]


def test_each_byte_of_the_file_counts(tmp_path: Path):
    file = tmp_path / "table.parquet"
    write(file, table_of(20))
    good = file.read_bytes()
    before = digests_of([file], NAMES)
    footer = int.from_bytes(good[-8:-4], "little")
    for place in range(4, len(good) - footer - 8):
        file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        assert digests_of([file], NAMES) != before, place


def test_lists_and_several_files_count(tmp_path: Path):
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file in files:
        write(file, table_of(10))
    before = digests_of(files, ["texts"])
    assert before.keys() == {LAYOUT, "texts"}
    write(files[1], table_of(10, texts=[[f"texT {row}"] * (row % 3) for row in range(10)]))
    assert digests_of(files, ["texts"])["texts"] != before["texts"]
    assert digests_of(files[:1], ["texts"])["texts"] != before["texts"]


def test_a_text_file_counts_as_a_whole(tmp_path: Path):
    file = tmp_path / "table.csv"
    file.write_text("key,score\n1,2\n")
    before = digests_of([file], ["key"])
    file.write_text("key,score\n1,3\n")
    after = digests_of([file], ["key"])
    assert before[LAYOUT] != after[LAYOUT]
    assert before["key"] == after["key"]


def test_a_table_that_was_cut_is_an_error(tmp_path: Path):
    file = tmp_path / "table.parquet"
    write(file, table_of())
    table = Table([str(file)], of="data.join.0")
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"data\.join\.0: '.*table\.parquet' cannot be read as a table"):
        table.digests(["key"])
