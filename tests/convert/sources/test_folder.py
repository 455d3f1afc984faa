"""Folders of images with captions beside them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.fields import FieldReader
from mmdata.convert.sources import files
from mmdata.convert.sources.folder import FolderSource
from mmdata.errors import BadSample, ConfigError, DataError
from tests.convert.conftest import left_out


def write(root: Path, photo: Any, **captions: str) -> None:
    for seed, (name, caption) in enumerate(captions.items()):
        (root / f"{name}.jpg").write_bytes(photo(20, 30, seed=seed))
        (root / f"{name}.txt").write_text(caption)


def captions(root: Path) -> list[tuple[str, list[str] | str]]:
    """What each row of a folder says: its captions, or the reason it has none."""
    found: list[tuple[str, list[str] | str]] = []
    source = FolderSource(root, ConvertConfig())
    for row in source.rows():
        try:
            if row.fault:
                raise BadSample(*row.fault)
            found.append((row.image, FieldReader()(row).captions))
        except BadSample as bad:
            found.append((row.image, str(bad.reason)))
    assert len(found) == source.num_rows
    return found


def test_folder_is_walked_in_name_order(tmp_path: Path, photo: Any) -> None:
    for folder in ("z", "b", "b/inner"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, photo, x=folder)
    write(tmp_path, photo, m="m", c="c")
    assert captions(tmp_path) == [
        ("c.jpg", ["c"]),
        ("m.jpg", ["m"]),
        ("b/x.jpg", ["b"]),
        ("b/inner/x.jpg", ["b/inner"]),
        ("z/x.jpg", ["z"]),
    ]


def test_captions_come_from_json_txt_or_caption(corpus: Path) -> None:
    (corpus / "a.json").write_text('{"captions": ["one", "two"], "caption": "unread"}')
    (corpus / "a.txt").write_text("unread")
    (corpus / "b.TXT").write_text("\ufefffrom text\n")
    (corpus / "b.json").write_text('{"caption": "unread"}')
    (corpus / "c.caption").write_text("from caption")
    assert captions(corpus) == [("a.jpg", ["one", "two"]), ("b.jpg", ["from text"]), ("c.jpg", ["from caption"])]


def test_json_with_one_caption_and_a_label(corpus: Path, tmp_path: Path, make: Any) -> None:
    for label, name in enumerate("abc"):
        content = {"caption": f"photo {name}", "label": label, "licence": "CC0", "other": 1}
        (corpus / f"{name}.json").write_text(json.dumps(content))
    report = make(corpus, keep=["licence", "path"])
    assert report.accounts["written"] == 3
    assert (
        b'{"captions":["photo b"],"label":1,"licence":"CC0","path":"b.jpg"}'
        in (tmp_path / "out/000000.tar").read_bytes()
    )


def test_what_lacks_its_half_is_a_row_with_a_reason(corpus: Path) -> None:
    (corpus / "a.txt").write_text("photo a")
    (corpus / "b.txt").write_bytes(b"caf\xe9")
    (corpus / "gone.txt").write_text("no image")
    (corpus / "c.json").write_text("{")
    (corpus / "drawing.svg").write_text("<svg/>")
    assert captions(corpus) == [
        ("a.jpg", ["photo a"]),
        ("b.jpg", "bad_caption"),
        ("c.jpg", "bad_caption"),
        ("drawing.svg", "missing_caption"),
    ]


def test_text_without_an_image_is_ignored_and_counted(corpus: Path, make: Any) -> None:
    for name in ("a.txt", "b.txt", "c.txt", "README.txt", "dataset.json", "dataset.txt"):
        (corpus / name).write_text("photo")
    report = make(corpus, max_bad_share=0.0)
    assert report.accounts["rows"] == report.accounts["written"] == 3
    assert (report.source["ignored_texts"], report.source["ignored_files"]) == (2, 0)


def test_text_beside_class_folders_is_ignored(corpus: Path, photo: Any, make: Any) -> None:
    for seed, name in enumerate(("cat/1.jpg", "cat/2.jpg", "dog/1.jpg")):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_bytes(photo(20, 30, seed=seed))
    for name in "abc":
        (corpus / f"{name}.jpg").unlink()
    (corpus / "README.txt").write_text("about cats")
    report = make(corpus, max_bad_share=0.0)
    assert (report.accounts["written"], report.accounts["classes"]) == (3, ["cat", "dog"])
    assert report.source["ignored_texts"] == 1


@pytest.mark.parametrize("texts", [1, 2])
def test_texts_without_an_image_are_rows_if_most_are(corpus: Path, texts: int) -> None:
    (corpus / "a.txt").write_text("a photo")
    for number in range(texts):
        (corpus / f"other{number}.txt").write_text("a photo")
    alone = [("other0.txt", "missing_image"), ("other1.txt", "missing_image")]
    images = [("a.jpg", ["a photo"]), ("b.jpg", "missing_caption"), ("c.jpg", "missing_caption")]
    assert captions(corpus) == images + (alone if texts == 2 else [])


BOXES = "0 0.5 0.5 0.1 0.2\n3 0.25 .5 1e-3 -1\n"
"""A text as YOLO has it beside an image."""


def test_texts_in_labels_beside_images_are_named_as_boxes(corpus: Path, tmp_path: Path) -> None:
    (corpus / "images").mkdir()
    (corpus / "labels").mkdir()
    for name in "abc":
        (corpus / f"{name}.jpg").rename(corpus / f"images/{name}.jpg")
        (corpus / f"labels/{name}.txt").write_text(BOXES)
    with pytest.raises(
        DataError,
        match=r"3 missing_image \(first: labels/a.txt: a caption without an image; texts in labels/ are boxes in "
        r"YOLO's form, and no captions\)",
    ):
        convert(corpus, tmp_path / "out")


def test_texts_of_numbers_are_no_captions(corpus: Path, make: Any) -> None:
    for name in "abc":
        (corpus / f"{name}.txt").write_text(BOXES if name < "c" else "a photo")
    with pytest.raises(
        DataError,
        match=r"corpus': most of its captions are numbers only \(a.jpg: '0 0.5 0.5 0.1 0.2.*'\), as in "
        r"YOLO's files of boxes; write captions into the text files, or give a table .* --caption-column\)",
    ):
        make(corpus)
    (corpus / "b.txt").write_text("3 photos")
    assert make(corpus).accounts["written"] == 3


def test_files_that_are_neither_are_counted(corpus: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (corpus / name).write_text("x")
    for name in ("LICENCE", ".DS_Store", "._a.jpg", "notes.md"):
        (corpus / name).write_text("x")
    (corpus / ".git").mkdir()
    (corpus / ".git/a.jpg").write_text("x")
    source = FolderSource(corpus, ConvertConfig())
    assert source.num_rows == 3
    assert source.describe()["ignored_files"] == 4


def test_image_without_usual_extension_counts_with_a_caption(corpus: Path, photo: Any) -> None:
    for name in ("a.txt", "b.txt", "c.txt", "d.txt", "v1.2.txt"):
        (corpus / name).write_text("x")
    (corpus / "d.bin").write_bytes(photo(20, 30))
    (corpus / "v1.2.jpg").write_bytes(photo(20, 30))
    assert [path for path, _ in captions(corpus)] == ["a.jpg", "b.jpg", "c.jpg", "d.bin", "v1.2.jpg"]


def test_folder_that_is_a_link_is_walked_once(corpus: Path, tmp_path: Path, photo: Any) -> None:
    for name in "abc":
        (corpus / f"{name}.txt").write_text(name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write(elsewhere, photo, d="from elsewhere")
    for path, target in {"again": elsewhere, "images": elsewhere, "loop": corpus, "up": tmp_path}.items():
        (corpus / path).symlink_to(target)
    (elsewhere / "back").symlink_to(elsewhere)
    assert captions(corpus)[3:] == [
        ("images", "not_a_file"),
        ("loop", "not_a_file"),
        ("up", "not_a_file"),
        ("again/back", "not_a_file"),
        ("again/d.jpg", ["from elsewhere"]),
    ]


def test_folder_below_a_link_is_walked_once(corpus: Path, tmp_path: Path, photo: Any, make: Any) -> None:
    """Links to a folder and to one in it, in either order, and one from there up the tree."""
    for name in "abc":
        (corpus / f"{name}.txt").write_text(name)
    far = tmp_path / "far"
    for seed, name in enumerate(("x", "x/sub", "y", "y/sub")):
        (far / name).mkdir(parents=True)
        (far / name / "1.jpg").write_bytes(photo(20, 30, seed=seed))
        (far / name / "1.txt").write_text(name)
    for path, target in {"a": "x", "b": "x/sub", "c": "y/sub", "d": "y"}.items():
        (corpus / path).symlink_to(far / target)
    (far / "y/sub/up").symlink_to(far)
    (far / "y/.hidden").symlink_to(far / "y")
    assert captions(corpus)[3:] == [
        ("a/1.jpg", ["x"]),
        ("a/sub", "not_a_file"),
        ("b/1.jpg", ["x/sub"]),
        ("c/1.jpg", ["y/sub"]),
        ("c/up/x", "not_a_file"),
        ("c/up/y", "not_a_file"),
        ("d/1.jpg", ["y"]),
        ("d/sub", "not_a_file"),
    ]
    make(corpus, max_bad_share=0.9)
    details = {line["detail"] for line in left_out(tmp_path / "out")}
    assert details == {"leads to a folder that is in the corpus already, or has the corpus in it"}


def test_what_folders_hold_besides_rows_is_no_part_of_a_corpus(corpus: Path, tmp_path: Path, make: Any) -> None:
    """A link to the corpus is listed; the size of its folder grows with hidden folders."""
    for name in "abc":
        (corpus / f"{name}.txt").write_text(name)
    (corpus / "loop").symlink_to(corpus)
    make(corpus)
    size = corpus.stat().st_size
    for number in range(1000):
        (corpus / f".hidden-{number:04d}-{'x' * 100}").mkdir()
    assert corpus.stat().st_size != size
    assert make(corpus).accounts["written"] == 3


def test_files_that_vanish_while_they_are_listed_cost_nothing_or_their_row(
    corpus: Path, photo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (corpus / f"{name}.txt").write_text(name)
    for name in (".d.jpg.Xy12", "d.jpg"):
        (corpus / name).write_bytes(photo(20, 30))
    entry_of = files._entry

    def vanishing(found: os.DirEntry[str]) -> files.Entry:
        if found.name in (".d.jpg.Xy12", "d.jpg"):
            os.unlink(found.path)
        return entry_of(found)

    monkeypatch.setattr(files, "_entry", vanishing)
    source = FolderSource(corpus, ConvertConfig())
    assert source.num_rows == 4
    assert source.describe()["ignored_files"] == 1


@pytest.mark.parametrize(
    "names", [["a.txt", "b.txt", "c.txt"], ["cat/x.jpg", "dog/y.jpg"]], ids=["captions", "classes"]
)
def test_link_to_itself_costs_one_row(corpus: Path, tmp_path: Path, photo: Any, make: Any, names: list[str]) -> None:
    for seed, name in enumerate(names):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_bytes(photo(20, 30, seed=seed) if name.endswith("jpg") else b"a photo")
    folder = corpus / "cat" if (corpus / "cat").exists() else corpus
    (folder / "z.jpg").symlink_to("z.jpg")
    if folder == corpus:
        (corpus / "z.txt").write_text("a photo")
    (corpus / "z").symlink_to("z")
    report = make(corpus)
    assert report.accounts["written"] == len(names)
    last = left_out(tmp_path / "out")[-1]
    assert (last["reason"], last["detail"].split("' ", 1)[1]) == ("not_a_file", "is a link that leads back to itself")


def test_classes_may_be_links(corpus: Path, tmp_path: Path, photo: Any, make: Any) -> None:
    for seed, name in enumerate(("cat", "dog")):
        (tmp_path / "all" / name).mkdir(parents=True)
        (tmp_path / "all" / name / "1.jpg").write_bytes(photo(20, 30, seed=seed))
        (corpus / name).symlink_to(tmp_path / "all" / name)
    (corpus / "loop").symlink_to(corpus)
    (corpus / "circle").symlink_to(corpus / "circle")
    report = make(corpus)
    assert (report.accounts["written"], report.accounts["classes"]) == (2, ["cat", "dog"])


def test_name_that_is_not_utf8_is_accepted_and_reported(corpus: Path, tmp_path: Path, photo: Any, make: Any) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (corpus / name).write_text(f"photo {name}")
    raw = os.fsencode(corpus) + b"/caf\xe9"
    Path(os.fsdecode(raw + b".jpg")).write_bytes(photo(20, 30, seed=8))
    Path(os.fsdecode(raw + b"2.jpg")).write_bytes(b"no image")
    for end in (b".txt", b"2.txt"):
        Path(os.fsdecode(raw + end)).write_text("coffee")
    assert make(corpus).accounts["written"] == 4
    line = json.loads((tmp_path / "out/__mmdata__/quarantine.jsonl").read_bytes())
    assert line["path"] == "caf\udce92.jpg"
    assert line["reason"] == "not_an_image"


def test_a_folder_may_be_deeper_than_the_stack_of_python(tmp_path: Path, photo: Any) -> None:
    root = tmp_path / "deep"
    here = root
    for _ in range(120):  # ten levels at a time: `mkdir(parents=True)` is recursive itself
        here = here / "/".join("d" * 10)
        here.mkdir(parents=True)
    write(here, photo, deep="far below")
    write(root, photo, near="above", z="last")
    below = "/".join("d" * 1200)
    try:
        assert captions(root) == [("near.jpg", ["above"]), ("z.jpg", ["last"]), (f"{below}/deep.jpg", ["far below"])]
        (root / "t.csv").write_text("image,caption\nelsewhere/1.jpg,a dog\n")
        with pytest.raises(DataError, match="name the folder that they are relative to with --images FOLDER"):
            convert(root / "t.csv", tmp_path / "out", ConvertConfig())
    finally:
        subprocess.run(["rm", "-r", root], check=True)  # as pytest cannot


def test_folder_without_images_is_an_error(tmp_path: Path, make: Any) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/captions.csv").write_text("image,caption\n")
    with pytest.raises(DataError, match=r"'.*raw' was read by its only table: table '.*captions.csv': no rows"):
        make(tmp_path / "raw")
    (tmp_path / "raw/more.csv").write_text("image,caption\n")
    message = r"no images in it; the corpus is empty; it has tables \(captions.csv, more.csv\): give one as the source"
    with pytest.raises(DataError, match=message):
        make(tmp_path / "raw")


def test_output_inside_the_source_is_an_error(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lies inside the source .*; choose a folder beside it"):
        convert(corpus, corpus / "shards")
