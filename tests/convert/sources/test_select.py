"""`mmdata convert SHARDS OUT --select`: the rows of indexed shards that meet a condition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmdata.cli.data.convert import selected_rows
from mmdata.convert import convert
from mmdata.convert.sources.chosen import SelectedRows
from mmdata.errors import ConfigError, DataError
from mmdata.index import Index, build_index
from tests.loader.member_tars import write_tar
from tests.programs import PATIENCE_S, run_program


@pytest.fixture
def shards(tmp_path: Path, photo: Callable[..., bytes]) -> Path:
    """Two tars of six samples each, of 20 to 31 × 40 pixels."""
    for tar in range(2):
        samples = {
            f"{tar}{row:03d}": {
                "jpg": photo(20 + 6 * tar + row, 40, seed=row + 10 * tar),
                "txt": f"photo {tar} {row}".encode(),
            }
            for row in range(6)
        }
        write_tar(tmp_path / "shards" / f"{tar}.tar", samples)
    build_index(tmp_path / "shards")
    return tmp_path / "shards"


def keys_of(folder: Path) -> list[str]:
    index = Index.open(folder)
    return index.keys(range(len(index)))


def test_selected_rows_alone_are_converted(shards: Path, tmp_path: Path) -> None:
    report = convert(shards, tmp_path / "out", rows=selected_rows(str(shards), "height >= 24 and height < 28"))
    assert keys_of(tmp_path / "out") == ["0004", "0005", "1000", "1001"]
    assert (report.accounts["written"], report.accounts["rows"]) == (4, 4)
    again = convert(shards, tmp_path / "out", rows=selected_rows(str(shards), "height >= 24 and height < 28"))
    assert again.was_complete


def test_a_file_of_keys_selects_for_the_program(shards: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["0001", "1005"]}), tmp_path / "good.parquet")
    flags = ["--select", str(tmp_path / "good.parquet")]
    command = [sys.executable, "-m", "mmdata", "convert", str(shards), str(tmp_path / "out"), *flags]
    done = run_program(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert keys_of(tmp_path / "out") == ["0001", "1005"]
    assert pq.read_table(tmp_path / "out/__mmdata__/rows")["row"].to_pylist() == [1, 11]


def test_another_condition_is_another_conversion(shards: Path, tmp_path: Path) -> None:
    convert(shards, tmp_path / "out", rows=selected_rows(str(shards), "height >= 24"))
    with pytest.raises(Exception, match=r"holds another conversion \(rows: other rows are selected\)"):
        convert(shards, tmp_path / "out", rows=selected_rows(str(shards), "height < 24"))
    in_other_words = selected_rows(str(shards), "not height < 24")
    assert convert(shards, tmp_path / "out", rows=in_other_words).was_complete


def test_select_is_for_shards(shards: Path, tmp_path: Path, raw_corpus: Path) -> None:
    chosen = selected_rows(str(shards), "height >= 24")
    with pytest.raises(
        ConfigError, match="the source is no folder of tars; rows of shards with an index can be selected"
    ):
        convert(raw_corpus / "captions.jsonl", tmp_path / "out", rows=chosen)


def test_select_of_a_table_names_the_flag(raw_corpus: Path) -> None:
    with pytest.raises(DataError, match=r"^--select takes rows of shards with an index: '.*jsonl' is a table"):
        selected_rows(str(raw_corpus / "captions.jsonl"), "width > 3")


@pytest.mark.parametrize("select", ["score > 0.6", "height > 1000", "height >", "none.npy"])
def test_a_wrong_condition_is_told_of_the_flag(shards: Path, select: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        selected_rows(str(shards), select)
    assert str(caught.value).startswith("--select")
    assert "data.select" not in str(caught.value)


def test_selected_image_that_is_not_where_the_index_says_is_an_error(
    shards: Path, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    chosen = selected_rows(str(shards), "height >= 24 and height < 28")
    write_tar(shards / "1.tar", {"1000": {"txt": b"a photo", "jpg": photo(26, 40, seed=10)}})
    changed = r"selected images, \d are where it says; `mmdata verify .*shards` names what has changed"
    with pytest.raises(DataError, match=f"select 'height >= 24 and height < 28': the index of '.*' lists 4 {changed}"):
        convert(shards, tmp_path / "out", rows=chosen)
    (shards / "1.tar").unlink()
    with pytest.raises(DataError, match=f"lists 4 {changed}"):
        convert(shards, tmp_path / "out", rows=chosen)


def test_selection_without_a_row_names_itself(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="select 'height > 99': no row is selected"):
        convert(shards, tmp_path / "out", rows=SelectedRows("height > 99", {}))
