"""Plans: every row once, one bucket a step, the same steps for any world size and from any start."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmdata.plan import (
    Bucket,
    BucketPolicy,
    LengthAspectPolicy,
    Plan,
    Rows,
    Shapes,
    Step,
    rank_slice,
)
from mmdata.plan.buckets import fit_into_budget
from mmdata.plan.queues import fill_up

# Literal examples


def listed(steps: list[Step]) -> list[tuple[int, int, list[int]]]:
    """(number, text length, rows) of each step."""
    return [(step.number, step.bucket.length, step.rows.tolist()) for step in steps]


def unshuffled(rows: Rows, bounds: list[int], global_batch_size: int, **settings: Any) -> list[Step]:
    policy = LengthAspectPolicy(bounds, [(64, 64)])
    plan = Plan(rows, policy, global_batch_size=global_batch_size, shuffle=False, **settings)
    return list(plan.steps(0))


def test_plan_in_order_cuts_each_bucket_and_pads_the_last_batch(fake_rows):
    rows = fake_rows([4, 3], [3, 9, 3, 9, 3, 9, 3])
    assert listed(unshuffled(rows, [4, 10], 2)) == [
        (0, 4, [0, 2]),
        (1, 4, [4, 6]),
        (2, 10, [1, 3]),
        (3, 10, [-1, 5]),
    ]


def test_plan_fills_long_batches_first_so_that_the_last_is_short(fake_rows):
    rows = fake_rows([7], [3, 3, 3, 9, 9, 20, 9])
    steps = unshuffled(rows, [4, 10, 20], 2)
    assert listed(steps) == [(0, 4, [0, 1]), (1, 10, [3, 4]), (2, 20, [6, 5]), (3, 4, [-1, 2])]


def test_plan_moves_what_is_left_to_the_next_longer_bucket(fake_rows):
    rows = fake_rows([6], [3, 3, 3, 9, 9, 9])
    assert listed(unshuffled(rows, [4, 10], 2)) == [(0, 4, [0, 1]), (1, 10, [3, 4]), (2, 10, [2, 5])]


def test_plan_moves_what_is_left_of_one_image_shape_to_another_at_last(fake_rows):
    rows = fake_rows([4], [5, 5, 5, 5], height=[10, 10, 10, 20], width=[10, 10, 10, 10])
    policy = LengthAspectPolicy([8], [(32, 32), (64, 32)])
    steps = list(Plan(rows, policy, global_batch_size=2, shuffle=False).steps(0))
    assert [(step.bucket, step.rows.tolist()) for step in steps] == [
        (Bucket(8, 32, 32), [0, 1]),
        (Bucket(8, 32, 32), [2, 3]),
    ]


def test_plan_carries_what_is_left_of_a_window_into_the_next(fake_rows):
    rows = fake_rows([3, 0, 3], [3, 3, 3, 3, 3, 9])
    assert listed(unshuffled(rows, [4, 10], 2, window_rows=3)) == [
        (0, 4, [0, 1]),
        (1, 4, [2, 3]),
        (2, 10, [4, 5]),
    ]


def test_plan_shuffled_is_the_same_on_every_machine(fake_rows):
    rows = fake_rows([5, 4], [3, 9] * 4 + [3])
    plan = Plan(rows, LengthAspectPolicy([4, 10], [(64, 64)]), global_batch_size=4, seed=7, window_rows=5)
    assert listed(list(plan.steps(0))) == [(0, 10, [7, 1, 3, 5]), (1, 4, [4, 6, 8, 0]), (2, 4, [-1, -1, -1, 2])]
    assert listed(list(plan.steps(1))) == [(0, 10, [7, 5, 1, 3]), (1, 4, [0, 6, 4, 8]), (2, 4, [-1, -1, -1, 2])]


def test_plan_fewer_rows_than_a_batch_are_one_step(fake_rows):
    assert listed(unshuffled(fake_rows([2]), [77], 8)) == [(0, 77, [-1, -1, -1, 0, -1, -1, -1, 1])]


@pytest.mark.parametrize(
    ("count", "size", "padded"),
    [
        (2, 4, [-1, 0, -1, 1]),
        (1, 3, [-1, -1, 0]),
        (3, 4, [0, 1, -1, 2]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_fill_up_spreads_the_masked_rows_evenly(count: int, size: int, padded: list[int]):
    assert fill_up(np.arange(count)[:, None], size)[:, 0].tolist() == padded


@given(st.integers(1, 256).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size))))
def test_fill_up_leaves_ranks_about_equally_full(count_and_size: tuple[int, int]):
    count, size = count_and_size
    padded = fill_up(np.arange(count)[:, None], size)[:, 0]
    assert padded[padded >= 0].tolist() == list(range(count))
    for world_size in [w for w in range(1, size + 1) if size % w == 0]:
        full = (padded.reshape(world_size, -1) >= 0).sum(axis=1)
        assert full.max() - full.min() <= 1


# Laws, over random corpora


class TwoTexts:
    """A user's policy: short texts with square images, long ones with wide images."""

    buckets = (Bucket(12, 224, 224), Bucket(77, 192, 256))

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return (shapes.length > 12).astype(np.int64)


IMAGE_SHAPES = [(224, 224), (192, 256), (256, 192)]

policies = st.one_of(
    st.builds(
        LengthAspectPolicy,
        st.lists(st.integers(1, 77), min_size=1, max_size=8, unique=True).map(sorted),
        st.integers(1, 3).map(lambda count: IMAGE_SHAPES[:count]),
    ),
    st.just(TwoTexts()),
)

settings_of_plans = st.fixed_dictionaries(
    {
        "global_batch_size": st.sampled_from([1, 2, 3, 4, 7, 8, 12, 32, 64, 500]),
        "seed": st.integers(0, 2**32),
        "shuffle": st.booleans(),
        "window_rows": st.sampled_from([1, 5, 40, 2**20]),
        "num_lanes": st.sampled_from([1, 1, 2, 3, 4, 8, 16]),
    }
)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sizes of shards (empty ones and ones of a single row among them), and a seed for what is in them."""
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 17, 60]), min_size=1, max_size=12).filter(any))
    return sizes, draw(st.integers(0, 999))


def make(fake_rows, corpus: tuple[list[int], int]) -> Any:
    """Rows of skewed lengths, others in every second epoch, and of various sizes."""
    sizes, seed = corpus
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    lengths = np.clip(rng.lognormal(np.log(14), 0.6, (2, count)), 1, 120).astype(int)
    return fake_rows(sizes, *lengths, height=rng.integers(10, 900, count), width=rng.integers(10, 900, count))


@given(corpora(), policies, settings_of_plans)
def test_plan_holds_its_laws(fake_rows, corpus: tuple[list[int], int], policy: BucketPolicy, settings: dict[str, Any]):
    rows = make(fake_rows, corpus)
    settings = with_lanes(rows, settings)
    plan = Plan(rows, policy, **settings)
    size = settings["global_batch_size"]
    for epoch in (0, 1):
        steps = list(plan.steps(epoch))
        assert len(steps) == len(plan) >= -(-rows.count // size)
        assert [step.number for step in steps] == list(range(len(steps)))
        assert all(step.rows.shape == (size,) and step.rows.dtype == np.int64 for step in steps)
        assert all(step.bucket in policy.buckets for step in steps)
        every = np.concatenate([step.rows for step in steps])
        assert np.sort(every[every >= 0]).tolist() == list(range(rows.count))
        if settings["num_lanes"] == 1:
            assert len(steps) == -(-rows.count // size)
            assert all((step.rows >= 0).all() for step in steps[:-1])
            check_fit(rows, policy, steps, epoch)


def with_lanes(rows: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a number of lanes that fits: the largest divisor of the batch that the shards allow."""
    lanes, size = settings["num_lanes"], settings["global_batch_size"]
    return settings | {"num_lanes": max(n for n in range(1, lanes + 1) if size % n == 0 and n < len(rows.starts))}


def check_fit(rows: Any, policy: BucketPolicy, steps: list[Step], epoch: int) -> None:
    """Rows are in their policy's bucket, or were moved to a longer text; fewer than a batch of each bucket were."""
    own = policy.assign(rows.shapes(np.arange(rows.count), epoch))
    longest = max(bucket.length for bucket in policy.buckets)
    moved = 0
    for step in steps:
        for row in step.rows[step.rows >= 0].tolist():
            bucket = policy.buckets[own[row]]
            moved += step.bucket != bucket
            assert step.bucket.length >= bucket.length
            length = int(rows.lengths[epoch % len(rows.lengths)][row])
            assert step.bucket.length >= min(length, longest) or isinstance(policy, TwoTexts)
    assert moved <= (len(policy.buckets) - 1) * len(policy.buckets) * (len(steps[0].rows) - 1)


@given(corpora(), policies, settings_of_plans)
def test_plan_resumes_at_every_step(fake_rows, corpus: tuple[list[int], int], policy: BucketPolicy, settings: Any):
    rows = make(fake_rows, corpus)
    settings = with_lanes(rows, settings)
    whole = listed(list(Plan(rows, policy, **settings).steps(3)))
    step = max(1, len(whole) // 5)
    for start in [*range(0, len(whole), step), len(whole)]:
        # another process, which has seen none of the steps before
        assert listed(list(Plan(rows, policy, **settings).steps(3, start=start))) == whole[start:]


@given(corpora(), policies, settings_of_plans)
def test_plan_gives_every_world_size_the_same_global_batches(
    fake_rows, corpus: tuple[list[int], int], policy: BucketPolicy, settings: dict[str, Any]
):
    rows = make(fake_rows, corpus)
    settings = with_lanes(rows, settings)
    steps = list(Plan(rows, policy, **settings).steps(0))
    size = settings["global_batch_size"]
    for world_size in [w for w in (2, 3, 4, 8, 64) if size % w == 0]:
        # Each rank plans by itself, and from another step on.
        start = len(steps) // world_size
        ranks = [
            list(Plan(rows, policy, **settings).steps(0, start=start, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        for parts, step in zip(zip(*ranks, strict=True), steps[start:], strict=True):
            assert all(part.bucket == step.bucket and part.number == step.number for part in parts)
            assert {len(part.rows) for part in parts} == {size // world_size}
            assert np.concatenate([part.rows for part in parts]).tolist() == step.rows.tolist()


def test_plan_epochs_and_seeds_have_orders_of_their_own(fake_rows):
    rows = fake_rows([50] * 4, list(range(1, 51)) * 4)
    policy = LengthAspectPolicy([16, 50], [(64, 64)])
    plans = [Plan(rows, policy, global_batch_size=8, seed=seed) for seed in (0, 1)]
    orders = [str(listed(list(plan.steps(epoch)))) for plan in plans for epoch in range(3)]
    assert len(set(orders)) == 6


def test_plan_shuffles_rows_and_batches(fake_rows):
    rows = fake_rows([500] * 2, [10, 30] * 500)
    plan = Plan(rows, LengthAspectPolicy([10, 30], [(64, 64)]), global_batch_size=10)
    steps = list(plan.steps(0))
    bucket_runs = len([None for _ in groupby(step.bucket for step in steps)])
    assert bucket_runs > 25  # 50.5 expected of a random order of 50 and 50, 2 of a sorted one
    rows_in_order = np.concatenate([step.rows for step in steps])
    assert abs(np.corrcoef(rows_in_order, np.arange(1000))[0, 1]) < 0.15


def test_plan_windows_of_the_same_make_have_orders_of_their_own(fake_rows):
    rows = fake_rows([80, 80], [10, 30] * 80)
    plan = Plan(rows, LengthAspectPolicy([10, 30], [(64, 64)]), global_batch_size=4, window_rows=80)
    steps = list(plan.steps(0))
    halves = [steps[:20], steps[20:]]
    buckets = [[step.bucket for step in half] for half in halves]
    assert buckets[0] != buckets[1]
    members = [np.concatenate([step.rows for step in half]) for half in halves]
    within = [sorted(part.tolist()) for part in members]
    assert sorted(within) == [list(range(80)), list(range(80, 160))]  # each window is one shard
    # The rows of the first bucket alone, so that the order of batches plays no part.
    first = [[step.rows % 80 for step in half if step.bucket.length == 10] for half in halves]
    assert {tuple(rows.tolist()) for rows in first[0]} != {tuple(rows.tolist()) for rows in first[1]}


def test_plan_in_order_keeps_the_order_of_the_index(fake_rows):
    steps = unshuffled(fake_rows([7, 0, 16]), [77], 5, window_rows=6)
    every = np.concatenate([step.rows for step in steps])
    assert every[every >= 0].tolist() == list(range(23))


# Windows


def test_plan_windows_are_whole_shards_and_full_but_the_last(fake_rows):
    rng = np.random.default_rng(0)
    for seed in range(30):
        sizes = rng.choice([0, 1, 3, 19, 20, 45], 15).tolist()
        rows = fake_rows([*sizes, 1])
        plan = Plan(rows, LengthAspectPolicy([77], [(64, 64)]), global_batch_size=4, seed=seed, window_rows=20)
        list(plan.steps(0))
        assert all(len(window) >= 20 for window in rows.asked[:-1])
        shards = [set(np.searchsorted(rows.starts, window, side="right").tolist()) for window in rows.asked]
        assert sum(map(len, shards)) == len(set().union(*shards))
        # No window is larger than it must be: it was not full before its last shard.
        assert all(len(window) < 20 + 45 for window in rows.asked)


# What is refused


class OneTooMany:
    buckets = (Bucket(8, 1, 1), Bucket(16, 1, 1))

    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return np.where(shapes.length > 20, 2, 0)


class Undecided(OneTooMany):
    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return np.where(shapes.length > 20, -1, 0)


class Forgetful(OneTooMany):
    def assign(self, shapes: Shapes) -> NDArray[np.int64]:
        return np.zeros(int((shapes.length <= 20).sum()), np.int64)


class Fractional(OneTooMany):
    def assign(self, shapes: Shapes) -> Any:
        return shapes.length / 20


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (OneTooMany(), r"bucket policy OneTooMany: row 2 got bucket 2; every row needs one of 0 … 1"),
        (Undecided(), r"bucket policy Undecided: row 2 got bucket -1; every row needs one of 0 … 1"),
        (Forgetful(), r"bucket policy Forgetful: assign\(\) gave int64 \(2,\) for 3 rows, not one integer each"),
        (Fractional(), r"bucket policy Fractional: assign\(\) gave float64 \(3,\) for 3 rows, not one integer each"),
    ],
)
def test_plan_policy_that_leaves_a_row_without_a_bucket_is_named(fake_rows, policy: BucketPolicy, message: str):
    plan = Plan(fake_rows([3], [5, 9, 25]), policy, global_batch_size=2, shuffle=False)
    with pytest.raises(ValueError, match=message):
        list(plan.steps(0))


def test_plan_of_no_rows_is_refused(fake_rows):
    with pytest.raises(ValueError, match="the corpus has no rows: nothing to plan"):
        Plan(fake_rows([0, 0]), TwoTexts(), global_batch_size=2)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (0, 3, r"global_batch_size 8 is not a multiple of world_size 3; 6 is"),
        (0, 16, r"global_batch_size 8 is not a multiple of world_size 16; 16 is"),
        (2, 2, r"rank must be in 0 … 1 \(world_size 2\): got 2"),
        (-1, 2, r"rank must be in 0 … 1 \(world_size 2\): got -1"),
        (0, 0, "world_size must be 1 or more: got 0"),
    ],
)
def test_rank_slice_refuses(rank: int, world_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        rank_slice(8, rank, world_size)


def test_plan_of_a_negative_epoch_is_refused(fake_rows):
    with pytest.raises(ValueError, match="epoch must be 0 or more: got -1"):
        next(Plan(fake_rows([3]), TwoTexts(), global_batch_size=1).steps(-1))


def test_plan_of_windows_without_rows_is_refused(fake_rows):
    with pytest.raises(ValueError, match="window_rows must be 1 or more: got 0"):
        Plan(fake_rows([3]), TwoTexts(), global_batch_size=1, window_rows=0)


def test_plan_of_batches_without_rows_is_refused(fake_rows):
    with pytest.raises(ValueError, match=r"a batch has 1 row or more: got batch sizes \[0, 0\]"):
        Plan(fake_rows([3]), TwoTexts(), global_batch_size=0)


def test_plan_of_a_token_budget_names_the_setting_that_ranks_ask_for(fake_rows):
    policy = LengthAspectPolicy([8, 77], [(64, 64)])
    policy.buckets = fit_into_budget(policy.buckets, 800, global_batch_size=64, multiple=8)
    plan = Plan(fake_rows([3]), policy, global_batch_size=64)
    assert plan.batch_sizes == [32, 8]
    with pytest.raises(
        ValueError,
        match=r"a batch of 8 rows cannot be shared by world_size 16; "
        r"set global_batch_size to 512, or that times a power of two$",
    ):
        plan.check_ranks(0, 16)
    plan.check_ranks(0, 8)


# Identity


def test_plan_identity_tells_plans_apart(fake_rows):
    rows, policy = fake_rows([5, 5]), LengthAspectPolicy([8, 16], [(64, 64)])
    known: dict[str, Any] = {"global_batch_size": 4, "seed": 0, "shuffle": True, "window_rows": 100, "num_lanes": 1}
    plan = Plan(rows, policy, **known)
    assert Plan(fake_rows([5, 5]), LengthAspectPolicy([8, 16], [(64, 64)]), **known).identity() == plan.identity()
    others = {
        "rows": Plan(fake_rows([4, 6]), policy, **known),
        "policy": Plan(rows, LengthAspectPolicy([9, 16], [(64, 64)]), **known),
        **{
            key: Plan(rows, policy, **{**known, key: value})
            for key, value in {
                "global_batch_size": 2,
                "seed": 1,
                "shuffle": False,
                "window_rows": 50,
                "num_lanes": 2,
            }.items()
        },
    }
    for key, other in others.items():
        identity = other.identity()
        assert [name for name in identity if identity[name] != plan.identity()[name]] == [key]


def test_plan_identity_follows_what_a_policy_of_cells_does(fake_rows):
    """No row of the corpus is longer than 8 tokens: what the policies do with others is asked of the cells."""

    class Long:
        buckets = (Bucket(8, 64, 64), Bucket(16, 64, 64))
        uses_cells = True
        bound = 8

        def assign(self, shapes: Shapes) -> NDArray[np.int64]:
            return (shapes.length > self.bound).astype(np.int64)

    class Longer(Long):
        bound = 9

    Longer.__qualname__ = Long.__qualname__
    rows = fake_rows([5], [3, 4, 5, 6, 7])
    identities = [Plan(rows, policy, global_batch_size=4).identity() for policy in (Long(), Long(), Longer())]
    assert identities[0] == identities[1] != identities[2]
    assert rows.asked == []


# A large epoch


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.sweep(keep=1)
def test_plan_resumes_at_random_steps_of_a_large_epoch_under_another_world_size(fake_rows, num_lanes: int):
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 2000, 400)
    count = int(sizes.sum())
    lengths = np.clip(rng.lognormal(np.log(14), 0.6, count), 3, 77).astype(int)
    rows = fake_rows(sizes, lengths, height=rng.integers(100, 900, count), width=rng.integers(100, 900, count))
    policy = LengthAspectPolicy([9, 13, 19, 77], IMAGE_SHAPES)
    settings: Any = {"global_batch_size": 64, "window_rows": 2**15, "num_lanes": num_lanes}
    whole = [step.rows for step in Plan(rows, policy, **settings).steps(1)]
    assert len(whole) > 6000
    for start in rng.integers(0, len(whole), 6).tolist():
        for world_size in (2, 64):
            ranks = rng.integers(0, world_size, 2).tolist()
            for rank in ranks:
                parts = Plan(rows, policy, **settings).steps(1, start=start, rank=rank, world_size=world_size)
                mine = rank_slice(64, rank, world_size)
                for part, step in zip(parts, whole[start : start + 50], strict=False):
                    assert part.rows.tolist() == step[mine].tolist()


def test_plan_resumed_reads_only_the_windows_whose_rows_wait(fake_rows):
    rng = np.random.default_rng(0)
    rows = fake_rows([500] * 200, rng.integers(3, 78, 100_000))
    plan = Plan(rows, LengthAspectPolicy([9, 13, 19, 77], [(64, 64)]), global_batch_size=64, window_rows=2000)
    middle = next(plan.steps(0, start=len(plan) // 2))
    assert middle.number == len(plan) // 2
    assert sum(map(len, rows.asked)) <= 3 * 2000  # of 100,000: the cost does not grow with the step
