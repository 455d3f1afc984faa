"""What is published is whole, is ours, and is the same however often a run was cut short."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mmdata import Loader, stream
from mmdata.cli.data.index import trainer
from mmdata.cli.data.plan import plan_of
from mmdata.convert import ConvertConfig, convert, convert_part
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.files import lock
from mmdata.index import Index, Manifest, build_index
from mmdata.index.verify import verify
from tests.convert.conftest import content
from tests.index.rewrite import write_manifest
from tests.programs import PATIENCE_S, run_program


@pytest.fixture
def table(corpus: Path) -> Path:
    path = corpus / "t.csv"
    path.write_text("image,caption\na.jpg,photo a\nb.jpg,photo b\nc.jpg,photo c\n")
    return path


@pytest.mark.sweep
def test_killed_anywhere_and_repeated_is_as_undisturbed(raw_corpus: Path, tmp_path: Path) -> None:
    rows = (raw_corpus / "captions.jsonl").read_text().splitlines(keepends=True)
    (raw_corpus / "few.jsonl").write_text("".join(rows[:3]))
    script = Path(__file__).with_name("killed.py")
    done = run_program(
        [sys.executable, script, raw_corpus / "few.jsonl", tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["fresh"] > 20, report  # places where it was killed
    assert report["overwrite"] > report["fresh"]
    assert report["failing"] > 20
    assert report["full"] > 5  # sizes at which it failed


def test_same_conversion_again_does_nothing(table: Path, tmp_path: Path) -> None:
    assert not convert(table, tmp_path / "out").was_complete
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.name != ".mmdata.lock"}
    report = convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.5))
    assert report.was_complete
    assert report.accounts["written"] == 3
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_same_corpus_elsewhere_gives_the_same_bytes(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out", ConvertConfig(train_tokenizer=300))
    os.rename(table.parent, tmp_path / "moved")
    convert(tmp_path / "moved/t.csv", tmp_path / "out2", ConvertConfig(train_tokenizer=300))
    assert content(tmp_path / "out") == content(tmp_path / "out2")


def test_other_input_is_an_error_that_names_it(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out")
    table.write_text(table.read_text() + "a.jpg,again\n")
    with pytest.raises(DataError, match=r"conversion \(the file 't.csv' has changed\); .*--overwrite"):
        convert(table, tmp_path / "out")


def test_damaged_shard_is_an_error_that_names_it_until_overwrite(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out")
    before = content(tmp_path / "out")
    os.truncate(tmp_path / "out/000000.tar", 512)
    with pytest.raises(DataError, match=r"conversion, damaged \('000000.tar' has 512 bytes of \d+\); .*--overwrite"):
        convert(table, tmp_path / "out")
    (tmp_path / "out/000000.tar").unlink()
    with pytest.raises(DataError, match=r"this conversion, damaged \('000000.tar' is missing\); .* --overwrite"):
        convert(table, tmp_path / "out")
    convert(table, tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out") == before


def test_index_does_not_write_over_the_ledger_of_a_conversion(table: Path, tmp_path: Path) -> None:
    table.write_text(table.read_text() + "gone.jpg,no photo\n")
    convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.5))
    ledger = tmp_path / "out/__mmdata__/quarantine.jsonl"
    assert ledger.read_bytes().count(b"\n") > 0
    (tmp_path / "out/__mmdata__/manifest.json").unlink()
    with pytest.raises(DataError, match=r"quarantine.jsonl': lists the rows that a conversion left out, .* list away"):
        build_index(tmp_path / "out")
    ledger.unlink()
    build_index(tmp_path / "out")


def test_overwrite_replaces_every_file(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out", ConvertConfig(shard_rows=1, train_tokenizer=300))
    convert(table, tmp_path / "out", ConvertConfig(), overwrite=True)
    convert(table, tmp_path / "fresh", ConvertConfig())
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_overwrite_replaces_the_tokenizer_that_the_index_has_trained(table: Path, tmp_path: Path) -> None:
    convert(table, tmp_path / "out")
    build_index(tmp_path / "out", make_tokenizer=trainer(300))
    assert (tmp_path / "out/tokenizer").is_symlink()
    convert(table, tmp_path / "out", overwrite=True)
    convert(table, tmp_path / "fresh")
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert convert(table, tmp_path / "out").was_complete


@pytest.mark.parametrize("name", ["thesis.tex", "000009.tar"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_foreign_files_are_an_error_and_stay(table: Path, tmp_path: Path, name: str, is_converted: bool) -> None:
    (tmp_path / "out").mkdir()
    if is_converted:
        convert(table, tmp_path / "out")
    (tmp_path / "out" / name).write_text("ten years")
    before = content(tmp_path / "out")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=rf"holds 1 file\(s\) that are not a conversion's \({name}\); nothing is"):
            convert(table, tmp_path / "out", overwrite=overwrite)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["thesis.tex", "000000.tar", "__mmdata__/manifest.json"])
def test_foreign_file_is_refused_before_a_killed_run_is_finished(table: Path, tmp_path: Path, name: str) -> None:
    convert(table, tmp_path / "done")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".mmdata.lock").touch()
    os.rename(tmp_path / "done", tmp_path / "out" / ".mmdata-convert")  # completed, nothing moved yet
    if name == "__mmdata__/manifest.json":
        write_manifest(tmp_path / "out", [])
    else:
        (tmp_path / "out" / name).write_text("ten years")
    before = content(tmp_path / "out")
    with pytest.raises(
        DataError, match=rf"holds 1 file\(s\) that are not a conversion's \({name}\); nothing is deleted"
    ):
        convert(table, tmp_path / "out")
    assert content(tmp_path / "out") == before


def test_manifest_of_another_program_is_foreign(table: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_manifest(tmp_path / "out", [])
    with pytest.raises(DataError, match=r"not a conversion's \(__mmdata__/manifest.json\)"):
        convert(table, tmp_path / "out", overwrite=True)


def test_second_writer_is_an_error(table: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with lock(tmp_path / "out"), pytest.raises(DataError, match="another process is writing here"):
        convert(table, tmp_path / "out")


def test_output_that_cannot_be_written_is_an_error_before_reading(corpus: Path) -> None:
    (corpus / "t.parquet").write_bytes(b"not read")
    with pytest.raises(DataError, match=r"output '.*/a.jpg/out': cannot be written \(Not a directory\); choose"):
        convert(corpus / "t.parquet", corpus / "a.jpg/out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output_is_an_error_before_reading(corpus: Path, tmp_path: Path) -> None:
    (corpus / "t.parquet").write_bytes(b"not read")
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
        convert(corpus / "t.parquet", tmp_path / "out")


def test_missing_source_is_an_error_and_makes_no_output(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"source '.*/gone': no such file or folder"):
        convert(tmp_path / "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_many_bad_rows_publish_nothing_and_tell_why(table: Path, tmp_path: Path) -> None:
    table.write_text(table.read_text() + "gone.jpg,x\n" + "b.jpg,\n" + "b.jpg,\n")
    with pytest.raises(
        DataError,
        match=r"3 of 6 rows are unusable, over max_bad_share=0.05; nothing is published. 2 empty_caption "
        r"\(first: t.csv, line 6: .*\); 1 missing_image \(first: t.csv, line 5: 'gone.jpg': .*quarantine.jsonl",
    ):
        convert(table, tmp_path / "out")
    with pytest.raises(DataError) as raised:
        convert(table, tmp_path / "out")
    assert "--images" not in str(raised.value), "other images of the table were found"
    ledger = tmp_path / "out/.mmdata-convert/__mmdata__/quarantine.jsonl"
    assert [json.loads(line)["row"] for line in ledger.read_text().splitlines()] == [3, 4, 5]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".mmdata.lock", ".mmdata-convert"}
    report = convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.5))
    assert report.accounts["quarantined"] == 3


def test_corpus_without_a_usable_row_is_an_error(table: Path, tmp_path: Path) -> None:
    table.write_text("image,caption\ngone.jpg,x\n")
    with pytest.raises(DataError, match=r"none of 1 rows could be written; nothing is published. 1 missing_image"):
        convert(table, tmp_path / "out", ConvertConfig(max_bad_share=1.0))


def test_table_of_which_no_image_is_found_names_where_the_first_was_looked_for(table: Path, tmp_path: Path) -> None:
    table.write_text("image,caption\nbelow/gone.jpg,x\ngone.jpg,y\n")
    folder = table.parent
    where = (
        f"the table's paths are relative to '{folder}', and '{folder}/below/gone.jpg' does not exist: name the folder "
        "that they are relative to with --images FOLDER"
    )
    for share in (0.05, 1.0):
        with pytest.raises(DataError, match=re.escape(where)):
            convert(table, tmp_path / "out", ConvertConfig(max_bad_share=share))
    table.write_text("image,caption\nhttp://127.0.0.1/gone.jpg,x\n")
    with pytest.raises(DataError) as raised:
        convert(table, tmp_path / "out")
    assert "1 refused_address (first: t.csv, line 2: address 127.0.0.1 is loopback" in str(raised.value)
    assert "--images" not in str(raised.value)


def test_accounts_are_in_the_manifest(table: Path, tmp_path: Path) -> None:
    table.write_text(table.read_text() + "a.jpg,again\nb.jpg,\n")
    convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.2))
    accounts: dict[str, Any] = Manifest.read(tmp_path / "out").accounts or {}
    run = accounts.pop("run")
    assert accounts.pop("version") == version("mmdata")
    assert accounts == {
        "rows": 5,
        "written": 3,
        "merged": 1,
        "duplicate": 0,
        "filtered": 0,
        "quarantined": 1,
        "reasons": {"empty_caption": 1},
    }
    assert run["source"]["image"] == "image"
    assert run["settings"]["shard_rows"] == 10_000
    assert str(tmp_path) not in json.dumps(run)


def test_image_whose_row_could_not_be_written_is_no_duplicate(corpus: Path, tmp_path: Path) -> None:
    rows = [{"image": "a.jpg", "caption": ["x" * 60_000] * 20}, {"image": "a.jpg", "caption": "short"}]
    (corpus / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = convert(corpus / "t.jsonl", tmp_path / "out", ConvertConfig(max_bad_share=0.5))
    assert report.accounts["reasons"] == {"caption_too_long": 1}
    assert "JSON member of 1200074 bytes; at most 1048576" in (tmp_path / "out/__mmdata__/quarantine.jsonl").read_text()
    assert report.manifest.rows == report.accounts["written"] == 1


@pytest.mark.parametrize("val_share", [None, 0.3])
def test_whoever_opens_the_folder_of_a_stopped_conversion_is_told(
    raw_corpus: Path, tmp_path: Path, val_share: float | None
) -> None:
    out, table = tmp_path / "out", raw_corpus / "captions.jsonl"
    convert_part(table, out, ConvertConfig(shard_rows=7, val_share=val_share), part=(1, 2), engine=threads(1))
    message = (
        f"folder '{out}': a conversion into it was stopped or refused, or still runs; run the same `mmdata "
        "convert` command again: it continues where that ended, or says why nothing was published"
    )
    settings = {"shards": str(out), "tokenizer": "clip", "global_batch_size": 2}
    openings: list[Callable[[], Any]] = [
        lambda: Index.open(out),
        lambda: build_index(out),
        lambda: verify(out),
        lambda: Loader.from_config(settings),
        lambda: stream(str(out), settings),
        lambda: plan_of(str(out), []),
        lambda: convert(out, tmp_path / "other"),
    ]
    for opening in openings:
        with pytest.raises(DataError, match=f"^{re.escape(message)}"):
            opening()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("add", "files of the source were added, removed, renamed or have another size"),
        ("table", "the source was of the kind folder, and is of the kind table"),
        (
            "many",
            'check: was "full", is "header"; keep_duplicates: was false, is true; max_image_bytes: was 268435456, is '
            "1000000; min_side: was 2, is 9; shard_bytes: was 1000000000, is 7; and 1 more",
        ),
    ],
)
def test_another_conversion_is_told_in_words(raw_corpus: Path, tmp_path: Path, change: str, message: str) -> None:
    folder, config = tmp_path / "corpus", ConvertConfig()
    folder.mkdir()
    for name in ("000.jpg", "001.jpg"):
        data = next(path for path in sorted(raw_corpus.rglob("*.*")) if path.suffix == ".jpg").read_bytes()
        (folder / name).write_bytes(data + name.encode())
        (folder / name).with_suffix(".txt").write_text(name)
    convert(folder, tmp_path / "out", config)
    source = folder
    if change == "add":
        (folder / "001.txt").write_text("longer than it was")
    elif change == "table":
        source = raw_corpus / "captions.jsonl"
    else:
        limits: dict[str, Any] = {"min_side": 9, "max_image_bytes": 10**6, "shard_bytes": 7, "shard_rows": 3}
        config = ConvertConfig(check="header", keep_duplicates=True, **limits)
    with pytest.raises(DataError) as error:
        convert(source, tmp_path / "out", config)
    assert str(error.value) == (
        f"output '{tmp_path / 'out'}': holds another conversion ({message}); choose another folder, or replace it with "
        "--overwrite"
    )
