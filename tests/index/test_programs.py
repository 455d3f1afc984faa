from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from tests.programs import run_program


def program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmdata", name, *map(str, arguments)]
    return run_program(command, capture_output=True, text=True)


def test_index_and_verify_end_with_their_accounts(shards, tmp_path):
    train_tokenizer(["picture one again", "picture two"], tmp_path / "tokenizer", vocab_size=300)
    out = tmp_path / "out"
    run = program("index", shards, "--out", out, "--tokenizer", tmp_path / "tokenizer")
    assert (run.returncode, run.stderr) == (0, "")
    closing = f"10 samples in = 10 indexed + 0 quarantined; 3 shards, 0 members ignored; index in {out}"
    lines = [closing, f"next: mmdata init {out}    # writes a config to train with"]
    lines += [f"      mmdata plan {out}    # batches, shapes and padding"]
    assert run.stdout.splitlines() == [*lines, f"      mmdata report {out}    # a page about the corpus"]
    manifest = json.loads((out / "__mmdata__/manifest.json").read_text())
    assert manifest["tokenizer"] == Tokenizer.load(tmp_path / "tokenizer").fingerprint
    assert (manifest["rows"], manifest["captions"]) == (10, 19)

    run = program("verify", out)
    size = sum(path.stat().st_size for path in shards.glob("*.tar"))
    assert (run.returncode, run.stderr, run.stdout) == (0, "", f"ok: 3 shards, 10 rows, {size:,} bytes\n")


def test_index_counts_quarantined_samples_by_reason(tmp_path, tar, photo):
    (tmp_path / "x.tar").write_bytes(
        tar([("a.jpg", photo(20, 30)), ("a.txt", b"t"), ("a.json", b"{}x"), ("b.txt", b"t")])
    )
    run = program("index", tmp_path / "x.tar")
    assert run.returncode == 2
    assert re.fullmatch(r"error: 1 of 2 samples cannot be used \(1 missing_image\), more than 5%.*\n", run.stderr)
    run = program("index", tmp_path / "x.tar", "--max-bad-share", 0.5)
    assert (run.returncode, run.stdout.splitlines()) == (
        0,
        [
            "quarantined: 1 missing_image",
            "lost: 1 json_unreadable (used without its JSON); the first: shard 'x.tar', sample 'a': "
            "JSON member does not parse: Extra data: line 1 column 3 (char 2)",
            f"2 samples in = 1 indexed + 1 quarantined; 1 shard, 0 members ignored; index in {tmp_path}",
            f"next: mmdata index {tmp_path} --max-bad-share 1 --tokenizer clip    "
            "# counts captions; reads no image again",
            f"      mmdata init {tmp_path}    # writes a config to train with",
            f"      mmdata plan {tmp_path}    # batches, shapes and padding",
            f"      mmdata report {tmp_path}    # a page about the corpus",
        ],
    )


def test_verify_prints_one_line_a_problem(shards):
    (shards / "000001.tar").unlink()
    run = program("verify", shards)
    assert run.returncode == 1
    assert run.stdout.splitlines() == [
        f"shard '000001.tar': no such file: '{shards / '000001.tar'}'",
        f"1 problem in 1 shard of {shards}",
    ]


@pytest.mark.parametrize("name", ["index", "verify"])
def test_an_expected_error_is_one_line(name, tmp_path):
    run = program(name, tmp_path / "none")
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(r"error: .*none'.*\n", run.stderr)


def test_index_of_a_conversion_that_left_rows_out_ends_with_0(raw_corpus, tmp_path):
    table = raw_corpus / "captions.jsonl"
    table.write_text(table.read_text() + '{"image": "gone.jpg", "captions": ["x"]}\n')
    assert program("convert", table, tmp_path / "out").returncode == 0
    run = program("index", tmp_path / "out", "--tokenizer", "clip")
    assert (run.returncode, run.stderr) == (0, "")
