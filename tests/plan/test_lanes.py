"""Lanes: balanced, the same in every epoch, and each read by the ranks of its slice only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmdata.plan import LengthAspectPolicy, Plan
from mmdata.plan.groups import mix_evenly
from mmdata.plan.windows import assign_to_lanes, cut_windows

POLICY = LengthAspectPolicy([8, 16, 77], [(64, 64)])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 9))
def test_assign_to_lanes_gives_each_shard_to_one_lane_and_balances_rows(sizes: list[int], num_lanes: int, seed: int):
    lanes = assign_to_lanes(np.array(sizes), num_lanes, seed=seed)
    assert sorted(np.concatenate(lanes).tolist()) == list(range(len(sizes)))
    rows = [int(np.array(sizes)[lane].sum()) for lane in lanes]
    assert max(rows) - min(rows) <= max(sizes)


def test_assign_to_lanes_depends_on_the_seed():
    sizes = np.full(40, 100)
    assert [lane.tolist() for lane in assign_to_lanes(sizes, 4, seed=0)] == [
        lane.tolist() for lane in assign_to_lanes(sizes, 4, seed=0)
    ]
    assert [lane.tolist() for lane in assign_to_lanes(sizes, 4, seed=0)] != [
        lane.tolist() for lane in assign_to_lanes(sizes, 4, seed=1)
    ]


def test_windows_are_whole_shards():
    assert cut_windows(np.array([3, 3, 3, 3, 1]), 5) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert cut_windows(np.array([9]), 5) == [slice(0, 1)]
    assert cut_windows(np.array([0, 0, 2]), 1) == [slice(0, 3)]


@pytest.mark.sweep
def test_lanes_of_64_nodes_each_read_shards_of_their_own_in_every_epoch(fake_rows):
    rng = np.random.default_rng(0)
    sizes = [20] * 256
    rows = fake_rows(sizes, np.clip(rng.lognormal(np.log(14), 0.6, 256 * 20), 3, 77).astype(int))
    touched: list[set[int]] = [set() for _ in range(64)]
    for rank in range(64):
        plan = Plan(rows, POLICY, global_batch_size=256, num_lanes=64, window_rows=500)
        for epoch in (0, 1):
            for step in plan.steps(epoch, rank=rank, world_size=64):
                mine = step.rows[step.rows >= 0]
                touched[rank] |= set((np.searchsorted(rows.starts, mine, side="right") - 1).tolist())
    assert [len(shards) for shards in touched] == [4] * 64
    assert len(set().union(*touched)) == 256


def test_lanes_ask_only_for_the_shapes_of_their_own_windows(fake_rows):
    rows = fake_rows([10] * 8)
    plan = Plan(rows, POLICY, global_batch_size=8, num_lanes=4, window_rows=8)
    assert len(list(plan.steps(0, rank=1, world_size=4))) == 10
    assert sum(map(len, rows.asked)) == 20


@pytest.mark.parametrize(
    ("num_lanes", "message"),
    [
        (3, "num_lanes must divide every batch size: got 3, and batches of 8 rows"),
        (0, "num_lanes must divide every batch size: got 0, and batches of 8 rows"),
        (8, "8 lanes need as many shards: got 2; set num_lanes lower"),
    ],
)
def test_plan_refuses_lanes_that_do_not_fit(fake_rows, num_lanes: int, message: str):
    with pytest.raises(ValueError, match=message):
        Plan(fake_rows([5, 5]), POLICY, global_batch_size=8, num_lanes=num_lanes)


@pytest.mark.parametrize(
    ("counts", "order"),
    [([2, 4], [2, 0, 3, 4, 1, 5]), ([3], [0, 1, 2]), ([2, 2], [0, 2, 1, 3]), ([0, 2], [0, 1]), ([], [])],
)
def test_runs_are_mixed_evenly_and_keep_their_order(counts: list[int], order: list[int]):
    assert mix_evenly([np.ones(count) for count in counts]).tolist() == order
