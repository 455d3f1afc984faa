"""What a conversion would give, against the conversion itself. The corpora and their samples are fixed."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import ConvertConfig, Preview, Report, convert, preview
from mmdata.convert.sampling import Estimate
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError, Reason
from mmdata.index import Index
from mmdata.tars.tar import END
from tests.convert.conftest import content, jsonl
from tests.programs import run_program

ROWS = 3000
STATUSES = ("written", "merged", "duplicate", "filtered", "quarantined")


@pytest.fixture
def mixed(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """A table of 3,000 rows, of which about 4 % name no image, 2 % have no caption and 1 % an image cut short."""
    root, rng = tmp_path / "mixed", random.Random(6)
    root.mkdir()
    for seed in range(20):
        (root / f"{seed}.jpg").write_bytes(photo(16 + seed, 30, seed=seed))
    (root / "cut.jpg").write_bytes(photo(40, 40)[:-300])
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        kind = rng.random()
        name = f"gone-{number}.jpg" if kind < 0.04 else "cut.jpg" if kind > 0.99 else f"{number % 20}.jpg"
        rows.append({"image": name, "caption": "" if 0.04 <= kind < 0.06 else f"photo {number}"})
    return jsonl(root / "t.jsonl", rows)


def agrees(found: Preview, report: Report) -> None:
    """The truth lies in every interval."""
    for status in STATUSES:
        interval: Estimate = getattr(found, status)
        assert interval.low <= report.accounts[status] <= interval.high, status
    assert {reason: count for reason, count in report.accounts["reasons"].items() if count > 60}.keys() <= {
        str(reason) for reason in found.reasons
    }
    for reason, interval in found.reasons.items():
        assert interval.low <= report.accounts["reasons"][str(reason)] <= interval.high, reason


def test_preview_intervals_hold_what_the_conversion_gives(mixed: Path, tmp_path: Path) -> None:
    config = ConvertConfig(keep_duplicates=True, max_bad_share=0.5, shard_rows=700)
    found = preview(mixed, config, out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    report = convert(mixed, tmp_path / "out", config, engine=threads(2))
    agrees(found, report)
    assert (found.rows, found.sample.size) == (ROWS, 500)
    assert set(found.reasons) == {Reason.MISSING_IMAGE, Reason.EMPTY_CAPTION, Reason.CORRUPT_IMAGE}
    assert found.bytes.low < report.manifest.bytes < found.bytes.high < 1.1 * report.manifest.bytes
    assert found.packing == (report.manifest.num_shards, 0)
    assert found.room_bytes == (found.bytes.likely, 2 * found.bytes.high)
    assert found.cpu_s > 0
    assert found.seconds is not None
    assert found.seconds >= found.cpu_s * ROWS
    assert found.free_bytes is not None
    assert (found.fails, found.urls, found.knows_merges) == (False, 0, True)
    again = preview(mixed, config)
    assert [getattr(again, name) for name in (*STATUSES, "reasons", "examples", "bytes")] == [
        getattr(found, name) for name in (*STATUSES, "reasons", "examples", "bytes")
    ]
    assert again.free_bytes is None


@pytest.mark.parametrize(("share", "fails"), [(0.2, False), (0.08, None), (0.01, True)])
def test_preview_says_whether_too_many_rows_cannot_be_used(mixed: Path, share: float, fails: bool | None) -> None:
    assert preview(mixed, ConvertConfig(keep_duplicates=True, max_bad_share=share)).fails is fails


def test_preview_counts_rows_of_one_image_as_they_will_be_merged(tmp_path: Path, photo: Callable[..., bytes]) -> None:
    for seed in range(400):
        (tmp_path / f"{seed}.jpg").write_bytes(photo(16, 16, seed=seed))
    rows = [{"image": f"{number // 5}.jpg", "caption": f"photo {number % 4}"} for number in range(2000)]
    rows += [{"image": f"gone-{number // 2}.jpg", "caption": f"photo {number}"} for number in range(100)]
    table = jsonl(tmp_path / "t.jsonl", rows)
    found = preview(table, ConvertConfig())
    report = convert(table, tmp_path / "out", ConvertConfig(), engine=threads(2))
    assert [report.accounts[status] for status in STATUSES] == [400, 1200, 400, 0, 100]
    agrees(found, report)
    assert found.merged.sampled > 200
    assert found.duplicate.sampled > 50
    assert 0.9 * report.manifest.bytes < found.bytes.likely < 1.1 * report.manifest.bytes
    assert found.examples[Reason.DUPLICATE_IMAGE].endswith("with no caption that is new")


def test_preview_of_a_small_corpus_is_what_the_conversion_gives(raw_corpus: Path, tmp_path: Path) -> None:
    table = raw_corpus / "captions.jsonl"
    table.write_text(table.read_text() + '{"image": "gone.jpg", "captions": ["x"]}\n')
    first = ConvertConfig(train_tokenizer=300)
    convert(table, tmp_path / "first", first, engine=threads(1))
    config = ConvertConfig(tokenizer=str(tmp_path / "first/tokenizer"), shard_rows=9)
    found = preview(table, config)
    report = convert(table, tmp_path / "out", config, engine=threads(1))
    assert [getattr(found, status) for status in STATUSES] == [
        Estimate(report.accounts[status], *3 * [report.accounts[status]]) for status in STATUSES
    ]
    assert found.reasons == {Reason.MISSING_IMAGE: Estimate(1, 1, 1, 1)}
    assert found.examples == {
        Reason.MISSING_IMAGE: "captions.jsonl, line 41: 'gone.jpg': No such file or directory",
    }
    assert found.bytes.likely == report.manifest.bytes - len(END) * report.manifest.num_shards
    assert found.packing == (report.manifest.num_shards, 0)
    tokens = sorted(Index.open(tmp_path / "out").lists("caption_tokens")[1].tolist())
    assert found.lengths is not None
    assert (found.lengths.captions, found.lengths.longest) == (82, tokens[-1])
    assert (found.lengths.half, found.lengths.most) == (tokens[40], tokens[77])
    assert found.lengths.cut == sum(length > 77 for length in tokens)


def test_preview_reads_images_in_a_table_at_some_places(tmp_path: Path, photo: Callable[..., bytes]) -> None:
    good, rng = photo(16, 16), random.Random(1)
    images = [good[:-200] if rng.random() < 0.1 else good + number.to_bytes(4, "big") for number in range(ROWS)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": [f"photo {n}" for n in range(ROWS)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    config = ConvertConfig(max_bad_share=0.5)
    found = preview(tmp_path / "t.parquet", config)
    assert (found.sample.run, len(found.sample.ranges), found.knows_merges) == (5, 100, False)
    report = convert(tmp_path / "t.parquet", tmp_path / "out", ConvertConfig(max_bad_share=0.5, group_by="none"))
    agrees(found, report)
    assert found.reasons[Reason.CORRUPT_IMAGE].likely > 200


@pytest.mark.parametrize("val_share", [None, 0.3])
def test_preview_of_tars_packs_train_and_val(raw_corpus: Path, tmp_path: Path, val_share: float | None) -> None:
    convert(raw_corpus / "captions.jsonl", tmp_path / "shards", ConvertConfig(shard_rows=16), engine=threads(1))
    config = ConvertConfig(val_share=val_share, shard_rows=30)
    found = preview(tmp_path / "shards", config)
    report = convert(tmp_path / "shards", tmp_path / "out", config, engine=threads(1))
    assert found.written.likely == 40
    assert found.packing.shards == report.manifest.num_shards + (report.val.num_shards if report.val else 0)


def test_preview_of_rows_of_a_program(photo: Callable[..., bytes]) -> None:
    rows = [{"image": photo(16, 16, seed=number), "caption": "x" * number} for number in range(5)]
    found = preview(rows)
    assert (found.written.likely, found.reasons[Reason.EMPTY_CAPTION].likely) == (4, 1)
    assert preview(iter(rows)).written == found.written


def test_preview_leaves_an_output_as_it_is(raw_corpus: Path, tmp_path: Path) -> None:
    convert(raw_corpus / "captions.jsonl", tmp_path / "out", engine=threads(1))
    before = content(tmp_path / "out"), sorted(os.listdir(tmp_path / "out"))
    preview(raw_corpus / "captions.jsonl", ConvertConfig(resize=16), out=tmp_path / "out")
    assert (content(tmp_path / "out"), sorted(os.listdir(tmp_path / "out"))) == before
    with pytest.raises(ConfigError, match="lies inside the source"):
        preview(raw_corpus, out=raw_corpus / "images/out")
    with pytest.raises(DataError, match="no such file or folder"):
        preview(raw_corpus / "no.csv", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def run(*words: Any) -> Any:
    command = [sys.executable, "-m", "mmdata", "convert", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return run_program(command, capture_output=True, text=True, env=environment)


def test_program_prints_what_a_conversion_would_give(mixed: Path, tmp_path: Path) -> None:
    done = run(mixed, tmp_path / "out", "--plan", "keep_duplicates=true", "--max-bad-share", "0.01", "--workers", "1")
    assert (done.returncode, done.stderr) == (0, "")
    found = preview(mixed, ConvertConfig(keep_duplicates=True, max_bad_share=0.01))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["rows", "predicted", "95", "%", "interval", "in", "the", "sample"]
    assert lines[1].split() == ["in", "3,000", "known", "500"]
    written = found.written
    assert (
        lines[2].split() == f"written {written.likely:,} {written.low:,} to {written.high:,} {written.sampled}".split()
    )
    assert lines[3].split() == ["merged", "0", "known", "0"]
    assert lines[10:14] == [
        "the first of each reason in the sample:",
        *(f"  {reason}: {example}" for reason, example in found.examples.items()),
    ]
    assert lines[14] == (
        "sample: 500 of 3,000 rows, spread over all of them; a reason that it does not show may still have up to "
        "23 rows"
    )
    assert [line.partition(":")[0] for line in lines[15:]] == [
        "shards",
        "time",
        "room",
        "nothing would be published",
    ]
    assert list(tmp_path.glob("out*")) == []


def test_program_does_not_pretend_to_predict_merges_and_duplicates(tmp_path: Path, photo: Callable[..., bytes]) -> None:
    images = pa.array([photo(16, 16), photo(16, 16)], pa.binary())
    pq.write_table(pa.table({"image": images, "caption": ["a", "b"]}), tmp_path / "t.parquet")
    done = run(tmp_path / "t.parquet", tmp_path / "out", "--plan")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["written", "2", "known", "2"],
        ["merged", "not", "predicted"],
        ["duplicate", "not", "predicted"],
    ]
    assert lines[7:10] == [
        "sample: all 2 rows, so these are no guesses",
        "duplicates: equal images under different names cannot be predicted from a sample, and count as written here",
        "merged: rows of one image are found by reading all images, and count as written here",
    ]


@pytest.mark.parametrize("flags", [["--part", "1/2"], ["--finish"], ["--overwrite"]])
def test_program_refuses_to_plan_and_do(tmp_path: Path, flags: list[str]) -> None:
    done = run(tmp_path / "t.csv", tmp_path / "out", "--plan", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --plan looks at the whole corpus and writes nothing: leave --part, --finish")
