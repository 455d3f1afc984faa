"""Groups by ranks, margins and a second model. The oracle is sentence-transformers' mine_hard_negatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentence_transformers.util import mine_hard_negatives
from torch import Tensor
from torch.nn.functional import normalize

from datasets import Dataset
from mmdata.train.memory.neighbours import Hardness, group_neighbours
from tests.train.test_neighbours import members

ROWS = 40


def both_sides(seed: int, spread: float = 0.8) -> Tensor:
    """(ROWS, 2, 8): images, and captions near them."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(ROWS, 8, generator=generator)
    texts = images + spread * torch.randn(ROWS, 8, generator=generator)
    return normalize(torch.stack([images, texts], dim=1), dim=2)


class Model:
    """A SentenceTransformer and a CrossEncoder that know features by the number that a text is."""

    device = torch.device("cpu")

    def __init__(self, features: Tensor) -> None:
        self.features = features

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        return self.features[[int(text) for text in texts], 0].numpy()

    def encode_document(self, texts: list[str], **options: Any) -> Any:
        return self.features[[int(text) for text in texts], 1].numpy()

    def similarity(self, queries: Any, documents: Any) -> Tensor:
        return torch.as_tensor(queries) @ torch.as_tensor(documents).T

    def similarity_pairwise(self, queries: Any, documents: Any) -> Tensor:
        return (torch.as_tensor(queries) * torch.as_tensor(documents)).sum(1)

    def predict(self, pairs: list[tuple[str, str]], **options: Any) -> Tensor:
        return torch.stack([self.features[int(a), 0] @ self.features[int(b), 1] for a, b in pairs])


@pytest.mark.parametrize(
    "settings",
    [
        {"range_min": 3, "range_max": 12},
        {"range_max": 12, "absolute_margin": 0.15},
        {"range_max": 30, "relative_margin": 0.3},
        {"range_min": 2, "range_max": 20, "absolute_margin": -0.05, "relative_margin": 0.05},
        {"range_min": 2, "range_max": 20, "relative_margin": 0.05, "rescored": True},
    ],
)
def test_hard_negatives_are_those_of_sentence_transformers(settings: dict[str, Any]):
    features, second = both_sides(0), both_sides(1)
    rescored = second if settings.get("rescored") else features
    hardness = Hardness(**{**settings, "rescored": rescored if settings.get("rescored") else None})
    scores, decided = (x[:, 0] @ x[:, 1].T for x in (features, rescored))
    hard, _ = hardness.judge(scores, decided)
    found = {
        (row, column)
        for row, columns in enumerate(decided.masked_fill(~hard, -9.0).topk(4, dim=1).indices.tolist())
        for column in columns
        if hard[row, column]
    }
    numbers = [str(row) for row in range(ROWS)]
    theirs = mine_hard_negatives(
        Dataset.from_dict({"image": numbers, "text": numbers}),
        Model(features),  # type: ignore[arg-type]
        cross_encoder=Model(second) if settings.get("rescored") else None,  # type: ignore[arg-type]
        num_negatives=4,
        verbose=False,
        **{name: value for name, value in settings.items() if name != "rescored"},
    )
    assert len(found) > ROWS
    assert found == {(int(row["image"]), int(row["negative"])) for row in theirs}


@pytest.mark.parametrize("rescored", [None, both_sides(1)])
def test_groups_hold_no_row_that_is_taken_for_false_and_begin_with_hard_ones(rescored: Tensor | None):
    features = both_sides(0)
    hardness = Hardness(range_min=1, range_max=15, relative_margin=0.1, rescored=rescored)
    groups = members(group_neighbours(features, 3, hardness=hardness), 3)
    assert len(groups) > 3
    scores = features[:, 0] @ features[:, 1].T
    decided = scores if rescored is None else rescored[:, 0] @ rescored[:, 1].T
    judged = [hardness.judge(scores, decided), hardness.judge(scores.T, decided.T)]
    hard, false = judged[0][0] | judged[1][0], judged[0][1] | judged[1][1]
    for group in groups:
        pairs = ~torch.eye(3, dtype=torch.bool)
        assert not (false[group][:, group] & pairs).any()
        assert (hard[group][:, group] | ~pairs).all(1).any()  # the row that took the others
    assert not torch.equal(members(group_neighbours(features, 3), 3), groups)


def test_both_sides_without_ranks_are_grouped_as_their_pairs():
    features = both_sides(0)
    pairs = normalize(features.sum(1), dim=1)
    assert torch.equal(group_neighbours(features, 4), group_neighbours(pairs, 4))
    spoiled = features.clone()
    spoiled[3, 1] = 0.0  # no caption
    assert group_neighbours(spoiled, 4)[3] == -1


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        (
            torch.rand(8, 4),
            {"absolute_margin": 0.1},
            r"features must be float \(rows, 2, dimensions\) of images and cap",
        ),
        (torch.rand(8, 3, 4), {}, r"features must be float \(rows, dimensions\): got torch.float32 \(8, 3, 4\)"),
        (
            torch.rand(8, 2, 4),
            {"rescored": torch.rand(7, 2, 4)},
            r"rescored must be float \(8, 2, E\): got \(7, 2, 4\)",
        ),
    ],
)
def test_features_that_do_not_fit_the_rules_are_refused(features: Tensor, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        group_neighbours(features, 2, hardness=Hardness(**settings))
