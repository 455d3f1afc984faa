"""Rows that an earlier conversion left out, tried again. Both folders together hold what an undisturbed one holds."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmdata.convert import ConvertConfig, Report, Retry, convert, convert_part
from mmdata.convert.settle.retry import RETRIED
from mmdata.convert.units.engines import local, threads
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, build_index
from mmdata.index.verify import verify
from tests.convert.conftest import content, jsonl, left_out, tolerant
from tests.loader.member_tars import write_tar
from tests.programs import PATIENCE_S, run_program

COUNTS = ("rows", "written", "merged", "duplicate", "filtered", "quarantined")


def make(source: Any, out: Path, *, retry: Any = None, reasons: Any = "missing_image", **more: Any) -> Report:
    """Convert, or retry one folder or several for one reason or several."""
    folders, reasons = ([one] if isinstance(one, (str, Path)) else one for one in (retry, reasons))
    chosen = Retry(folders, reasons) if retry else None
    engine = more.pop("engine", threads(1))
    return convert(source, out, tolerant(**more), chosen=chosen, engine=engine)


def counts(report: Report) -> dict[str, Any]:
    """The accounts, without what is 0."""
    assert report.accounts["rows"] == sum(report.accounts[name] for name in COUNTS[1:])
    return {name: report.accounts[name] for name in COUNTS if report.accounts[name]}


def members(*folders: Path) -> dict[str, bytes]:
    """All members of all tars, which Python's own reader reads; no name is in two folders."""
    found: dict[str, bytes] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                for member in tar:
                    assert member.name not in found
                    found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
        assert verify(folder) == []
    return found


def keys_of(*folders: Path) -> list[str]:
    return sorted({name.partition(".")[0] for name in members(*folders)})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "__mmdata__/rows").to_pylist()


@pytest.fixture
def photos(photo: Callable[..., bytes]) -> list[bytes]:
    return [photo(20, 30, seed=seed) for seed in range(8)]


@pytest.fixture
def half(tmp_path: Path, photos: list[bytes]) -> Path:
    """A table of 0.jpg to 7.jpg; of odd number, they do not exist. `mend` supplies them."""
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(0, 8, 2):
        (root / f"{number}.jpg").write_bytes(photos[number])
    return jsonl(root / "t.jsonl", [{"image": f"{n}.jpg", "caption": f"photo {n}"} for n in range(8)])


def mend(table: Path, photos: list[bytes]) -> None:
    for number in range(1, 8, 2):
        (table.parent / f"{number}.jpg").write_bytes(photos[number])


@pytest.mark.parametrize("shard_rows", [3, 100])
def test_retry_writes_what_was_supplied_under_the_keys_of_its_rows(
    half: Path, photos: list[bytes], tmp_path: Path, shard_rows: int
) -> None:
    assert counts(make(half, tmp_path / "a", shard_rows=shard_rows)) == {"rows": 8, "written": 4, "quarantined": 4}
    before = content(tmp_path / "a")
    mend(half, photos)
    (half.parent / "5.jpg").unlink()
    report = make(half, tmp_path / "b", retry=tmp_path / "a", shard_rows=shard_rows)
    assert counts(report) == {"rows": 4, "written": 3, "quarantined": 1}
    assert report.accounts["reasons"] == {"missing_image": 1}
    assert content(tmp_path / "a") == before
    assert keys_of(tmp_path / "b") == ["000000001", "000000003", "000000007"]
    assert [(line["row"], line["place"]) for line in left_out(tmp_path / "b")] == [(5, "t.jsonl, line 6")]
    listed = [(row["row"], row["status"], row["key"]) for row in rows_of(tmp_path / "b")]
    written = [(n, "written", f"{n:09}") for n in (1, 3, 7)]
    assert listed == sorted([*written, (5, "quarantined", None)])
    make(half, tmp_path / "whole", shard_rows=shard_rows)
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")
    assert make(half, tmp_path / "b", retry=tmp_path / "a", shard_rows=shard_rows).was_complete


def test_list_of_rows_has_the_hash_of_each_written_image(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a")
    for row in rows_of(tmp_path / "a"):
        expected = None if row["row"] % 2 else hashlib.sha256(photos[row["row"]]).digest()[:16]
        assert row["digest"] == expected


def test_retry_of_a_retry_takes_what_failed_the_last_time(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    (half.parent / "7.jpg").write_bytes(b"")
    make(half, a)
    (half.parent / "1.jpg").write_bytes(photos[1])
    (half.parent / "3.jpg").write_bytes(b"")
    make(half, b, retry=a, shard_rows=2)
    assert [(row["row"], row["reason"]) for row in rows_of(b)] == [
        (1, None),
        (3, "empty_file"),
        (5, "missing_image"),
    ]
    mend(half, photos)
    report = make(half, c, retry=[a, b], reasons=["empty_file"])
    assert counts(report) == {"rows": 2, "written": 2}
    assert keys_of(c) == ["000000003", "000000007"]
    make(half, tmp_path / "d", retry=[a, b, c], reasons=["empty_file", "missing_image"])
    assert keys_of(tmp_path / "d") == ["000000005"]
    make(half, tmp_path / "whole")
    assert members(a, b, c, tmp_path / "d") == members(tmp_path / "whole")
    assert len(Index.open([a, b, c, tmp_path / "d"])) == 8
    with pytest.raises(DataError, match=r"b': is a retry itself; give the folder that it retries before it"):
        make(half, tmp_path / "e", retry=[b])
    with pytest.raises(DataError, match=r"a': is no retry of '.*a', but a conversion of its own"):
        make(half, tmp_path / "e", retry=[a, a])
    with pytest.raises(DataError, match=r"c': retries a folder that is not given before it, or has been changed since"):
        make(half, tmp_path / "e", retry=[a, c])


@pytest.mark.parametrize(
    ("retry", "error", "message"),
    [
        (
            {"reasons": "missing_imag"},
            ConfigError,
            "'missing_imag': no row is left out for it; did you mean 'missing_image'",
        ),
        (
            {"reasons": "xyz"},
            ConfigError,
            "'xyz': no row is left out for it; the reasons are bad_answer, bad_caption, ",
        ),
        ({"reasons": "damaged_shard"}, ConfigError, "'damaged_shard': no row is left out for it"),
        (
            {"reasons": "duplicate_image"},
            ConfigError,
            "'duplicate_image': these rows did not fail; the reasons are bad_",
        ),
        ({"reasons": "filtered"}, ConfigError, "'filtered': these rows did not fail"),
        ({"reasons": []}, ConfigError, r"name with --reason what is tried again; '.*a' left out 4 missing_image$"),
        (
            {"reasons": ["timed_out", "empty_file"]},
            DataError,
            r"nothing to retry: no row is left out as timed_out or empty_file; '.*a' left out 4 missing_image$",
        ),
        (
            {"resize": 8},
            DataError,
            r"a': it was made of another source, or with other settings \(quality: was not set, is 95; ",
        ),
        (
            {"keep": ["path"]},
            DataError,
            r'\(keep: was \[\], is \["path"\]\); give the same ones again, but for allow',
        ),
    ],
)
def test_retry_that_cannot_be_is_an_error(
    half: Path, tmp_path: Path, retry: dict[str, Any], error: type[Exception], message: str
) -> None:
    make(half, tmp_path / "a")
    with pytest.raises(error, match=message):
        make(half, tmp_path / "b", retry=tmp_path / "a", **retry)
    assert not (tmp_path / "b/__mmdata__").exists()


def test_retry_of_another_table_is_an_error(half: Path, tmp_path: Path) -> None:
    make(half, tmp_path / "a")
    half.write_text(half.read_text().replace("photo 3", "photo three"))
    with pytest.raises(DataError, match=r"other settings \(the file 't.jsonl' has changed\); give the same"):
        make(half, tmp_path / "b", retry=tmp_path / "a")


def test_retry_needs_the_folder_of_a_whole_conversion(half: Path, tmp_path: Path) -> None:
    make(half, tmp_path / "a", val_share=0.5)
    with pytest.raises(DataError, match=r"a/train': is one of two parts of a conversion; give '.*a'"):
        make(half, tmp_path / "b", retry=tmp_path / "a/train", val_share=0.5)
    with pytest.raises(DataError, match="no such folder"):
        make(half, tmp_path / "b", retry=tmp_path / "none")
    with pytest.raises(ConfigError, match="retry: no folder"):
        Retry([], ["missing_image"])
    make(half, tmp_path / "c")
    for place in ("", "inside", "..", "../corpus/../c"):
        with pytest.raises(ConfigError, match=r"is, holds or lies in '.*c', which is retried and stays as it is"):
            make(half, tmp_path / "c" / place, retry=tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "indexed")
    shutil.rmtree(tmp_path / "indexed/__mmdata__")
    build_index(tmp_path / "indexed")
    with pytest.raises(DataError, match=r"indexed': its manifest has no accounts of a conversion"):
        make(half, tmp_path / "b", retry=tmp_path / "indexed")


def test_retry_needs_the_list_of_rows_whole(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a")
    mend(half, photos)
    path = tmp_path / "a/__mmdata__/rows/00000.parquet"
    whole, table = path.read_bytes(), pq.read_table(path)

    def expect(message: str) -> None:
        with pytest.raises(DataError, match=message):
            make(half, tmp_path / "b", retry=tmp_path / "a")

    path.write_bytes(whole[:-9])
    expect(r"00000.parquet': not a list of rows that is whole \(.*\); convert anew")
    pq.write_table(table.drop_columns(["digest"]), path)
    expect(r"00000.parquet': not a list of rows that is whole \(.*digest.*\); convert anew")
    pq.write_table(table.slice(0, 7), path)
    expect(r"rows/ lists 7 of 8 rows; was it left out of a copy")
    reasons = pa.array([None, *table["reason"].to_pylist()[1:-1], None], pa.string())
    pq.write_table(table.set_column(2, "reason", reasons), path)
    expect("its list of rows and its manifest differ; convert anew")
    path.unlink()
    expect(r"rows/ lists 0 of 8 rows; was it left out of a copy\? Copy it too, or convert anew")


def test_settings_that_do_not_decide_what_is_stored_may_change(half: Path, tmp_path: Path, photo: Any) -> None:
    (half.parent / "1.jpg").write_bytes(photo(40, 400, seed=50))
    (half.parent / "3.jpg").write_bytes(photo(40, 400, seed=51))
    assert make(half, tmp_path / "a", max_aspect=5).accounts["reasons"] == {"extreme_aspect": 2, "missing_image": 2}
    more = {"max_aspect": 10, "shard_rows": 1, "max_bad_share": 0.0, "images": str(half.parent.resolve())}
    report = make(half, tmp_path / "b", retry=tmp_path / "a", reasons=["extreme_aspect"], **more)
    assert (counts(report), report.manifest.num_shards) == ({"rows": 2, "written": 2}, 2)


def test_rows_that_all_fail_again_publish_nothing_and_some_do(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    config = ConvertConfig(max_bad_share=0.5)
    convert(half, tmp_path / "a", config)
    chosen = Retry([tmp_path / "a"], ["missing_image"])
    with pytest.raises(DataError, match="none of 4 rows could be written; nothing is published"):
        convert(half, tmp_path / "b", config, chosen=chosen)
    (half.parent / "1.jpg").write_bytes(photos[1])
    assert counts(convert(half, tmp_path / "b", config, chosen=chosen)) == {"rows": 4, "written": 1, "quarantined": 3}


@pytest.mark.parametrize("resize", [None, 8])
def test_images_of_the_earlier_folder_are_duplicates(
    half: Path, photos: list[bytes], tmp_path: Path, resize: int | None
) -> None:
    """Row 1 has the image of row 4, which the earlier folder has; 3 and 5 have one of their own."""
    make(half, tmp_path / "a", resize=resize)
    for number, image in ((1, photos[4]), (3, photos[3]), (5, photos[3]), (7, photos[4])):
        (half.parent / f"{number}.jpg").write_bytes(image)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", resize=resize)
    assert counts(report) == {"rows": 4, "written": 1, "duplicate": 3}
    assert keys_of(tmp_path / "b") == ["000000003"]
    earlier = "the image of row 4 again, byte for byte, which an earlier folder has"
    own = "the image of row 3 again, byte for byte, with other captions or another label"
    assert [(line["row"], line["detail"]) for line in left_out(tmp_path / "b")] == [
        (1, earlier),
        (5, own),
        (7, earlier),
    ]


def test_duplicates_are_written_where_they_are_kept(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a", keep_duplicates=True)
    (half.parent / "1.jpg").write_bytes(photos[4])
    report = make(half, tmp_path / "b", retry=tmp_path / "a", keep_duplicates=True)
    assert counts(report) == {"rows": 4, "written": 1, "quarantined": 3}


def test_names_of_classes_have_the_numbers_of_the_earlier_folder(
    half: Path, photos: list[bytes], tmp_path: Path
) -> None:
    labels = ["cat", "emu", "dog", "dog", "cat", 0, "dog", "ant"]
    jsonl(half, [{"image": f"{n}.jpg", "caption": f"photo {n}", "label": label} for n, label in enumerate(labels)])
    assert make(half, tmp_path / "a").accounts["classes"] == ["cat", "dog"]
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", shard_rows=2)
    assert report.accounts["classes"] == ["cat", "dog", "emu", "0", "ant"]
    assert Index.open(tmp_path / "b").column("label").tolist() == [2, 1, 3, 4]
    union = Index.open([tmp_path / "a", tmp_path / "b"])
    assert union.class_names == ["cat", "dog", "emu", "0", "ant"]
    by_key = dict(zip(union.keys(range(8)), union.column("label").tolist(), strict=True))
    assert [union.class_names[by_key[f"{n:09}"]] for n in range(8)] == [str(label) for label in labels]


def test_names_among_numbers_are_broken_rows_as_in_an_undisturbed_conversion(
    half: Path, photos: list[bytes], tmp_path: Path
) -> None:
    labels = [3, "cat", 1, 7, 1, None, 1, "dog"]
    jsonl(half, [{"image": f"{n}.jpg", "caption": f"photo {n}", "label": label} for n, label in enumerate(labels)])
    make(half, tmp_path / "a", label_column="label")
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", shard_rows=2, label_column="label")
    assert (report.accounts["reasons"], "classes" in report.accounts) == ({"broken_row": 2}, False)
    make(half, tmp_path / "whole", label_column="label")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")


def test_class_of_a_number_is_no_caption_of_a_name(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    """The earlier folder's names are for numbering: a template does not see them, as it did not before."""
    rows = [{"image": f"{n}.jpg", "label": ["cat", 0][n % 2]} for n in range(8)]
    jsonl(half, rows)
    make(half, tmp_path / "a", caption_templates=["a {}."])
    mend(half, photos)
    with pytest.raises(DataError, match="class 0 has no name to put into a caption template"):
        make(half, tmp_path / "b", retry=tmp_path / "a", reasons="missing_caption", caption_templates=["a {}."])


@pytest.mark.parametrize("train", [False, True])
def test_parts_of_a_retry_are_those_of_an_undisturbed_conversion(
    half: Path, photos: list[bytes], tmp_path: Path, train: bool
) -> None:
    more = {"val_share": 0.5, **({"train_tokenizer": 300} if train else {})}
    first = make(half, tmp_path / "a", **more)
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", **more)
    assert counts(report) == {"rows": 4, "written": 4}
    assert report.manifest.tokenizer == first.manifest.tokenizer
    assert not (tmp_path / "b/train/tokenizer").exists()
    make(half, tmp_path / "whole", **more)
    for part in ("train", "val"):
        assert members(tmp_path / "a" / part, tmp_path / "b" / part) == members(tmp_path / "whole" / part)
    if train:
        Index.open([tmp_path / "a/train", tmp_path / "b/train"])
        given = {"val_share": 0.5, "tokenizer": str(tmp_path / "a/train/tokenizer")}
        assert make(half, tmp_path / "b", retry=tmp_path / "a", **given).was_complete
        with pytest.raises(DataError, match=r"tokenizer: was given, is not set; train_tokenizer: was not set, is 301"):
            make(half, tmp_path / "c", retry=tmp_path / "a", val_share=0.5, train_tokenizer=301)
        with pytest.raises(DataError, match=r"val_share: was 0.5, is 0.4"):
            make(half, tmp_path / "c", retry=tmp_path / "a", **{**given, "val_share": 0.4})


def test_rows_of_one_image_are_merged_in_the_retry(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    images = [0, 1, 2, 1, 1, 0, 1, 3]
    captions = ["a", "b", "c", "d", "", "e", "b", "f"]
    jsonl(half, [{"image": f"{i}.jpg", "caption": c} for i, c in zip(images, captions, strict=True)])
    first = make(half, tmp_path / "a", shard_rows=2)
    assert counts(first) == {"rows": 8, "written": 2, "merged": 1, "quarantined": 5}
    assert first.accounts["reasons"] == {"empty_caption": 1, "missing_image": 4}
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", shard_rows=2)
    assert counts(report) == {"rows": 4, "written": 2, "merged": 1, "duplicate": 1}
    assert left_out(tmp_path / "b")[0] | {"path": ""} == {
        "row": 6,
        "place": "t.jsonl, line 7",
        "path": "",
        "reason": "duplicate_image",
        "detail": "the image of row 1 again, with no caption that is new",
    }
    make(half, tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")
    assert json.loads(members(tmp_path / "b")["000000001.json"])["captions"] == ["b", "d"]


def test_boxes_of_rows_that_are_not_retried_are_blurred_too(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    """Row 3 names the image of row 1 and has no caption: it is left out for that, and not tried again."""
    images, boxes = [0, 1, 2, 1], [[], [[0, 0, 0.5, 0.5]], [], [[0.5, 0.5, 1, 1]]]
    rows = [
        {"image": f"{i}.jpg", "caption": "x" * (n < 3), "faces": b}
        for n, (i, b) in enumerate(zip(images, boxes, strict=True))
    ]
    jsonl(half, rows)
    make(half, tmp_path / "a", blur_boxes="faces")
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", blur_boxes="faces")
    assert counts(report) == {"rows": 1, "written": 1}
    make(half, tmp_path / "whole", blur_boxes="faces")
    found = members(tmp_path / "a", tmp_path / "b")
    assert found == members(tmp_path / "whole")
    assert json.loads(found["000000001.json"])["blurred"] == 2


def test_rows_that_stay_merged_into_a_written_one_fail_again(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    rows = [{"image": "0.jpg", "caption": c * 60_000} for c in "abcdefghi"]
    jsonl(half, [{"image": "none.jpg", "caption": "x"}, *rows, {"image": "1.jpg", "caption": "x"}])
    assert make(half, tmp_path / "a").accounts["reasons"] == {"caption_too_long": 1, "missing_image": 2}
    mend(half, photos)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", reasons=["caption_too_long", "missing_image"])
    assert counts(report) == {"rows": 3, "written": 1, "quarantined": 2}
    found = [(line["row"], line["reason"]) for line in left_out(tmp_path / "b")]
    assert found == [(0, "missing_image"), (9, "caption_too_long")]


def test_rows_grouped_by_content_are_merged_among_themselves(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a", group_by="content")
    for number, image in ((1, photos[0]), (3, photos[3]), (5, photos[0]), (7, photos[3])):
        (half.parent / f"{number}.jpg").write_bytes(image)
    report = make(half, tmp_path / "b", retry=tmp_path / "a", group_by="content", shard_rows=2)
    assert counts(report) == {"rows": 4, "written": 1, "merged": 1, "duplicate": 2}
    assert json.loads(members(tmp_path / "b")["000000003.json"])["captions"] == ["photo 3", "photo 7"]


@pytest.mark.parametrize("engine", [threads(2), local(2)])
def test_images_in_a_table_are_retried(tmp_path: Path, photo: Any, engine: Any) -> None:
    images = [photo(20, 20 + 3 * (n * 5 % 8), seed=n) for n in range(8)]
    table = pa.table({"image": images, "caption": [f"photo {n}" for n in range(8)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    first = make(tmp_path / "t.parquet", tmp_path / "a", max_pixels=20 * 30)
    assert counts(first) == {"rows": 8, "written": 4, "quarantined": 4}
    assert keys_of(tmp_path / "a") == [f"{n:09}" for n in (0, 2, 5, 7)]
    again = {"retry": tmp_path / "a", "reasons": "image_too_large", "engine": engine}
    assert counts(make(tmp_path / "t.parquet", tmp_path / "b", **again, shard_rows=2)) == {"rows": 4, "written": 4}
    make(tmp_path / "t.parquet", tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")


def test_samples_of_tars_are_retried_under_their_own_keys(tmp_path: Path, photo: Any) -> None:
    samples = {f"s{n}": {"jpg": photo(20, 20 + n, seed=n), "txt": f"photo {n}".encode()} for n in range(6)}
    write_tar(tmp_path / "tars/0.tar", samples)
    first = make(tmp_path / "tars", tmp_path / "a", max_pixels=450)
    assert first.accounts["reasons"] == {"image_too_large": 3}
    make(tmp_path / "tars", tmp_path / "b", retry=tmp_path / "a", reasons="image_too_large")
    assert keys_of(tmp_path / "b") == ["s3", "s4", "s5"]
    make(tmp_path / "tars", tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")


def test_rows_of_a_program_keep_the_keys_that_it_gave(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    rows = [
        {"image": str(half.parent / f"{n}.jpg"), "caption": "x", **({"key": f"k{n}"} if n < 4 else {})}
        for n in range(8)
    ]
    make(rows, tmp_path / "a")
    mend(half, photos)
    make(rows, tmp_path / "b", retry=tmp_path / "a")
    assert keys_of(tmp_path / "b") == ["000000005", "000000007", "k1", "k3"]
    make(rows, tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")


def test_parts_of_jobs_give_the_bytes_of_one(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a")
    mend(half, photos)
    make(half, tmp_path / "one", retry=tmp_path / "a", shard_rows=1)
    config, chosen = tolerant(shard_rows=1), Retry([tmp_path / "a"], ["missing_image"])
    made = [
        convert_part(half, tmp_path / "b", config, part=(k, 3), chosen=chosen, engine=threads(1)) for k in (1, 2, 3)
    ]
    assert [part.rows for part in made] == [2, 1, 1]
    assert not convert(half, tmp_path / "b", config, chosen=chosen, finish=True).was_complete
    assert content(tmp_path / "b") == content(tmp_path / "one")


@pytest.fixture(scope="module")
def pictures(photo: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 0.jpg to 5.jpg."""
    root = tmp_path_factory.mktemp("pictures")
    for seed in range(6):
        (root / f"{seed}.jpg").write_bytes(photo(8, 8, seed=seed))
    return root


ROW = st.tuples(
    st.integers(0, 5), st.sampled_from(["one", "two", "three", ""]), st.sampled_from([None, "cat", "dog", "emu"])
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.lists(ROW, min_size=2, max_size=12),
    late=st.sets(st.integers(0, 5)),
    later=st.sets(st.integers(0, 5)),
    size=st.integers(1, 5),
)
def test_all_folders_together_hold_what_an_undisturbed_conversion_holds(
    pictures: Path, rows: list[Any], late: set[int], later: set[int], size: int
) -> None:
    """Of six images some come late and some of these later still; captions are merged, labels are names."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        table = jsonl(root / "t.jsonl", [{"image": f"{i}.jpg", "caption": c, "label": name} for i, c, name in rows])
        folders: list[Path] = []
        total = 0
        for number, there in enumerate((set(range(6)) - late, late - later, late & later)):
            for image in there:
                shutil.copy(pictures / f"{image}.jpg", root)
            used = {image for image, caption, _ in rows if caption and image in there}
            if not used and not folders:
                return
            if used:
                report = make(table, root / str(number), retry=folders, shard_rows=size, max_bad_share=1.0)
                folders.append(root / str(number))
                total += sum(report.accounts[name] for name in ("written", "merged", "duplicate"))
        whole = make(table, root / "whole", max_bad_share=1.0)
        assert total == sum(whole.accounts[name] for name in ("written", "merged", "duplicate"))
        assert _said(folders) == _said([root / "whole"])


def _said(folders: list[Path]) -> dict[str, Any]:
    """Image, captions and the label's name of each sample."""
    index, found = Index.open(folders), members(*folders)
    names = [*(index.class_names or []), None]
    labels = dict(zip(index.keys(range(len(index))), index.column("label").tolist(), strict=True))
    return {
        key: (
            hashlib.sha256(found[f"{key}.jpg"]).hexdigest()[:8],
            json.loads(found.get(f"{key}.json", b"{}")).get("captions"),
            found[f"{key}.txt"],
            names[label],
        )
        for key, label in labels.items()
    }


def test_program_retries_and_says_how_to_train_on_both(half: Path, photos: list[bytes], tmp_path: Path) -> None:
    make(half, tmp_path / "a")
    mend(half, photos)

    def run(*flags: str) -> Any:
        command = [sys.executable, "-m", "mmdata", "convert", str(half), "b", *flags]
        return run_program(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    done = run("--reason", "missing_image")
    assert done.stderr.startswith("error: --reason says which rows of an earlier conversion are tried again")
    done = run("--retry", "a")
    assert done.stderr == "error: retry: name with --reason what is tried again; 'a' left out 4 missing_image\n"
    done = run("--retry", "a", "--reason", "missing_image")
    assert (done.returncode, done.stderr) == (0, "")
    assert "to train on all of them, set data.shards: [{shards: a}, {shards: b}]\n" in done.stdout
    assert keys_of(tmp_path / "b") == ["000000001", "000000003", "000000005", "000000007"]


def test_reasons_are_those_that_the_documentation_lists() -> None:
    text = (Path(__file__).parents[2] / "docs/convert.md").read_text()
    assert [reason for reason in RETRIED if f"`{reason}`" not in text] == []
