"""Parts of a conversion, made by jobs that share the output folder, give the bytes of one job."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import ConvertConfig, convert, convert_part
from mmdata.convert.row import numbers
from mmdata.convert.sources.arrow import ParquetTable
from mmdata.convert.sources.tables import TableRow
from mmdata.convert.units.engines import Engine, Progress, processes, threads
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit
from mmdata.errors import ConfigError, DataError
from tests.convert.conftest import content, jsonl, make_parts, start
from tests.programs import PATIENCE_S

SETTINGS = ConvertConfig(shard_rows=7, val_share=0.4, max_bad_share=0.3)


@pytest.fixture
def table(raw_corpus: Path) -> Path:
    """The corpus's table, four times over: each image comes in several parts."""
    path = raw_corpus / "captions.jsonl"
    path.write_text((path.read_text() + '{"image": "gone.jpg", "captions": ["x"]}\n{broken\n') * 4)
    return path


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_give_the_bytes_of_one_job(table: Path, tmp_path: Path, parts: int) -> None:
    convert(table, tmp_path / "one", SETTINGS, engine=threads(1))
    rows = 0
    for part in range(parts, 0, -1):
        for again in range(2):
            made = convert_part(table, tmp_path / "out", SETTINGS, part=(part, parts), engine=threads(1))
            assert made.units == len(range(part - 1, 24, parts))
            rows += made.rows if again else 0
    assert rows == 4 * 42
    assert not (tmp_path / "out/train/__mmdata__").exists()
    report = convert(table, tmp_path / "out", SETTINGS, finish=True)
    assert not report.was_complete
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert convert_part(table, tmp_path / "out", SETTINGS, part=(1, parts)).units == 0


def test_part_of_a_parquet_table_makes_its_own_rows_alone(
    raw_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in (raw_corpus / "captions.jsonl").read_text().splitlines()] * 4
    table = raw_corpus / "captions.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=9)
    settings = SETTINGS.model_copy(update={"group_by": "none"})
    convert(table, tmp_path / "one", settings, engine=threads(1))
    read: list[str] = []
    rows_from = ParquetTable.rows_from
    monkeypatch.setattr(numbers, "ROWS_SEEN", 0)  # the first captions are looked at when the table is opened

    def counted(table: ParquetTable, columns: Sequence[str], start: int) -> Iterator[TableRow]:
        for row in rows_from(table, columns, start):
            if len(columns) > 1:  # else the paths are looked at, to find the folder
                read.append(row.place)
            yield row

    monkeypatch.setattr(ParquetTable, "rows_from", counted)
    convert_part(table, tmp_path / "out", settings, part=(2, 3), engine=threads(1))
    assert read == [f"captions.parquet, row {row + 1}" for row in range(len(rows)) if row // 7 % 3 == 1]
    for part in (1, 3):
        convert_part(table, tmp_path / "out", settings, part=(part, 3), engine=threads(1))
    convert(table, tmp_path / "out", settings, finish=True)
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.parametrize("engine", [threads(1), processes(2)], ids=["threads", "processes"])
@pytest.mark.sweep(keep=1)
def test_parquet_tables_that_are_read_from_any_row_give_the_tars_of_json_lines(
    raw_corpus: Path, tmp_path: Path, engine: Engine
) -> None:
    rows = [json.loads(line) for line in (raw_corpus / "captions.jsonl").read_text().splitlines()]
    rows = [{**row, "split": "test" if number % 5 == 3 else "train"} for number, row in enumerate(rows * 3)]
    jsonl(raw_corpus / "rows.jsonl", rows)
    settings = SETTINGS.model_copy(update={"split": "train"})
    convert(raw_corpus / "rows.jsonl", tmp_path / "lines", settings, engine=threads(1))
    for number, some in enumerate((rows[:50], rows[50:])):
        pq.write_table(pa.Table.from_pylist(some), raw_corpus / f"rows-{number}.parquet", row_group_size=11)
    settings = settings.model_copy(update={"table": "rows-*.parquet"})
    make_parts(raw_corpus, tmp_path / "out", settings, engine=engine)
    for unit in (4, 5, 9):  # holes, for the run that goes on
        shutil.rmtree(next((tmp_path / "out/train/.mmdata-convert").glob(f".units-*/{unit:06d}")))
    convert(raw_corpus, tmp_path / "out", settings, engine=engine)

    def shards(out: Path) -> dict[str, bytes]:
        return {name: data for name, data in content(out).items() if re.search(r"\d{6}\.tar$|/index-\d+\.arrow$", name)}

    assert len(shards(tmp_path / "out")) == 5 + 2  # tars, and the columns of train and of val
    assert shards(tmp_path / "out") == shards(tmp_path / "lines")


def test_table_that_grows_while_it_is_converted_is_an_error(raw_corpus: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (raw_corpus / "captions.jsonl").read_text().splitlines()]
    tables = [raw_corpus / f"rows-{number}.parquet" for number in range(2)]
    for table in tables:
        pq.write_table(pa.Table.from_pylist(rows), table)

    def replacing(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        pq.write_table(pa.Table.from_pylist(rows * 2), tables[1])
        yield from threads(1)(job, units)

    settings = ConvertConfig(shard_rows=7, table="rows-*.parquet", group_by="none")
    with pytest.raises(DataError, match=r"rows-1.parquet': has changed since it was opened"):
        convert(raw_corpus, tmp_path / "out", settings, engine=replacing)
    assert not (tmp_path / "out/__mmdata__").exists()


def test_jobs_at_the_same_time_give_the_bytes_of_one(table: Path, tmp_path: Path) -> None:
    flags = ["--shard-rows", 7, "--max-bad-share", 0.3]
    jobs = [start(table, tmp_path / "out", *flags, "--part", f"{part}/2", "--workers", 1) for part in (1, 2)]
    outputs = [job.communicate(timeout=PATIENCE_S) for job in jobs]
    assert [(job.returncode, stderr) for job, (_, stderr) in zip(jobs, outputs, strict=True)] == [(0, "")] * 2
    assert outputs[0][0] == (
        "part 1 of 2: 84 rows done, of which 0 cannot be used; when all parts are done, run the same command with "
        "--finish in place of --part\n"
    )
    last = start(table, tmp_path / "out", *flags, "--finish")
    stdout, stderr = last.communicate(timeout=PATIENCE_S)
    assert (last.returncode, stderr) == (0, "")
    assert re.search(r"^written +40$", stdout, re.MULTILINE)
    convert(table, tmp_path / "one", ConvertConfig(shard_rows=7, max_bad_share=0.3), engine=threads(1))
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_finish_without_all_parts_says_how_many_units_are_left(table: Path, tmp_path: Path) -> None:
    for parts, missing in ((), 24), ((1, 4), 12), ((2, 3), 0):
        for part in parts:
            convert_part(table, tmp_path / "out", SETTINGS, part=(part, 4), engine=threads(1))
        if missing:
            message = (
                rf"^{missing} units to make, as parts have not run .* \(first: rows \d+ to \d+\); run all parts ag"
            )
            with pytest.raises(DataError, match=message):
                convert(table, tmp_path / "out", SETTINGS, finish=True)
    report = convert(table, tmp_path / "out", SETTINGS, finish=True)
    assert report.accounts["written"] == 40


def test_part_is_refused_while_the_whole_is_made(table: Path, tmp_path: Path) -> None:
    def meanwhile(job: Any, units: Any) -> Any:
        with pytest.raises(DataError, match="another process is writing here"):
            convert_part(table, tmp_path / "out", SETTINGS, part=(1, 2))
        return threads(1)(job, units)

    convert(table, tmp_path / "out", SETTINGS, engine=meanwhile)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part", "3/2"], "argument --part: must be K/N with K from 1 to N, as 3/64: got '3/2'"),
        (["--part", "x"], "argument --part: must be K/N with K from 1 to N, as 3/64: got 'x'"),
        (["--part", "1/2", "--finish"], "--part makes a part, and neither replaces nor publishes anything"),
        (["--part", "1/2", "--train-tokenizer", "300"], "train_tokenizer: each part would read all captions; train it"),
    ],
)
def test_parts_that_cannot_be_are_an_error(table: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    job = start(table, tmp_path / "out", *flags)
    stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, stdout) == (2, "")
    assert message in stderr


def test_part_that_is_none_is_an_error(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="part 3 of 2: parts are numbered from 1 to their number"):
        convert_part(table, tmp_path / "out", SETTINGS, part=(3, 2))


def begin_together(barrier: Any, table: Path, out: Path, part: int) -> None:
    barrier.wait()
    convert_part(table, out, SETTINGS, part=(part, 3), engine=threads(1))


def test_parts_that_begin_and_end_at_the_same_time_take_turns_with_the_folder(table: Path, tmp_path: Path) -> None:
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:21]))
    fork = multiprocessing.get_context("fork")
    for number in range(4):
        barrier = fork.Barrier(3)
        out = tmp_path / f"out{number}"
        parts = [fork.Process(target=begin_together, args=(barrier, table, out, part)) for part in (1, 2, 3)]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        assert [part.exitcode for part in parts] == [0, 0, 0]
        assert convert(table, out, SETTINGS, finish=True).accounts["rows"] == 21


def test_part_with_other_settings_is_an_error_that_names_them_also_in_the_first_unit(
    table: Path, tmp_path: Path
) -> None:
    other = SETTINGS.model_copy(update={"min_side": 9})

    def meanwhile(job: Any, units: Any) -> Any:
        with pytest.raises(DataError, match=r"an unfinished conversion \(min_side: was 2, is 9\); run that again"):
            convert_part(table, tmp_path / "out", other, part=(1, 2), engine=threads(1))
        return threads(1)(job, units)

    assert convert_part(table, tmp_path / "out", SETTINGS, part=(1, 2), engine=meanwhile).units == 12


def test_units_that_were_refused_are_published_when_more_is_allowed(table: Path, tmp_path: Path) -> None:
    strict = SETTINGS.model_copy(update={"max_bad_share": 0.0})
    make_parts(table, tmp_path / "out", strict)
    with pytest.raises(DataError, match=r"8 of 168 rows are unusable, over max_bad_share=0.0; nothing is published"):
        convert(table, tmp_path / "out", strict, finish=True)
    convert(table, tmp_path / "out", SETTINGS, finish=True)
    convert(table, tmp_path / "one", SETTINGS, engine=threads(1))
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_conversion_that_is_there_is_not_good_enough_for_a_call_that_allows_less(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out", SETTINGS, engine=threads(1))
    before = content(tmp_path / "out")
    strict = SETTINGS.model_copy(update={"max_bad_share": 0.01})
    with pytest.raises(
        DataError, match=r"published by a call that allowed more: 8 of 168 rows are unusable, over max_b"
    ):
        convert(table, tmp_path / "out", strict, engine=threads(1))
    assert content(tmp_path / "out") == before
    assert convert(table, tmp_path / "out", SETTINGS, engine=threads(1)).was_complete
