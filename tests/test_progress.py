"""Progress of a conversion: what is said when, on a terminal and in a log, and of a run that goes on with another."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmdata import progress
from mmdata.convert import ConvertConfig, convert, convert_part
from mmdata.convert.units.engines import threads
from mmdata.progress import SILENT, Pass, Track, duration
from tests.convert.conftest import content, jsonl
from tests.programs import PATIENCE_S, Program, run_program


def test_pass_says_counts_rate_share_and_time_left() -> None:
    one = Pass("convert", 1_000_000, began=0.0)
    assert one.text(0.5) == "0 of 1,000,000 rows"
    one.made = 120_000
    one.left_out, one.judged = 480, 120_000
    assert one.text(150) == "120,000 of 1,000,000 rows, 800 rows/s, 0.4 % left out, 19 min left"
    assert Pass("convert", 10, began=0.0).text(9) == "0 of 10 rows"


def test_pass_counts_what_was_done_before_as_done_and_not_as_fast() -> None:
    one = Pass("convert", 1000, began=0.0)
    one.skipped = 900
    one.made = 50
    assert one.text(10) == "950 of 1,000 rows, 5 rows/s, 10 s left"
    one.made = 100
    one.ended = 20
    assert one.text(99) == "1,000 rows, 5 rows/s"


def test_pass_of_which_nothing_is_counted_says_how_long_it_takes() -> None:
    assert Pass("compare all rows", 0, began=5.0).text(47.2) == "43 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.2, "1 s"),
        (89, "89 s"),
        (90, "2 min"),
        (3600, "60 min"),
        (5400, "1 h 30 min"),
        (90_060, "25 h 01 min"),
    ],
)
def test_duration_is_rounded_up(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_silent_track_passes_things_through() -> None:
    things = [1, 2]
    assert list(SILENT(things, "x", 2)) == things
    SILENT.skip(1)
    SILENT.leave_out(1, of=2)
    SILENT.say("x")


def test_lines_come_also_while_nothing_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    said = ""
    with progress.progress_in_rows() as track:
        track.say("compare all rows")
        while said.count("\n") < 2:
            said += capsys.readouterr().err
    assert all(re.fullmatch(r"compare all rows: [1-9]\d* s", line) for line in said.splitlines()), said


class Told(Track):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.ended: list[tuple[str, str]] = []

    def note(self, one: Pass) -> None:
        if one.ended is not None:
            self.ended.append((one.what, re.sub(r", .* \w+/s", "", one.text(0.0))))


@pytest.fixture
def table(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Twenty rows, of which two have no image."""
    (tmp_path / "corpus").mkdir()
    for seed in range(18):
        (tmp_path / f"corpus/{seed}.jpg").write_bytes(photo(16, 16, seed=seed))
    return jsonl(tmp_path / "corpus/t.jsonl", [{"image": f"{n}.jpg", "caption": f"photo {n}"} for n in range(20)])


def test_conversion_tells_its_passes_and_what_an_earlier_run_has_done(table: Path, tmp_path: Path) -> None:
    config = ConvertConfig(shard_rows=5, max_bad_share=0.5)
    told = Told()
    convert_part(table, tmp_path / "out", config, part=(2, 2), engine=threads(1), track=told)
    assert told.ended == [("compare images", "20 rows"), ("convert", "10 rows, 20.0 % left out")]
    assert told.skipped == 0
    told = Told()
    convert(table, tmp_path / "out", config, engine=threads(1), track=told)
    assert told.skipped == 10
    assert [(what, text) for what, text in told.ended if "rows" in text or "units" in text] == [
        ("compare images", "20 rows"),
        ("convert", "20 rows, 10.0 % left out"),
        ("put shards together", "4 units"),
    ]
    assert [what for what, _ in told.ended[2:]] == ["compare all rows", "put shards together"]
    assert told.current.what == "end shards and manifest"
    convert(table, tmp_path / "silent", config, engine=threads(1))
    assert content(tmp_path / "out") == content(tmp_path / "silent")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def test_program_shows_bars_on_a_terminal(table: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command: list[Any] = [sys.executable, "-m", "mmdata", "convert", table, tmp_path / "out"]
    command += ["--max-bad-share", "0.5", "--shard-rows", "5", "--workers", "1"]
    with (
        (tmp_path / "stdout").open("w") as stdout,
        Program(command, stdout=stdout, stderr=theirs, env=environment(TERM="xterm")) as program,
    ):
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # Linux's way to say that the other side is closed
            pass
        finally:
            os.close(ours)
        assert program.wait(PATIENCE_S) == 0
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    seen = [re.sub(r"\s+━+\s+", " ", line).strip() for line in last]
    assert any(re.fullmatch(r"convert 20 rows(, [\d.]+ rows/s)?, 10\.0 % left out", line) for line in seen), seen
    assert any(re.fullmatch(r"put shards together 4 units(, [\d.]+ units/s)?", line) for line in seen), seen
    assert any(line.startswith("end shards and manifest") for line in seen), seen


def test_program_writes_lines_into_a_log_and_none_in_the_first_minute(table: Path, tmp_path: Path) -> None:
    """The program itself, with lines every 10 ms in place of every minute."""
    program = "import sys, mmdata.cli, mmdata.progress as p; p.LINE_S = float(sys.argv.pop(1)); "
    program += "sys.exit(mmdata.cli.main())"
    found: list[str] = []
    for line_s in ("0.01", "60"):
        command = [sys.executable, "-c", program, line_s, "convert", table, tmp_path / line_s]
        done = run_program(
            [*command, "--max-bad-share", "0.5", "--workers", "1"], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stderr)
    assert found[1] == ""
    lines = found[0].splitlines()
    assert lines
    known = r"(compare images|group captions|convert|put shards together): \d+( of \d+)? (rows|units).*"
    assert all(re.fullmatch(known + r"|(compare all rows|end shards and manifest): \d+ s", line) for line in lines), (
        lines
    )


def test_program_says_how_long_it_took_for_the_rows_that_it_has_examined(table: Path, tmp_path: Path) -> None:
    def said(out: str, *flags: str) -> str:
        command = [sys.executable, "-m", "mmdata", "convert", table, tmp_path / out, "--shard-rows", "5"]
        command += ["--max-bad-share", "0.5", *flags]
        done = run_program(command, capture_output=True, text=True, env=environment())
        assert (done.returncode, done.stderr) == (0, "")
        return next((line for line in done.stdout.splitlines() if line.endswith(" kB")), "")

    size = r"\d+(\.\d)? kB"
    assert said("out", "--part", "1/2") == ""
    assert re.fullmatch(rf"10 rows in \d+ s, [\d,]+ a second; 10 more had been examined before; {size}", said("out"))
    assert said("out") == ""  # complete already
    said("parts", "--part", "1/1")
    assert re.fullmatch(rf"20 rows were examined before, and put together in \d+ s; {size}", said("parts", "--finish"))
