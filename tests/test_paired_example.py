"""Paired differences, against scipy where it is there."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # as `python examples/compare.py` does

from paired import Difference, difference, markdown, student_t


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (9, 2.26216), (100, 1.98397)])
def test_student_t_is_that_of_the_tables(degrees: int, expected: float):
    assert student_t(degrees) == pytest.approx(expected, rel=1e-5)


def test_difference_of_three_seeds():
    found = difference([0.6, 0.7, 0.8], [0.5, 0.5, 0.7])
    assert found == Difference(pytest.approx(0.13333, abs=1e-5), *map(pytest.approx, (-0.01008842, 0.27675509)), 3, 3)


def test_difference_of_one_seed_has_no_interval():
    found = difference([0.6], [0.7])
    assert (round(found.mean, 9), found.won, found.seeds) == (-0.1, 0, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_equal_is_not_won():
    assert difference([0.5, 0.6], [0.5, 0.5]).won == 1


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30))
def test_interval_is_that_of_scipy(pairs: list[tuple[float, float]]):
    stats = pytest.importorskip("scipy.stats")
    ours, theirs = zip(*pairs, strict=True)
    gains = np.subtract(ours, theirs)
    found = difference(ours, theirs)
    if gains.std() < 1e-9:
        assert found.high - found.low < 1e-6
        return
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-4, abs=1e-7)


def test_table_compares_the_seeds_that_both_have():
    scores = {
        "plain": {1: {"colour": 0.50, "r1": 0.1}, 2: {"colour": 0.60, "r1": 0.2}, 3: {"colour": 0.9, "r1": 0.3}},
        "mined": {2: {"colour": 0.70, "r1": 0.2}, 1: {"colour": 0.55, "r1": 0.4}},
        "later": {},
    }
    assert markdown(scores, "plain", "colour", ["r1"]) == [
        "| arm | seeds | colour | gain over plain (95 %) | seeds won | r1 |",
        "|---|---|---|---|---|---|",
        "| plain | 3 | 66.7 |  |  | 20.0 |",
        "| mined | 2 | 62.5 | +7.5 (-24.3 to +39.3) | 2 | 30.0 |",
    ]
