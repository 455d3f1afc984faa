from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from mmdata.errors import DataError
from mmdata.files import Staged, lock, read_json_lines, remove, shipped, whole_folder, write_whole
from tests.programs import Program


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_writer_that_fails_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "a"
    write_whole(path, lambda file: file.write(b"old"))

    def failing(file: BinaryIO) -> None:
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, failing)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failing_sync_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_whole(path, b"old")

    def failing(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_lock_is_held_against_other_processes_and_freed_with_them(tmp_path):
    program = f"""
import sys
from pathlib import Path
from mmdata.files import lock
with lock(Path({str(tmp_path)!r})):
    print("held", flush=True)
    sys.stdin.read()
"""
    with Program([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(DataError, match="another process is writing here"), lock(tmp_path):
            pass
        other.kill()
        other.wait()
        with lock(tmp_path):
            pass


def test_json_lines_are_read_but_for_one_that_a_kill_cut(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_bytes(b'{"step": 1, "a": "x"}\n{"step": 2}\n{"st')
    assert list(read_json_lines(path, {"step": int})) == [{"step": 1, "a": "x"}, {"step": 2}]
    assert list(read_json_lines(tmp_path / "none.jsonl", {})) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"st', "not JSON: "),
        (b"", "not JSON: Expecting value: line 2 column 1 (char 1)"),
        (b"\xff\xfe", "not JSON: "),
        (b"[" * 100_000, "not JSON: maximum recursion depth exceeded"),
        (b'{"step": ' + b"9" * 5_000 + b"}", "not JSON: Exceeds the limit (4300 digits)"),
        (b"[1]", "expected a JSON object, got a list"),
        (b'{"step": "1"}', "no 'step' (int) in it"),
        (b'{"epoch": 1}', "no 'step' (int) in it"),
    ],
)
def test_a_json_line_that_is_no_entry_is_an_error_with_its_place(tmp_path, line: bytes, wrong: str):
    path = tmp_path / "l.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    message = rf"^'{re.escape(str(path))}', line 2: {re.escape(wrong)}.*; delete the line to go on$"
    with pytest.raises(DataError, match=message):
        list(read_json_lines(path, {"step": int}))


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    place = tmp_path / "a"
    (tmp_path / ".a.part").mkdir()
    (tmp_path / ".a.part" / "left").write_bytes(b"by a killed run")
    with pytest.raises(FileNotFoundError), whole_folder(place) as aside:
        (aside / "none" / "1").write_bytes(b"1")
    with whole_folder(place) as aside:
        remove(aside)
    assert os.listdir(tmp_path) == []
    with whole_folder(place) as aside:
        (aside / "1").write_bytes(b"1")
        (aside / "b").mkdir()
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(place)) == ["1", "b"]


def staged(folder: Path, *numbers: int) -> Staged:
    """Files x/1, x/2 and so on, made but not published; x/last.txt names them."""
    one = Staged(
        folder, folder / ".new", last="x/last.txt", names=lambda made: (made / "x/last.txt").read_text().split()
    )
    (one.new / "x").mkdir(parents=True)
    for number in numbers:
        (one.new / f"x/{number}").write_text(f"of {numbers}")
    (one.new / "x/last.txt").write_text(" ".join(f"x/{number}" for number in numbers))
    return one


def test_what_is_published_replaces_what_was_there_and_no_file_of_others(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/of others").touch()
    for numbers in ((1, 2, 3), (2, 4)):
        one = staged(tmp_path, *numbers)
        one.publish()
        remove(one.new)
        assert sorted(os.listdir(tmp_path / "x")) == [*map(str, numbers), "last.txt", "of others"]
        assert (tmp_path / "x/2").read_text() == f"of {numbers}"
    one = staged(tmp_path / "y", 5)
    one.withdraw()
    assert one.is_whole
    assert os.listdir(tmp_path / "y") == [".new"]


def test_shipped_finds_the_files_of_the_checkout():
    root = Path(__file__).parents[1]
    assert shipped("configs", "scenes.yaml").samefile(root / "configs" / "scenes.yaml")
