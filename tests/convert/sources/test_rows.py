"""Some rows of a source (`rows`), and no image that another folder has (`not_in`): of failed rows tried again, too."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import ConvertConfig, Report, convert, convert_part
from mmdata.convert.settle.not_in import WrittenImages
from mmdata.convert.units.engines import local, threads
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, Manifest, build_index
from mmdata.index.verify import verify
from tests.convert.conftest import content, jsonl, left_out, tolerant
from tests.convert.conftest import members as members_of
from tests.convert.fetch.sites import Answer, Site
from tests.loader.member_tars import write_tar
from tests.programs import PATIENCE_S, run_program

COUNTS = ("rows", "written", "merged", "duplicate", "filtered", "quarantined")


def make(source: Any, out: Path, rows: Any = None, not_in: Any = (), *, workers: int = 1, **settings: Any) -> Report:
    engine = local(workers) if workers > 1 else threads(1)
    return convert(source, out, tolerant(**settings), rows=rows, not_in=not_in, engine=engine)


def counts(report: Report) -> dict[str, Any]:
    """The accounts, without what is 0."""
    assert report.accounts["rows"] == sum(report.accounts[name] for name in COUNTS[1:])
    return {name: report.accounts[name] for name in COUNTS if report.accounts[name]}


def members(*folders: Path) -> dict[str, bytes]:
    """All members of all tars, of which `verify` finds nothing wrong."""
    assert all(verify(folder) == [] for folder in folders)
    return members_of(*folders)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "__mmdata__/rows").to_pylist()


def numbers_in(path: Path, *numbers: int) -> Path:
    path.write_text("".join(f"{number}\n" for number in numbers))
    return path


@pytest.fixture
def photos(photo: Callable[..., bytes]) -> list[bytes]:
    return [photo(20, 30, seed=seed) for seed in range(8)]


@pytest.fixture
def table(tmp_path: Path, photos: list[bytes]) -> Path:
    """Rows 0 to 7 name 0.jpg to 7.jpg; rows 8 and 9 name 1.jpg again, row 9 with no caption that is new."""
    (tmp_path / "corpus").mkdir()
    for number, data in enumerate(photos):
        (tmp_path / f"corpus/{number}.jpg").write_bytes(data)
    names = [*range(8), 1, 1]
    rows = [{"image": f"{name}.jpg", "caption": f"photo {8 if n == 9 else n}"} for n, name in enumerate(names)]
    return jsonl(tmp_path / "corpus/t.jsonl", rows)


def in_parquet(table: Path, photos: list[bytes]) -> Path:
    """The rows of a table with their images in it, in small row groups."""
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    found = [{**row, "image": photos[int(row["image"][0])]} for row in rows]
    pq.write_table(pa.Table.from_pylist(found), table.with_suffix(".parquet"), row_group_size=2)
    return table.with_suffix(".parquet")


@pytest.mark.parametrize("kind", ["paths", "images", "program"])
@pytest.mark.parametrize("shard_rows", [2, 100])
def test_chosen_rows_keep_their_keys_and_no_other_is_read(
    table: Path, photos: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shard_rows: int
) -> None:
    monkeypatch.setattr("mmdata.convert.sources.chosen.NEAR", 1)
    source: Any = in_parquet(table, photos) if kind == "images" else table
    if kind == "program":
        source = [{"image": str(table.parent / f"{n}.jpg"), "caption": f"photo {n}"} for n in range(8)]
    make(source, tmp_path / "whole", shard_rows=shard_rows)
    for number in (0, 2, 3, 4):
        (table.parent / f"{number}.jpg").unlink()
    report = make(source, tmp_path / "out", numbers_in(tmp_path / "rows.txt", 7, 1, 5), shard_rows=shard_rows)
    assert counts(report) == {"rows": 3, "written": 3}
    assert [(row["row"], row["key"]) for row in rows_of(tmp_path / "out")] == [(n, f"{n:09}") for n in (1, 5, 7)]
    whole = members(tmp_path / "whole")
    assert members(tmp_path / "out").items() >= {name: whole[name] for name in whole if name[8] in "57"}.items()
    assert make(source, tmp_path / "out", [1, 5, 7, 7], shard_rows=shard_rows).was_complete


def test_messages_have_the_numbers_of_the_whole_source(table: Path, photos: list[bytes], tmp_path: Path) -> None:
    (table.parent / "7.jpg").write_bytes(photos[6])
    make(table, tmp_path / "out", [1, 6, 7, 8, 9])
    assert [(line["row"], line["place"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        (7, "t.jsonl, line 8", "the image of row 6 again, byte for byte, with other captions or another label"),
        (9, "t.jsonl, line 10", "the image of row 1 again, with no caption that is new"),
    ]
    assert [row["detail"] for row in rows_of(tmp_path / "out") if row["row"] == 8] == ["merged into row 1"]


def test_class_has_one_number_whichever_rows_are_chosen(table: Path, tmp_path: Path) -> None:
    labels = ["cat", "dog", "cat", "owl"]
    rows = [{"image": f"{number}.jpg", "label": label} for number, label in enumerate(labels)]
    named = jsonl(table.parent / "named.jsonl", rows)
    make(named, tmp_path / "a", [0, 1])
    make(named, tmp_path / "b", [2, 3], [tmp_path / "a"])
    make(named, tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == members(tmp_path / "whole")
    assert Index.open([tmp_path / "a", tmp_path / "b"]).class_names == ["cat", "dog", "owl"]


def test_any_workers_and_parts_give_the_same_bytes(table: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"rows": [0, 1, 3, 4, 6, 8], "not_in": [tmp_path / "before"]}
    make(table, tmp_path / "before", [3, 4, 5])
    make(table, tmp_path / "out", **chosen, shard_rows=2)
    make(table, tmp_path / "processes", **chosen, shard_rows=2, workers=2)
    for part in (2, 1):
        convert_part(table, tmp_path / "parts", tolerant(shard_rows=2), part=(part, 2), **chosen, engine=threads(1))
    convert(table, tmp_path / "parts", tolerant(shard_rows=2), finish=True, **chosen)
    assert content(tmp_path / "out") == content(tmp_path / "processes") == content(tmp_path / "parts")


def test_images_of_other_folders_are_left_out_whatever_they_are_called(
    table: Path, photos: list[bytes], tmp_path: Path
) -> None:
    make(table, tmp_path / "a", [0, 1], resize=10)  # the original decides, not what was stored of it
    make(table, tmp_path / "b", [2, 3, 4], val_share=0.4)
    before = content(tmp_path / "a")
    (table.parent / "copy.jpg").write_bytes(photos[0])
    rows = [{"image": f"{name}.jpg", "caption": "new"} for name in ("copy", 4, 1, 6, 6)]
    report = make(jsonl(table.parent / "more.jsonl", rows), tmp_path / "c", not_in=[tmp_path / "a", tmp_path / "b"])
    assert counts(report) == {"rows": 5, "written": 1, "duplicate": 4}
    assert [(line["row"], line["reason"], line["detail"]) for line in left_out(tmp_path / "c")] == [
        *((n, "duplicate_image", "a folder of not_in has the image, byte for byte") for n in (0, 1, 2)),
        (4, "duplicate_image", "the image of row 3 again, with no caption that is new"),
    ]
    assert content(tmp_path / "a") == before


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as one:
        yield one


def test_urls_that_failed_are_fetched_again_and_no_others(site: Site, tmp_path: Path, photos: list[bytes]) -> None:
    good = {f"/{number}.jpg": Answer(200, data) for number, data in enumerate(photos)}
    rows = [{"url": site.url(f"/{n}.jpg"), "caption": f"photo {n}"} for n in range(8)]
    table = jsonl(tmp_path / "t.jsonl", rows)
    config = ConvertConfig(allow_private_addresses=True, max_bad_share=1, shard_rows=3)
    site.answers |= {**good, **{f"/{n}.jpg": Answer(404) for n in (2, 5, 6)}}
    convert(table, tmp_path / "a", config, engine=threads(2))
    failed = tmp_path / "failed.jsonl"
    others = [{"row": 0, "reason": "duplicate_image"}, {"row": 1, "reason": "filtered"}]
    jsonl(failed, [*left_out(tmp_path / "a"), *others])
    site.requests.clear()
    site.answers |= {**good, "/6.jpg": good["/0.jpg"]}
    report = convert(table, tmp_path / "b", config, rows=failed, not_in=[tmp_path / "a"], engine=threads(2))
    assert counts(report) == {"rows": 3, "written": 2, "duplicate": 1}
    assert site.images() == 3
    site.answers |= good
    convert(table, tmp_path / "whole", config, engine=threads(2))
    whole = members(tmp_path / "whole")
    assert members(tmp_path / "a", tmp_path / "b") == {name: whole[name] for name in whole if name[8] != "6"}


@pytest.mark.parametrize(
    ("flag", "value", "parts"), [("--val-share", "0.4", ["train", "val"]), ("--train-tokenizer", "300", [""])]
)
def test_command_that_is_shown_converts_the_failed_rows_again(
    site: Site,
    tmp_path: Path,
    photos: list[bytes],
    flag: str,
    value: str,
    parts: list[str],
) -> None:
    good = {f"/{number}.jpg": Answer(200, data) for number, data in enumerate(photos)}
    rows = [{"url": site.url(f"/{n}.jpg"), "says": f"photo {n}"} for n in range(8)]
    jsonl(tmp_path / "a table.jsonl", [*rows, {"url": site.url("/8.jpg"), "says": ""}])
    site.answers |= {**good, "/8.jpg": good["/0.jpg"], **{f"/{n}.jpg": Answer(404) for n in (2, 5, 6)}}
    settings = ["--caption-column", "says", "--allow-private-addresses", "--max-bad-share", "0.2", "contact=me@a.b"]
    done = run_tool("a table.jsonl", "out", *settings, flag, value, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("urls: "))
    told, command = line.split("; to convert them again: mmdata convert ")
    assert told == "urls: 3 of the quarantined rows have a URL that gave no image"
    site.answers |= good
    done = run_tool(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [*(tmp_path / "out" / part for part in parts), tmp_path / "out-again"]
    assert len({Index.open(folder).tokenizer for folder in folders}) == 1
    assert {name[:9] for name in members(*folders)} == {f"{number:09}" for number in range(8)}
    assert [line["row"] for line in left_out(tmp_path / "out-again")] == [8]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\nx\n", r"rows '.*rows.txt', line 2: 'x' is no number of a row; give one a line, from 0, or a quaran"),
        ('{"row": 1}\n{"row": true}', r"line 2: 'True' is no number of a row"),
        ('{"rows": 1}', r"line 1: '{\"rows\": 1}' is no number of a row"),
        ('{"row": 1', r"line 1: '{\"row\": 1' is no number of a row"),
        ("1\n-2\n", r"line 2: '-2' is no number of a row"),
        ("9" * 30, r"line 1: '9+' is no number of a row"),
        ("\n", "rows: none is chosen"),
        (Path("none.txt"), r"rows 'none.txt': cannot be read \(No such file or directory\)"),
        ("", "rows: none is chosen"),
        ([], "rows: none is chosen"),
        ([3, -1], "rows: -1 is no row of the source, which has rows numbered from 0"),
        ([2**63], r"a list of integers; .*; got list, uint64 of shape \(1,\)"),
        ([2**64], r"a list of integers; .*; got list, object of shape \(1,\)"),
        (np.array([True, False]), r"give np.flatnonzero\(mask\); got ndarray, bool"),
        ([1.0, 2.5], r"a list of integers; .*; got list, float64 of shape \(2,\)"),
        (["1", 2], r"a list of integers; .*; got list, <U21 of shape \(2,\)"),
        (["1", "2"], r"rows '1': cannot be read"),
        ([[1, 2]], r"a list of integers; .*; got list, int64 of shape \(1, 2\)"),
        ([[1], [2, 3]], "a list of integers; "),
        (3, r"a list of integers; .*; got int, int64 of shape \(\)"),
        ({1, 2}, r"a list of integers; .*; got set, object of shape \(\)"),
    ],
)
def test_what_names_no_rows_is_an_error(table: Path, tmp_path: Path, rows: Any, message: str) -> None:
    if isinstance(rows, str):
        (tmp_path / "rows.txt").write_text(rows)
        rows = tmp_path / "rows.txt"
    with pytest.raises(ConfigError, match=message):
        make(table, tmp_path / "out", rows)
    assert not (tmp_path / "out").exists()


def test_file_of_rows_that_is_a_pipe_is_not_opened(table: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        DataError, match=r"rows '.*pipe': is a FIFO, and only regular files are read; it was not opened"
    ):
        make(table, tmp_path / "out", tmp_path / "pipe")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [np.array([2, 1], np.uint8), range(1, 3), (1, 2), pa.array([1, 2])])
def test_integers_of_any_array_are_rows(table: Path, tmp_path: Path, rows: Any) -> None:
    assert counts(make(table, tmp_path / "out", rows)) == {"rows": 2, "written": 2}


def test_row_that_the_source_has_not_is_an_error(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows: 10 is no row of the source, which has 10 rows, numbered from 0"):
        make(table, tmp_path / "out", [2, 10])


def test_other_rows_are_another_conversion(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [1])
    make(table, tmp_path / "b", [2])
    make(table, tmp_path / "out", [3, 4], [tmp_path / "a"])
    for rows, not_in, what in (
        ([3, 5], ["a"], "rows: other rows are selected"),
        (None, ["a"], "rows: other rows are selected"),
        ([3, 4], ["a", "b"], "the folders of not_in are others"),
    ):
        with pytest.raises(DataError, match=rf"holds another conversion \({what}\)"):
            make(table, tmp_path / "out", rows, [tmp_path / name for name in not_in])


def test_folder_that_does_not_say_what_it_holds_is_no_folder_of_not_in(
    table: Path, photos: list[bytes], tmp_path: Path
) -> None:
    write_tar(tmp_path / "indexed/a.tar", {"a": {"jpg": photos[0], "txt": b"a"}})
    build_index(tmp_path / "indexed")
    make(table, tmp_path / "copied", [0, 1])
    (tmp_path / "copied/__mmdata__/rows/00000.parquet").unlink()
    make(table, tmp_path / "damaged", [0, 1])
    (tmp_path / "damaged/__mmdata__/rows/00000.parquet").write_bytes(b"PAR1")
    for folder, error, message in (
        (tmp_path / "none", DataError, "none"),
        (tmp_path / "indexed", DataError, "its manifest has no accounts of a conversion"),
        (
            tmp_path / "copied",
            DataError,
            r"__mmdata__/rows/ has digests of 0 images, and 2 were written; a copy that `mmdata push` has made is",
        ),
        (tmp_path / "damaged", DataError, "not a list of rows that is whole"),
        (tmp_path / "out", ConfigError, "is the output as well; convert into a folder beside it"),
        ("s3://bucket/a", ConfigError, "must be a folder of this machine; copy its __mmdata__/, which has no images"),
    ):
        with pytest.raises(error, match=message):
            make(table, tmp_path / "out", not_in=[folder])
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="not_in leaves out images that were written before, and keep_duplicates wr"):
        make(table, tmp_path / "out", not_in=[tmp_path / "damaged"], keep_duplicates=True)


def test_folders_of_not_in_are_one_or_any_iterable(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [3])
    expected = make(table, tmp_path / "b", [2, 3], [tmp_path / "a"])
    assert counts(expected) == {"rows": 2, "written": 1, "duplicate": 1}
    for number, not_in in enumerate((tmp_path / "a", str(tmp_path / "a"), (tmp_path / name for name in "a"))):
        make(table, tmp_path / f"c{number}", [2, 3], not_in)
        assert content(tmp_path / f"c{number}") == content(tmp_path / "b")
    with pytest.raises(ConfigError, match="not_in '': the name of a folder is expected"):
        make(table, tmp_path / "out", [2, 3], "")


@pytest.mark.parametrize("missing", ["train", "val"])
def test_half_of_a_conversion_stands_for_itself_alone(table: Path, tmp_path: Path, missing: str) -> None:
    make(table, tmp_path / "a", val_share=0.4)
    shutil.rmtree(tmp_path / "a" / missing)
    (there,) = (tmp_path / "a" / name for name in ("train", "val") if name != missing)
    message = f"not_in '.*a': its '{missing}' is missing, and '{there.name}' was made with val_share; put it back, or "
    with pytest.raises(DataError, match=f"{message}name '{there}' to leave out the images of this part alone"):
        make(table, tmp_path / "out", not_in=[tmp_path / "a"])
    assert counts(make(table, tmp_path / "out", not_in=[there]))["written"] == 8 - Manifest.read(there).rows


def test_output_and_folders_of_not_in_lie_apart(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", val_share=0.4)
    before = content(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"not_in '.*a/train': lies inside the output '.*a'; convert into a folder"):
        convert(table, tmp_path / "a", tolerant(), not_in=[tmp_path / "a/train"], overwrite=True)
    with pytest.raises(ConfigError, match=r"not_in '.*a': lies around the output '.*a/more'; convert into a folder"):
        make(table, tmp_path / "a/more", not_in=[tmp_path / "a"])
    assert content(tmp_path / "a") == before


def test_folder_of_not_in_that_is_indexed_again_is_the_same(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [2, 3])
    make(table, tmp_path / "b", [4])
    make(table, tmp_path / "out", [3, 4, 5], [tmp_path / "a", tmp_path / "b"])
    before = Manifest.read(tmp_path / "a").content()
    build_index(tmp_path / "a", count_tokens=lambda texts: [*map(len, texts)], tokenizer="characters")
    assert Manifest.read(tmp_path / "a").content() != before
    not_in = [tmp_path / "b", tmp_path / "a", tmp_path / "b"]
    assert make(table, tmp_path / "out", [3, 4, 5], not_in).was_complete


def test_damage_of_a_list_of_digests_is_an_error(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [2, 3])
    path = tmp_path / "a/__mmdata__/rows/00000.parquet"
    whole = path.read_bytes()
    expected = WrittenImages([tmp_path / "a"]).names
    digest = pq.read_table(path)["digest"][1].as_py()
    column = next(
        group.column(place)
        for group in (pq.ParquetFile(path).metadata.row_group(0),)
        for place in range(group.num_columns)
        if group.column(place).path_in_schema == "digest"
    )
    start = column.dictionary_page_offset or column.data_page_offset
    pages = range(start, start + column.total_compressed_size)
    assert len(digest) < len(pages)
    for place in pages:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with suppress(DataError):
            assert WrittenImages([tmp_path / "a"]).names == expected
    middle = pages[len(pages) // 2]
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(DataError, match=r"'.*a/__mmdata__/rows/00000.parquet': not a list of rows that is whole \(.*C"):
        make(table, tmp_path / "out", not_in=[tmp_path / "a"])


def test_list_of_another_conversion_is_an_error(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [2, 3])
    path = tmp_path / "a/__mmdata__/rows/00000.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.set_column(8, "digest", [pa.nulls(2, pa.binary(16))]), path)
    with pytest.raises(DataError, match="has digests of 0 images, and 2 were written; a copy that"):
        make(table, tmp_path / "out", not_in=[tmp_path / "a"])
    pq.write_table(rows.drop_columns("digest"), path)
    with pytest.raises(DataError, match="parquet': is no list of rows: it has no column of digests; convert anew"):
        make(table, tmp_path / "out", not_in=[tmp_path / "a"])


def test_flags_choose_rows(table: Path, tmp_path: Path) -> None:
    numbers_in(tmp_path / "rows.txt", 2, 3)
    make(table, tmp_path / "a", [3])
    tool = [sys.executable, "-m", "mmdata", "convert", str(table), str(tmp_path / "out")]
    flags = ["--rows", str(tmp_path / "rows.txt"), "--not-in", str(tmp_path / "a"), "--max-bad-share", "1"]
    done = run_program([*tool, *flags], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert {name[:9] for name in members(tmp_path / "out")} == {"000000002"}
    done = run_program([*tool, *flags, "--select", "height > 2"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "--rows and --select both say which rows are taken: give one of them" in done.stderr


def test_all_images_that_other_folders_have_are_said_in_a_sentence(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", [1, 2, 3])
    with pytest.raises(
        DataError, match=r"^the images of all 2 rows are in the folders of --not-in; nothing is left to"
    ):
        make(table, tmp_path / "out", [2, 3], [tmp_path / "a"])


def run_tool(*words: str | Path, cwd: Path | None = None) -> Any:
    command = [sys.executable, "-m", "mmdata", "convert", *map(str, words)]
    return run_program(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=cwd)


def test_advice_on_duplicates_is_true_with_not_in(table: Path, tmp_path: Path) -> None:
    numbers_in(tmp_path / "rows.txt", 2, 3)
    make(table, tmp_path / "a", [3])
    done = run_tool(table, tmp_path / "out", "--rows", tmp_path / "rows.txt", "--not-in", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "duplicates: their image is in a folder of --not-in, or an earlier row of the same image was" in done.stdout
    assert "keep_duplicates" not in done.stdout


def test_plan_refuses_what_the_conversion_refuses(table: Path, tmp_path: Path) -> None:
    make(table, tmp_path / "a", val_share=0.4)
    done = run_tool(table, tmp_path / "a", "--not-in", tmp_path / "a/train", "--plan")
    assert done.returncode == 2
    assert "lies inside the output" in done.stderr


@pytest.mark.parametrize("flag", ["--rows", "--select"])
def test_empty_choice_does_not_convert_all(table: Path, tmp_path: Path, flag: str) -> None:
    done = run_tool(table, tmp_path / "out", flag, "")
    assert done.returncode == 2
    assert f"{flag} '': names no rows; leave the flag out to convert all" in done.stderr
    assert not (tmp_path / "out").exists()
