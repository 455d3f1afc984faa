"""What holds for any lengths, batch sizes and world sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmdata.samplers import BucketBatchSampler, PlannedBatchSampler, TwoStreamBatchSampler

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=90)
WORLD_SIZES = st.integers(1, 8)


def bucket_ranks(lengths: list[int], global_batch_size: int, world_size: int, **settings: Any) -> list[Any]:
    return [
        BucketBatchSampler(lengths, global_batch_size // world_size, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def global_batches(ranks: list[PlannedBatchSampler]) -> list[list[int]]:
    """The rest of the epoch, over all ranks, in the order of the ranks."""
    return [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@given(
    lengths=LENGTHS,
    batch_size=st.integers(1, 9),
    world_size=WORLD_SIZES,
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    bounds=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_bucket_gives_each_row_once_in_equal_batches_of_one_bound(
    lengths: list[int], batch_size: int, world_size: int, drop_last: bool, shuffle: bool, bounds: int, epoch: int
):
    size = batch_size * world_size
    assume(not drop_last or len(lengths) >= size)
    ranks = bucket_ranks(lengths, size, world_size, drop_last=drop_last, shuffle=shuffle, bounds=bounds)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    steps = len(lengths) // size if drop_last else -(-len(lengths) // size)
    assert [len(rank) for rank in batches] == [len(sampler) for sampler in ranks] == [steps] * world_size
    sizes = [{len(part) for part in parts} for parts in zip(*batches, strict=True)]
    rest = -(-(len(lengths) % size) // world_size)  # rows of a rank in the batch that is not full
    assert sizes == [{batch_size}] * (len(lengths) // size) + ([{rest}] if rest and not drop_last else [])
    step_bounds = ranks[0].step_bounds(epoch)
    assert len(step_bounds) == steps
    assert all(
        lengths[row] <= bound for rank in batches for rows, bound in zip(rank, step_bounds, strict=True) for row in rows
    )
    times = Counter(row for rank in batches for rows in rank for row in rows)
    assert set(times) <= set(range(len(lengths)))
    assert sum(times.values()) - len(times) == ranks[0].repeated
    assert len(lengths) - len(times) == ranks[0].dropped
    assert ranks[0].repeated == (0 if drop_last else -len(lengths) % world_size)
    assert ranks[0].dropped == (len(lengths) % size if drop_last else 0)


@given(
    kinds=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    leftover=st.sampled_from(["pad", "drop"]),
    epoch=st.integers(0, 3),
)
def test_bucket_of_kinds_gives_full_batches_of_one_kind(
    kinds: list[int], batch_size: int, world_size: int, leftover: str, epoch: int
):
    size = batch_size * world_size
    assume(leftover == "pad" or max(Counter(kinds).values()) >= size)
    ranks = bucket_ranks(kinds, size, world_size, bounds=range(5), leftover=leftover)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    found = global_batches(ranks)
    assert len(found) == len(ranks[0])
    assert [[kinds[row] for row in batch] for batch in found] == [[one] * size for one in ranks[0].step_bounds(epoch)]
    times = Counter(row for batch in found for row in batch)
    assert sum(times.values()) - len(times) == ranks[0].repeated
    assert len(kinds) - len(times) == ranks[0].dropped
    assert (ranks[0].dropped == 0) == (leftover == "pad" or all(n % size == 0 for n in Counter(kinds).values()))


@given(
    primary=st.integers(1, 60),
    secondary=st.integers(1, 40),
    primary_size=st.integers(1, 6),
    secondary_size=st.integers(1, 6),
    world_size=WORLD_SIZES,
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_two_stream_gives_primary_rows_once_and_secondary_ones_in_turn(
    primary: int,
    secondary: int,
    primary_size: int,
    secondary_size: int,
    world_size: int,
    drop_last: bool,
    shuffle: bool,
):
    size = primary_size * world_size
    assume(not drop_last or primary >= size)
    ranks = [
        TwoStreamBatchSampler(
            range(primary),
            range(1000, 1000 + secondary),
            primary_size + secondary_size,
            secondary_size,
            drop_last=drop_last,
            shuffle=shuffle,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    turns: Counter[int] = Counter()
    for _ in range(3):  # epochs
        batches = [list(sampler) for sampler in ranks]
        assert [len(rank) for rank in batches] == [len(sampler) for sampler in ranks]
        for parts in zip(*batches, strict=True):
            assert len({len(part) for part in parts}) == 1
        for rank in batches:
            assert all(row >= 1000 for rows in rank for row in rows[-secondary_size:])
            assert all(len(rows) == primary_size + secondary_size for rows in rank[: primary // size])
        firsts = Counter(row for rank in batches for rows in rank for row in rows[:-secondary_size])
        assert sum(firsts.values()) - len(firsts) == ranks[0].repeated
        assert set(firsts) <= set(range(primary))
        assert primary - len(firsts) == ranks[0].dropped
        turns.update(row for rank in batches for rows in rank for row in rows[-secondary_size:])
    times = [turns[row] for row in range(1000, 1000 + secondary)]
    assert max(times) - min(times) <= 1
    assert sum(times) == sum(turns.values()) == 3 * len(ranks[0]) * secondary_size * world_size


@given(
    lengths=LENGTHS,
    size=st.sampled_from([4, 6, 8, 12]),
    data=st.data(),
    drop_last=st.booleans(),
    stream=st.sampled_from(["bucket", "two"]),
)
def test_resume_at_every_step_under_another_world_size_gives_the_rest(
    lengths: list[int], size: int, data: st.DataObject, drop_last: bool, stream: str
):
    assume(not drop_last or len(lengths) >= size)
    sizes = st.sampled_from([n for n in range(1, 9) if size % n == 0])
    before, after = data.draw(sizes), data.draw(sizes)

    def ranks(world_size: int) -> list[Any]:
        if stream == "bucket":
            return bucket_ranks(lengths, size, world_size, drop_last=drop_last, bounds=3)
        each = size // world_size
        return [
            TwoStreamBatchSampler(
                range(len(lengths)), [1000, 1001], 2 * each, each, drop_last=drop_last, rank=rank, world_size=world_size
            )
            for rank in range(world_size)
        ]

    def rows(batches: list[list[int]]) -> list[set[int]]:
        return [set(batch) for batch in batches]  # ranks differ in order, and in what is repeated

    whole = rows([*global_batches(ranks(1)), *_second_epoch(ranks(1))])
    for stop in range(len(whole)):
        saved = ranks(before)
        for sampler in saved:
            taken = 0
            while taken < stop:
                for _ in sampler:
                    taken += 1
                    if taken == stop:
                        break
        states = [sampler.state_dict() for sampler in saved]
        assert all(state == states[0] for state in states)
        resumed = ranks(after)
        for sampler in resumed:
            sampler.load_state_dict(states[0])
        rest = rows(global_batches(resumed))
        steps = len(resumed[0])
        wanted = whole[stop:] if stop >= steps else whole[stop:steps]
        assert rest == wanted


def _second_epoch(ranks: list[Any]) -> list[list[int]]:
    for sampler in ranks:
        sampler.set_epoch(1)
    return global_batches(ranks)


@given(count=st.integers(1, 50), world_size=WORLD_SIZES)
def test_bucket_global_batches_are_those_of_one_rank(count: int, world_size: int):
    lengths = [i % 7 for i in range(count * world_size)]  # divides: nothing is repeated
    size = 3 * world_size
    assert global_batches(bucket_ranks(lengths, size, world_size)) == global_batches(bucket_ranks(lengths, size, 1))


def test_bucket_chooses_bounds_that_pad_least():
    sampler = BucketBatchSampler([4] * 10 + [5] * 10 + [20], 7, bounds=2)
    assert sampler.bounds == (5, 20)


@pytest.mark.parametrize("longest", [1024, 1025, 480_000])
def test_bucket_chooses_bounds_of_long_rows_too(longest: int):
    sampler = BucketBatchSampler([*range(0, longest, 97), longest], 8, bounds=4)
    assert len(sampler.bounds) == 4
    assert sampler.bounds[-1] == longest
