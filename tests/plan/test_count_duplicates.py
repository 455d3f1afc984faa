"""Duplicates in a batch: rows with the image or the caption of another are counted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan.rows import Hashes
from mmdata.plan.summary import count_duplicates


def test_count_duplicates_counts_a_row_once():
    assert count_duplicates(Hashes(np.array([1, 1, 2, 1]), np.array([5, 5, 5, 6]))) == 3
    assert count_duplicates(Hashes(np.array([1, 2]), np.array([1, 2]))) == 0


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=30))
def test_count_duplicates_counts_rows_that_repeat_an_earlier_one(pairs: list[tuple[int, int]]):
    images, captions = [image for image, _ in pairs], [caption for _, caption in pairs]
    repeated = [image in images[:i] or caption in captions[:i] for i, (image, caption) in enumerate(pairs)]
    assert count_duplicates(Hashes(np.array(images, np.int64), np.array(captions, np.int64))) == sum(repeated)
