"""Draws among sources of captions: by probability, of those that a row has, the same in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mmdata.hashing import hash64
from mmdata.index.side import SideFile
from mmdata.plan import CaptionSources
from mmdata.tables.captions import TableCaptions, cleaned
from mmdata.tables.table import take_rows

PROBABILITIES = [0.5, 0.3, 0.2, 0.0]


class CountsLetters:
    """A tokenizer whose tokens are letters."""

    name, fingerprint = "", "letters"

    def count(self, captions: Any) -> list[int]:
        return list(map(len, captions))


def table(lists: list[Any], *, rows: list[int] | None = None) -> TableCaptions:
    """A column of lists of captions; `rows`: the row of the column for each row of the index."""
    of_rows = np.arange(len(lists)) if rows is None else np.array(rows, np.int64)
    values = take_rows(pa.chunked_array([pa.array(lists, pa.list_(pa.string()))]), of_rows)

    def in_memory(kind: str, make: Callable[[], Any]) -> SideFile:
        columns = make()
        return SideFile(columns, xxhash.xxh3_128_hexdigest(str(columns.to_pydict()).encode()), Path())

    return TableCaptions(in_memory, lambda: cleaned(values, place=str, of="x"))


def sources(
    columns: list[list[Any]],
    probabilities: Sequence[float] = PROBABILITIES,
    seed: int = 0,
) -> CaptionSources:
    names = [f"join:{number}" for number in range(len(columns))]
    tables = dict(zip(names, map(table, columns), strict=True))
    return CaptionSources(tables, dict(zip(names, probabilities, strict=False)), seed=seed)


@pytest.mark.parametrize("seed", [0, 7, -1])
@pytest.mark.sweep(keep=1)
def test_frequencies_lie_within_binomial_bounds(seed: int):
    num_rows, passes = 20_000, 10
    columns = [[["a"]] * num_rows for _ in PROBABILITIES]
    # Every second row lacks the second source: it draws the others as 5 : 2.
    columns[1] = [None if row % 2 else ["a"] for row in range(num_rows)]
    drawn = sources(columns, seed=seed)
    rows = np.arange(num_rows)
    found = np.stack([drawn.choose(rows, number).source for number in range(passes)])
    for part, expected in ((found[:, ::2], PROBABILITIES), (found[:, 1::2], [5 / 7, 0.0, 2 / 7, 0.0])):
        counts = np.bincount(part.ravel(), minlength=4)
        deviation = np.sqrt(part.size * np.array(expected) * (1 - np.array(expected)))
        assert (np.abs(counts - part.size * np.array(expected)) <= 4 * deviation).all()
    # Neither the passes of a row nor rows of a pass go together: pairs are as frequent as their product.
    for one, other in ((found[:-1, ::2], found[1:, ::2]), (found[:, :-2:2], found[:, 2::2])):
        both = ((one == 0) & (other == 0)).sum()
        assert abs(both - one.size / 4) <= 4 * np.sqrt(one.size * 3 / 16)


def test_other_seeds_draw_otherwise():
    columns = [[["a"]] * 1000] * 2
    one, other = (sources(columns, [0.5, 0.5], seed=seed).choose(np.arange(1000), 0).source for seed in (1, 2))
    assert 400 < (one != other).sum() < 600


captions = st.lists(st.one_of(st.none(), st.just(" "), st.text("ab", max_size=4)), max_size=3)


@given(st.data())
def test_a_row_draws_of_what_it_has_in_any_company(data: Any):
    num_rows = data.draw(st.integers(1, 12))
    columns = [
        data.draw(st.lists(st.one_of(st.none(), captions), min_size=num_rows, max_size=num_rows)) for _ in range(3)
    ]
    constant = [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]]
    probabilities = data.draw(st.sampled_from(constant))
    drawn = sources(columns, probabilities)
    drawn.count(CountsLetters())
    kept = [[[text for text in found or [] if text and text.strip()] for found in column] for column in columns]
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=20)))
    passes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows))))
    chosen = drawn.choose(rows, passes)
    tokens, hashes = drawn.tokens(rows, passes), drawn.hashes(rows, passes)
    longest = [max((len(text) for column in kept for text in column[row]), default=0) for row in rows.tolist()]
    found = list(drawn.all_tokens(rows))
    assert [probability for probability, _, _ in found] == probabilities
    of_rows, all_tokens = (np.concatenate([columns[i] for columns in found]) for i in (1, 2))
    assert [max(all_tokens[of_rows == i].tolist(), default=0) for i in range(len(rows))] == longest
    for i, (row, number) in enumerate(zip(rows.tolist(), passes.tolist(), strict=True)):
        source, position = int(chosen.source[i]), int(chosen.position[i])
        has = [one for one in range(3) if kept[one][row]]
        likely = [one for one in has if probabilities[one] > 0]
        if not has:
            assert (source, tokens[i], hashes[i]) == (-1, 0, 0)
            continue
        assert source in (likely or has)
        table = drawn.sources[source]
        assert isinstance(table, TableCaptions)
        text = table.text(row, position)
        assert text == kept[source][row][position]
        assert (tokens[i], hashes[i]) == (len(text), hash64(text.encode()))
        alone = drawn.choose(np.array([row]), number)
        assert (alone.source[0], alone.position[0]) == (source, position)


def test_captions_of_a_source_come_in_turn():
    drawn = sources([[["a", "b", "c"]]], [1.0])
    positions = [int(drawn.choose(np.array([0]), number).position[0]) for number in range(6)]
    assert sorted(positions[:3]) == [0, 1, 2]
    assert positions[:3] == positions[3:]


def test_only_rows_of_the_index_are_looked_at_and_their_order_is_free():
    too_long = "x" * 70_000
    one = table([["a"], [too_long], None, ["b", "c"]], rows=[3, -1, 0])
    other = table([["b", "c"], ["a"]], rows=[0, -1, 1])
    assert one.num_captions(np.arange(3)).tolist() == [2, 0, 1]
    assert [one.text(0, 0), one.text(0, 1), one.text(2, 0)] == ["b", "c", "a"]
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != table([["b", "c"], ["a"]], rows=[1, -1, 0]).fingerprint
