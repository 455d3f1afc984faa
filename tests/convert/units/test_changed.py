"""Files that change between two runs of a conversion: what was made of them is made again, or the run says so."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.convert import ConvertConfig, conversion, convert, convert_part
from mmdata.convert.units import engines
from mmdata.convert.units.engines import Engine, Progress, processes, threads
from mmdata.convert.units.staging import Receipt
from mmdata.convert.units.unit import Job, Unit
from mmdata.errors import DataError
from mmdata.index import Index
from tests.convert.conftest import Killed, content, jsonl, killing, make_parts
from tests.logs import messages
from tests.programs import PATIENCE_S

ROWS = 12
SETTINGS = ConvertConfig(shard_rows=4, max_bad_share=0.5)
TO_MAKE = "to make, as parts have not run or files have changed"
Edit = Callable[[Path, int], None]


def with_captions(folder: Path, pictures: list[bytes]) -> Path:
    folder.mkdir()
    for number in range(ROWS):
        (folder / f"{number:02d}.jpg").write_bytes(pictures[number])
        (folder / f"{number:02d}.txt").write_text(f"old caption {number:02d}")
    return folder


def with_json(folder: Path, pictures: list[bytes]) -> Path:
    with_captions(folder, pictures)
    for path in folder.glob("*.txt"):
        path.with_suffix(".json").write_text(json.dumps({"caption": path.read_text(), "author": "me"}))
        path.unlink()
    return folder


def with_classes(folder: Path, pictures: list[bytes]) -> Path:
    for number in range(ROWS):
        path = folder / ("cat" if number < 6 else "dog") / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[number])
    return folder


def with_table(folder: Path, pictures: list[bytes]) -> Path:
    with_captions(folder, pictures)
    rows = [{"image": f"{number:02d}.jpg", "caption": f"caption {number}"} for number in range(ROWS)]
    return jsonl(folder / "table.jsonl", rows)


def with_coco(folder: Path, pictures: list[bytes]) -> Path:
    with_captions(folder, pictures)
    images = [{"id": number, "file_name": f"{number:02d}.jpg"} for number in range(ROWS)]
    boxes: list[Any] = [{"image_id": n, "id": n, "category_id": 1, "bbox": [0, 0, 5, 5]} for n in range(ROWS)]
    captions: list[Any] = [{"image_id": n, "id": n, "caption": f"caption {n}"} for n in range(ROWS)]
    categories = [{"id": 1, "name": "dog"}]
    path = folder / "instances_train.json"
    path.write_text(json.dumps({"images": images, "annotations": boxes + captions, "categories": categories}))
    return path


def with_tar(folder: Path, pictures: list[bytes]) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(ROWS):
            for end, data in (("jpg", pictures[number]), ("txt", b"old caption %02d" % number)):
                member = tarfile.TarInfo(f"{number:02d}.{end}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def edit_captions(folder: Path, end: int) -> None:
    """Edit the captions of the rows before `end`, at equal length, and with the old time of the last change."""
    for path in sorted(folder.glob("*.*")):
        if path.suffix in (".txt", ".json") and path.stem < f"{end:02d}":
            before = path.stat()
            path.write_text(path.read_text().replace("old", "new"))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_images(folder: Path, end: int) -> None:
    """Turn a byte in the middle of the images of the rows before `end`; the JPEGs still decode, or do not."""
    for path in folder.rglob("*.jpg"):
        if path.stem < f"{end:02d}":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def edit_tar(folder: Path, end: int) -> None:
    path = folder / "a.tar"
    data = path.read_bytes()
    for number in range(end):
        data = data.replace(b"old caption %02d" % number, b"new caption %02d" % number)
    path.write_bytes(data)


CORPORA = [
    (with_captions, edit_captions),
    (with_captions, edit_images),
    (with_json, edit_captions),
    (with_classes, edit_images),
    (with_table, edit_images),
    (with_coco, edit_images),
    (with_tar, edit_tar),
]


@pytest.mark.parametrize(("make", "edit"), CORPORA)
def test_stopped_conversion_takes_up_files_that_have_changed(
    tmp_path: Path, pictures: list[bytes], make: Callable[..., Path], edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = make(tmp_path / "corpus", pictures), tmp_path / "out"
    with pytest.raises(Killed):
        convert(source, out, SETTINGS, engine=killing(9))
    edit(tmp_path / "corpus", 3)
    report = convert(source, out, SETTINGS, engine=threads(1))
    convert(source, tmp_path / "undisturbed", SETTINGS, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")
    assert report.accounts["rows"] == ROWS
    assert [text.split(": ")[0] for text in messages(caplog)] == ["rows 0 to 3 have to be converted again"]


def test_label_that_changes_the_numbers_of_classes_changes_all_units(
    tmp_path: Path, pictures: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    source, out = with_json(tmp_path / "corpus", pictures), tmp_path / "out"
    for path in source.glob("*.json"):
        path.write_text(json.dumps({"caption": "x", "label": "cat" if path.stem < "06" else "dog"}))
    with pytest.raises(Killed):
        convert(source, out, SETTINGS, engine=killing(9))
    (source / "05.json").write_text(json.dumps({"caption": "x", "label": "ape"}))
    report = convert(source, out, SETTINGS, engine=threads(1))
    convert(source, tmp_path / "undisturbed", SETTINGS, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")
    assert report.accounts["classes"] == ["cat", "ape", "dog"]
    assert Index.open(out).column("label").tolist() == [0] * 5 + [1] + [2] * 6
    assert messages(caplog) == [
        "rows 0 to 3 have to be converted again: captions or labels of other rows have changed",
        "rows 4 to 7 have to be converted again: '05.json' has changed",
    ]


def write_table(path: Path, caption: str, pictures: list[bytes]) -> None:
    """A table of some kind; its captions fill more than what a reader of text takes at once."""
    rows = [{"image": f"{number:02d}.jpg", "caption": caption + "x" * 9000} for number in range(ROWS)]
    if path.suffix == ".jsonl":
        jsonl(path, rows)
    elif path.suffix == ".csv":
        path.write_text("image,caption\n" + "".join(f"{row['image']},{row['caption']}\n" for row in rows))
    else:
        pq.write_table(pa.table({"image": pictures[:ROWS], "caption": [row["caption"] for row in rows]}), path)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "images.parquet"])
def test_no_unit_of_a_table_that_was_replaced_meanwhile_stays(tmp_path: Path, pictures: list[bytes], name: str) -> None:
    table, out = with_captions(tmp_path / "corpus", pictures) / name, tmp_path / "out"
    write_table(table, "old caption", pictures)
    shutil.copy2(table, tmp_path / "saved")

    def replacing(job: Job, units: Iterable[Unit]) -> Iterator[Receipt | Progress]:
        iterator = iter(units)
        yield from threads(1)(job, islice(iterator, 1))
        write_table(table, "new", pictures)
        yield from threads(1)(job, iterator)

    with pytest.raises(DataError, match=f"table '{table}': has changed since it was opened"):
        convert(table, out, SETTINGS, engine=replacing)
    shutil.copy2(tmp_path / "saved", table)
    convert(table, out, SETTINGS, engine=threads(1))
    convert(table, tmp_path / "undisturbed", SETTINGS, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")


def test_copy_of_the_corpus_is_the_same_corpus(tmp_path: Path, pictures: list[bytes]) -> None:
    out = tmp_path / "out"
    for name, make in (("folder", with_captions), ("tars", with_tar)):
        source = make(tmp_path / name, pictures)
        with pytest.raises(Killed):
            convert(source, out / name, SETTINGS, engine=killing(9))
        shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
        shutil.rmtree(source)
        (tmp_path / "copy").rename(source)
        made = convert_part(source, out / name, SETTINGS, part=(1, 3), engine=unused)
        assert (made.units, made.rows) == (1, 4)


def test_copy_of_tars_with_other_captions_is_read_where_it_is(tmp_path: Path, pictures: list[bytes]) -> None:
    source, out, copy = with_tar(tmp_path / "corpus", pictures), tmp_path / "out", tmp_path / "copy"
    make_parts(source, out, SETTINGS, 1)
    shutil.copytree(source, copy)
    edit_tar(copy, 1)
    with pytest.raises(DataError, match=TO_MAKE):
        convert(copy, out, SETTINGS, finish=True)
    convert(copy, out, SETTINGS, engine=threads(1))
    assert Index.open(out)[0].captions == ["new caption 00"]


def unused(job: Any, units: Any) -> Iterator[Any]:
    """An engine that is given no unit."""
    assert not list(units)
    yield from ()


@pytest.mark.parametrize("engine", [threads(1), threads(2), processes(2)], ids=["one", "threads", "processes"])
def test_parts_take_up_files_that_have_changed(
    tmp_path: Path, pictures: list[bytes], engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = with_captions(tmp_path / "corpus", pictures), tmp_path / "out"
    make_parts(source, out, SETTINGS, engine=engine)
    edit_captions(source, 1)
    message = (
        r"^1 unit to make, .* \(first: rows 0 to 3\); run all parts again, which make only these, and then --finish"
    )
    with pytest.raises(DataError, match=message):
        convert(source, out, SETTINGS, finish=True)
    for part in (1, 2):
        assert convert_part(source, out, SETTINGS, part=(part, 2), engine=engine).rows == (8, 4)[part - 1]
    convert(source, out, SETTINGS, finish=True)
    convert(source, tmp_path / "undisturbed", SETTINGS, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")
    assert messages(caplog) == ["rows 0 to 3 have to be converted again: '00.txt' has changed"]


def edit_caption_of_equal_image(folder: Path) -> None:
    (folder / "01.txt").write_text("new caption 00")


def replace_equal_image(folder: Path) -> None:
    shutil.copyfile(folder / "02.jpg", folder / "01.jpg")


@pytest.mark.parametrize(
    ("make", "edit"), [(with_captions, edit_caption_of_equal_image), (with_table, replace_equal_image)]
)
def test_finish_refuses_parts_that_have_merged_other_rows(
    tmp_path: Path, pictures: list[bytes], make: Callable[..., Path], edit: Callable[[Path], None]
) -> None:
    source, out = make(tmp_path / "corpus", [pictures[0], *pictures]), tmp_path / "out"
    settings = ConvertConfig(shard_rows=1, group_by="content")
    convert_part(source, out, settings, part=(1, 2), engine=threads(1))
    edit(tmp_path / "corpus")
    convert_part(source, out, settings, part=(2, 2), engine=threads(1))
    with pytest.raises(DataError, match=TO_MAKE):
        convert(source, out, settings, finish=True)
    make_parts(source, out, settings)
    convert(source, out, settings, finish=True)
    convert(source, tmp_path / "undisturbed", settings, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")


def test_finish_says_that_a_file_is_gone(
    tmp_path: Path, pictures: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    table, out = with_table(tmp_path / "corpus", pictures), tmp_path / "out"
    make_parts(table, out, SETTINGS, 1)
    (tmp_path / "corpus/05.jpg").unlink()
    with pytest.raises(DataError, match=TO_MAKE):
        convert(table, out, SETTINGS, finish=True)
    assert messages(caplog) == ["rows 4 to 7 have to be converted again: '05.jpg' is gone"]


def test_changed_files_are_looked_for_in_several_threads(
    tmp_path: Path, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = with_captions(tmp_path / "corpus", pictures), tmp_path / "out"
    make_parts(source, out, SETTINGS, 1)
    both = threading.Barrier(2)

    def look(*args: Any, **options: Any) -> None:
        both.wait(PATIENCE_S)

    monkeypatch.setattr(engines, "CHUNK", 1)
    monkeypatch.setattr(conversion, "usable_cores", lambda: 2)
    monkeypatch.setattr(conversion, "changed_file", look)
    assert convert(source, out, SETTINGS, finish=True).accounts["written"] == ROWS


def test_tokenizer_of_other_captions_counts_all_captions_again(tmp_path: Path, pictures: list[bytes]) -> None:
    source, out = with_captions(tmp_path / "corpus", pictures), tmp_path / "out"
    settings = SETTINGS.model_copy(update={"train_tokenizer": 300})
    with pytest.raises(Killed):
        convert(source, out, settings, engine=killing(9))
    for number in range(8, ROWS):
        (source / f"{number:02d}.txt").write_text("old captiom 11")
    convert(source, out, settings, engine=threads(1))
    convert(source, tmp_path / "undisturbed", settings, engine=threads(1))
    assert content(out) == content(tmp_path / "undisturbed")
