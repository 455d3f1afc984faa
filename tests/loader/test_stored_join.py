"""A join is made once, lies beside the index, and belongs to the table and the index that it was made of."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import mmdata.tables.joined_table
from mmdata import Index, Loader
from mmdata.config.data import JoinConfig
from mmdata.errors import ConfigError, DataError
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer
from tests.programs import Program

from .conftest import Corpus

ORDER = np.random.default_rng(1).permutation(50).tolist()


def write_table(corpus: Corpus, file: Path, rows: list[int] = ORDER, **columns: Any) -> JoinConfig:
    """A table of some rows; another value leaves its size, its footer and, by `os.utime`, its time as they were."""
    table = pa.table(
        {
            "key": [corpus.samples[row].key for row in rows],
            "score": [row / 50 for row in rows],
            "recap": [[f"recaption {row:02d} of a tree", ""] for row in rows],
            **columns,
        }
    )
    kept_ns = file.stat().st_mtime_ns if file.exists() else None
    pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)
    if kept_ns:
        os.utime(file, ns=(kept_ns, kept_ns))
    return JoinConfig(table=str(file))


@pytest.fixture
def own(corpus: Corpus, tmp_path: Path) -> Corpus:
    """The corpus in a folder that no other test joins with."""
    return corpus.copy(tmp_path / "corpus")


@pytest.fixture
def no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be matched."""

    def match(*_: object, **__: object) -> None:
        raise AssertionError("a join was made that exists")

    monkeypatch.setattr(mmdata.tables.joined_table, "match", match)


def joins_of(corpus: Corpus) -> list[str]:
    found = (corpus.folder / "shards" / "__mmdata__" / "joins").iterdir()
    return sorted(path.name for path in found if not path.name.startswith("."))


class CountsOnce:
    """A tokenizer of a corpus that may be asked once for each caption."""

    def __init__(self, corpus: Corpus) -> None:
        self._tokenizer = Tokenizer.load(corpus.folder / "tokenizer")
        self.name, self.fingerprint = "", self._tokenizer.fingerprint
        self.counted: list[str] = []

    def count(self, captions: Any) -> Any:
        self.counted += captions
        return self._tokenizer.count(captions)


def test_a_table_is_matched_and_its_captions_are_counted_once(
    own: Corpus, tmp_path: Path, request: pytest.FixtureRequest
):
    settings, tokenizer = write_table(own, tmp_path / "recaps.parquet"), CountsOnce(own)
    found: list[Any] = []
    for start in range(2):
        (table,) = Joined([settings], own.index).tables
        captions = table.captions("recap", of="x")
        captions.count(tokenizer)
        rows = np.arange(50)
        numbers = np.zeros(50, np.int64)
        found.append(
            [
                table.table_rows.tolist(),
                captions.num_captions(rows).tolist(),
                captions.tokens(rows, numbers).tolist(),
                captions.hashes(rows, numbers).tolist(),
                [captions.text(row, 0) for row in range(50)],
                captions.fingerprint,
                table.values("score", of="x").fingerprint,
            ]
        )
        if not start:
            request.getfixturevalue("no_match")
    assert found[0] == found[1]
    assert found[0][0] == np.argsort(ORDER).tolist()
    assert found[0][1] == [1] * 50
    assert found[0][4] == [f"recaption {row:02d} of a tree" for row in range(50)]
    assert tokenizer.counted == [f"recaption {row:02d} of a tree" for row in ORDER]
    names = joins_of(own)
    assert len(names) == 4
    assert all(name.startswith("recaps-") for name in names)


CHANGES: dict[str, Any] = {
    "key": {"rows": [ORDER[1], ORDER[0], *ORDER[2:]]},
    "score": {"score": [row / 51 for row in ORDER]},
    "recap": {"recap": [[f"recaption {row:02d} of a treE", ""] for row in ORDER]},
}


@pytest.mark.parametrize("column", ["key", "score", "recap"])
def test_a_table_that_changed_since_is_refused_where_the_column_is_used(own: Corpus, tmp_path: Path, column: str):
    file = tmp_path / "recaps.parquet"
    write_table(own, file)
    before = file.stat()
    settings: dict[str, Any] = {"join": [{"table": str(file)}], "add_captions": True}
    uses: dict[str, dict[str, Any]] = {
        "key": {},
        "score": {"select": "score >= 0"},
        "recap": {"captions": {"join:recap": 1.0}},
    }
    with own.loader(**settings, **uses["score"], captions={"join:recap": 1.0}):
        pass
    write_table(own, file, **CHANGES[column])
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    named = r" \(in .*\)" if column == "key" else rf" \(in '{column}'\)"
    message = (
        rf"^data\.join\.0: '{file}' changed after it was joined with the index{named}: join it again with "
        rf"`mmdata join {own.folder}/shards {file}`, or put back the file that was joined$"
    )
    for name, use in uses.items():
        if column in ("key", name):
            with pytest.raises(DataError, match=message):
                own.loader(**settings, **use)
        else:
            own.loader(**settings, **use).close()
    (table,) = Joined([JoinConfig(table=str(file))], own.index, replaces=True).tables
    assert table.path is not None
    for use in uses.values():
        own.loader(**settings, **use).close()


def test_a_file_more_in_a_pattern_is_a_change(own: Corpus, tmp_path: Path):
    write_table(own, tmp_path / "part-0.parquet", ORDER[:25])
    settings = JoinConfig(table=str(tmp_path / "part-*.parquet"), key="key")
    Joined([settings], own.index)
    write_table(own, tmp_path / "part-1.parquet", ORDER[25:])
    with pytest.raises(DataError, match=r"changed after it was joined .*part-\*\.parquet --key key`"):
        Joined([settings], own.index)


def test_another_index_of_the_folder_is_joined_anew(own: Corpus, tmp_path: Path):
    settings = write_table(own, tmp_path / "recaps.parquet")
    before = Joined([settings], own.index).tables[0].table_rows
    names = joins_of(own)
    other = Corpus(tmp_path / "other", own.samples)
    other.folder.mkdir()
    own.write_beside(other.folder / "shards", own.samples[:20])
    (own.folder / "shards" / "__mmdata__" / "joins").rename(other.folder / "shards" / "__mmdata__" / "joins")
    assert Joined([settings], other.index).tables[0].table_rows.tolist() == before[:20].tolist()
    assert joins_of(other) == names  # in place of the old one


def test_a_folder_that_was_moved_keeps_its_joins(own: Corpus, tmp_path: Path, request: pytest.FixtureRequest):
    settings = write_table(own, tmp_path / "recaps.parquet")
    Joined([settings], own.index)
    own.folder.rename(tmp_path / "moved")
    moved = Corpus(tmp_path / "moved", own.samples)
    request.getfixturevalue("no_match")
    Joined([settings], moved.index)


def test_an_index_that_cannot_be_written_has_its_joins_in_the_cache(
    own: Corpus, tmp_path: Path, request: pytest.FixtureRequest
):
    (own.folder / "shards" / "__mmdata__" / "joins").write_text("")  # a permission would not stop root
    write_table(own, tmp_path / "recaps.parquet")
    settings = {"join": [{"table": str(tmp_path / "recaps.parquet")}], "cache_dir": str(tmp_path / "cache")}
    own.loader(**settings).close()
    assert len(list((tmp_path / "cache" / "joins").rglob("recaps-*.npz"))) == 1
    request.getfixturevalue("no_match")
    own.loader(**settings).close()


def test_the_datasets_of_a_mixture_are_joined_together(own: Corpus, tmp_path: Path):
    own.write_beside(tmp_path / "more", [])
    samples = own.samples[:20]
    for number, name in enumerate(("one", "two")):
        own.write_beside(tmp_path / name, samples[10 * number : 10 * number + 10])
    settings = write_table(own, tmp_path / "recaps.parquet", list(range(19, -1, -1)))
    both = Index.open([tmp_path / "one", tmp_path / "two"])
    for _ in range(2):
        assert Joined([settings], both).tables[0].table_rows.tolist() == list(range(19, -1, -1))
        assert Joined([settings], Index.open(tmp_path / "one")).tables[0].table_rows.tolist() == list(range(19, 9, -1))
    assert len(list((tmp_path / "one" / "__mmdata__" / "joins").glob("*.npz"))) == 2
    write_table(own, tmp_path / "recaps.parquet", list(range(20)))
    with pytest.raises(DataError, match=r"join it again with `mmdata join CONFIG`"):
        Joined([settings], both)


def test_a_table_without_any_key_of_the_index_is_not_kept(own: Corpus, tmp_path: Path):
    file = tmp_path / "recaps.parquet"
    settings = write_table(own, file)
    write_table(own, file, key=[f"x{row:04d}" for row in range(50)])
    for _ in range(2):
        with pytest.raises(ConfigError, match="50 of 50 rows have no row in"):
            Joined([settings], own.index)
    write_table(own, file)
    Joined([settings], own.index)


def with_field(corpus: Corpus, file: Path) -> Loader:
    return corpus.loader(join=[{"table": str(file)}], fields={"clip": "join:score", "recaption": "join:text"})


def join_again(corpus: Corpus, file: Path) -> None:
    Joined([JoinConfig(table=str(file))], corpus.index, replaces=True)


def test_a_state_of_other_fields_is_refused(own: Corpus, tmp_path: Path):
    file = tmp_path / "recaps.parquet"
    write_table(own, file, text=[str(row) for row in ORDER])
    with with_field(own, file) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    write_table(own, file, sorted(ORDER), text=[str(row) for row in sorted(ORDER)])  # in another order: the same
    join_again(own, file)
    with with_field(own, file) as loader:
        loader.load_state_dict(state)
    for column, value in (("score", 0.99), ("text", "x")):
        columns: dict[str, Any] = {"score": [row / 50 for row in ORDER], "text": [str(row) for row in ORDER]}
        columns[column][7] = value
        write_table(own, file, **columns)
        join_again(own, file)
        message = (
            r"^this loader state belongs to other fields: fields was 'data\.fields clip join:score, recaption "
            r"join:text \(\w{16}\)' and is 'data\.fields clip .* \(\w{16}\)'; resume with"
        )
        with with_field(own, file) as loader, pytest.raises(ConfigError, match=message):
            loader.load_state_dict(state)


RANK = """
import sys
from mmdata import Index
from mmdata.config.data import JoinConfig
from mmdata.tables.joined import Joined

(table,) = Joined([JoinConfig(table=sys.argv[2])], Index.open(sys.argv[1])).tables
print(table.table_rows.tolist(), table.captions("recap", of="x").fingerprint)
"""


def test_ranks_that_start_together_make_one_join(own: Corpus, tmp_path: Path):
    write_table(own, tmp_path / "recaps.parquet")
    command = [sys.executable, "-c", RANK, str(own.folder / "shards"), str(tmp_path / "recaps.parquet")]
    ranks = [Program(command, stdout=-1, text=True) for _ in range(4)]
    printed = {rank.communicate()[0] for rank in ranks}
    assert len(printed) == 1
    assert printed.pop().startswith(str(np.argsort(ORDER).tolist()))
    assert len(joins_of(own)) == 2
