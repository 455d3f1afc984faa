"""Samples of rows, and what they say about all of them. SciPy is the oracle of the interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from mmdata.config.convert import ConvertConfig
from mmdata.convert.sampling import RUNS, Estimate, SampledRows, wilson
from mmdata.convert.sources.rows import InputRow
from mmdata.progress import SILENT


class Corpus:
    """Rows of some images, in turn; or of images in a table, which is not read."""

    root, classes, has_captions, group_by = "", (), True, "image"
    can_be_sent = True

    def __init__(self, rows: int, images: int | None) -> None:
        self.num_rows, self._images = rows, images
        self.holds_images = images is None

    def rows(self, start: int = 0) -> Iterator[InputRow]:
        assert self._images is not None, "no row need be read"
        return (InputRow(row, "", f"{row % self._images}.jpg") for row in range(self.num_rows))


def sample_of(rows: int, images: int | None) -> tuple[SampledRows, np.ndarray]:
    sample = SampledRows(ConvertConfig(), None, SILENT)
    numbers = sample(Corpus(rows, images))  # type: ignore[arg-type]
    assert (sample.rows, sample.size) == (rows, len(numbers))
    assert len(np.unique(numbers)) == len(numbers)
    return sample, numbers


@settings(max_examples=30)
@given(st.integers(1, 10**7))
def test_sample_of_images_in_a_table_has_a_run_in_each_stretch_and_is_the_same_again(rows: int) -> None:
    sample, numbers = sample_of(rows, None)
    assert np.array_equal(numbers, sample_of(rows, None)[1])
    wanted = min(rows, max(500, min(2000, -(-rows // 100))))
    if wanted == rows:
        assert sample.is_whole
        return
    run = -(-wanted // RUNS)
    assert wanted - run < sample.size < wanted + run
    runs = numbers.reshape(-1, run)
    assert len(runs) == sample.independent <= RUNS
    for number, (first, last) in enumerate(zip(runs[:, 0], runs[:, -1], strict=True)):
        assert last - first == run - 1
        assert rows * number // len(runs) <= first
        assert last < rows * (number + 1) // len(runs)


def test_sample_of_paths_has_all_rows_of_its_images_but_for_one() -> None:
    sample, numbers = sample_of(60_000, 12_000)
    assert (sample.size, sample.independent, sample.knows_merges) == (600, 120, True)
    sample, numbers = sample_of(600, 7)
    assert sample.size == 500
    counts = Counter((numbers % 7).tolist())
    assert sorted(counts.values())[1:] == [count for count in sorted(counts.values()) if count > 84]


def test_sample_of_many_rows_is_bounded() -> None:
    assert sample_of(250_000, 250_000)[0].size == 2000
    assert sample_of(250_000, 1)[0].size == 2000


@given(st.integers(1, 5000), st.data())
def test_interval_is_that_of_wilson(size: int, data: st.DataObject) -> None:
    found = data.draw(st.integers(0, size))
    expected = binomtest(found, size).proportion_ci(0.95, "wilson")
    assert wilson(found / size, size) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_estimate_of_rows_of_one_image_each_with_exact_numbers() -> None:
    sample, _ = sample_of(100_000, 100_000)
    # 100 of 1,000: Wilson gives 0.08290942 to 0.12015089
    assert sample.count(100) == Estimate(100, 8290, 10_000, 12_016)
    assert sample.count(0) == Estimate(0, 0, 0, 383)
    assert sample.count(1000) == Estimate(1000, 99_617, 100_000, 100_000)


def test_estimate_of_all_rows_is_the_count() -> None:
    sample, _ = sample_of(400, 80)
    assert sample.is_whole
    assert sample.count(7) == Estimate(7, 7, 7, 7)


@pytest.mark.parametrize(("images", "alike"), [(20_000, 1), (4000, 1), (None, 50)])
@pytest.mark.parametrize("share", [0.03, 0.3])
def test_interval_holds_the_truth_in_95_of_100_corpora(share: float, images: int | None, alike: int) -> None:
    """Rows are bad by themselves, with all others of their image, or with those beside them."""
    sample, numbers = sample_of(20_000, images)
    held = 0
    for seed in range(400):
        bad = np.random.default_rng(seed).random(images or 20_000 // alike) < share
        bad = np.repeat(bad, alike) if images is None else np.tile(bad, 20_000 // images)
        found = sample.count(int(bad[numbers].sum()))
        held += found.low <= bad.sum() <= found.high
    assert held / 400 >= 0.93  # 0.95, less two standard deviations
