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

from mmdata.config.data import Probability
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
    probabilities: Sequence[Probability] = PROBABILITIES,
    seed: int = 0,
    epochs: int | None = None,
) -> CaptionSources:
    names = [f"join:{number}" for number in range(len(columns))]
    tables = dict(zip(names, map(table, columns), strict=True))
    return CaptionSources(tables, dict(zip(names, probabilities, strict=False)), seed=seed, epochs=epochs)


@pytest.mark.parametrize("seed", [0, 7, -1])
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


@pytest.mark.parametrize("seed", [0, 7])
def test_probabilities_change_along_a_line_within_binomial_bounds(seed: int):
    num_rows, epochs = 20_000, 5
    columns = [[["a"]] * num_rows for _ in range(3)]
    # Every second row lacks the second source.
    columns[1] = [None if row % 2 else ["a"] for row in range(num_rows)]
    drawn = sources(columns, [(0.5, 0.9), (0.5, 0.0), (0.0, 0.1)], seed, epochs)
    rows = np.arange(num_rows)
    for number, first in enumerate([0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9]):
        part = min(number, 4) / 4
        whole = np.array([first, 0.5 * (1 - part), 0.1 * part])
        lacking = np.array([first, 0.0, 0.1 * part])
        source = drawn.choose(rows, number).source
        for found, expected in ((source[::2], whole), (source[1::2], lacking / lacking.sum())):
            counts = np.bincount(found, minlength=3)
            deviation = np.sqrt(found.size * expected * (1 - expected))
            assert (np.abs(counts - found.size * expected) <= 4 * deviation + 1e-6).all()
        # The same, whatever the passes of the rows beside it.
        mixed = np.where(rows % 3 == 0, number, 2)
        assert (drawn.choose(rows, mixed).source == source)[::3].all()


shares = st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any)


@given(shares, shares, st.integers(2, 12), st.integers(0, 2**20 - 1))
def test_probabilities_lie_on_a_line_and_sum_to_one(begin: list[int], end: list[int], epochs: int, number: int):
    pairs = [(one / sum(begin), other / sum(end)) for one, other in zip(begin, end, strict=True)]
    drawn = sources([[["a"]]] * 3, pairs, epochs=epochs)
    assert drawn.probabilities(0)[:, 0].tolist() == [one for one, _ in pairs]
    assert drawn.probabilities(epochs - 1)[:, 0].tolist() == [one for _, one in pairs]
    part = min(number, epochs - 1) / (epochs - 1)
    found = drawn.probabilities(np.array([number]))[:, 0]
    assert found == pytest.approx([one + (other - one) * part for one, other in pairs])
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)


def test_a_source_of_probability_0_at_an_end_gives_nothing_there():
    columns = [[["a"]] * 1000] * 2
    drawn = sources(columns, [(1.0, 0.0), (0.0, 1.0)], epochs=3)
    rows = np.arange(1000)
    assert [drawn.choose(rows, number).source.mean() for number in (0, 2, 9)] == [0.0, 1.0, 1.0]
    assert 0.4 < drawn.choose(rows, 1).source.mean() < 0.6


def test_a_line_between_equal_probabilities_is_a_constant():
    columns = [[["a"]] * 1000] * 2
    constant, line = sources(columns, [0.3, 0.7]), sources(columns, [(0.3, 0.3), (0.7, 0.7)], epochs=4)
    assert constant.name == line.name
    names = {
        sources(columns, [(0.3, 0.5), (0.7, 0.5)], epochs=4).name,
        sources(columns, [(0.3, 0.5), (0.7, 0.5)], epochs=5).name,
        sources(columns, [(0.5, 0.3), (0.5, 0.7)], epochs=4).name,
        constant.name,
    }
    assert len(names) == 4
    with pytest.raises(ValueError, match="probabilities change over the epochs of a run: epochs must be 2 or more"):
        sources(columns, [(0.3, 0.5), (0.7, 0.5)])


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
    begin, end = data.draw(st.sampled_from(constant)), data.draw(st.sampled_from(constant))
    drawn = sources(columns, list(zip(begin, end, strict=True)), epochs=data.draw(st.integers(2, 8)))
    drawn.count(CountsLetters())
    kept = [[[text for text in found or [] if text and text.strip()] for found in column] for column in columns]
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=20)))
    passes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows))))
    chosen = drawn.choose(rows, passes)
    tokens, hashes = drawn.tokens(rows, passes), drawn.hashes(rows, passes)
    longest = [max((len(text) for column in kept for text in column[row]), default=0) for row in rows.tolist()]
    assert drawn.longest(rows).tolist() == longest
    for i, (row, number) in enumerate(zip(rows.tolist(), passes.tolist(), strict=True)):
        source, position = int(chosen.source[i]), int(chosen.position[i])
        has = [one for one in range(3) if kept[one][row]]
        likely = [one for one in has if drawn.probabilities(number)[one, 0] > 0]
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
