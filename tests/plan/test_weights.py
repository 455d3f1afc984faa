"""Rows that come more or less often than once an epoch: as often as their weights say, and never twice in a batch."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdata.plan import LengthAspectPolicy, Plan
from mmdata.plan.weights import RowWeights, WeightedPlan
from mmdata.tables.selection import Selection

POLICY = LengthAspectPolicy([4, 12, 77], [(64, 64), (32, 96)])


def make(fake_rows: Any, sizes: list[int], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    captions = [rng.integers(2, 80, count) for _ in range(3)]
    return fake_rows(sizes, *captions, width=rng.choice([64, 200], count))


def weights_of(values: Any, *, seed: int = 0) -> RowWeights:
    return RowWeights(np.asarray(values, np.float32), name="weights", seed=seed)


def passes_of_epoch(plan: Plan, epoch: int) -> dict[int, list[int]]:
    """The passes of each row in an epoch; checks its steps meanwhile."""
    found: dict[int, list[int]] = {}
    steps = list(plan.steps(epoch))
    assert [(step.epoch, step.number) for step in steps] == [(epoch, n) for n in range(plan.num_steps(epoch))]
    for step in steps:
        rows = step.rows[step.rows >= 0].tolist()
        assert len(set(rows)) == len(rows), "a row twice in a batch"
        assert ((step.passes < 0) == (step.rows < 0)).all()
        for row, number in zip(rows, step.passes[step.rows >= 0].tolist(), strict=True):
            found.setdefault(row, []).append(number)
    return found


corpora = st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) >= 4)


@settings(max_examples=60)
@given(sizes=corpora, seed=st.integers(0, 2**63), highest=st.sampled_from([0.6, 1.0, 1.5, 4.0]), zeros=st.booleans())
def test_each_row_comes_as_often_as_its_weight_says(
    fake_rows: Any, sizes: list[int], seed: int, highest: float, zeros: bool
):
    rows, rng = make(fake_rows, sizes, seed % 1000), np.random.default_rng(seed)
    values = rng.uniform(0, highest, rows.count).astype(np.float32)
    values[0] = highest
    values[1:3] = 1.0
    if zeros:
        values[3:] *= rng.random(rows.count - 3) < 0.5
    plan = WeightedPlan(Plan(rows, POLICY, global_batch_size=8, seed=3, window_rows=20), weights_of(values, seed=seed))
    passes: dict[int, list[int]] = {row: [] for row in range(rows.count)}
    for epoch in range(6):
        found = passes_of_epoch(plan, epoch)
        for row in range(rows.count):
            weight = float(values[row])
            assert int(weight) <= len(found.get(row, [])) <= int(weight) + (weight % 1 > 0)
            passes[row] += sorted(found.get(row, []))
    for row, numbers in passes.items():
        # An oracle in whole passes: over 6 epochs 6 w of them, up to one; the first is 0 and none is left out.
        assert numbers == list(range(len(numbers)))
        assert abs(len(numbers) - 6 * float(values[row])) < 1


@settings(max_examples=25)
@given(sizes=corpora, seed=st.integers(0, 1000), world_size=st.sampled_from([1, 2, 4]), data=st.data())
def test_ranks_share_each_step_and_go_on_anywhere(
    fake_rows: Any, sizes: list[int], seed: int, world_size: int, data: Any
):
    rows = make(fake_rows, sizes, seed)
    values = np.random.default_rng(seed).uniform(0.5, 3, rows.count)

    def plan() -> Plan:
        return WeightedPlan(Plan(rows, POLICY, global_batch_size=8, window_rows=20), weights_of(values))

    steps = list(plan().steps(2))
    start = data.draw(st.integers(0, len(steps)))
    own = [list(plan().steps(2, start=start, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert [len(part) for part in own] == [len(steps) - start] * world_size
    for number, step in enumerate(steps[start:]):
        assert np.concatenate([part[number].rows for part in own]).tolist() == step.rows.tolist()
        assert np.concatenate([part[number].passes for part in own]).tolist() == step.passes.tolist()
        assert {part[number].bucket for part in own} == {step.bucket}


def test_steps_of_buckets_are_those_of_an_epoch(fake_rows: Any):
    rows = make(fake_rows, [30, 50], 1)
    values = np.random.default_rng(1).uniform(0, 3, 80)
    plan = WeightedPlan(Plan(rows, POLICY, global_batch_size=8), weights_of(values))
    counted = Counter(step.bucket for step in plan.steps(1))
    assert plan.steps_of_buckets(1) == [counted[bucket] for bucket in POLICY.buckets]


def test_a_batch_takes_the_bucket_of_the_caption_that_the_pass_chooses(fake_rows: Any):
    rows = fake_rows([16], [3] * 16, [60] * 16, [10] * 16)  # caption e in pass e
    plan = WeightedPlan(Plan(rows, POLICY, global_batch_size=8, shuffle=False), weights_of([3.0] * 16))
    found = [(step.bucket.length, set(step.passes.tolist())) for step in plan.steps(0)]
    assert sorted(found) == [(4, {0}), (4, {0}), (12, {2}), (12, {2}), (77, {1}), (77, {1})]


def test_frequencies_over_a_million_rows_are_the_weights():
    rng = np.random.default_rng(0)
    values = rng.choice([0.05, 0.4, 1.0, 1.7, 3.3], 1_000_000).astype(np.float32)
    weights = weights_of(values, seed=7)
    rows, parts = np.arange(len(values)), weights.num_parts
    assert parts == 4
    counts = weights.passes(rows, 5 * parts)[0] - weights.passes(rows, 4 * parts)[0]  # of epoch 4
    chi_squared = 0.0
    for value in np.unique(values):
        own, whole = counts[values == value], int(value)
        share = float(value) - whole
        more = int((own > whole).sum())
        assert set(own.tolist()) <= {whole, whole + (share > 0)}
        if share:
            chi_squared += (more - share * len(own)) ** 2 / (share * (1 - share) * len(own))
    assert chi_squared < 18.5  # four degrees of freedom: exceeded once in a thousand seeds


def test_a_tenth_is_once_in_ten_epochs():
    weights = weights_of([0.1] * 999 + [1.0])
    rows = np.arange(999)
    epochs = np.stack([weights.passes(rows, epoch + 1)[0] - weights.passes(rows, epoch)[0] for epoch in range(10)])
    assert (epochs.sum(axis=0) == 1).all()
    assert (epochs.sum(axis=1) > 60).all()  # of 99.9 on average, with a deviation of 9.5


def test_parts_without_a_row_have_no_step(fake_rows: Any):
    plan = WeightedPlan(Plan(fake_rows([3]), POLICY, global_batch_size=2), weights_of([5.0, 0.0, 0.3]))
    assert plan.weights.num_parts == 5
    assert [plan.num_steps(epoch) for epoch in range(4)] == [5] * 4
    assert len(passes_of_epoch(plan, 3)[0]) == 5


def test_rows_meet_others_in_each_epoch(fake_rows: Any):
    weights = weights_of([1.0] * 999 + [10.0])
    rows = np.arange(999)
    parts = [weights.passes(rows, part + 1)[0] > weights.passes(rows, part)[0] for part in (0, 10, 20)]
    assert all(60 < part.sum() < 140 for part in parts)  # of 99.9 on average, with a deviation of 9.5
    assert all((one & other).sum() < 30 for one, other in itertools.pairwise(parts))  # 10 on average


def test_a_window_reaches_over_as_many_shards_as_one_of_all_rows(fake_rows: Any):
    rows = fake_rows([100] * 50)
    plan = WeightedPlan(Plan(rows, POLICY, global_batch_size=10, window_rows=500), weights_of([1.0] * 4999 + [10.0]))
    shards = {int(row) // 100 for step, _ in zip(plan.steps(0), range(3), strict=False) for row in step.rows}
    assert len(shards) <= 6  # a window of 500 of all rows is five shards


def test_an_epoch_whose_passes_cannot_be_counted_is_refused(fake_rows: Any):
    plan = WeightedPlan(Plan(fake_rows([4]), POLICY, global_batch_size=2), weights_of([1000.0, 1, 1, 1]))
    assert plan.num_steps(8387) == 1000
    with pytest.raises(ValueError, match=r"^epoch must be 0 … 8387 with weights up to 1000: got 8388$"):
        next(plan.steps(8388))


def test_weights_are_a_part_of_the_identity(fake_rows: Any):
    rows = fake_rows([4])
    one, same, other = (
        WeightedPlan(Plan(rows, POLICY, global_batch_size=2), weights_of(values)).identity()
        for values in ([1, 2, 1, 1], [1, 2, 1, 1], [1, 2, 1, 1.5])
    )
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"weights"}


def test_wrong_weights_are_refused(fake_rows: Any):
    with pytest.raises(ValueError, match=r"^weights: 3 for 4 rows; give one a row$"):
        WeightedPlan(Plan(fake_rows([4]), POLICY, global_batch_size=2), weights_of([1.0] * 3))
    with pytest.raises(
        ValueError, match=r"^weights \(\w{16}\): the weights are so small that an epoch may have no row"
    ):
        WeightedPlan(Plan(fake_rows([4]), POLICY, global_batch_size=2), weights_of([0.2] * 4))


def test_weights_of_selected_rows_leave_the_others_out(fake_rows: Any):
    rows = fake_rows([10, 10])
    chosen = np.arange(20) % 2 == 0
    rows.selection = Selection(rows.starts, [chosen[:10], chosen[10:]], name="even")
    plan = WeightedPlan(Plan(rows, POLICY, global_batch_size=4), weights_of(np.where(chosen, 1.5, 0.0)))
    assert set(passes_of_epoch(plan, 0)) == set(range(0, 20, 2))
    assert plan.num_rows == 10


def test_the_next_epoch_of_a_rare_row_is_found_at_once():
    weights = RowWeights(np.array([0.3, 1e-5, 1e-8, 0.0], np.float32), name="w", seed=3)
    row = np.array([0])
    epochs = [epoch for epoch in range(40) if weights.passes(row, epoch + 1)[0] > weights.passes(row, epoch)[0]]
    assert [weights.next_epoch(0, epoch) for epoch in range(epochs[-1] + 1)] == [
        next(one for one in epochs if one >= epoch) for epoch in range(epochs[-1] + 1)
    ]
    rare = weights.next_epoch(1, 0)
    assert rare is not None
    rows = np.array([1])
    assert weights.passes(rows, rare + 1)[0] == weights.passes(rows, rare)[0] + 1 == [1]
    assert weights.next_epoch(3, 0) is None
    assert weights.next_epoch(2, 2**20) is None  # beyond the last epoch that there is
