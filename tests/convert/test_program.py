"""The program `mmdata convert`: flags, messages, signals. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.errors import DataError
from mmdata.index import Index
from tests.convert.conftest import content
from tests.programs import PATIENCE_S, Program
from tests.waiting import wait_until

TERMINATED = "terminated; nothing was published, run the same command again: it continues where this ended\n"
INTERRUPTED = "nothing was published, run the same command again: it continues where this ended\ninterrupted\n"
PACE = re.compile(r"^41 rows in \d+ s, [\d,]+ a second; ", re.MULTILINE)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mmdata", "convert", *map(str, arguments)]
    return Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.fixture
def long_table(tmp_path: Path, photo: Any) -> Path:
    """Eight thousand rows on a large photo: a conversion of many seconds on any machine."""
    (tmp_path / "long").mkdir()
    (tmp_path / "long/big.jpg").write_bytes(photo(900, 1200))
    table = tmp_path / "long/t.csv"
    table.write_text("image,caption\n" + "".join(f"big.jpg,photo {i}\n" for i in range(8000)))
    return table


def wait_for_shards(out: Path, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: list(out.glob(".mmdata-convert/.units-*/[0-9]*/receipt.json")), program=process)


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGTERM, 143, TERMINATED),
        (signal.SIGINT, 130, INTERRUPTED),
        (signal.SIGKILL, -9, ""),
    ],
)
@pytest.mark.sweep(keep=1)
def test_signal_ends_the_run_and_publishes_nothing(
    long_table: Path, tmp_path: Path, number: int, status: int, message: str
) -> None:
    out = tmp_path / "out"
    flags = ["keep_duplicates=true", "--workers", 2, "--shard-rows", 500]
    process = start(long_table, out, *flags)
    wait_for_shards(out, process)
    with pytest.raises(DataError, match="another process is writing here"):
        convert(long_table, out)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout, stderr) == (status, "", message)
    left = {path.name for path in out.iterdir()}
    assert left <= {".mmdata.lock", ".mmdata-convert"}
    # The same folder can be used at once, for this conversion or, when that is said, for another.
    small = long_table.with_name("small.csv")
    small.write_text("image,caption\nbig.jpg,photo\n")
    with pytest.raises(DataError, match=r"unfinished conversion \(.*shard_rows: was 500, is 10000.* with --overwrite"):
        convert(small, out)
    convert(small, out, overwrite=True)
    convert(small, tmp_path / "undisturbed")
    assert content(out) == content(tmp_path / "undisturbed")


def test_program_prints_the_accounts_and_makes_what_the_library_makes(raw_corpus: Path, tmp_path: Path) -> None:
    table = raw_corpus / "captions.jsonl"
    table.write_text(table.read_text() + '{"image": "gone.jpg", "captions": ["x"]}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("table: captions.jsonl\nshard_rows: 7\ntrain_tokenizer: 400\n")
    process = start(raw_corpus, tmp_path / "out", "--recipe", recipe, "--shard-rows", 9, "keep=[path]")
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (0, "")  # no progress bar where there is no terminal
    assert [line.split() for line in stdout.splitlines()[:8]] == [
        ["rows", "count"],
        ["in", "41"],
        ["written", "40"],
        ["merged", "0"],
        ["duplicate", "0"],
        ["filtered", "0"],
        ["quarantined", "1"],
        ["missing_image", "1"],
    ]
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    assert PACE.sub("PACE ", stdout).splitlines()[8:] == [
        "columns: image = image, captions = captions",
        f"5 shards in {tmp_path}/out: 40 images, 82 captions; 1 left out, each with its reason in "
        f"{tmp_path}/out/__mmdata__/quarantine.jsonl",
        f"PACE {written / 1000:.3g} kB",
        f"next: mmdata init {tmp_path}/out    # writes a config to train with",
        f"      mmdata plan {tmp_path}/out    # batches, shapes and padding",
        f"      mmdata report {tmp_path}/out    # a page about the corpus",
    ]
    config = ConvertConfig(shard_rows=9, train_tokenizer=400, keep=("path",))
    convert(table, tmp_path / "out2", config)
    assert content(tmp_path / "out") == content(tmp_path / "out2")
    small = raw_corpus / "small.jsonl"
    small.write_text(table.read_text().splitlines()[0])
    stdout = start(small, tmp_path / "small").communicate(timeout=PATIENCE_S)[0]
    assert f"\n1 shard in {tmp_path}/small: 1 image, 2 captions\n" in stdout
    index = Index.open(tmp_path / "out")
    assert len(index) == 40
    assert index.lists("caption_tokens")[1].min() > 3
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image-column", "img"], "error: table '{table}': no column 'img' (image); there are: image, captions\n"),
        (["--recipe", "nowhere"], "error: recipe 'nowhere': no such file, and datasets/ has only: "),
    ],
)
def test_program_error_is_one_line(raw_corpus: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    table = raw_corpus / "captions.jsonl"
    process = start(table, tmp_path / "out", *flags)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.startswith(message.format(table=table))
    assert stderr.count("\n") == 1


def test_program_shrinks_shards(raw_corpus: Path, tmp_path: Path) -> None:
    convert(raw_corpus / "captions.jsonl", tmp_path / "shards")
    process = start(tmp_path / "shards", tmp_path / "small", "--resize", 44, "quality=80")
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (0, "")
    assert f"\n1 shard in {tmp_path}/small: 40 images, 82 captions\n" in stdout
    convert(tmp_path / "shards", tmp_path / "small2", ConvertConfig(resize=44, quality=80))
    assert content(tmp_path / "small") == content(tmp_path / "small2")
