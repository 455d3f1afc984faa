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
from mmdata.convert.preview import STATUSES
from mmdata.convert.preview_lines import preview_lines, preview_table
from mmdata.convert.sampling import Estimate
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError, Reason
from tests.convert.conftest import content, jsonl
from tests.programs import run_program

ROWS = 3000


@pytest.fixture
def mixed(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """A table of 3,000 rows, of which about 4 % name no image, 2 % have no caption and 1 % an image cut short."""
    root, rng = tmp_path / "mixed", random.Random(6)
    root.mkdir()
    good, cut = photo(16, 30), photo(40, 40)[:-300]
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        kind = rng.random()
        if kind >= 0.04:
            (root / f"{number}.jpg").write_bytes((cut if kind > 0.99 else good) + number.to_bytes(4, "big"))
        rows.append({"image": f"{number}.jpg", "caption": "" if 0.04 <= kind < 0.06 else f"photo {number}"})
    return jsonl(root / "t.jsonl", rows)


def agrees(found: Preview, report: Report) -> None:
    """The truth lies in every interval."""
    for status, interval in found.statuses.items():
        assert interval.low <= report.accounts[status] <= interval.high, status
    assert {reason: count for reason, count in report.accounts["reasons"].items() if count > 60}.keys() <= {
        str(reason) for reason in found.reasons
    }
    for reason, interval in found.reasons.items():
        assert interval.low <= report.accounts["reasons"][str(reason)] <= interval.high, reason


def test_preview_intervals_hold_what_the_conversion_gives(mixed: Path, tmp_path: Path) -> None:
    config = ConvertConfig(max_bad_share=0.5, shard_rows=700)
    found = preview(mixed, config, out=tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    report = convert(mixed, tmp_path / "out", config, engine=threads(2))
    agrees(found, report)
    assert (found.sample.rows, found.sample.size, found.sample.urls, found.sample.knows_merges) == (ROWS, 500, 0, True)
    assert set(found.reasons) == {Reason.MISSING_IMAGE, Reason.EMPTY_CAPTION, Reason.CORRUPT_IMAGE}
    assert 0.9 * report.manifest.bytes < found.bytes < 1.1 * report.manifest.bytes
    assert found.shards == report.manifest.num_shards
    assert found.cpu_s > 0
    assert found.seconds == pytest.approx(found.cpu_s * ROWS)
    again = preview(mixed, config)
    assert [getattr(again, name) for name in ("statuses", "reasons", "examples", "bytes")] == [
        getattr(found, name) for name in ("statuses", "reasons", "examples", "bytes")
    ]


@pytest.mark.parametrize(
    ("share", "line"),
    [(0.2, None), (0.08, "nothing may be published: perhaps more than 8 %"), (0.01, "nothing would be published: m")],
)
def test_preview_says_whether_too_many_rows_cannot_be_used(mixed: Path, share: float, line: str | None) -> None:
    lines = preview_lines(preview(mixed, ConvertConfig(max_bad_share=share)))
    assert [found.startswith(line or "") for found in lines if found.startswith("nothing")] == [True] * bool(line)


def test_preview_counts_rows_of_one_image_as_they_will_be_merged(tmp_path: Path, photo: Callable[..., bytes]) -> None:
    for seed in range(400):
        (tmp_path / f"{seed}.jpg").write_bytes(photo(16, 16, seed=seed))
    rows = [{"image": f"{number % 400}.jpg", "caption": f"photo {number // 400 % 4}"} for number in range(2000)]
    rows += [{"image": f"gone-{number // 2}.jpg", "caption": f"photo {number}"} for number in range(100)]
    table = jsonl(tmp_path / "t.jsonl", rows)
    found = preview(table, ConvertConfig())
    report = convert(table, tmp_path / "out", ConvertConfig(), engine=threads(2))
    assert [report.accounts[status] for status in STATUSES] == [400, 1200, 400, 0, 100]
    agrees(found, report)
    assert found.statuses["merged"].sampled > 200
    assert 0.85 * report.manifest.bytes < found.bytes < 1.15 * report.manifest.bytes
    assert found.examples[Reason.DUPLICATE_IMAGE].endswith("with no caption that is new")


def test_preview_of_a_small_corpus_is_what_the_conversion_gives(raw_corpus: Path, tmp_path: Path) -> None:
    table = raw_corpus / "captions.jsonl"
    table.write_text(table.read_text() + '{"image": "gone.jpg", "captions": ["x"]}\n')
    config = ConvertConfig(shard_rows=9, train_tokenizer=300)
    found = preview(table, config)
    report = convert(table, tmp_path / "out", config, engine=threads(1))
    assert found.statuses == {
        status: Estimate(report.accounts[status], *3 * [report.accounts[status]]) for status in STATUSES
    }
    assert found.reasons == {Reason.MISSING_IMAGE: Estimate(1, 1, 1, 1)}
    assert found.examples == {
        Reason.MISSING_IMAGE: "captions.jsonl, line 41: 'gone.jpg': No such file or directory",
    }
    assert (found.bytes, found.shards) == (report.manifest.bytes, report.manifest.num_shards)
    assert preview(table, config, rows=[0, 2, 40]).statuses["written"] == Estimate(2, 2, 2, 2)
    convert(table, tmp_path / "before", rows=[0, 1])
    for before in (tmp_path / "before", [tmp_path / "before"]):
        assert preview(table, config, not_in=before).statuses["duplicate"] == Estimate(2, 2, 2, 2)
    with pytest.raises(ConfigError, match=r"not_in .*before': is the output as well"):
        preview(table, config, not_in=tmp_path / "before", out=tmp_path / "before")


def test_preview_reads_images_in_a_table_at_some_places(tmp_path: Path, photo: Callable[..., bytes]) -> None:
    good, rng = photo(16, 16), random.Random(1)
    images = [good[:-200] if rng.random() < 0.1 else good + number.to_bytes(4, "big") for number in range(ROWS)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": [f"photo {n}" for n in range(ROWS)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    config = ConvertConfig(max_bad_share=0.5, group_by="none", keep_duplicates=True)
    found = preview(tmp_path / "t.parquet", config)
    assert (found.sample.size, found.sample.independent, found.sample.urls) == (500, 100, None)
    agrees(found, convert(tmp_path / "t.parquet", tmp_path / "out", config))
    assert found.reasons[Reason.CORRUPT_IMAGE].likely > 200
    said = preview_lines(preview(tmp_path / "t.parquet", config.model_copy(update={"group_by": "image"})))
    assert "merged: rows of one image are seldom all in this sample; there may be more" in said


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, ["at most", "at least", "at least"]),
        ({"group_by": "none"}, ["at most", "to", "at least"]),
        ({"keep_duplicates": True}, ["at most", "at least", "at least"]),
        ({"group_by": "none", "keep_duplicates": True}, ["to", "to", "to"]),
    ],
)
def test_program_gives_no_interval_for_what_a_sample_cannot_show(
    tmp_path: Path, photo: Callable[..., bytes], settings: dict[str, Any], bounds: list[str]
) -> None:
    good = photo(16, 16)
    images = [good + (number // 2).to_bytes(4, "big") for number in range(1000)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": [f"photo {n}" for n in range(1000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    found = preview(tmp_path / "t.parquet", ConvertConfig(**{"group_by": "image", **settings}))
    cells = list(preview_table(found).columns[2].cells)[1:4]
    assert [next(bound for bound in ("at most", "at least", "to") if bound in cell) for cell in cells] == bounds


@pytest.mark.parametrize("val_share", [None, 0.3])
def test_preview_of_tars_counts_the_shards_of_train_and_val(
    raw_corpus: Path, tmp_path: Path, val_share: float | None
) -> None:
    convert(raw_corpus / "captions.jsonl", tmp_path / "shards", ConvertConfig(shard_rows=16), engine=threads(1))
    config = ConvertConfig(val_share=val_share, shard_rows=30)
    found = preview(tmp_path / "shards", config)
    report = convert(tmp_path / "shards", tmp_path / "out", config, engine=threads(1))
    assert found.statuses["written"].likely == 40
    assert found.shards == report.manifest.num_shards + (report.val.num_shards if report.val else 0)


def test_preview_of_rows_of_a_program(photo: Callable[..., bytes]) -> None:
    rows = [{"image": photo(16, 16, seed=number), "caption": "x" * number} for number in range(5)]
    found = preview(rows)
    assert (found.statuses["written"].likely, found.reasons[Reason.EMPTY_CAPTION].likely) == (4, 1)
    assert preview(iter(rows)).statuses == found.statuses


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


def test_preview_of_rows_none_of_which_can_be_written_says_why(tmp_path: Path) -> None:
    table = jsonl(tmp_path / "t.jsonl", [{"image": f"gone{n}.jpg", "caption": "a photo"} for n in range(3)])
    found = preview(table)
    assert (found.statuses["written"].likely, found.shards, found.bytes) == (0, 0, 0)
    assert found.reasons == {Reason.MISSING_IMAGE: Estimate(3, 3, 3, 3)}
    assert found.examples == {Reason.MISSING_IMAGE: "t.jsonl, line 1: 'gone0.jpg': No such file or directory"}
    verdict, too_many = preview_lines(found)[-2:]
    assert verdict.startswith("nothing would be published of this sample: none of 3 rows could be written; nothing is")
    assert "name the folder that they are relative to with --images FOLDER" in verdict
    assert too_many.startswith("nothing would be published: more than 5 % of the rows cannot be used")
    done = run(table, tmp_path / "out", "--plan")
    assert (done.returncode, done.stderr) == (1, "")
    assert verdict in done.stdout


@pytest.mark.parametrize(("val_share", "part"), [(1e-9, "validation"), (1 - 1e-9, "training")])
def test_preview_says_that_a_part_would_be_empty(raw_corpus: Path, tmp_path: Path, val_share: float, part: str) -> None:
    done = run(raw_corpus / "captions.jsonl", tmp_path / "out", "--plan", "--val-share", str(val_share))
    with pytest.raises(DataError, match=rf"val_share {val_share} of \d+ samples leaves none for {part}; ") as caught:
        convert(raw_corpus / "captions.jsonl", tmp_path / "out", {"val_share": val_share}, engine=threads(1))
    assert done.returncode == 1, done.stderr
    assert f"nothing would be published of this sample: {caught.value}" in done.stdout


def run(*words: Any) -> Any:
    command = [sys.executable, "-m", "mmdata", "convert", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return run_program(command, capture_output=True, text=True, env=environment)


def test_program_prints_what_a_conversion_would_give(mixed: Path, tmp_path: Path) -> None:
    allowed = run(mixed, tmp_path / "out", "--plan", "--max-bad-share", "0.5", "--workers", "1")
    done = run(mixed, tmp_path / "out", "--plan", "--max-bad-share", "0.01", "--workers", "1")
    assert (allowed.returncode, done.returncode, done.stderr) == (0, 1, "")
    found = preview(mixed, ConvertConfig(max_bad_share=0.01))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["rows", "predicted", "95", "%", "interval", "in", "the", "sample"]
    assert lines[1].split() == ["in", "3,000", "known", "500"]
    written = found.statuses["written"]
    assert lines[2].split() == f"written {written.likely:,} at most {written.high:,} {written.sampled}".split()
    assert lines[3].split() == ["merged", "0", "0", "to", "23", "0"]
    assert lines[4].split() == ["duplicate", "0", "at", "least", "0", "0"]
    assert lines[10:14] == [
        "the first of each reason in the sample:",
        *(f"  {reason}: {example}" for reason, example in found.examples.items()),
    ]
    assert lines[14:16] == [
        "sample: 500 of 3,000 rows, spread over all of them; a reason that it does not show may still have up to "
        "23 rows",
        "duplicates: equal images under different names are seldom both in a sample; there may be more",
    ]
    assert [line.partition(":")[0] for line in lines[16:]] == ["shards", "time", "nothing would be published"]
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize("flags", [["--part", "1/2"], ["--finish"], ["--overwrite"]])
def test_program_refuses_to_plan_and_do(tmp_path: Path, flags: list[str]) -> None:
    done = run(tmp_path / "t.csv", tmp_path / "out", "--plan", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --plan looks at the whole corpus and writes nothing: leave --part, --finish")
