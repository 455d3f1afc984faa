"""What Hugging Face's `datasets` saves to disk and writes as Parquet, by the library itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import datasets
from mmdata.convert import ConvertConfig, Report, convert
from mmdata.convert.units.engines import threads
from mmdata.errors import DataError
from mmdata.index import Index
from tests.convert.sources.test_tables import captions

WORDS = ["one", "two", "three", "four"]
TEXT = datasets.Value("string")


@pytest.fixture(scope="module")
def photos(photo: Callable[..., bytes]) -> list[bytes]:
    return [photo(20, 30, seed=200 + number) for number in range(4)]


def dataset(photos: list[bytes], texts: Any = WORDS, kind: Any = TEXT) -> datasets.Dataset:
    features = datasets.Features(image=datasets.Image(), caption=kind)
    return datasets.Dataset.from_dict(
        {"image": [{"bytes": data, "path": None} for data in photos], "caption": texts}, features=features
    )


def made(source: Path, out: Path, **settings: Any) -> Report:
    return convert(source, out, ConvertConfig(max_bad_share=0.5, **settings), engine=threads(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.select([3, 1]), ["four", "two"]),
        (lambda table: table.filter(lambda row: row["caption"] != "two"), ["one", "three", "four"]),
        (lambda table: table.map(lambda row: {"caption": row["caption"] + "!"}), ["one!", "two!", "three!", "four!"]),
        (lambda table: datasets.concatenate_datasets([table.select([0]), table.select([2])]), ["one", "three"]),
    ],
)
def test_dataset_that_was_changed_is_saved_as_it_is_then(
    tmp_path: Path, photos: list[bytes], change: Any, words: list[str]
) -> None:
    table = change(dataset(photos))
    table.save_to_disk(str(tmp_path / "saved"))
    made(tmp_path / "saved", tmp_path / "out")
    assert table["caption"][:] == words
    assert captions(tmp_path / "out") == [[word] for word in words]


@pytest.mark.parametrize(
    ("texts", "kind", "expected"),
    [
        (WORDS, datasets.Value("large_string"), [[word] for word in WORDS]),
        ([[word, "x"] for word in WORDS], datasets.LargeList(TEXT), [[word, "x"] for word in WORDS]),
        ([[word, "x"] for word in WORDS], datasets.Sequence(TEXT, length=2), [[word, "x"] for word in WORDS]),
        (
            [{"raw": word, "id": 1} for word in WORDS],
            {"raw": TEXT, "id": datasets.Value("int64")},
            [[w] for w in WORDS],
        ),
        ([[{"raw": word}, {"raw": "x"}] for word in WORDS], datasets.List({"raw": TEXT}), [[w, "x"] for w in WORDS]),
        ([{"raw": [word, "x"]} for word in WORDS], {"raw": datasets.List(TEXT)}, [[w, "x"] for w in WORDS]),
    ],
)
@pytest.mark.parametrize("form", ["disk", "parquet"])
def test_captions_of_each_type_are_read(
    tmp_path: Path, photos: list[bytes], texts: Any, kind: Any, expected: list[list[str]], form: str
) -> None:
    table, source = dataset(photos, texts, kind), tmp_path / ("t.parquet" if form == "parquet" else "saved")
    table.to_parquet(str(source)) if form == "parquet" else table.save_to_disk(str(source))
    made(source, tmp_path / "out")
    assert captions(tmp_path / "out") == expected


def test_images_without_any_path_are_images(tmp_path: Path, photos: list[bytes]) -> None:
    rows = {"image": [{"bytes": data, "path": None} for data in photos], "caption": WORDS}
    table = datasets.Dataset.from_dict(rows)  # without features: the paths are of the type null
    assert str(table.data.schema.field("image").type) == "struct<bytes: binary, path: null>"
    table.save_to_disk(str(tmp_path / "saved"))
    assert made(tmp_path / "saved", tmp_path / "out").accounts["written"] == 4


def test_part_without_rows_is_an_error_that_names_it(tmp_path: Path, photos: list[bytes]) -> None:
    table = dataset(photos)
    datasets.DatasetDict({"train": table, "test": table.select([])}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"dataset '.*/saved': its part 'test' has no rows; the corpus is empty"):
        made(tmp_path / "saved", tmp_path / "out", split="test")
    assert made(tmp_path / "saved", tmp_path / "out", split="train").accounts["written"] == 4


def test_only_class_label_of_another_name_is_the_label(tmp_path: Path, photos: list[bytes]) -> None:
    kinds = datasets.ClassLabel(names=["oak", "elm"])
    features = datasets.Features(img=datasets.Image(), species=kinds, age=datasets.Value("int64"))
    rows = {"img": [{"bytes": data, "path": None} for data in photos], "species": [0, 1, 1, 0], "age": [1, 2, 3, 4]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    report = made(tmp_path / "saved", tmp_path / "out")
    assert (report.source["label"], report.accounts["classes"]) == ("species", ["oak", "elm"])
    assert Index.open(tmp_path / "out").column("label").tolist() == [0, 1, 1, 0]
