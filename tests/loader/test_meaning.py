"""`data.meaning`: rows with equal values of a column have equal hashes of captions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mmdata import Loader
from mmdata.config import DataConfig, evaluation_data
from mmdata.errors import ConfigError
from mmdata.hashing import EMPTY_HASH
from mmdata.loader.corpus import open_corpus
from mmdata.loader.meaning import Meaning, rows_alike
from mmdata.plan.groups import write_groups
from tests.joins import join_first

from .conftest import Corpus
from .test_join import write_table


def hashes_of(loader: Loader, entry: str = "caption_hash") -> dict[int, int]:
    found: dict[int, int] = {}
    with loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            found |= dict(zip(entries["rows"].tolist(), entries[entry].tolist(), strict=True))
    found.pop(-1, None)
    return found


@pytest.mark.parametrize("worker_type", ["thread", "process"])
@pytest.mark.parametrize("kind", ["text", "number"])
def test_rows_of_one_meaning_have_one_hash(corpus: Corpus, tmp_path: Path, worker_type: str, kind: str):
    meant = [None if row >= 40 else row % 4 for row in range(50)]
    column = pa.array([value if kind == "number" or value is None else f"m{value}" for value in meant])
    table = write_table(corpus, tmp_path / "meant.parquet", list(range(50)), meant=column)
    loading = {"num_workers": 2, "worker_type": worker_type}
    plain = hashes_of(corpus.loader(add_hashes=True))
    loader = corpus.loader(join=[{"table": table}], meaning="meant", loading=loading)  # adds hashes by itself
    found = hashes_of(loader)
    assert sorted(found) == list(range(50))
    for value in range(4):
        assert len({found[row] for row in range(40) if row % 4 == value}) == 1
    assert len({found[row] for row in range(40)}) == 4
    assert {row: found[row] for row in range(40, 50)} == {row: plain[row] for row in range(40, 50)}  # by their texts
    assert hashes_of(corpus.loader(add_hashes=True), "image_hash") == hashes_of(
        corpus.loader(join=[{"table": table}], meaning="meant"), "image_hash"
    )


def test_captions_that_are_dropped_are_equal_whatever_they_mean(corpus: Corpus, tmp_path: Path):
    table = write_table(corpus, tmp_path / "meant.parquet", list(range(50)), meant=list(range(50)))
    given = {"join": [{"table": table}], "meaning": "meant", "caption_dropout": 0.5, "add_captions": True}
    with corpus.loader(**given) as loader:
        batches: list[dict[str, Any]] = [dict(batch) for batch in loader]
    pairs = [p for one in batches for p in zip(one["captions"], one["caption_hash"].tolist(), strict=True)]
    dropped = {found for text, found in pairs if not text}
    kept = [found for text, found in pairs if text]
    assert dropped <= {EMPTY_HASH, 0}  # 0 in padding
    assert len(set(kept)) == len(kept) > 10


def test_a_column_of_the_index_is_a_meaning_too(corpus: Corpus):
    found = hashes_of(corpus.loader(meaning="width"))
    widths = [corpus.index[row].image.size[0] for row in range(50)]
    pairs = {(widths[row], found[row]) for row in range(50)}
    assert len(pairs) == len(set(widths)) == len({one for _, one in pairs})


def test_rows_alike_are_those_of_one_image_or_one_meaning(corpus: Corpus, tmp_path: Path):
    table = write_table(corpus, tmp_path / "meant.parquet", list(range(50)), meant=[row % 4 for row in range(50)])
    data = DataConfig.model_validate({**corpus.settings, "join": [{"table": table}], "meaning": "meant"})
    join_first(data)
    opened = open_corpus(data)
    meaning = Meaning.from_config(data, opened.index, opened.joined)
    assert meaning is not None
    alike = rows_alike(opened.index, None, meaning)
    assert alike[:, 0].tolist() == opened.index.column("image_hash").tolist()
    assert [len(np.unique(alike[first::4, 1])) for first in range(4)] == [1, 1, 1, 1]
    by_text = rows_alike(opened.index, None, None)
    plain = hashes_of(corpus.loader(add_hashes=True))
    assert by_text[:, 1].tolist() == [plain[row] for row in range(50)]


def test_groups_that_were_made_without_knowing_what_rows_mean_are_told(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    table = write_table(corpus, tmp_path / "meant.parquet", list(range(50)), meant=[row % 25 for row in range(50)])
    given = {"join": [{"table": table}], "meaning": "meant"}
    path = tmp_path / "g.arrow"
    of_rows = np.arange(50) // 2
    of_rows[[0, 25]], of_rows[[1, 24]] = 0, 12  # rows 0 and 25 mean the same
    for groups, told in ((of_rows, True), (np.arange(50) // 2, False)):
        write_groups(path, groups, corpus.index, {"size": 2})
        caplog.clear()
        with corpus.loader(**given, groups={"source": str(path), "size": 2}):
            pass
        said = (
            f"data.groups.source '{path}': 1 of 25 groups hold rows that mean the same (data.meaning meant), which are "
            "no negatives of each other: make the groups anew with `mmdata neighbours` and data.meaning"
        )
        assert (said in caplog.messages) == told


def test_a_table_that_knows_few_rows_is_told(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for rows, told in ((4, True), (5, False)):
        table = write_table(corpus, tmp_path / f"{rows}.parquet", list(range(rows)), meant=[0] * rows)
        caplog.clear()
        with corpus.loader(join=[{"table": table}], meaning="meant"):
            pass
        said = (
            f"data.meaning: {rows} of 50 rows have a value of 'meant'; captions of all others are equal by their texts"
        )
        assert any(message.startswith(said) for message in caplog.messages) == told


def test_floats_are_no_meaning(corpus: Corpus, tmp_path: Path):
    table = write_table(corpus, tmp_path / "meant.parquet", list(range(50)), meant=[row / 2 for row in range(50)])
    said = (
        "data.meaning 'meant': its values are floats (double), which are seldom equal; give texts or whole numbers. "
        'pandas makes floats of whole numbers where some are missing: table.astype({"meant": "Int64"})'
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        corpus.loader(join=[{"table": table}], meaning="meant")


def test_a_state_knows_the_meanings(corpus: Corpus, tmp_path: Path):
    rows = list(range(50))
    first = write_table(corpus, tmp_path / "a.parquet", rows, meant=[row % 4 for row in rows])
    other = write_table(corpus, tmp_path / "b.parquet", rows, meant=[row % 5 for row in rows])
    with corpus.loader(join=[{"table": first}], meaning="meant") as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    for changes in ({"join": [{"table": other}], "meaning": "meant"}, {"join": [{"table": first}], "add_hashes": True}):
        with (
            corpus.loader(**changes) as loader,
            pytest.raises(ConfigError, match=r"other fields: fields was 'data.meaning"),
        ):
            loader.load_state_dict(state)


def test_evaluations_compare_texts(corpus: Corpus):
    data = DataConfig.model_validate({**corpus.settings, "meaning": "width", "val": {"share": 0.3}})
    assert evaluation_data(data).meaning is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meaning": "widht"}, "data.meaning: no column 'widht' of numbers, texts or dates .did you mean 'width'"),
        (
            {"meaning": "width", "negative_captions": "wrong.parquet"},
            "meaning and negative_captions exclude each other: whether",
        ),
    ],
)
def test_a_wrong_meaning_is_refused(corpus: Corpus, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        corpus.loader(**changes)
