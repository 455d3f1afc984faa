"""What a source may need besides its name, and what is said where it is not one corpus."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from mmdata.convert import ConvertConfig, convert, load_recipe
from mmdata.convert.sources.columns import as_list
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index
from tests.convert.conftest import left_out
from tests.convert.sources.test_sources import NAMES, Photos, folder_of, frame
from tests.convert.sources.test_tables import captions
from tests.programs import run_program

TABLE = b"image,caption\n1.jpg,x\n"


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        (
            ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
            {},
            "has 2 parts, which are converted one by one: test, train; choose one with --split train",
        ),
        (
            ["default/train/0000.parquet", "default/val/0000.parquet"],
            {},
            "has 2 parts, .*: default/train, default/val; choose one with --split default/train",
        ),
        (["train-00000-of-00001.parquet"], {"split": "dev"}, "split 'dev': no such part in '.*'; there are: train"),
        (["a/metadata.csv", "b/metadata.csv"], {}, "has 2 parts, .*: a, b; choose one with --split a"),
        (["train/cat/1.jpg", "val/cat/1.jpg"], {}, "has 2 parts, .*: train, val; choose one with --split train"),
        (
            ["images/1.jpg", "images/2.jpg", "captions.txt", "more.csv"],
            {},
            "no captions beside them; it has tables .captions.txt, more.csv.: give one as the source, as "
            ".*captions.txt$",
        ),
        (
            ["val2017/1.jpg", "annotations/captions_val2017.json", "annotations/objects_val2017.json"],
            {},
            "tables .annotations/captions_val2017.json, annotations/objects_val2017.json.: give one as the source",
        ),
        (
            ["images/1.jpg", "images/2.jpg", "names.csv"],
            {},
            "source '.*corpus' was read by its only table: table '.*names.csv': no rows",
        ),
    ],
)
def test_folder_that_is_not_one_corpus_says_what_it_holds(
    tmp_path: Path, files: list[str], settings: dict[str, Any], message: str
) -> None:
    for name in files:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with pytest.raises((DataError, ConfigError), match=message):
        convert(tmp_path / "corpus", tmp_path / "out", ConvertConfig(**settings))


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (
            "",
            {"delimiter": ";", "quotes": False, "caption_columns": ["x"]},
            "'.*corpus': it is a folder of images, .*; settings .* for it: caption_columns, delimiter, quotes; "
            "leave them out, or give a table as the source$",
        ),
        (
            "t.json",
            {"columns": ["a", "b"]},
            "it is a JSON table; settings that are not for it: columns;",
        ),
        ("t.parquet", {"encoding": "latin-1"}, "it is a Parquet or .*; settings that are not for it: encoding;"),
        (
            "t.tar",
            {"images": "x", "format": "csv"},
            "it is WebDataset tars; settings that are not for it: format, images;",
        ),
        (
            "t.json",
            {"table": "other.json"},
            "table 'other.json': '.*t.json' is a file itself; give its folder, or leave",
        ),
    ],
)
def test_setting_that_does_not_belong_to_the_kind_of_source_is_an_error(
    tmp_path: Path, photos: Photos, source: str, settings: dict[str, Any], message: str
) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    (tmp_path / "corpus/1.txt").write_text("x")
    frame(names, caption=NAMES).to_parquet(tmp_path / "corpus/t.parquet")
    (tmp_path / "corpus/t.json").write_text(json.dumps([{"image": names[0], "caption": "x"}]))
    (tmp_path / "corpus/t.tar").write_bytes(bytes(10240))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "corpus" / source, tmp_path / "out", ConvertConfig(**settings))


def test_images_alone_are_an_error_that_names_the_ways(tmp_path: Path, photos: Photos) -> None:
    folder_of(tmp_path / "corpus/cat", photos)
    message = (
        "neither captions nor labels; put a .txt with .* or give a table of .* or sort the images into a folder for"
    )
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "corpus", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "below"), [("captions.csv", ""), ("captions.csv", "images"), ("annotations/captions.csv", "val2017")]
)
def test_only_table_of_a_folder_of_images_is_taken(tmp_path: Path, photos: Photos, name: str, below: str) -> None:
    names = folder_of(tmp_path / "corpus", photos, below=below)
    (tmp_path / "corpus" / name).parent.mkdir(exist_ok=True)
    table = frame(names, words=NAMES).assign(filepath=[Path(one).name for one in names])
    table.to_csv(tmp_path / "corpus" / name, index=False)
    settings = ConvertConfig(caption_columns=["words"])
    report = convert(tmp_path / "corpus", tmp_path / "out", settings)
    assert [file["name"] for file in report.source["files"]] == [Path(name).name]
    convert(tmp_path / "corpus" / name, tmp_path / "by_table", settings)
    assert captions(tmp_path / "out") == captions(tmp_path / "by_table") == [[one] for one in NAMES]


def test_class_numbers_are_those_of_torchvision(tmp_path: Path, photos: Photos) -> None:
    for name, photo in zip(["b/2.jpg", "a/9.jpg", "c d/1.jpg"], photos, strict=True):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True)
        (tmp_path / "corpus" / name).write_bytes(photo)
    (tmp_path / "corpus/a/0.jpg").write_bytes(b"no image")
    report = convert(tmp_path / "corpus", tmp_path / "out", ConvertConfig(max_bad_share=0.5))
    assert report.accounts["classes"] == ImageFolder(tmp_path / "corpus").classes


def test_class_folders_named_by_numbers_are_numbered_by_torchvision(tmp_path: Path, photo: Any) -> None:
    for i in range(12):
        (tmp_path / f"corpus/{i}").mkdir(parents=True)
        (tmp_path / f"corpus/{i}/a.jpg").write_bytes(photo(8, 12, seed=i))
    theirs = ImageFolder(tmp_path / "corpus")
    report = convert(tmp_path / "corpus", tmp_path / "out", ConvertConfig(caption_templates=["number {}"]))
    assert report.accounts["classes"] == theirs.classes
    assert Index.open(tmp_path / "out").column("label").tolist() == theirs.targets
    assert captions(tmp_path / "out") == [[f"number {theirs.classes[label]}"] for label in theirs.targets]


@pytest.mark.parametrize("above", ["corpus", "corpus/train"])
def test_folder_of_classes_may_be_below_if_no_image_is_beside_it(tmp_path: Path, photos: Photos, above: str) -> None:
    names = ["train/flowers/daisy/1.jpg", "train/flowers/rose/2.jpg"]
    for name, photo in zip(names, photos, strict=False):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_bytes(photo)
    report = convert(tmp_path / "corpus", tmp_path / "out")
    assert (report.accounts["classes"], report.accounts["written"]) == (["daisy", "rose"], 2)
    (tmp_path / above / "cover.jpg").write_bytes(photos[2])
    with pytest.raises(DataError, match=r"neither captions nor labels.*and give the folder that holds these"):
        convert(tmp_path / "corpus", tmp_path / "other")


def test_table_without_a_header_takes_the_names_of_its_columns(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    table = tmp_path / "corpus/t.csv"
    table.write_text("".join(f"{name},said {name}\n" for name in names))
    with pytest.raises(ConfigError, match=r"if the table has no header line, all with columns=.image,caption."):
        convert(table, tmp_path / "out")
    convert(table, tmp_path / "out", ConvertConfig(columns=["image", "caption"]))
    assert captions(tmp_path / "out") == [[f"said {name}"] for name in names]


def test_table_in_another_encoding_says_so(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    table = tmp_path / "corpus/t.csv"
    table.write_bytes(b"image,caption\n" + b"".join(f"{name},caf\xe9\n".encode("latin-1") for name in names))
    with pytest.raises(DataError, match=r"3 of 3 rows are unusable.* bad_caption .*, such as encoding=latin-1"):
        convert(table, tmp_path / "out")
    table.write_text("image,caption\n" + "".join(f"{name},café\n" for name in names), encoding="utf-16")
    convert(table, tmp_path / "out", ConvertConfig(encoding="utf-16"))
    assert captions(tmp_path / "out") == [["café"]] * 3


def test_split_of_a_folder_is_that_of_the_only_table_in_it(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos, below="images")
    frame(names, caption=NAMES, split=["train", "val", "train"]).to_csv(tmp_path / "corpus/t.csv", index=False)
    report = convert(tmp_path / "corpus", tmp_path / "out", ConvertConfig(split="train"))
    assert (report.accounts["written"], report.accounts["filtered"]) == (2, 1)
    with pytest.raises(DataError, match=r"none of 3 rows could be written.*its split is 'train'"):
        convert(tmp_path / "corpus", tmp_path / "dev", ConvertConfig(split="dev"))


def test_split_column_chooses_rows_and_the_others_are_filtered(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    frame(names, caption=NAMES, split=["train", "val", "train"]).to_csv(tmp_path / "corpus/t.csv", index=False)
    report = convert(tmp_path / "corpus/t.csv", tmp_path / "out", ConvertConfig(split="train"))
    assert (report.accounts["written"], report.accounts["filtered"]) == (2, 1)
    assert captions(tmp_path / "out") == [[NAMES[0]], [NAMES[2]]]


def test_images_in_several_folders_are_an_error_that_names_them(tmp_path: Path, photos: Photos) -> None:
    for below in ("large", "small"):
        names = folder_of(tmp_path / "corpus", photos, below=below)
    table = tmp_path / "corpus/t.csv"
    frame(names, caption=NAMES).to_csv(table, index=False)
    with pytest.raises(ConfigError, match=r"its images are in several folders: large, small; name .* with --images"):
        convert(table, tmp_path / "out")
    convert(table, tmp_path / "out", ConvertConfig(images="small"))
    assert captions(tmp_path / "out") == [[name] for name in NAMES]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delimiter": ",,"}, r"delimiter.*must be one character"),
        ({"encoding": "utf-9"}, "encoding.*no encoding 'utf-9' is known; usual ones are utf-8, latin-1"),
        ({"columns": ["image", "image"]}, "columns must name two or more different columns"),
        ({"caption_templates": ["a photo"]}, r"must hold {} once, and no other braces: got 'a photo'"),
    ],
)
def test_setting_out_of_range_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, settings)


@pytest.mark.parametrize(
    ("rows", "caption_templates", "reason", "detail"),
    [
        ("2.jpg,", None, "missing_caption", "the row has neither a caption nor a label"),
        ("2.jpg,3", ["a {}"], "missing_caption", "class 3 has no name to put into a caption template; give names as"),
    ],
)
def test_row_without_caption_and_label_is_quarantined(
    tmp_path: Path, photos: Photos, rows: str, caption_templates: list[str] | None, reason: str, detail: str
) -> None:
    folder_of(tmp_path / "corpus", photos)
    table = tmp_path / "corpus/t.csv"
    table.write_text(f"image,label\n1.jpg,cat\n{rows}\n")
    convert(table, tmp_path / "out", ConvertConfig(max_bad_share=0.5, caption_templates=caption_templates))
    line = json.loads((tmp_path / "out/__mmdata__/quarantine.jsonl").read_text())
    assert line["reason"] == reason
    assert line["detail"].startswith(detail)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (str(["it's", 'a "b"', "c\nd"]), ["it's", 'a "b"', "c\nd"]),
        (str(np.array(["a", "b c"], object)), ["a", "b c"]),
        (json.dumps(["é", "\u2028"]), ["é", "\u2028"]),
        ("[]", []),
        ("['a dog', None]", ["a dog", None]),  # as pandas and Python write what is missing
        ("[nan, 'None']", [None, "None"]),
        ('["a dog", null]', ["a dog", None]),
        ("[None]", [None]),
        ("[a photo]", None),
        ("[None of them]", None),
        ("[1, 2]", None),
        ("['a', __import__('os')]", None),
        ("['a' + 'b']", None),
        ("['\\N{no such name}']", None),
        ("['a'" + " " * 200_000 + "x]", None),  # minutes, if each of the spaces were tried as the end
    ],
)
def test_list_written_as_text_is_read_and_nothing_is_executed(text: str, found: list[str | None] | None) -> None:
    assert as_list(text) == found


def test_command_takes_the_settings_of_tables(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos, below="pictures")
    lines = [f"{name}\t{kind}\n" for name, kind in zip(names, ["big_cat", "dog", "dog"], strict=True)]
    (tmp_path / "corpus/list.data").write_text("".join(lines), encoding="latin-1")
    flags = ["format=csv", "delimiter=tab", "encoding=latin-1", "columns=[image,label]"]
    command = [sys.executable, "-m", "mmdata", "convert", "corpus/list.data", "out", *flags]
    done = run_program(
        [*command, "--caption-template", "a {}", "--images", "corpus/pictures"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert captions(tmp_path / "out") == [["a big cat"], ["a dog"], ["a dog"]]


def run_convert(folder: Path, *arguments: str) -> list[str]:
    """What the command prints, by line, without the table of counts."""
    command = [sys.executable, "-m", "mmdata", "convert", *arguments]
    done = run_program(command, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()[7:]
    return [line for line in lines if not re.fullmatch(r"[\d,]+ rows in \d+ s, \d+ a second; [\d.]+ [kM]B", line)]


def test_command_says_what_it_found(tmp_path: Path, photos: Photos) -> None:
    for name, photo in zip(["cat/1.jpg", "dog/2.jpg", "dog/3.jpg"], photos, strict=True):
        (tmp_path / "classes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "classes" / name).write_bytes(photo)
    assert run_convert(tmp_path, "classes", "out") == [
        "classes: 2: cat, dog",
        "captions: none, a corpus of labels; leave data.tokenizer out, or convert with "
        '--caption-template "a photo of a {}."',
        "1 shard in out: 3 images, labels only",
        "next: mmdata plan out    # batches, shapes and padding",
        "      mmdata report out    # a page about the corpus",
    ]
    assert run_convert(tmp_path, "classes", "out3", "--caption-template", "a {}", "--train-tokenizer", "300")[1:] == [
        "captions: images of one class have equal ones, false negatives of each other; "
        "train.mask_false_negatives=true makes them no negatives",
        "1 shard in out3: 3 images, 3 captions",
        "next: mmdata init out3    # writes a config to train with",
        "      mmdata plan out3    # batches, shapes and padding",
        "      mmdata report out3    # a page about the corpus",
    ]
    names = folder_of(tmp_path / "table", [photos[0], photos[0], photos[1]], below="images")
    frame(names, caption=["a", "b", "c"]).to_csv(tmp_path / "table/t.csv", index=False)
    assert run_convert(tmp_path, "table", "out4")[:2] == [
        "table: found t.csv in table; --table names another one",
        "images: found in the folder 'images'; --images names another one",
    ]
    assert run_convert(tmp_path, "table/t.csv", "out2", "--val-share", "0.6") == [
        "images: found in the folder 'images'; --images names another one",
        "columns: image = filepath, captions = caption",
        "1 shard in out2/train: 1 image, 1 caption",
        "1 shard in out2/val: 1 image, 1 caption; 1 left out, each with its reason in "
        "out2/val/__mmdata__/quarantine.jsonl",
        "1 of the duplicates have other captions, or another label, than the row of the same image that was written: "
        "group_by=content gives that row their captions",
        "next: mmdata index out2/train --tokenizer clip    # counts captions; reads no image again",
        "      mmdata init out2/train    # writes a config to train with",
        "      mmdata plan out2/train    # batches, shapes and padding",
        "      mmdata report out2/train    # a page about the corpus",
    ]


def test_entry_of_json_that_is_no_object_is_quarantined(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    (tmp_path / "corpus/array.json").write_text(json.dumps([{"image": names[0], "caption": "x"}, "no object"]))
    convert(tmp_path / "corpus/array.json", tmp_path / "out", ConvertConfig(max_bad_share=0.9))
    (line,) = left_out(tmp_path / "out")
    assert (line["place"], line["reason"]) == ("array.json, entry 2", "broken_row")
    assert line["detail"] == "a JSON object is expected, got str"


@pytest.mark.parametrize(
    ("name", "data", "settings", "message"),
    [
        ("t.csv", TABLE, {"encoding": "utf-16"}, r"t.csv', after line 0: not utf-16: .* name its encoding, as in"),
        ("t.tar", b"\0" * 10240, {"split": "a"}, "split 'a': '.*t.tar' holds tars, all of one part; give those of"),
        ("t.csv", TABLE, {"split": "a"}, r"no column 'split' \(split\); there are: image, caption"),
        ("t.csv", TABLE, {"images": "no"}, "images 'no': no such folder in '.*', nor above it, nor in the current"),
    ],
)
def test_source_that_does_not_fit_its_settings_is_an_error(
    tmp_path: Path, name: str, data: bytes, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises((ConfigError, DataError), match=message):
        convert(tmp_path / name, tmp_path / "out", ConvertConfig(**settings))


def test_text_table_with_another_encoding_may_be_a_txt(tmp_path: Path, photos: Photos) -> None:
    names = folder_of(tmp_path / "corpus", photos)
    table = tmp_path / "corpus/captions.txt"
    table.write_text("image;caption\n" + "".join(f"{name};ü\n" for name in names), encoding="utf-16")
    convert(table, tmp_path / "out", ConvertConfig(encoding="utf-16"))
    assert captions(tmp_path / "out") == [["ü"]] * 3
