"""A join is made by `mmdata join`, lies beside the index, and belongs to the table and the index it was made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from mmdata import Index, Loader
from mmdata.config.corpus import JoinConfig
from mmdata.errors import ConfigError
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer
from tests.flat_settings import grouped
from tests.joins import join_first

from .conftest import Corpus, write

ORDER = np.random.default_rng(1).permutation(50).tolist()


def write_table(corpus: Corpus, file: Path, rows: list[int] = ORDER, **columns: Any) -> str:
    """A table of some rows; another value leaves its size as it was."""
    table = pa.table(
        {
            "key": [corpus.samples[row].key for row in rows],
            "score": [row / 50 for row in rows],
            "recap": [[f"recaption {row:02d} of a tree", ""] for row in rows],
            **columns,
        }
    )
    pyarrow.parquet.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)
    return str(file)


@pytest.fixture
def own(corpus: Corpus, tmp_path: Path) -> Corpus:
    """The corpus in a folder that no other test joins with."""
    return corpus.copy(tmp_path / "corpus")


def joins_of(corpus: Corpus) -> list[str]:
    found = (corpus.folder / "shards" / "__mmdata__" / "joins").iterdir()
    return sorted(path.name for path in found if not path.name.startswith("."))


def start(corpus: Corpus, **changes: Any) -> Loader:
    """A start, which joins nothing."""
    return Loader.from_config(grouped(**{**corpus.settings, **changes}), rank=0, world_size=1)


def test_a_start_reads_what_was_joined_and_no_table(own: Corpus, tmp_path: Path):
    write_table(own, tmp_path / "recaps.parquet")
    settings: dict[str, Any] = {
        "join": [{"table": str(tmp_path / "recaps.parquet")}],
        "captions": {"join:recap": 1.0},
        "fields": {"clip": "join:score"},
        "select": "score < 0.9",
    }
    join_first(grouped(**own.settings, **settings))
    names = joins_of(own)
    assert len(names) == 4  # which rows, score, captions, their tokens
    assert all(name.startswith("recaps-") for name in names)

    table = tmp_path / "recaps.parquet"
    status = table.stat()
    table.write_bytes(bytes(status.st_size))  # no table, of the same size and time
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen: list[int] = []
    with start(own, **settings) as loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            for place, row in enumerate(entries["rows"].tolist()):
                if row >= 0:
                    seen.append(row)
                    assert entries["captions"][place] == f"recaption {row:02d} of a tree"
                    assert entries["clip"][place] == row / 50
    assert sorted(seen) == list(range(45))
    assert joins_of(own) == names


RUN = r"run `mmdata join CONFIG`$"


def test_what_is_not_joined_is_an_error_that_names_the_command(own: Corpus, tmp_path: Path):
    file = tmp_path / "recaps.parquet"
    write_table(own, file)
    join: dict[str, Any] = {"join": [{"table": str(file)}]}
    with pytest.raises(ConfigError, match=rf"^data\.join\.0: '{file}' is not joined .*: it does not exist\); {RUN}"):
        start(own, **join)
    join_first(grouped(**own.settings, **join))
    start(own, **join).close()
    for use in ({"select": "score > 0"}, {"fields": {"clip": "join:score"}}, {"row_weights": "score"}):
        message = rf"^data\.join\.0: column 'score' of '{file}' is not joined with the index .*; {RUN}"
        with pytest.raises(ConfigError, match=message):
            start(own, **join, **use)
    join |= {"captions": {"join:recap": 1.0}}
    with pytest.raises(ConfigError, match=rf"^data\.join\.0: column 'recap' of '{file}' is not joined .*{RUN}"):
        start(own, **join)
    join_first(grouped(**own.settings, **join))
    start(own, **join).close()


def test_a_table_that_changed_since_is_refused_until_it_is_joined_again(own: Corpus, tmp_path: Path):
    write_table(own, tmp_path / "part-0.parquet", ORDER[:25])
    settings: dict[str, Any] = {"join": [{"table": str(tmp_path / "part-*.parquet")}], "select": "score >= 0"}
    join_first(grouped(**own.settings, **settings))

    def rows() -> int:
        with start(own, **settings) as loader:
            return loader.plan.num_rows

    message = rf"^data\.join\.0: '.*part-0.parquet'.* is not joined with .* or of one that changed since\); {RUN}"
    assert rows() == 25
    for change in (
        lambda: write_table(own, tmp_path / "part-0.parquet", ORDER[:25], score=[row - 30.0 for row in ORDER[:25]]),
        lambda: write_table(own, tmp_path / "part-1.parquet", ORDER[25:]),
        lambda: (tmp_path / "part-1.parquet").unlink(),
    ):
        change()
        with pytest.raises(ConfigError, match=message):
            rows()
        join_first(grouped(**own.settings, **settings))
        rows()
    assert rows() == sum(row >= 30 for row in ORDER[:25])


def test_another_index_of_the_folder_is_joined_anew(own: Corpus, tmp_path: Path):
    settings = {"join": [{"table": write_table(own, tmp_path / "recaps.parquet")}]}
    join_first(grouped(**own.settings, **settings))
    names = joins_of(own)
    other = Corpus(tmp_path / "other", own.samples)
    other.folder.mkdir()
    (own.folder / "tokenizer").rename(other.folder / "tokenizer")
    write(other.folder / "shards", own.samples[:20], Tokenizer.load(other.folder / "tokenizer"))
    (own.folder / "shards" / "__mmdata__" / "joins").rename(other.folder / "shards" / "__mmdata__" / "joins")
    with pytest.raises(ConfigError, match=rf"made of another table or index.*{RUN}"):
        start(other, **settings)
    join_first(grouped(**other.settings, **settings))
    start(other, **settings).close()
    assert joins_of(other) == names  # in place of the old one


def test_a_folder_that_was_moved_keeps_its_joins(own: Corpus, tmp_path: Path):
    settings = {"join": [{"table": write_table(own, tmp_path / "recaps.parquet")}], "select": "score > 0.5"}
    join_first(grouped(**own.settings, **settings))
    own.folder.rename(tmp_path / "moved")
    start(Corpus(tmp_path / "moved", own.samples), **settings).close()


def test_an_index_that_cannot_be_written_has_its_joins_in_the_cache(own: Corpus, tmp_path: Path):
    (own.folder / "shards" / "__mmdata__" / "joins").write_text("")  # a permission would not stop root
    cache = tmp_path / "cache"
    settings: dict[str, Any] = {
        "join": [{"table": write_table(own, tmp_path / "recaps.parquet")}],
        "loading": {"cache_dir": str(cache)},
    }
    join_first(grouped(**own.settings | settings))
    assert len(list((cache / "joins").rglob("recaps-*.arrow"))) == 1
    start(own, **settings).close()
    cache.rename(tmp_path / "gone")
    cache.write_text("")
    with pytest.raises(ConfigError, match="neither the folder of the index nor the loader's cache can be written"):
        join_first(grouped(**own.settings | settings))


def test_the_datasets_of_a_mixture_are_joined_together(own: Corpus, tmp_path: Path):
    for number, name in enumerate(("one", "two")):
        own.write_beside(tmp_path / name, own.samples[10 * number : 10 * number + 10])
    settings = [JoinConfig(table=write_table(own, tmp_path / "recaps.parquet", list(range(19, -1, -1))))]
    both, one = Index.open([tmp_path / "one", tmp_path / "two"]), Index.open(tmp_path / "one")
    for writes in (True, False):
        for index, count in ((both, 20), (one, 10)):
            (table,) = Joined(settings, index, writes=writes).tables
            found = [score for shard in range(index.num_shards) for score in table.of_shard(shard, "score").to_pylist()]
            assert found == [row / 50 for row in range(count)]
    assert len(list((tmp_path / "one" / "__mmdata__" / "joins").glob("*.arrow"))) == 4


def test_a_table_without_any_key_of_the_index_is_not_kept(own: Corpus, tmp_path: Path):
    file = tmp_path / "recaps.parquet"
    settings = {"join": [{"table": write_table(own, file, key=[f"x{row:04d}" for row in range(50)])}]}
    with pytest.raises(ConfigError, match="50 of 50 rows have no row in"):
        join_first(grouped(**own.settings, **settings))
    with pytest.raises(ConfigError, match=RUN):
        start(own, **settings)
