"""`data.caption_hash`: rows with equal values of a column have equal hashes of captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mmdata import Loader
from mmdata.config import DataConfig
from mmdata.errors import ConfigError
from mmdata.hashing import EMPTY_HASH
from mmdata.loader.corpus import open_corpus
from mmdata.plan import IndexRows
from mmdata.plan.from_config import equal_rows
from tests.joins import join_first

from .conftest import Corpus


def hashes_of(loader: Loader, entry: str = "caption_hash") -> dict[int, int]:
    found: dict[int, int] = {}
    with loader:
        for batch in loader:
            entries: dict[str, Any] = dict(batch)
            found |= dict(zip(entries["rows"].tolist(), entries[entry].tolist(), strict=True))
    found.pop(-1, None)
    return found


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize("kind", ["text", "number"])
@pytest.mark.sweep(keep=1)
def test_rows_of_one_value_have_one_hash(corpus: Corpus, tmp_path: Path, num_processes: int, kind: str):
    meant = [None if row >= 40 else row % 4 for row in range(50)]
    column = pa.array([value if kind == "number" or value is None else f"m{value}" for value in meant])
    table = corpus.table(tmp_path / "meant.parquet", meant=column)
    loading = {"num_workers": 2, "num_processes": num_processes}
    plain = hashes_of(corpus.loader())
    loader = corpus.loader(join=[{"table": table}], caption_hash="meant", loading=loading)  # adds hashes by itself
    found = hashes_of(loader)
    assert sorted(found) == list(range(50))
    for value in range(4):
        assert len({found[row] for row in range(40) if row % 4 == value}) == 1
    assert len({found[row] for row in range(40)}) == 4
    assert {row: found[row] for row in range(40, 50)} == {row: plain[row] for row in range(40, 50)}  # by their texts
    assert hashes_of(corpus.loader(), "image_hash") == hashes_of(
        corpus.loader(join=[{"table": table}], caption_hash="meant"), "image_hash"
    )


def test_captions_that_are_dropped_are_equal_whatever_their_rows_have(corpus: Corpus, tmp_path: Path):
    table = corpus.table(tmp_path / "meant.parquet", meant=list(range(50)))
    given = {"join": [{"table": table}], "caption_hash": "meant", "caption_dropout": 0.5}
    with corpus.loader(**given) as loader:
        batches: list[dict[str, Any]] = [dict(batch) for batch in loader]
    pairs = [p for one in batches for p in zip(one["captions"], one["caption_hash"].tolist(), strict=True)]
    dropped = {found for text, found in pairs if not text}
    kept = [found for text, found in pairs if text]
    assert dropped <= {EMPTY_HASH, 0}  # 0 in padding
    assert len(set(kept)) == len(kept) > 10


def test_a_column_of_the_index_may_stand_for_the_hash(corpus: Corpus):
    found = hashes_of(corpus.loader(caption_hash="width"))
    widths = [corpus.index[row].image.size[0] for row in range(50)]
    pairs = {(widths[row], found[row]) for row in range(50)}
    assert len(pairs) == len(set(widths)) == len({one for _, one in pairs})


def test_all_hashes_are_those_of_image_and_column(corpus: Corpus, tmp_path: Path):
    table = corpus.table(tmp_path / "meant.parquet", meant=[row % 4 for row in range(50)])
    data = DataConfig.model_validate({**corpus.settings, "join": [{"table": table}], "caption_hash": "meant"})
    join_first(data)
    opened = open_corpus(data)
    equals = equal_rows(data, opened.index, opened.joined)
    assert equals is not None
    alike = IndexRows(opened.index, equals=equals).all_hashes()
    assert alike[:, 0].tolist() == opened.index.column("image_hash").tolist()
    assert [len(np.unique(alike[first::4, 1])) for first in range(4)] == [1, 1, 1, 1]
    by_text = IndexRows(opened.index).all_hashes()
    plain = hashes_of(corpus.loader())
    assert by_text[:, 1].tolist() == [plain[row] for row in range(50)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"caption_hash": "widht"},
            "data.caption_hash: no column 'widht' of numbers, texts or dates .did you mean 'width'",
        ),
        (
            {"caption_hash": "width", "negative_captions": "wrong.parquet"},
            "negative_captions does not go with caption_hash: whether",
        ),
    ],
)
def test_a_wrong_column_is_refused(corpus: Corpus, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        corpus.loader(**changes)
