"""Tables of URLs without a header line: which column is taken for what, and where it is said."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mmdata.cli.data.convert import show
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.sources.delimited import DelimitedTable, name_columns
from mmdata.convert.units.engines import threads
from mmdata.errors import ConfigError

IMAGE = "http://a.example/1.jpg"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([["a dog", IMAGE]], ["caption", "url"]),
        ([[IMAGE, "a dog"]], ["url", "caption"]),
        ([["7", IMAGE, "en", "a dog that sleeps"]], ["column1", "url", "column3", "caption"]),
        ([["http://a.example/page", IMAGE, "a dog"]], ["column1", "url", "caption"]),
        ([["https://a.example/x", "https://a.example/y", "a dog"]], ["url", "column2", "caption"]),
        ([["a dog", IMAGE], ["see http://b.example now", IMAGE]], ["caption", "url"]),
        ([["a", IMAGE], ["a cat and a dog"], ["", IMAGE], ["b", "HTTPS://b.example/2"]], ["caption", "url"]),
        ([[IMAGE]], ["url"]),
        ([[IMAGE, "17", "0.5"]], ["url", "column2", "column3"]),
        ([["犬", IMAGE, "12"]], ["caption", "url", "column3"]),
    ],
)
def test_columns_are_named_by_what_they_hold(rows: list[list[str]], names: list[str]) -> None:
    assert name_columns(rows) == names


@pytest.mark.parametrize(
    ("text", "columns", "guessed", "num_rows"),
    [
        (f"a dog\t{IMAGE}\nb\t{IMAGE}\n", ["caption", "url"], True, 2),
        (f"{IMAGE},a dog\n", ["url", "caption"], True, 1),
        (f"\n\n{IMAGE},a dog\n", ["url", "caption"], True, 1),
        (f"url,caption\n{IMAGE},a dog\n", ["url", "caption"], False, 1),
        (f"see http://a.example here,caption\n{IMAGE},a dog\n", ["see http://a.example here", "caption"], False, 1),
        (f'{IMAGE},a dog\n{IMAGE},"not closed\n', ["url", "caption"], True, None),
    ],
)
def test_first_line_with_a_url_is_a_row(
    tmp_path: Path, text: str, columns: list[str], guessed: bool, num_rows: int | None
) -> None:
    (tmp_path / "t.csv").write_text(text)
    table = DelimitedTable(tmp_path / "t.csv", ConvertConfig())
    assert (table.columns, table.guessed) == (columns, guessed)
    if num_rows is not None:
        assert len(list(table.rows(columns))) == num_rows


def test_names_that_are_given_are_taken(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"a,{IMAGE}\n")
    table = DelimitedTable(tmp_path / "t.csv", ConvertConfig(columns=["said", "where"]))
    assert (table.columns, table.guessed) == (["said", "where"], False)


def test_list_of_urls_alone_lacks_captions(tmp_path: Path, make: Any) -> None:
    (tmp_path / "t.csv").write_text(f"{IMAGE}\n{IMAGE}\n")
    with pytest.raises(ConfigError, match=r"no caption column of a usual name .*; there are: url; name it with"):
        make(tmp_path / "t.csv")


def test_program_says_which_fields_it_took(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "t.tsv").write_text("a dog\tn/a\thttp://127.0.0.1:9/1.jpg\na cat\tn/a\ta.jpg\n")
    config = ConvertConfig(max_bad_share=0.9)
    report = convert(corpus / "t.tsv", tmp_path / "out", config, engine=threads(1))
    options = argparse.Namespace(source=str(corpus / "t.tsv"), out=tmp_path / "out", not_in=None)
    show(report, options, config)
    said = "took field 1 as caption, field 2 as column2, field 3 as url; columns=[…] names others"
    assert f"header: none in the table, whose first line holds a URL; {said}\n" in capsys.readouterr().out
