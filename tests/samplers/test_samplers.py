"""Epochs, state and arguments of the batch samplers, and torch's DataLoader around them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import mmdata
from mmdata.errors import ConfigError
from mmdata.samplers import BucketBatchSampler, TwoStreamBatchSampler

LENGTHS = [3, 9, 1, 4, 9, 2, 6, 5, 3, 5]


def bucket(**settings: Any) -> BucketBatchSampler:
    return BucketBatchSampler(**{"lengths": LENGTHS, "batch_size": 4, "bounds": [4, 9]} | settings)


def two_stream(**settings: Any) -> TwoStreamBatchSampler:
    given = {"primary_indices": range(10), "secondary_indices": [20, 21, 22], "batch_size": 6}
    return TwoStreamBatchSampler(**given | {"secondary_batch_size": 2} | settings)


BOTH = pytest.mark.parametrize("make", [bucket, two_stream])


def test_bucket_without_shuffle_keeps_the_order_within_each_bound():
    sampler = bucket(shuffle=False)
    assert list(sampler) == [[0, 2, 3, 5], [8, 1, 4, 6], [7, 9]]
    assert sampler.step_bounds(0) == [4, 9, 9]


def test_bucket_row_longer_than_all_bounds_is_refused():
    message = (
        r"^5 of 10 rows are longer than the last of bounds \(4\); row 1 has 9: add a bound of 9, or truncate these "
        r"rows and give np\.minimum\(lengths, 4\)$"
    )
    with pytest.raises(ValueError, match=message):
        bucket(bounds=[2, 4], batch_size=2)
    truncated = bucket(lengths=np.minimum(LENGTHS, 4), bounds=[2, 4], batch_size=2, shuffle=False)
    assert list(truncated) == [[2, 5], [0, 1], [3, 4], [6, 7], [8, 9]]


def test_bucket_last_batch_has_the_bound_of_its_longest_row():
    assert bucket(lengths=[1, 2, 3, 3, 3], bounds=[2, 4, 8]).step_bounds(0) == [4, 4]


def test_bucket_never_mixes_bounds_where_what_is_left_is_padded_or_dropped():
    padded = bucket(shuffle=False, bounds=[4, 5, 9], leftover="pad")
    assert list(padded) == [[0, 2, 3, 5], [8, 0, 2, 3], [7, 9, 7, 9], [1, 4, 6, 1]]
    assert (padded.step_bounds(0), padded.repeated, padded.dropped, len(padded)) == ([4, 4, 5, 9], 6, 0, 4)
    dropped = bucket(shuffle=False, bounds=[4, 5, 9], leftover="drop")
    assert list(dropped) == [[0, 2, 3, 5]]
    assert (dropped.step_bounds(0), dropped.repeated, dropped.dropped, len(dropped)) == ([4], 0, 6, 1)


def test_bucket_state_of_another_leftover_is_refused():
    with pytest.raises(ConfigError, match=r"leftover was 'merge' and is 'pad'"):
        bucket(leftover="pad").load_state_dict(bucket().state_dict())


def test_bucket_leftover_that_leaves_no_batch_or_contradicts_is_refused():
    with pytest.raises(ValueError, match="leftover=drop leaves no batch: no 6 of the 10 rows fill a global batch"):
        bucket(batch_size=6, bounds=[2, 4, 5, 9], leftover="drop")
    with pytest.raises(ValueError, match="drop_last is about leftover 'merge', and leftover is 'pad': leave one of"):
        bucket(drop_last=True, leftover="pad")


def test_two_stream_without_shuffle_repeats_secondary_rows_over_epochs():
    sampler = two_stream(shuffle=False, secondary_indices=[20, 21, 22, 23])
    assert list(sampler) == [[0, 1, 2, 3, 20, 21], [4, 5, 6, 7, 22, 23], [8, 9, 20, 21]]
    assert list(sampler) == [[0, 1, 2, 3, 22, 23], [4, 5, 6, 7, 20, 21], [8, 9, 22, 23]]


def test_last_batch_that_does_not_divide_repeats_rows_at_its_end():
    ranks = [bucket(lengths=[1] * 10, batch_size=2, rank=rank, world_size=4, shuffle=False) for rank in range(4)]
    assert [list(sampler)[-1] for sampler in ranks] == [[8], [9], [8], [9]]
    assert [sampler.repeated for sampler in ranks] == [2] * 4


@BOTH
def test_state_is_small_json_and_of_a_loops_own_place_too(make: Any):
    sampler = make()
    iterator = iter(sampler)
    next(iterator)
    next(iterator)
    state = sampler.state_dict()
    assert len(json.dumps(state)) < 1024
    assert state == make().state_at(0, 2)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.set_epoch(0)  # as trainers do
    assert list(resumed) == list(iterator)


@pytest.mark.parametrize(
    ("saved", "loaded", "changed"),
    [
        (bucket(), bucket(lengths=[*LENGTHS[:-1], 6]), "lengths was '"),
        (bucket(), bucket(bounds=[5, 9]), "bounds was '"),
        (bucket(), bucket(batch_size=2), "global_batch_size was 4 and is 2"),
        (bucket(), bucket(rank=0, world_size=2), "global_batch_size was 4 and is 8"),
        (bucket(), bucket(drop_last=True), "drop_last was False and is True"),
        (bucket(), bucket(shuffle=False), "shuffle was True and is False"),
        (bucket(), bucket(seed=7), "seed was 0 and is 7"),
        (two_stream(), two_stream(primary_indices=range(11)), "primary_indices was '"),
        (two_stream(), two_stream(secondary_indices=[20]), "secondary_indices was '"),
        (two_stream(), two_stream(secondary_batch_size=3), "global_secondary_batch_size was 2 and is 3"),
        (bucket(), two_stream(), "primary_indices was None and is '"),
    ],
)
def test_state_of_other_batches_is_refused_with_what_changed(saved: Any, loaded: Any, changed: str):
    with pytest.raises(ConfigError, match=f"belongs to other batches: .*{re.escape(changed)}.*or start anew"):
        loaded.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "lengths is empty: a batch needs rows"),
        ({"lengths": [1.5, 2.0]}, r"lengths must be a list of whole numbers: got list, float64 of shape \(2,\)"),
        ({"lengths": DistributedSampler(range(4), 2, 0)}, "lengths must be a list of whole numbers: got Distributed"),
        ({"lengths": [3, -1]}, "lengths must be 0 or more: row 1 has -1"),
        ({"bounds": [9, 4]}, r"bounds must rise, or be how many to choose: got \[9, 4\]"),
        ({"bounds": 0}, "bounds must rise, or be how many to choose: got 0"),
        ({"batch_size": 0}, "batch_size should be a positive integer value"),
        (
            {"drop_last": True, "batch_size": 11},
            "drop_last=True leaves no batch: no 11 of the 10 rows fill",
        ),
        ({"rank": 1}, "rank and world_size go together: got rank=1, world_size=None"),
        ({"rank": 2, "world_size": 2}, r"rank must be in 0 … 1 \(world_size 2\): got 2"),
        ({"sampler": RandomSampler(LENGTHS)}, "got RandomSampler, whose rows and order would not be used"),
        ({"sampler": DistributedSampler(range(9), 2, 0)}, "lengths has 10 entries and the dataset 9 rows"),
        (
            {"sampler": DistributedSampler(LENGTHS, 2, 1), "rank": 0, "world_size": 2},
            "rank=0, world_size=2 were given, but the DistributedSampler is of rank 1 of 2; leave them out",
        ),
    ],
)
def test_bucket_wrong_argument_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        bucket(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"primary_indices": []}, "primary_indices is empty: a batch needs rows"),
        ({"secondary_indices": []}, "secondary_indices is empty: a batch needs rows"),
        ({"secondary_batch_size": 0}, r"must be 1 … batch_size-1, to leave room for primary rows: got 0 of 6"),
        ({"secondary_batch_size": 6}, r"must be 1 … batch_size-1, to leave room for primary rows: got 6 of 6"),
        (
            {"secondary_indices": [20, 9, 3]},
            "^2 rows are in primary_indices and in secondary_indices, row 3 for one: leave them out of one list, or "
            "set allow_overlap=True$",
        ),
        ({"secondary_indices": np.ones((2, 2), int)}, r"got ndarray, int64 of shape \(2, 2\)"),
    ],
)
def test_two_stream_wrong_argument_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        two_stream(**settings)


def test_two_stream_takes_overlapping_rows_where_told():
    sampler = two_stream(secondary_indices=[20, 9, 3], allow_overlap=True, shuffle=False)
    assert list(sampler) == [[0, 1, 2, 3, 20, 9], [4, 5, 6, 7, 3, 20], [8, 9, 9, 3]]


def test_rank_comes_from_a_distributed_sampler():
    sampler = bucket(batch_size=2, sampler=DistributedSampler(LENGTHS, num_replicas=2, rank=1))
    assert (sampler.rank, sampler.world_size) == (1, 2)
    assert list(sampler) == list(bucket(batch_size=2, rank=1, world_size=2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataloader_gives_the_batches_epoch_after_epoch(num_workers: int):
    sampler = bucket(lengths=torch.tensor(LENGTHS))
    loader = DataLoader(list(range(10)), batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 3
    wanted = bucket()
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == list(wanted)


def test_names_are_public():
    assert mmdata.BucketBatchSampler is BucketBatchSampler
    assert mmdata.TwoStreamBatchSampler is TwoStreamBatchSampler
