"""Random numbers by counter."""

from __future__ import annotations

import numpy as np
import pytest

from mmdata import seeding
from mmdata.seeding import Purpose, mix, permutation, random_raw, uniforms


def test_mix_gives_the_published_numbers_of_splitmix64():
    # The first three outputs for seed 0; the state advances by the golden gamma.
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % 2**64], np.uint64).astype(np.int64)
    assert [hex(n) for n in mix(states).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_mix_takes_negative_numbers_and_none():
    assert mix(np.array([-1, -(2**63)])).dtype == np.uint64
    assert mix(np.empty(0, np.int64)).shape == (0,)


def test_random_raw_gives_the_published_numbers_of_philox():
    # Random123's known answers for Philox4x64-10 with key 0; NumPy steps the counter before it draws, so they begin
    # at counter 2**256 - 1, which no stream of ours has, and ours begins at the block of counter 1.
    first = np.random.Philox(key=[0, 0], counter=[2**64 - 1] * 4).random_raw(8)
    assert [hex(n) for n in first[:2].tolist()] == ["0x16554d9eca36314c", "0xdb20fe9d672d0fdc"]
    ours = random_raw(4, seed=0, epoch=0, purpose=Purpose.SHARD_ORDER)
    np.testing.assert_array_equal(ours, first[4:])


def test_random_raw_depends_on_each_argument_and_on_nothing_else():
    known = {"seed": 1, "epoch": 2, "purpose": Purpose.ROW_ORDER, "position": 3}
    changed = [{"seed": 2}, {"epoch": 3}, {"purpose": Purpose.BATCH_ORDER}, {"position": 4}]
    changed += [{"seed": -1}, {"seed": -2}, {"seed": 2**63 - 1}]
    draws = [tuple(random_raw(4, **{**known, **change}).tolist()) for change in [{}, *changed]]
    assert len(set(draws)) == len(draws)
    np.random.seed(0)
    assert tuple(random_raw(4, **known).tolist()) == draws[0]


def test_random_raw_begins_alike_however_many_are_drawn():
    known = {"seed": 5, "epoch": 0, "purpose": Purpose.ROW_TRANSFORM, "position": 9}
    np.testing.assert_array_equal(random_raw(100, **known)[:7], random_raw(7, **known))


def test_random_raw_streams_of_neighbouring_positions_do_not_overlap():
    known = {"seed": 5, "epoch": 0, "purpose": Purpose.ROW_TRANSFORM}
    drawn = np.concatenate([random_raw(1000, **known, position=position) for position in range(20)])
    assert len(np.unique(drawn)) == 20_000


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_permutation_holds_each_number_once(count: int):
    order = permutation(count, seed=3, epoch=1, purpose=Purpose.ROW_ORDER)
    assert sorted(order.tolist()) == list(range(count))
    assert order.dtype == np.int64


def test_permutation_is_the_same_on_every_machine():
    order = permutation(10, seed=0, epoch=0, purpose=Purpose.ROW_ORDER)
    assert order.tolist() == [8, 7, 4, 2, 6, 5, 9, 0, 1, 3]


def test_permutation_of_equal_keys_keeps_their_order(monkeypatch: pytest.MonkeyPatch):
    keys = np.array([7, 3, 7, 3] * 500, np.uint64)
    monkeypatch.setattr(seeding, "random_raw", lambda count, **_: keys[:count])
    order = permutation(2000, seed=0, epoch=0, purpose=Purpose.ROW_ORDER)
    assert order.tolist() == [*range(1, 2000, 2), *range(0, 2000, 2)]


def test_permutation_every_order_is_equally_likely():
    # 6 orders of 3, 6000 draws: chi-square with 5 degrees of freedom is under 20.5 with probability 0.999.
    draws = [tuple(permutation(3, seed=s, epoch=0, purpose=Purpose.ROW_ORDER).tolist()) for s in range(6000)]
    counts = np.unique(draws, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5


def test_uniforms_lie_in_the_unit_interval_and_fill_it():
    numbers = uniforms(100_000, seed=0, epoch=0, purpose=Purpose.ROW_TRANSFORM)
    assert min(numbers) >= 0
    assert max(numbers) < 1
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # 99 degrees of freedom, 0.999
