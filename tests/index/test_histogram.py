from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.index.columns import MAX_TOKENS, aspect_bin, aspect_ratio, count_cells, pack_cells, unpack_cells


def test_the_worked_example_of_the_docstring():
    assert aspect_bin(480, 640) == 141
    assert pack_cells(12, 141) == 3213
    assert [int(part) for part in unpack_cells(np.array(3213))] == [12, 141]
    assert aspect_ratio(141) == pytest.approx(1.3252, abs=1e-4)


def test_bins_of_known_shapes_and_of_the_ends():
    heights, widths = np.array([1, 1, 2, 1, 1, 16, 100]), np.array([1, 2, 1, 15, 100, 1, 1])
    assert aspect_bin(heights, widths).tolist() == [128, 160, 96, 253, 255, 0, 0]
    assert aspect_bin(heights, widths).dtype == np.int32
    assert aspect_ratio([128, 160, 96, 0]).tolist() == [1.0, 2.0, 0.5, 1 / 16]


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_bin_stands_for_a_ratio_within_a_64th_of_an_octave(height, width):
    ratio = width / height
    if 1 / 16 <= ratio <= 15.6:
        assert abs(np.log2(aspect_ratio(aspect_bin(height, width)) / ratio)) <= 1 / 64 + 1e-12
    assert aspect_bin(height, width) + aspect_bin(width, height) in (255, 256) or not 1 / 16 <= ratio <= 16


@given(st.lists(st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, 255))))
def test_cells_are_unpacked_as_packed(pairs):
    tokens, bins = np.array(pairs, np.int64).reshape(-1, 2).T
    cells = pack_cells(tokens, bins)
    assert cells.dtype == np.int32
    assert [part.tolist() for part in unpack_cells(cells)] == [tokens.tolist(), bins.tolist()]


@pytest.mark.parametrize("tokens", [-1, MAX_TOKENS + 1])
def test_lengths_that_no_cell_holds_are_refused(tokens):
    with pytest.raises(ValueError, match=f"captions have 0 to {MAX_TOKENS} tokens: got {tokens} to {tokens}"):
        pack_cells([tokens], [128])


def test_cells_are_counted_in_order():
    cells, counts = count_cells(np.array([7, 3, 7, 7], np.int32))
    assert (cells.tolist(), counts.tolist()) == ([3, 7], [1, 3])
    assert [part.tolist() for part in count_cells(np.array([], np.int32))] == [[], []]
