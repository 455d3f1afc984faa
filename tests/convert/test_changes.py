"""What "nothing to do" says of files that have changed since a conversion was published."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import changes, convert
from mmdata.convert.units.engines import threads
from mmdata.index import Index
from tests.convert.conftest import content
from tests.convert.test_changed import ROWS, SETTINGS, edit_images, with_captions, with_table
from tests.programs import run_program


def test_finished_folder_says_which_files_have_changed(tmp_path: Path, pictures: list[bytes]) -> None:
    source, out = with_captions(tmp_path / "corpus", pictures), tmp_path / "out"
    settings = SETTINGS.model_copy(update={"val_share": 0.3})
    assert convert(source, out, settings, engine=threads(1)).changes.in_words(str(out)) == []
    assert convert(source, out, settings, engine=threads(1)).changes.in_words(str(out)) == []
    before = content(out)
    for number in range(5):
        (source / f"{number:02d}.txt").write_text(f"new caption {number:02d}")
    os.utime(source / "00.txt", (0, 0))  # an older time is another one too
    report = convert(source, out, settings, engine=threads(1))
    assert report.was_complete
    assert report.changes.in_words(str(out)) == [
        "5 files have another modification time than at the conversion (the first is '00.txt'): --overwrite converts "
        "all anew"
    ]
    assert content(out) == before


def test_file_is_named_whose_first_row_could_not_be_used(tmp_path: Path, pictures: list[bytes]) -> None:
    table, out = tmp_path / "corpus/table.csv", tmp_path / "out"
    with_captions(table.parent, pictures)
    table.write_text('image,caption\n00.jpg,""\n00.jpg,a dog\n01.jpg,a cat\n')
    convert(table, out, SETTINGS, engine=threads(1))
    edit_images(table.parent, 1)
    found = convert(table, out, SETTINGS, engine=threads(1)).changes
    assert (found.changed, found.first) == (1, "00.jpg")


def test_nothing_to_do_looks_at_the_files_of_a_bounded_number_of_rows(
    tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = with_captions(tmp_path / "corpus", pictures), tmp_path / "out"
    settings = SETTINGS.model_copy(update={"val_share": 0.3})
    convert(source, out, settings, engine=threads(1))
    edit_images(source, ROWS)
    for most, lines in ((ROWS, []), (5, ["only the files of the first 5 rows were looked at for changes"])):
        monkeypatch.setattr(changes, "MOST_ROWS", most)
        found = convert(source, out, settings, engine=threads(1)).changes
        assert (found.changed, found.in_words("out")[1:]) == (most, lines)


def test_nothing_to_do_reads_no_times_of_a_source_without_files(
    tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = tmp_path / "table.parquet", tmp_path / "out"
    pq.write_table(pa.table({"image": pictures, "caption": ["a dog"] * len(pictures)}), table)
    convert(table, out, engine=threads(1))
    monkeypatch.setattr(changes, "_read", None)
    assert convert(table, out, engine=threads(1)).was_complete


def test_nothing_to_do_says_that_missing_images_are_there(tmp_path: Path, pictures: list[bytes]) -> None:
    table, out = with_table(tmp_path / "corpus", pictures), tmp_path / "out"
    for name in ("02.jpg", "07.jpg"):
        (tmp_path / "corpus" / name).rename(tmp_path / name)
    flags = ["--max-bad-share", "0.5"]

    def run(*arguments: Any) -> list[str]:
        command = [sys.executable, "-m", "mmdata", "convert", table, *arguments, *flags, "--workers", "1"]
        done = run_program([str(word) for word in command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    run(out)
    (tmp_path / "02.jpg").rename(tmp_path / "corpus/02.jpg")
    (tmp_path / "corpus/05.jpg").unlink()
    assert run(out)[:3] == [
        f"{out} already holds this conversion; nothing to do",
        "1 file is no longer there (the first is '05.jpg'): --overwrite converts all anew",
        "1 file is there now and missing before (the first is '02.jpg'): to convert their rows alone, name a new "
        f"folder and add --retry {out} --reason missing_image; --overwrite converts all anew",
    ]
    folders = ["--retry", out]
    run(tmp_path / "new", *folders, "--reason", "missing_image")
    assert len(Index.open(tmp_path / "new")) == 1
    (tmp_path / "07.jpg").rename(tmp_path / "corpus/07.jpg")
    assert run(tmp_path / "new", *folders, "--reason", "missing_image")[1] == (
        "1 file is there now and missing before (the first is '07.jpg'): to convert their rows alone, name a new "
        f"folder and add --retry {out} --retry {tmp_path / 'new'} --reason missing_image; --overwrite converts all "
        "anew"
    )
    run(tmp_path / "newer", *folders, "--retry", tmp_path / "new", "--reason", "missing_image")
    assert len(Index.open(tmp_path / "newer")) == 1
