"""Plans over selected rows: the plan of a corpus that has no other rows, with the row numbers of the whole corpus."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mmdata.hashing import share_bound
from mmdata.plan import BucketPolicy, Groups, LengthAspectPolicy, Mixture, Plan, ShardSpan, summarize
from mmdata.plan.windows import RowRanges
from mmdata.tables.selection import Selection, shard_runs
from tests.plan.test_plan import corpora, make, policies, settings_of_plans, with_lanes


def select(rows: Any, chosen: NDArray[np.bool_], name: str = "some") -> None:
    """Give rows a selection: chosen is bool, one a row."""
    rows.selection = Selection(rows.starts, np.split(chosen, rows.starts[1:-1]), name=name)


def alone(fake_rows, rows: Any, chosen: NDArray[np.bool_]) -> Any:
    """A corpus of the chosen rows only, in shards of the same numbers."""
    sizes = [int(part.sum()) for part in np.split(chosen, rows.starts[1:-1])]
    lengths = [values[chosen] for values in rows.lengths]
    return fake_rows(sizes, *lengths, height=rows.height[chosen], width=rows.width[chosen])


@st.composite
def shares(draw: st.DrawFn) -> tuple[float, int]:
    """How many of the rows are chosen, and a seed."""
    return draw(st.sampled_from([0.02, 0.3, 0.9, 1.0])), draw(st.integers(0, 999))


def choose(count: int, share: tuple[float, int]) -> NDArray[np.bool_]:
    chosen = np.random.default_rng(share[1]).random(count) < share[0]
    chosen[share[1] % count] = True  # at least one
    return chosen


@given(corpora(), policies, settings_of_plans, shares())
def test_plan_of_selected_rows_is_that_of_a_corpus_of_these_rows_alone(
    fake_rows, corpus: tuple[list[int], int], policy: BucketPolicy, settings: dict[str, Any], share: tuple[float, int]
):
    rows = make(fake_rows, corpus)
    chosen = choose(rows.count, share)
    other, numbers = alone(fake_rows, rows, chosen), np.flatnonzero(chosen)
    settings = with_lanes(rows, settings)
    select(rows, chosen)
    plan, expected = Plan(rows, policy, **settings), Plan(other, policy, **settings)
    assert (plan.num_rows, len(plan)) == (len(numbers), len(expected))
    for epoch in (0, 3):
        steps, others = list(plan.steps(epoch)), list(expected.steps(epoch))
        assert len(steps) == plan.num_steps(epoch) == len(others)
        for step, one in zip(steps, others, strict=True):
            assert (step.bucket, step.number) == (one.bucket, one.number)
            assert step.rows.tolist() == np.where(one.rows < 0, -1, numbers[one.rows]).tolist()
        start, size = len(steps) // 2, settings["global_batch_size"]
        for world_size in [w for w in (1, 2, 4) if size % w == 0]:
            again = Plan(rows, policy, **settings).steps(epoch, start=start, rank=world_size - 1, world_size=world_size)
            share_of_rank = [step.rows[-(size // world_size) :].tolist() for step in steps[start:]]
            assert [step.rows.tolist() for step in again] == share_of_rank


@given(shares(), st.booleans(), st.sampled_from([1, 2]))
def test_mixtures_of_selected_rows_are_those_of_these_rows_alone(
    fake_rows, share: tuple[float, int], weighted: bool, num_lanes: int
):
    rows = make(fake_rows, ([40, 0, 25, 60, 9], 4))
    chosen = choose(rows.count, share)
    chosen[[0, 41, 70, 130]] = True
    other, numbers = alone(fake_rows, rows, chosen), np.flatnonzero(chosen)
    spans = ShardSpan(0, 3), ShardSpan(3, 5)
    if weighted:
        mixture = Mixture((spans[0]._replace(weight=3), spans[1]._replace(weight=1)))
    else:
        mixture = Mixture((spans[0]._replace(repeat=1.5), spans[1]._replace(repeat=2.0)))
    policy = LengthAspectPolicy([12, 77], [(64, 64)])
    select(rows, chosen)
    settings = {"global_batch_size": 8, "mixture": mixture, "window_rows": 20, "num_lanes": num_lanes}
    plan, expected = Plan(rows, policy, **settings), Plan(other, policy, **settings)
    for epoch in (0, 1):
        steps, others = list(plan.steps(epoch)), list(expected.steps(epoch))
        assert [step.bucket for step in steps] == [step.bucket for step in others]
        for step, one in zip(steps, others, strict=True):
            assert step.rows.tolist() == np.where(one.rows < 0, -1, numbers[one.rows]).tolist()
            assert step.passes.tolist() == one.passes.tolist()


def test_groups_of_selected_rows_have_no_other_rows(fake_rows):
    rows = fake_rows([10, 10])
    labels = np.repeat([0, 1, 2, 3, 4], 4)
    select(rows, np.arange(20) % 2 == 0)
    groups = Groups(labels, 2, 0, "label")
    mixture = Mixture((ShardSpan(0, 2),), groups)
    plan = Plan(rows, LengthAspectPolicy([8], [(64, 64)]), global_batch_size=2, mixture=mixture)
    pairs = sorted(sorted(step.rows.tolist()) for step in plan.steps(0))
    assert pairs == [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18]]
    with pytest.raises(ValueError, match="groups: of_rows has 19 entries for 20 rows"):
        Plan(
            rows, plan.policy, global_batch_size=2, mixture=replace(mixture, groups=replace(groups, of_rows=labels[1:]))
        )


def test_summary_of_selected_rows_counts_them_in_the_shards_where_they_lie(fake_rows):
    rows = fake_rows([3, 4, 2], [5] * 9)
    select(rows, np.array([0, 0, 0, 0, 1, 0, 1, 0, 1], bool))
    summary = summarize(Plan(rows, LengthAspectPolicy([8], [(64, 64)]), global_batch_size=3))
    assert (summary.rows, summary.steps, summary.masked) == (3, 1, 0)
    assert summary.touched.tolist() == [[False, True, True]]


def test_selection_turns_places_into_rows():
    starts = np.array([0, 3, 3, 12, 13])
    chosen = np.array([1, 1, 0, *[0, 0, 1, 1, 0, 1, 0, 0, 1], 0], bool)
    selection = Selection(starts, np.split(chosen, starts[1:-1]), name="some")
    assert len(selection) == 6
    assert selection.starts.tolist() == [0, 2, 2, 6, 6]
    assert [selection.of_shard(shard).tolist() for shard in range(4)] == [[0, 1], [], [5, 6, 8, 11], []]
    assert selection.rows(2, 3, 6).tolist() == [6, 8, 11]
    assert np.concatenate(list(selection.chunks(2))).tolist() == [0, 1, 5, 6, 8, 11]
    ranges = RowRanges(np.array([2, 0]), np.array([3, 0]), np.array([5, 2]), np.array([1, 0]))
    assert ranges.occurrences(selection).tolist() == [(1 << 40) + 6, (1 << 40) + 8, 0, 1]
    with pytest.raises(ValueError, match=r"selection: shard 0 has 3 rows, and its mask \(2,\); give one bool a row"):
        Selection(starts, [[True, True]], name="some")


def test_selection_is_part_of_a_plans_identity(fake_rows):
    rows = fake_rows([4, 4])
    policy = LengthAspectPolicy([8], [(64, 64)])
    whole = Plan(rows, policy, global_batch_size=2).identity()
    assert whole["selection"] is None
    select(rows, np.arange(8) < 5, "the first")
    assert Plan(rows, policy, global_batch_size=2).identity() == whole | {"selection": "the first"}


def test_selection_of_no_row_is_refused(fake_rows):
    rows = fake_rows([4])
    select(rows, np.zeros(4, bool), "none of them")
    with pytest.raises(ValueError, match=r"the selection \(none of them\) has no rows: nothing to plan"):
        Plan(rows, LengthAspectPolicy([8], [(64, 64)]), global_batch_size=2)


def test_share_bound_leaves_a_share_of_all_hashes_below_it():
    assert share_bound(0.5) == 0
    assert share_bound(0.25) == -(2**62)
    hashes = np.random.default_rng(0).integers(-(2**63), 2**63, 10**5)
    assert abs((hashes < share_bound(0.01)).sum() - 1000) < 130  # four standard deviations of a binomial


def test_shard_runs_cover_every_shard_once():
    assert list(shard_runs(np.array([0, 3, 3, 12, 13, 20]), 10)) == [(0, 2), (2, 4), (4, 5)]


def test_threads_that_count_the_same_rounds_get_the_same_steps(fake_rows):
    rows = fake_rows([50] * 40, np.random.default_rng(0).integers(3, 78, 2000))
    select(rows, choose(rows.count, (0.5, 3)))
    policy, settings = LengthAspectPolicy([8, 16, 77], [(64, 64)]), {"global_batch_size": 8, "window_rows": 60}
    expected = [step.rows.tolist() for step in Plan(rows, policy, **settings).steps(1)]
    shapes = rows.shapes
    rows.shapes = lambda *asked: time.sleep(0.001) or shapes(*asked)  # another thread goes on meanwhile
    plan, found = Plan(rows, policy, **settings), dict[int, list[list[int]]]()
    together = threading.Barrier(8)

    def read(number: int) -> None:
        together.wait()
        start = number * 10
        found[start] = [step.rows.tolist() for step in plan.steps(1, start=start)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {start: steps == expected[start:] for start, steps in found.items()} == dict.fromkeys(range(0, 80, 10), True)
    assert len(plan) == len(expected)
