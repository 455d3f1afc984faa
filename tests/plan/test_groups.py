"""Groups: rows of one label stand together, each row once, under the laws of plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import Bucket, Groups, LengthAspectPolicy, Mixture, Plan, ShardSpan
from mmdata.plan.groups import cover_table, form_units

SHAPES = [(64, 64), (48, 80)]
POLICY = LengthAspectPolicy([8, 16, 77], SHAPES)


def grouped(rows: Any, labels: Any, *, size: int = 1, candidates: int = 0, share: float = 1.0) -> Mixture:
    groups = Groups(np.asarray(labels), size=size, candidates=candidates, source="test", share=share)
    return Mixture((ShardSpan(0, len(rows.starts) - 1),), groups=groups)


def test_units_of_a_label_first_and_what_is_left_together():
    groups = Groups(np.empty(0, int), size=2, candidates=0, source="test")
    units, bucket = form_units(groups, np.array([7, 5, 7, 7, 5, -1]), np.zeros(6, int), np.zeros((1, 1), int))
    assert units.tolist() == [[1, 4], [0, 2], [3, 5]]
    assert bucket.tolist() == [0, 0, 0]


def test_candidates_are_others_of_the_label():
    groups = Groups(np.empty(0, int), size=1, candidates=2, source="test")
    units, _ = form_units(groups, np.array([7, 5, 7, 7, -1]), np.zeros(5, int), np.zeros((1, 1), int))
    by_anchor = {unit[0]: unit[1:] for unit in units.tolist()}
    assert by_anchor == {0: [2, 3], 2: [3, 0], 3: [0, 2], 1: [-1, -1], 4: [-1, -1]}


def test_covers_hold_both_texts_with_the_first_image_shape():
    buckets = [Bucket(8, 64, 64), Bucket(16, 64, 64), Bucket(8, 48, 80), Bucket(32, 48, 80)]
    table = cover_table(buckets)
    assert table[0].tolist() == [0, 1, 0, 3]  # no 32 with the first's image shape
    assert table[2].tolist() == [2, 3, 2, 3]


def test_covers_of_native_buckets_hold_the_patches_of_both():
    buckets = [Bucket(length, 0, 0, patches) for length in (8, 16) for patches in (64, 256)]
    assert cover_table(buckets)[1, 2] == 3


labelled = st.tuples(
    st.lists(st.sampled_from([0, 1, 5, 17, 40]), min_size=1, max_size=6).filter(any), st.integers(0, 999)
)


@given(
    labelled, st.sampled_from([2, 3, 4]), st.sampled_from([10, 2**20]), st.booleans(), st.sampled_from([0.3, 0.5, 1.0])
)
@pytest.mark.sweep
def test_plan_of_groups_holds_its_laws(
    fake_rows, corpus: Any, size: int, window_rows: int, shuffle: bool, share: float
):
    sizes, seed = corpus
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    lengths = rng.integers(1, 60, count)
    rows = fake_rows(sizes, lengths, height=rng.integers(10, 900, count), width=rng.integers(10, 900, count))
    labels = rng.integers(-1, 6, count)
    settings: Any = {
        "global_batch_size": 4 * size,
        "seed": seed,
        "shuffle": shuffle,
        "window_rows": window_rows,
        "mixture": grouped(rows, labels, size=size, share=share),
    }
    plan = Plan(rows, POLICY, **settings)
    steps = list(plan.steps(0))
    assert len(steps) == len(plan)
    assert Counter(row for step in steps for row in step.rows.tolist() if row >= 0) == Counter(range(count))
    for step in steps:
        assert step.bucket.length >= max((int(lengths[row]) for row in step.rows if row >= 0), default=0)
    if window_rows > count and share == 1:  # one window: all units of a label are whole but for fewer than `size` rows
        whole = Counter(
            labels[unit[0]]
            for step in steps
            for unit in step.rows.reshape(-1, size)
            if unit.min() >= 0 and len(set(labels[unit].tolist())) == 1 and labels[unit[0]] >= 0
        )
        for label in range(6):
            assert whole[label] >= (labels == label).sum() // size
    start = len(steps) // 2
    for world_size in (1, 2, 4):
        ranks = [
            list(Plan(rows, POLICY, **settings).steps(0, start=start, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        for parts, step in zip(zip(*ranks, strict=True), steps[start:], strict=True):
            assert np.concatenate([part.rows for part in parts]).tolist() == step.rows.tolist()


def in_groups(rows: Any, labels: Any, size: int) -> int:
    """How many rows of a batch stand in units of one label."""
    units = rows.reshape(-1, size)
    whole = [unit for unit in units if unit.min() >= 0 and labels[unit].min() >= 0]
    return sum(size for unit in whole if len(set(labels[unit].tolist())) == 1)


@pytest.mark.parametrize(("share", "together"), [(0.25, 8), (0.5, 16), (0.75, 24), (1.0, 32)])
def test_every_batch_has_its_share_of_groups_and_other_groups_in_each_epoch(fake_rows, share: float, together: int):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(800), 4))
    rows = fake_rows([1600, 1600])
    plan = Plan(rows, POLICY, global_batch_size=32, mixture=grouped(rows, labels, size=4, share=share))
    chosen: list[set[int]] = []
    for epoch in (0, 1):
        steps = [step.rows for step in plan.steps(epoch)]
        assert sorted(np.concatenate(steps).tolist()) == list(range(3200))
        assert {in_groups(step, labels, 4) for step in steps} == {together}
        units = np.concatenate(steps).reshape(-1, 4)
        chosen.append({int(labels[unit[0]]) for unit in units if len(set(labels[unit].tolist())) == 1})
    assert len(chosen[0] & chosen[1]) == pytest.approx(800 * share**2, abs=80)


def test_where_groups_are_few_all_of_them_are_spread_over_the_epoch(fake_rows):
    labels = np.where(np.arange(320) < 40, np.arange(320) // 4, -1)  # ten groups of four, and 280 rows of none
    rows = fake_rows([320])
    steps = list(Plan(rows, POLICY, global_batch_size=32, mixture=grouped(rows, labels, size=4, share=0.5)).steps(0))
    assert [in_groups(step.rows, labels, 4) for step in steps] == [4] * 10


def test_a_share_is_part_of_what_a_plan_depends_on(fake_rows):
    rows = fake_rows([40])
    mixtures = [grouped(rows, np.zeros(40, int), size=4, share=share) for share in (0.25, 0.5, 1.0)]
    assert len({mixture.fingerprint for mixture in mixtures}) == 3


def test_groups_keep_texts_of_like_length_together(fake_rows):
    """Labels say nothing about length: padding stays near that of rows by themselves."""
    rng = np.random.default_rng(0)
    rows = fake_rows([4000], rng.integers(1, 78, 4000))
    settings: Any = {"global_batch_size": 64}
    mixture = grouped(rows, rng.integers(0, 20, 4000), size=4)
    policy = LengthAspectPolicy([16, 32, 48, 77], SHAPES[:1])
    places = [
        sum(step.bucket.length * 64 for step in Plan(rows, policy, **settings, **more).steps(0))
        for more in ({}, {"mixture": mixture})
    ]
    assert places[1] < 1.05 * places[0]


def test_candidates_every_row_is_an_anchor_once_and_draws_change_by_epoch(fake_rows):
    rng = np.random.default_rng(1)
    rows = fake_rows([30, 30], rng.integers(1, 60, 60))
    labels = rng.integers(0, 5, 60)
    plan = Plan(rows, POLICY, global_batch_size=8, mixture=grouped(rows, labels, candidates=3))
    drawn: list[dict[int, list[int]]] = []
    for epoch in (0, 1):
        units = np.concatenate([step.rows.reshape(-1, 4) for step in plan.steps(epoch)])
        units = units[units[:, 0] >= 0]
        assert sorted(units[:, 0].tolist()) == list(range(60))
        for unit in units:
            assert set(labels[unit[unit >= 0]].tolist()) == {labels[unit[0]]}
            assert len(set(unit.tolist())) == 4
        drawn.append({unit[0]: unit[1:] for unit in units.tolist()})
    assert sum(drawn[0][row] != drawn[1][row] for row in range(60)) > 50


@pytest.mark.parametrize(
    ("size", "batch", "world_size", "message"),
    [
        (3, 8, 1, "groups of 3 rows do not fill a batch of 8 rows with num_lanes 1: set .* to a multiple of 3"),
        (4, 8, 4, "a batch of 8 rows in groups of 4 cannot be shared by world_size 4; .* to a multiple of 16"),
    ],
)
def test_groups_that_do_not_fit_are_refused(fake_rows, size: int, batch: int, world_size: int, message: str):
    rows = fake_rows([20])
    mixture = grouped(rows, np.zeros(20, int), size=size)
    with pytest.raises(ValueError, match=message):
        Plan(rows, POLICY, global_batch_size=batch, mixture=mixture).check_ranks(0, world_size)


def test_groups_without_an_entry_for_each_row_are_refused(fake_rows):
    mixture = Mixture((ShardSpan(0, 1),), Groups(np.zeros(2, np.int64), size=2, candidates=0, source="label"))
    with pytest.raises(ValueError, match="groups: of_rows has 2 entries for 3 rows; give one a row"):
        Plan(fake_rows([3]), POLICY, global_batch_size=2, mixture=mixture)


def test_groups_and_weights_exclude_each_other(fake_rows):
    rows = fake_rows([9, 9])
    groups = Groups(np.zeros(18, int), size=2, candidates=0, source="test")
    mixture = Mixture((ShardSpan(0, 1, weight=1), ShardSpan(1, 2, weight=1)), groups=groups)
    with pytest.raises(
        ValueError, match="weights: a fixed share of every batch needs batches of one size without groups"
    ):
        Plan(rows, POLICY, global_batch_size=8, mixture=mixture)
