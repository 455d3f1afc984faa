"""Mixtures: proportions exact to the row, all rows of a repeated dataset equally often, the laws of plans kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import LengthAspectPolicy, Mixture, Plan, ShardSpan, Step, summarize

POLICY = LengthAspectPolicy([8, 16, 77], [(64, 64)])


def weighted(*weights: int, shards: int) -> Mixture:
    """Datasets of `shards` shards each, with fixed shares of every batch."""
    return Mixture(tuple(ShardSpan(i * shards, (i + 1) * shards, weight=w) for i, w in enumerate(weights)))


def count_rows(steps: list[Step]) -> Counter[int]:
    return Counter(row for step in steps for row in step.rows.tolist() if row >= 0)


@st.composite
def mixed(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two datasets of shards; the second has at least one row in each of the first eight lanes."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 5, 17, 60]), min_size=8, max_size=12)
    return draw(sizes.filter(any)), [size + 1 for size in draw(sizes)]


@given(mixed(), st.sampled_from([(1, 1), (3, 1), (1, 2)]), st.sampled_from([1, 2]), st.integers(0, 99))
@pytest.mark.sweep
def test_two_shares_primary_once_secondary_repeated_shares_fixed(
    fake_rows, datasets: tuple[list[int], list[int]], weights: tuple[int, int], num_lanes: int, seed: int
):
    first, second = datasets
    rng = np.random.default_rng(seed)
    # The second dataset has the longer texts: the shares never agree on a bucket.
    lengths = np.concatenate([rng.integers(1, 40, sum(first)), rng.integers(10, 90, sum(second))])
    rows = fake_rows([*first, *second], lengths)
    mixture = Mixture(
        (
            ShardSpan(0, len(first), weight=weights[0]),
            ShardSpan(len(first), len(rows.starts) - 1, weight=weights[1]),
        )
    )
    settings: Any = {"global_batch_size": 24, "seed": seed, "window_rows": 40, "num_lanes": num_lanes}
    plan = Plan(rows, POLICY, mixture=mixture, **settings)
    secondary: Counter[int] = Counter()
    for epoch in (0, 1, 2):
        steps = list(plan.steps(epoch))
        assert len(steps) == plan.num_steps(epoch)
        used = count_rows(steps)
        assert {row: n for row, n in used.items() if row < sum(first)} == dict.fromkeys(range(sum(first)), 1)
        share = 24 * weights[1] // sum(weights)
        for step in steps:
            assert (step.rows >= sum(first)).sum() == share
            valid = step.rows >= 0
            longest = max(min(int(lengths[row]), 77) for row in step.rows[valid].tolist())
            assert step.bucket.length >= longest
        secondary.update({row: n for row, n in used.items() if row >= sum(first)})
        for world_size in (2, 3):
            ranks = [list(plan.steps(epoch, rank=rank, world_size=world_size)) for rank in range(world_size)]
            for parts, step in zip(zip(*ranks, strict=True), steps, strict=True):
                assert np.concatenate([part.rows for part in parts]).tolist() == step.rows.tolist()
        for start in range(0, len(steps), max(1, len(steps) // 4)):
            again = Plan(rows, POLICY, mixture=mixture, **settings).steps(epoch, start=start)
            assert [(s.number, s.bucket, s.rows.tolist(), s.passes.tolist()) for s in again] == [
                (s.number, s.bucket, s.rows.tolist(), s.passes.tolist()) for s in steps[start:]
            ]
    if num_lanes == 1:  # with more, lanes of unequal size repeat at their own pace
        counts = [secondary[row] for row in range(sum(first), rows.count)]
        assert max(counts) - min(counts) <= 1


def test_shares_give_each_rank_its_part(fake_rows):
    rows = fake_rows([40, 40, 50, 50])
    plan = Plan(rows, POLICY, global_batch_size=16, mixture=weighted(3, 1, shards=2))
    for rank in range(4):
        for step in list(plan.steps(0, rank=rank, world_size=4))[:-1]:
            assert ((step.rows < 80).sum(), (step.rows >= 80).sum()) == (3, 1)


def test_shares_passes_count_how_often_a_dataset_was_gone_through(fake_rows):
    rows = fake_rows([40, 4])
    plan = Plan(rows, POLICY, global_batch_size=4, mixture=weighted(1, 1, shards=1))
    seen: Counter[tuple[int, int]] = Counter()
    for epoch in (0, 1):
        for step in plan.steps(epoch):
            assert set(step.passes[step.rows < 40].tolist()) == {epoch}
            secondary = step.rows >= 40
            seen.update(zip(step.rows[secondary].tolist(), step.passes[secondary].tolist(), strict=True))
    # 20 steps of 2 in each epoch: ten passes an epoch over the four rows
    assert seen == Counter({(row, number): 1 for row in range(40, 44) for number in range(20)})


@given(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.3]), st.sampled_from([1.0, 2.0]), st.sampled_from([1, 3]))
def test_repeats_are_exact_over_an_epoch_and_over_time(fake_rows, one: float, other: float, num_lanes: int):
    rows = fake_rows([10, 0, 7, 3, 1, 9, 5, 5], np.arange(40) % 30 + 1)
    mixture = Mixture((ShardSpan(0, 4, one), ShardSpan(4, 8, other)))
    plan = Plan(rows, POLICY, global_batch_size=6, window_rows=8, num_lanes=num_lanes, mixture=mixture)
    total: Counter[int] = Counter()
    for epoch in range(4):
        steps = list(plan.steps(epoch))
        assert len(steps) == plan.num_steps(epoch)
        used = count_rows(steps)
        total += used
        for first, last, repeat in ((0, 20, one), (20, 40, other)):
            assert abs(sum(used[row] for row in range(first, last)) - repeat * 20) <= num_lanes
            counts = [total[row] for row in range(first, last)]
            assert max(counts) - min(counts) <= 1
        start = len(steps) // 2
        assert [step.rows.tolist() for step in plan.steps(epoch, start=start)] == [
            s.rows.tolist() for s in steps[start:]
        ]


def test_repeats_are_spread_over_the_epoch(fake_rows):
    rows = fake_rows([20] * 10 + [5] * 8)
    mixture = Mixture((ShardSpan(0, 10), ShardSpan(10, 18, 5.0)))
    plan = Plan(rows, POLICY, global_batch_size=20, window_rows=40, mixture=mixture)
    shares = [(step.rows >= 200).mean() for step in plan.steps(0)]
    halves = [np.mean(shares[: len(shares) // 2]), np.mean(shares[len(shares) // 2 :])]
    assert halves == pytest.approx([0.5, 0.5], abs=0.05)


def test_summary_says_what_each_dataset_gives(fake_rows):
    rows = fake_rows([8, 8, 3, 3])
    summary = summarize(Plan(rows, POLICY, global_batch_size=8, mixture=weighted(3, 1, shards=2)))
    assert (summary.steps, summary.rows_by_span, summary.masked) == (3, [16, 6], 2)


def test_shares_that_disagree_on_every_bucket_do_not_wait_for_the_end(fake_rows):
    """One dataset has short texts only, the other long ones only: what waits stays small, however long the epoch."""
    rows = fake_rows([100] * 40, [5] * 2000 + [70] * 2000)
    plan = Plan(rows, POLICY, global_batch_size=8, window_rows=200, mixture=weighted(1, 1, shards=20))
    steps = list(plan.steps(0))
    assert {step.bucket.length for step in steps} == {77}
    _, schedule = plan._schedule(0)
    assert (schedule.arrived - schedule.taken).sum(
        axis=2
    ).max() <= 8 * 3 * 4 + 200  # of 2,000: the batches that may wait, and a window


@pytest.mark.parametrize(
    ("mixture", "settings", "message"),
    [
        (
            weighted(2, 1, shards=2),
            {"global_batch_size": 8},
            "weights 2 : 1 do not share a batch of 8 rows with num_lanes 1 exactly: set .* to a multiple of 3",
        ),
        (weighted(1, 1, shards=2), {"num_lanes": 3, "global_batch_size": 12}, "3 lanes need as many shards: got 2"),
    ],
)
def test_mixtures_that_do_not_fit_are_refused(fake_rows, mixture: Mixture, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Plan(fake_rows([9, 9, 9, 9]), POLICY, **{"global_batch_size": 8, **settings}, mixture=mixture)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((ShardSpan(0, 2, weight=0),), "a weight must be 1 or more and a repeat above 0: .*weight=0"),
        ((ShardSpan(0, 2, 0.0),), "a repeat above 0: got ShardSpan.*repeat=0.0"),
        (
            (ShardSpan(0, 1), ShardSpan(0, 2)),
            r"datasets overlap: ShardSpan\(first_shard=0, last_shard=1.* no shard may",
        ),
        ((ShardSpan(1, 3, weight=1), ShardSpan(0, 2, weight=1)), "datasets overlap"),
        ((ShardSpan(0, 1, weight=1), ShardSpan(1, 2)), "give each dataset a weight, or each a repeat"),
        ((ShardSpan(0, 1, weight=1), ShardSpan(1, 2, 2.0, weight=1)), "give each dataset a weight, or each a repeat"),
    ],
)
def test_mixture_that_says_nothing_clear_is_refused(spans: tuple[ShardSpan, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Mixture(spans)


def test_repeat_that_leaves_an_epoch_empty_is_refused(fake_rows):
    """Half a row an epoch: the first epoch would have none."""
    mixture = Mixture((ShardSpan(0, 2, 0.05),))
    with pytest.raises(ValueError, match="so few rows are taken that an epoch may have none; set repeat higher"):
        Plan(fake_rows([5, 5]), POLICY, global_batch_size=2, mixture=mixture)
    rare = Mixture((ShardSpan(0, 1, 0.05), ShardSpan(1, 2)))
    epochs = [
        count_rows(list(Plan(fake_rows([5, 5]), POLICY, global_batch_size=2, mixture=rare).steps(e))) for e in range(4)
    ]
    assert [sum(count for row, count in used.items() if row < 5) for used in epochs] == [0, 0, 0, 1]


def test_repeat_is_taken_as_it_is_written(fake_rows):
    """As floats, 0.29 · 100 is 28.999…, of which the first epoch would take 28 rows."""
    mixture = Mixture((ShardSpan(0, 1, 0.29),))
    plan = Plan(fake_rows([100]), POLICY, global_batch_size=1, mixture=mixture)
    assert [plan.num_steps(epoch) for epoch in range(100)] == [29] * 100


def test_share_without_rows_is_refused(fake_rows):
    with pytest.raises(ValueError, match="the dataset of shards 2 to 3 has no rows; leave it out"):
        Plan(fake_rows([9, 9, 0, 0]), POLICY, global_batch_size=8, mixture=weighted(1, 1, shards=2))


def test_lane_without_rows_to_repeat_is_refused(fake_rows):
    with pytest.raises(ValueError, match="lane 1 of the dataset of shards 2 to 3 has no rows to repeat; set num_lanes"):
        Plan(fake_rows([9, 9, 4, 0]), POLICY, global_batch_size=8, num_lanes=2, mixture=weighted(1, 1, shards=2))
