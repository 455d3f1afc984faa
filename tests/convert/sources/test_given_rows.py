"""Rows that a program gives: what they may hold, how often they are read, and what becomes of bad ones."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import datasets
from mmdata.convert import ConvertConfig, Report, convert, convert_part
from mmdata.convert.sources.chosen import SelectedRows
from mmdata.convert.sources.given_rows import GivenTable
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError, DataError
from tests.convert.conftest import content, left_out, members

Make = Callable[..., Report]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(rows, **settings)`: convert into tmp_path/out, however many rows are bad."""

    def run(rows: Any, **settings: Any) -> Report:
        config = ConvertConfig(**{"max_bad_share": 0.9, **settings})
        return convert(rows, tmp_path / "out", config, engine=threads(1))

    return run


def test_generator_of_bytes_paths_and_pictures_is_converted(corpus: Path, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"image": (corpus / "a.jpg").read_bytes(), "caption": "one", "label": 0, "licence": "CC0"}
        yield {"image": corpus / "b.jpg", "captions": ["two", "deux"], "label": np.int64(1), "where": {"page": 3}}
        yield {"image": Image.open(corpus / "c.jpg"), "caption": "three", "score": np.float32(0.5), "key": "mine/c"}
        with Image.open(corpus / "c.jpg") as loaded:
            loaded.load()
        yield {"image": loaded.copy(), "caption": "four", "key": "mine/d"}

    report = convert(rows(), tmp_path / "out")
    assert (report.accounts["written"], report.accounts["rows"]) == (4, 4)
    found = members(tmp_path / "out")
    assert found["000000000.jpg"] == (corpus / "a.jpg").read_bytes()
    assert found["000000001.jpg"] == (corpus / "b.jpg").read_bytes()
    assert json.loads(found["000000000.json"]) == {"captions": ["one"], "label": 0, "licence": "CC0"}
    assert json.loads(found["000000001.json"]) == {"captions": ["two", "deux"], "label": 1, "where": {"page": 3}}
    assert json.loads(found["mine/c.json"]) == {"captions": ["three"], "score": 0.5}
    assert found["mine/c.jpg"] == (corpus / "c.jpg").read_bytes()
    with Image.open(io.BytesIO(found["mine/d.png"])) as stored, Image.open(corpus / "c.jpg") as given_one:
        assert (stored.format, stored.tobytes()) == ("PNG", given_one.tobytes())


def test_program_says_why_a_row_is_left_out(corpus: Path, tmp_path: Path, make: Make) -> None:
    good: dict[str, Any] = {"image": corpus / "a.jpg", "caption": "x", "page": 3, "left_out": None}
    said = ["missing_caption: nobody wrote one", "file 7 is torn", "odd: not a reason", 3, "corrupt_image"]
    report = make([good, *({"image": f"{why}.jpg", "left_out": why} for why in said)])
    assert json.loads(members(tmp_path / "out")["000000000.json"]) == {"captions": ["x"], "page": 3}
    assert report.accounts["reasons"] == {"broken_row": 3, "corrupt_image": 1, "missing_caption": 1}
    assert [(line["reason"], line["detail"]) for line in left_out(tmp_path / "out")] == [
        ("missing_caption", "nobody wrote one"),
        ("broken_row", "file 7 is torn"),
        ("broken_row", "odd: not a reason"),
        ("broken_row", "left_out is int, not a text"),
        ("corrupt_image", "the program left it out"),
    ]


@pytest.mark.parametrize("said", [None, math.nan, "", " \t"])
def test_what_says_nothing_leaves_no_row_out(corpus: Path, make: Make, said: Any) -> None:
    report = make([{"image": corpus / f"{name}.jpg", "caption": "x", "left_out": said} for name in "ab"])
    assert report.accounts["written"] == 2


def test_row_that_is_left_out_on_purpose_is_not_one_that_cannot_be_used(corpus: Path, tmp_path: Path) -> None:
    said = [None, "duplicate_image: of another site", "filtered: too old", "broken_row: torn"]
    rows = [{"image": corpus / "a.jpg", "caption": "x", "left_out": why} for why in said]
    made = convert_part(rows, tmp_path / "out", part=(1, 1), engine=threads(1))
    assert (made.rows, made.quarantined) == (4, 1)


def test_row_that_is_left_out_names_no_class(corpus: Path, make: Make) -> None:
    rows = [{"image": corpus / f"{name}.jpg", "caption": name, "label": f"class {name}"} for name in "abc"]
    report = make([{**rows[0], "left_out": "torn"}, *rows[1:]])
    assert report.accounts["classes"] == ["class b", "class c"]


def test_bytes_of_columns_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    rows = [{"image": bytes(1000), "label": number, "mask": b"m"} for number in range(2)]
    with GivenTable(rows, tmp_path) as table:
        assert [row.cells for row in table.rows(["label", "mask"])] == [
            {"image": None, "label": number, "mask": b"m"} for number in range(2)
        ]
        assert [row.cells for row in table.rows(["image"])] == [{**row, "mask": None} for row in rows]


def test_picture_is_stored_as_it_is_seen(corpus: Path, tmp_path: Path, make: Make) -> None:
    with Image.open(corpus / "a.jpg") as image:
        exif = image.getexif()
        exif[0x0112] = 6  # turned by 90 degrees
        image.save(tmp_path / "turned.jpg", exif=exif)
    turned = Image.open(tmp_path / "turned.jpg")
    turned.load()
    make([{"image": turned, "caption": "x"}])
    with Image.open(io.BytesIO(members(tmp_path / "out")["000000000.png"])) as stored:
        assert stored.size == (20, 30)


@pytest.mark.parametrize("form", ["generator", "list", "function", "iterable"])
def test_each_form_of_rows_gives_the_same_shards(corpus: Path, tmp_path: Path, form: str) -> None:
    rows = [{"image": str(corpus / f"{n}.jpg"), "caption": f"{n} {i}"} for i in range(2) for n in "abc"]
    forms: dict[str, Any] = {
        "generator": (row for row in rows),
        "list": rows,
        "function": lambda: iter(rows),
        "iterable": dict(enumerate(rows)).values(),
    }
    config = ConvertConfig(train_tokenizer=300, val_share=0.4)
    report = convert(forms[form], tmp_path / form, config, engine=threads(1))
    again = convert(list(rows), tmp_path / "list", config, engine=threads(1))
    assert report.accounts["merged"] == 3
    assert content(tmp_path / form) == content(tmp_path / "list")
    assert again.was_complete == (form == "list")
    assert report.source == again.source


def test_rows_of_a_generator_and_of_a_function_are_read_once(corpus: Path, tmp_path: Path) -> None:
    taken: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number, name in enumerate("abc"):
            taken.append(number)
            yield {"image": corpus / f"{name}.jpg", "caption": name}

    convert(rows(), tmp_path / "generator")
    convert(rows, tmp_path / "function")
    assert taken == [0, 1, 2] * 2
    assert content(tmp_path / "generator") == content(tmp_path / "function")


def test_rows_that_are_known_are_complete_already_and_others_are_an_error(corpus: Path, make: Make) -> None:
    def rows(caption: str) -> Iterator[dict[str, Any]]:
        return ({"image": (corpus / f"{n}.jpg").read_bytes(), "caption": caption} for n in "abc")

    assert not make(rows("x")).was_complete
    assert make(rows("x")).was_complete
    with pytest.raises(DataError, match=r"holds another conversion \(the rows are others\)"):
        make(rows("y"))


def test_error_of_the_program_passes_untouched_and_nothing_is_published(corpus: Path, tmp_path: Path) -> None:
    error = KeyError("of the program")

    def rows() -> Iterator[dict[str, Any]]:
        yield {"image": corpus / "a.jpg", "caption": "x"}
        raise error

    with pytest.raises(KeyError) as caught:
        convert(rows(), tmp_path / "out")
    assert caught.value is error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".mmdata.lock"]


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (None, "broken_row", "a dict is expected, got NoneType"),
        (("a.jpg", "x"), "broken_row", "a dict is expected, got tuple"),
        ({"image": None, "caption": "x"}, "missing_image", "the image's path is null"),
        ({"caption": "x"}, "missing_image", "the image's path is null"),
        ({"image": 7, "caption": "x"}, "missing_image", "the image's path is int, not a string"),
        ({"image": "a.jpg", "caption": None}, "missing_caption", "the row has no caption"),
        ({"image": "a.jpg", "caption": 3}, "bad_caption", "caption is int"),
        ({"image": "a.jpg", "caption": ""}, "empty_caption", ""),
        ({"image": b"GIF", "caption": "x"}, "not_an_image", ""),
        ({"image": b"", "caption": "x"}, "empty_file", ""),
        ({"image": "nowhere.jpg", "caption": "x"}, "missing_image", "No such file"),
        ({"image": "a.jpg", "caption": "x", 5: 6}, "broken_row", "the key 5 is int, not a string"),
        ({"image": "a.jpg", "caption": "x", "more": {1, 2}}, "broken_row", "'more' cannot be stored: .* type set"),
        ({"image": "a.jpg", "caption": "x", "more": {"a": b"x"}}, "broken_row", "'more' cannot be .* type bytes"),
        ({"image": np.zeros((2, 2, 3), np.uint8), "caption": "x"}, "broken_row", r"\(2, 2, 3\); give pixels as PIL"),
        ({"image": torch.zeros(3, 2, 2).byte(), "caption": "x"}, "broken_row", "an array of uint8, of shape"),
        ({"image": Image.new("CMYK", (9, 9)), "caption": "x"}, "broken_row", "cannot write mode CMYK as PNG"),
        ({"image": "a.jpg", "caption": "x", "key": "a.b"}, "broken_row", "key 'a.b': a key has no dot"),
        ({"image": "a.jpg", "caption": "x", "key": "../b"}, "broken_row", "a key has no dot and no empty folder"),
        ({"image": "a.jpg", "caption": "x", "key": ""}, "broken_row", "key '': a key has no dot"),
        ({"image": "a.jpg", "caption": "x", "key": "x" * 300}, "broken_row", "fits into the header of a tar"),
        ({"image": "a.jpg", "caption": "x", "key": 1.5}, "broken_row", "the key is float, not a string"),
        ({"image": "a.jpg", "caption": "x", "key": "good"}, "broken_row", "key 'good': another row, of another image"),
        ({"image": "a.jpg", "caption": "x", "key": "000000001"}, "broken_row", "key '000000001': another row"),
    ],
)
def test_bad_row_is_quarantined_with_its_reason(
    corpus: Path, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, row: Any, reason: str, detail: str
) -> None:
    monkeypatch.chdir(corpus)
    good = [{"image": "b.jpg", "caption": "b", "key": "good"}, {"image": "c.jpg", "caption": "c"}]
    report = make(iter([*good, row]))
    assert (report.accounts["rows"], report.accounts["written"]) == (3, 2)
    (line,) = left_out(tmp_path / "out")
    assert (line["row"], line["place"], line["reason"]) == (2, "row 2", reason)
    assert re.search(detail, line["detail"]), line["detail"]


def test_key_of_several_rows_is_fine_where_they_are_of_one_image(corpus: Path, tmp_path: Path, make: Make) -> None:
    rows = [{"image": corpus / "a.jpg", "caption": text, "key": 17} for text in ("one", "two")]
    report = make([*rows, {"image": corpus / "b.jpg", "caption": "b", "key": "b"}])
    assert (report.accounts["written"], report.accounts["merged"]) == (2, 1)
    assert json.loads(members(tmp_path / "out")["17.json"]) == {"captions": ["one", "two"]}


def test_key_of_several_rows_is_not_written_twice(corpus: Path, tmp_path: Path, make: Make) -> None:
    make([{"image": corpus / "a.jpg", "caption": text, "key": "k"} for text in "xy"], keep_duplicates=True)
    assert [line["detail"] for line in left_out(tmp_path / "out")] == ["key 'k': another row, of another image, has it"]


def test_number_of_a_row_is_no_key_once_another_row_has_it(corpus: Path, tmp_path: Path, make: Make) -> None:
    make([{"image": corpus / "a.jpg", "caption": "a", "key": "000000001"}, {"image": corpus / "b.jpg", "caption": "b"}])
    assert [line["detail"] for line in left_out(tmp_path / "out")] == [
        "key '000000001': another row, of another image, has it"
    ]


@pytest.mark.parametrize(
    ("rows", "settings", "error", "message"),
    [
        ([], {}, DataError, "table 'rows': no rows; the corpus is empty"),
        (
            ["a.csv"],
            {},
            DataError,
            r"rows: none of 1 can be used \(row 0: a dict is expected, got str\); each is a dict",
        ),
        ({"image": 1}, {}, DataError, r"none of 1 can be used \(row 0: a dict is expected, got str\)"),
        (7, {}, ConfigError, "source: a path, an iterable of dicts, or a function that returns one; got int"),
        (lambda: None, {}, ConfigError, "the function is to return an iterable of dicts; got NoneType"),
        ([{"picture": "a", "caption": "x"}], {}, ConfigError, r"name it with ConvertConfig\(image_column=…\)$"),
        ([{"image": "a", "said": "x"}], {}, ConfigError, r"name it with ConvertConfig\(caption_columns=\[…\]\)$"),
        ([{"a": "x"}], {}, ConfigError, r"name them with ConvertConfig\(image_column=…, caption_columns=\[…\]\)$"),
        (
            [{}],
            {"table": "t.csv"},
            ConfigError,
            "source 'rows': it is rows of a program; settings .* for it: table;",
        ),
        (
            [{}],
            {"delimiter": ";"},
            ConfigError,
            "it is rows of a program; .* not for it: delimiter;",
        ),
        ([{"image": "a", "caption": "x"}], {"images": "none"}, ConfigError, "images 'none': no such folder"),
    ],
)
def test_what_is_no_source_of_rows_is_an_error(
    make: Make, rows: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(rows, **settings)


def test_rows_of_a_program_cannot_be_selected(tmp_path: Path) -> None:
    rows = SelectedRows("aspect < 2", {})
    with pytest.raises(ConfigError, match="select: the source is no folder of tars; rows of shards with an index can"):
        convert([{"image": "a.jpg", "caption": "x"}], tmp_path / "out", rows=rows)


def test_settings_name_the_keys_of_rows_and_what_is_kept(corpus: Path, tmp_path: Path, make: Make) -> None:
    rows = [{"picture": "a.jpg", "said": "x", "kind": "cat", "licence": "CC0", "more": 1}]
    settings = {"image_column": "picture", "caption_columns": ["said"], "label_column": "kind", "keep": ["licence"]}
    report = make(rows, images=str(corpus), **settings)
    assert report.accounts["classes"] == ["cat"]
    found = members(tmp_path / "out")
    assert json.loads(found["000000000.json"]) == {"captions": ["x"], "label": 0, "licence": "CC0"}


def test_key_of_a_row_is_kept_where_keep_names_it(corpus: Path, tmp_path: Path, make: Make) -> None:
    make([{"image": corpus / "a.jpg", "caption": "x", "key": 7, "left_out": None, "n": 1}], keep=["*", "key"])
    assert json.loads(members(tmp_path / "out")["7.json"]) == {"captions": ["x"], "key": 7, "n": 1}


def test_with_a_folder_of_images_nothing_outside_it_is_read(corpus: Path, tmp_path: Path, make: Make) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.jpg").write_bytes((corpus / "a.jpg").read_bytes())
    make(
        [{"image": "a.jpg", "caption": "x"}, {"image": str(corpus / "b.jpg"), "caption": "y"}],
        images=str(tmp_path / "inner"),
    )
    assert [line["reason"] for line in left_out(tmp_path / "out")] == ["outside_root"]


def test_bytes_beside_the_image_are_left_out_and_said(
    corpus: Path, tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make([{"image": corpus / "a.jpg", "caption": "x", "mask": b"\xff\x00", "n": 1}])
    assert json.loads(members(tmp_path / "out")["000000000.json"]) == {"captions": ["x"], "n": 1}
    assert "table 'rows': keep '*' leaves out mask, whose cells are bytes" in caplog.text


def test_dataset_of_hugging_face_gives_its_files_byte_for_byte(corpus: Path, tmp_path: Path, make: Make) -> None:
    names = [str(corpus / f"{name}.jpg") for name in "abc"]
    table = datasets.Dataset.from_dict({"image": names, "caption": list("abc")})
    make(table.cast_column("image", datasets.Image(decode=False)))
    found = members(tmp_path / "out")
    assert [found[f"00000000{i}.jpg"] for i in range(3)] == [Path(name).read_bytes() for name in names]


def test_dataset_of_torch_with_places_is_read_once(tmp_path: Path, make: Make) -> None:
    class Photos(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, place: int) -> dict[str, Any]:
            pixels = np.random.default_rng().integers(0, 255, (9, 9, 3), np.uint8)  # other ones each time
            return {"image": Image.fromarray(pixels), "caption": f"photo {place}", "label": torch.tensor(place % 2)}

    assert make(Photos()).accounts["written"] == 3
    assert members(tmp_path / "out")["000000001.json"] == b'{"captions":["photo 1"],"label":1}'


def test_records_of_a_data_frame_are_rows(corpus: Path, tmp_path: Path, make: Make) -> None:
    frame = pd.DataFrame({"image": [str(corpus / "a.jpg")], "caption": ["x"], "n": [3]})
    frame["when"] = pd.Timestamp("2020-01-02T03:04:05")
    make(frame.to_dict("records"))
    assert json.loads(members(tmp_path / "out")["000000000.json"]) == {
        "captions": ["x"],
        "n": 3,
        "when": "2020-01-02T03:04:05",
    }


@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=5),
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=50)),
            max_size=4,
        ),
        max_size=8,
    )
)
def test_rows_from_the_temporary_file_are_those_of_the_program(
    tmp_path_factory: Any, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    with GivenTable(rows, folder) as table:
        expected = [repr(row) for row in rows]  # nan is not equal to itself
        assert [repr(row.cells) for row in table.rows(table.columns)] == expected
        assert [repr(row.cells) for row in table.rows(table.columns)] == expected
