from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmdata.train.memory.neighbours import Hardness, embed_rows, group_neighbours, mean_similarity
from tests.rounding import rounding


def clustered(rows: int, clusters: int, *, spread: float, seed: int = 0, dim: int = 32) -> tuple[Tensor, Tensor]:
    """Features (rows, dim) of any length around random centres, and the cluster of each row."""
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(clusters, (rows,), generator=generator)
    centres = torch.randn(clusters, dim, generator=generator)
    return centres[cluster] + spread * torch.randn(rows, dim, generator=generator), cluster


def members(groups: Tensor, size: int) -> Tensor:
    """(groups, size): the rows of each; an error unless each group has `size` rows and the numbers have no gap."""
    counts = torch.bincount(groups[groups >= 0])
    assert counts.tolist() == [size] * len(counts)
    return groups.argsort(stable=True)[int((groups < 0).sum()) :].reshape(-1, size)


def exact_bound(features: Tensor, size: int) -> float:
    """Mean similarity of each row to its `size` - 1 nearest rows, which no partition can exceed."""
    unit = F.normalize(features, dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    return similarity.topk(size - 1, dim=1).values.mean().item()


def similarity_of_pairs(features: Tensor, groups: list[list[int]]) -> float:
    """Mean cosine of all pairs in groups, pair by pair."""
    cosines = [
        F.cosine_similarity(features[a], features[b], dim=0)
        for group in groups
        for i, a in enumerate(group)
        for b in group[:i]
    ]
    return torch.stack(cosines).mean().item()


def test_groups_literal_example():
    angles = [math.radians(degrees) for degrees in (0, 90, 2, 91)]
    features = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])
    assert group_neighbours(features, 2).tolist() == [1, 0, 1, 0]


@given(st.integers(2, 9), st.integers(0, 300), st.integers(8, 64), st.integers(0, 999), st.sampled_from([1e-6, 0.5, 5]))
def test_groups_have_their_size_and_each_row_is_in_one_at_most(
    size: int, more: int, cell_rows: int, seed: int, spread: float
):
    features, _ = clustered(size + more, 5, spread=spread, seed=seed)
    groups = group_neighbours(features, size, seed=seed, cell_rows=cell_rows)
    assert groups.dtype == torch.int64
    assert len(members(groups, size)) == (size + more) // size
    assert int((groups < 0).sum()) == (size + more) % size


def test_rows_that_are_the_same_stand_in_no_group_together():
    angles = [math.radians(degrees) for degrees in (0, 1, 3, 90, 91, 93)]
    features = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])
    same = torch.tensor([[1, 10], [1, 20], [3, 30], [4, 40], [5, 40], [6, 60]])  # 0 and 1, 3 and 4
    groups = group_neighbours(features, 2, same=same).tolist()
    assert groups[2] in (groups[0], groups[1])
    assert groups[5] in (groups[3], groups[4])
    assert groups[0] != groups[1]
    assert groups[3] != groups[4]
    # 1 and 3 degrees are nearer than the bound allows, and 0 and 3 are not.
    bound = math.cos(math.radians(2.5))
    groups = group_neighbours(features, 2, hardness=Hardness(max_similarity=bound)).tolist()
    assert (groups[0], groups[3], groups[1]) == (groups[2], groups[5], groups[4])


@given(
    st.integers(2, 6),
    st.integers(0, 200),
    st.integers(1, 60),
    st.integers(8, 64),
    st.integers(0, 999),
    st.one_of(st.none(), st.floats(0.5, 0.99)),
)
def test_no_group_has_rows_that_are_the_same_or_too_similar(
    size: int, more: int, kinds: int, cell_rows: int, seed: int, bound: float | None
):
    features, _ = clustered(size + more, 5, spread=0.5, seed=seed)
    same = torch.randint(kinds, (size + more, 2), generator=torch.Generator().manual_seed(seed))
    try:
        groups = group_neighbours(
            features, size, seed=seed, cell_rows=cell_rows, same=same, hardness=Hardness(max_similarity=bound)
        )
    except ValueError as error:
        if not str(error).startswith(f"no group of {size} rows: too many rows are the same, or too similar"):
            raise
        return
    unit = torch.nn.functional.normalize(features.float(), dim=1)
    for group in members(groups, size):
        for a, b in itertools.combinations(group.tolist(), 2):
            assert (same[a] != same[b]).all()
            assert bound is None or float(unit[a] @ unit[b]) <= bound + 1e-5


def test_rows_of_which_none_is_the_same_are_grouped_as_without():
    features, _ = clustered(500, 9, spread=0.4)
    same = torch.arange(1000).reshape(500, 2)
    assert torch.equal(
        group_neighbours(features, 4, same=same, cell_rows=64), group_neighbours(features, 4, cell_rows=64)
    )


@pytest.mark.parametrize("same", [torch.zeros(5, dtype=torch.int64), torch.zeros(5, 2), torch.zeros(4, 2).long()])
def test_what_says_no_row_what_is_the_same_is_refused(same: Tensor):
    with pytest.raises(ValueError, match=r"same must be int64 \(5, K\): got"):
        group_neighbours(torch.rand(5, 3), 2, same=same)


def test_groups_of_rows_that_are_all_equal():
    groups = group_neighbours(torch.ones(1000, 4), 3, cell_rows=32)
    assert len(members(groups, 3)) == 333


def test_groups_lie_within_clusters():
    features, cluster = clustered(6000, 40, spread=0.2)
    groups = members(group_neighbours(features, 4, cell_rows=512), 4)
    mixed = (cluster[groups] != cluster[groups[:, :1]]).any(1)
    # a cluster whose rows are no multiple of four leaves up to three over: at most 30 groups of 40 clusters' rest
    assert int(mixed.sum()) <= 30


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_separate_bundles_are_those_of_brute_force(size: int):
    generator = torch.Generator().manual_seed(3)
    centres = torch.randn(200, 1, 64, generator=generator)
    features = (centres + 0.05 * torch.randn(200, size, 64, generator=generator)).flatten(0, 1)
    features = features[torch.randperm(len(features), generator=generator)]
    unit = F.normalize(features, dim=1)
    nearest = (unit @ unit.T).topk(size, dim=1).indices.sort(dim=1).values  # each row's own bundle
    groups = members(group_neighbours(features, size, cell_rows=64), size)
    assert {tuple(group) for group in groups.tolist()} == {tuple(bundle) for bundle in nearest.tolist()}


# 0.94 and 0.85 for four, 0.88 and 0.75 for sixteen rows in a group on 20,000 rows (docs/benchmarks/neighbours.py)
@pytest.mark.parametrize(("size", "share"), [(2, 0.93), (4, 0.88), (16, 0.8)])
def test_groups_come_near_the_exact_bound(size: int, share: float):
    features, _ = clustered(4000, 100, spread=0.5)
    groups = group_neighbours(features, size, cell_rows=1024)
    found, random = mean_similarity(features, groups)
    assert found > share * exact_bound(features, size)
    assert abs(random) < 0.05


def test_groups_are_equal_for_a_seed_and_whatever_holds_the_features(tmp_path: Path):
    features = clustered(3000, 30, spread=1.0)[0].half()
    np.save(tmp_path / "features.npy", features.numpy())
    first = group_neighbours(features, 4, seed=1, cell_rows=256)
    assert torch.equal(first, group_neighbours(features, 4, seed=1, cell_rows=256))
    mapped = np.load(tmp_path / "features.npy", mmap_mode="c")
    assert torch.equal(first, group_neighbours(mapped, 4, seed=1, cell_rows=256))
    assert torch.equal(first, group_neighbours(features.float(), 4, seed=1, cell_rows=256))
    assert not torch.equal(first, group_neighbours(features, 4, seed=2, cell_rows=256))


def test_groups_do_not_depend_on_the_length_of_features():
    features, _ = clustered(500, 20, spread=0.5)
    lengths = 2.0 ** torch.randint(-4, 5, (500, 1), generator=torch.Generator().manual_seed(0))  # exact in float
    assert torch.equal(group_neighbours(features * lengths, 4), group_neighbours(features, 4))


def test_rows_without_features_have_no_group():
    features, _ = clustered(40, 4, spread=0.5)
    features[[3, 17]] = 0
    features[8] = torch.nan
    features[21, 5] = torch.inf
    groups = group_neighbours(features, 4)
    assert groups[[3, 8, 17, 21]].tolist() == [-1] * 4
    assert len(members(groups, 4)) == 9


def test_groups_say_how_many_rows_are_done():
    done: list[int] = []
    group_neighbours(clustered(1000, 10, spread=0.5)[0], 4, cell_rows=128, on_cell=done.append)
    assert max(done) <= 128
    # 1000 rows, half of their 250 groups, and so on, until a cell holds them: 1000 + 500 + 248 + 124
    assert sum(done) == 1872


def test_mean_similarity_is_that_of_all_pairs():
    features, _ = clustered(60, 6, spread=0.5)
    groups = group_neighbours(features, 7)  # four rows are left over
    found, _ = mean_similarity(features, groups)
    expected = similarity_of_pairs(features, members(groups, 7).tolist())
    assert found == pytest.approx(expected, rel=0, abs=rounding(1.0, sums=32))  # cosines over 32 columns


@pytest.mark.parametrize(
    ("features", "size", "message"),
    [
        (torch.ones(4), 2, r"features must be float \(rows, dimensions\): got torch.float32 \(4,\)"),
        (torch.ones(4, 2).int(), 2, r"features must be float \(rows, dimensions\): got torch.int32 \(4, 2\)"),
        (
            torch.ones(4, 2),
            1,
            r"groups of 1 rows: the size must be 2 to 4, the rows with features \(finite, and not all zero\)",
        ),
        (torch.eye(4) * torch.tensor([1, 1, 1, 0]), 4, "groups of 4 rows: the size must be 2 to 3"),
    ],
)
def test_groups_that_cannot_be_are_refused(features: Tensor, size: int, message: str):
    with pytest.raises(ValueError, match=message):
        group_neighbours(features, size)


class Given(torch.nn.Module):
    """Features of a batch from its pixels and tokens, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return (
            F.normalize(batch["pixel_values"] * self.scale, dim=1),
            F.normalize(batch["input_ids"] * self.scale, dim=1),
            1,
            None,
        )


@pytest.mark.parametrize(
    ("of", "expected"),
    [("image", [[0, 1], [1, 0]]), ("text", [[0.6, 0.8], [0, 1]]), ("pair", [[0.316, 0.949], [0.707, 0.707]])],
)
def test_embed_rows_gives_the_features_of_valid_rows(of, expected: list[list[float]]):
    batch = {
        "pixel_values": torch.tensor([[0.0, 2.0], [9.0, 9.0], [3.0, 0.0]]),
        "input_ids": torch.tensor([[3.0, 4.0], [9.0, 9.0], [0.0, 7.0]]),
        "valid": torch.tensor([True, False, True]),
        "rows": torch.tensor([5, -1, 2]),
    }
    ((rows, features),) = embed_rows(Given(), [batch], side=of)
    assert rows.tolist() == [5, 2]
    assert features.dtype == torch.float16
    assert features.tolist() == [pytest.approx(row, abs=1e-3) for row in expected]


def test_mean_similarity_needs_groups():
    for groups, message in (
        (torch.full((3,), -1), "mean similarity of 0 groups: no row is in a group"),
        (torch.zeros(3), "groups has dtype float32, expected integers"),
    ):
        with pytest.raises(ValueError, match=message):
            mean_similarity(torch.eye(3), groups)
