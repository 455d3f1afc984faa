"""Errors of the system name a file and a remedy. Real limits: a file that may not grow, a full device, no folder."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmdata.errors import DataError, explain
from mmdata.files import lock, naming, sync_folder, write_whole
from mmdata.index import build_index
from tests.programs import PATIENCE_S, run_program

ROOT = Path(__file__).parents[1]

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from mmdata import cli
sys.exit(cli.main(sys.argv[2:]))
"""
TOO_LARGE = (
    "file too large; the file system, or `ulimit -f`, allows no larger file: raise the limit or choose another disk"
)


def limited(most_bytes: int, *arguments: object) -> str:
    """What a command says that may write no file of more bytes."""
    command = [sys.executable, "-c", LIMITED, str(most_bytes), *map(str, arguments)]
    done = run_program(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    return done.stderr.removeprefix("error: ")


def test_file_that_may_not_grow_is_named_with_a_remedy(raw_corpus: Path, tmp_path: Path) -> None:
    table, out = raw_corpus / "captions.jsonl", tmp_path / "out"
    private = out / ".mmdata-convert"
    unit = f"'{private}/.units-[0-9a-f]+/.attempt-000000-[^/]+/"
    assert re.fullmatch(rf"{unit}0-000000.tar': {re.escape(TOO_LARGE)}\n", limited(20_000, "convert", table, out))
    told = limited(2_000, "convert", table, out, "--train-tokenizer", 300)
    assert told == f"'{private}/__mmdata__/tokenizer/tokenizer.json': {TOO_LARGE}\n"
    table.write_text("".join(f'{{"image": "gone-{i}.jpg", "caption": "x"}}\n' for i in range(200)))
    told = limited(2_000, "convert", table, out, "--overwrite")
    assert re.fullmatch(rf"{unit}records.arrow': {re.escape(TOO_LARGE)}\n", told)


def test_index_that_may_not_grow_is_named_with_a_remedy(tmp_path: Path, photo) -> None:
    from tests.convert.sources.test_packed import pack

    samples = {f"{i}{end}": data for i in range(50) for end, data in ((".jpg", photo(9, 9, seed=i)), (".txt", b"x"))}
    pack(tmp_path / "in/a.tar", samples)
    told = limited(1_000, "index", tmp_path / "in", "--out", tmp_path / "index")
    assert told == f"'{tmp_path}/index/.mmdata-index/a.tar.scan': {TOO_LARGE}\n"
    assert {path.name for path in (tmp_path / "index").iterdir()} == {".mmdata.lock"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_device_behind_the_output_is_named(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = run_program(
            [sys.executable, "-m", "mmdata", "--help"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "error: 'standard output': no space left on device; "
        "free some space or choose another disk, then run this again\n",
    )


def test_write_whole_names_the_target_and_not_its_part(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        write_whole(tmp_path, b"x")
    assert explain(caught.value) == (
        f"'{tmp_path}': is a directory; a file is expected there, and it is a folder: choose another path"
    )
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        write_whole(tmp_path / "file" / "x", b"x")
    assert explain(caught.value) == (
        f"'{tmp_path}/file/x': not a directory; a part of the path is a file: choose another path"
    )
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "x", b"x")
    assert explain(caught.value) == f"'{tmp_path}/none/x': no such file or directory; check the path"
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/x'"):
        write_whole(tmp_path / "x", lambda file: write_to_full_device())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def write_to_full_device() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        full.write(b"x")


def test_naming_gives_a_name_to_errors_without_one_only(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device: 'here'"), naming("here"):
        write_to_full_device()
    with pytest.raises(FileNotFoundError, match="No such file or directory: '/none'"), naming("here"):
        Path("/none").read_bytes()
    with pytest.raises(OSError, match=r"^a library's own$"), naming("here"):
        raise OSError("a library's own")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError("of a library"), "of a library"),
        (OSError(errno.ENOTTY, "Not a tty"), "not a tty"),
        (OSError(errno.EROFS, "Read-only file system", "a"), "'a': read-only file system; choose a folder on a disk"),
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), "'a' to 'b': invalid link; it is moved to another disk"),
    ],
)
def test_explain_says_file_reason_and_remedy(error: OSError, sentence: str) -> None:
    assert explain(error).startswith(sentence)


def test_folders_that_are_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (lambda: sync_folder(tmp_path / "file" / "x"), lambda: lock(tmp_path / "file").__enter__()):
        with pytest.raises(NotADirectoryError, match=rf"'{tmp_path}/file/"):
            use()


def test_tar_whose_name_is_not_utf8_is_named(tmp_path: Path, photo) -> None:
    from tests.convert.sources.test_packed import pack

    (tmp_path / "in").mkdir()
    pack(tmp_path / "in" / os.fsdecode(b"caf\xe9.tar"), {"a.jpg": photo(9, 9), "a.txt": b"x"})
    with pytest.raises(
        DataError, match=r"'caf\\xe9.tar': the name is not UTF-8, and a manifest cannot hold it; rename"
    ):
        build_index(tmp_path / "in")
    os.rename(os.fsencode(tmp_path / "in") + b"/caf\xe9.tar", tmp_path / "in/a.tar")
    (tmp_path / "in").rename(tmp_path / os.fsdecode(b"\xe9"))
    with pytest.raises(DataError, match=r"\\xe9': the name is not UTF-8"):
        build_index(tmp_path / os.fsdecode(b"\xe9"), out=tmp_path / "out")
    assert build_index(tmp_path / os.fsdecode(b"\xe9")).accounts["indexed"] == 1
