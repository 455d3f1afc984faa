"""Mixtures, groups and budgets through the loader: what `data` says is what batches hold, resumed anywhere too."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmdata import Batch


def counted(batches: list[Batch]) -> Counter[int]:
    return Counter(row for batch in batches for row in batch["rows"].tolist() if row >= 0)


def weighted(corpus, second: Path) -> list[dict[str, Any]]:
    return [{"shards": corpus.settings["shards"], "weight": 3}, {"shards": str(second), "weight": 1}]


def test_weights_are_shares_of_every_batch_on_every_rank(corpus, second: Path):
    for rank in range(2):
        loader = corpus.loader(shards=weighted(corpus, second), rank=rank, world_size=2)
        batches = list(loader)
        assert len(batches) == len(loader) == 9  # 50 rows by sixes
        assert all((batch["rows"] >= 50).sum() == 1 for batch in batches)


def test_weights_first_dataset_once_the_other_equally_often(corpus, second: Path):
    loader = corpus.loader(shards=weighted(corpus, second))
    used = counted([batch for _ in range(3) for batch in loader])
    assert all(used[row] == 3 for row in range(50))
    assert sum(used[row] for row in range(50, 59)) == 3 * 9 * 2
    assert all(used[row] == 6 for row in range(50, 59))


def test_repeats_of_a_row_have_other_crops_and_captions(corpus, second: Path):
    shards = [{"shards": corpus.settings["shards"], "repeat": 0.5}, {"shards": str(second), "repeat": 3}]
    loader = corpus.loader(shards=shards)
    batches = list(loader)
    used = counted(batches)
    assert sum(used[row] for row in range(50)) == 25
    assert all(used[row] == 3 for row in range(50, 59))
    captions: dict[int, set[str]] = {}
    crops: dict[int, list[torch.Tensor]] = {}
    for batch in batches:
        for i, row in enumerate(batch["rows"].tolist()):
            if row >= 50:
                captions.setdefault(row, set()).add(
                    str(batch["input_ids"][i][batch["attention_mask"][i] == 1].tolist())
                )
                crops.setdefault(row, []).append(batch["pixel_values"][i])
    assert all(len(found) == 3 for found in captions.values())
    assert all(not torch.equal(a, b) for a, b, _ in crops.values() if a.shape == b.shape)
    assert "caption_hash" in batches[0]


def test_label_groups_stand_together(corpus, labelled: Path):
    loader = corpus.loader(shards=str(labelled), groups={"size": 2})
    batches = list(loader)
    assert counted(batches) == Counter(range(40))
    labels = torch.cat([batch["labels"] for batch in batches]).reshape(-1, 2)
    assert (labels[:, 0] == labels[:, 1]).all()


def test_candidates_follow_their_anchor(corpus, labelled: Path):
    loader = corpus.loader(shards=str(labelled), groups={"candidates": 3})
    batches = list(loader)
    rows = torch.cat([batch["rows"] for batch in batches]).reshape(-1, 4)
    labels = torch.cat([batch["labels"] for batch in batches]).reshape(-1, 4)
    assert sorted(rows[:, 0].tolist()) == list(range(40))
    assert (labels == labels[:, :1]).all()
    assert "image_hash" in batches[0]


def test_token_budget_gives_short_texts_larger_batches(corpus, labelled: Path):
    settings: Any = {"shards": str(labelled), "image_buckets": None, "image_size": 32}
    loader = corpus.loader(**settings, text_buckets=[8, 32], global_batch_size=64, token_budget=320, patch_size=16)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        length = len(loader)
        batches = list(loader)
        assert len(batches) == length
        assert counted(batches) == Counter(range(40))
        sizes = {batch["input_ids"].shape[1]: batch["input_ids"].shape[0] for batch in batches}
        assert sizes == {8: 24, 32: 8}


@pytest.mark.parametrize("world_size", [3, 6, 12])
@pytest.mark.parametrize(
    "changes", [{}, {"groups": {"size": 3}, "global_batch_size": 288, "token_budget": 6000}, {"num_lanes": 3}]
)
def test_token_budget_gives_batches_that_ranks_in_threes_share(
    corpus, labelled: Path, world_size: int, changes: dict[str, Any]
):
    settings: Any = {"shards": str(labelled), "image_buckets": None, "image_size": 32, "leftover": "pad"}
    settings |= {"text_buckets": [8, 32], "global_batch_size": 96, "token_budget": 2000, "patch_size": 16}
    settings |= {"shuffle": False, "transform": "eval"}
    loader = corpus.loader(**{**settings, **changes})
    loader.plan.check_ranks(0, world_size)
    sizes = sorted(loader.plan.batch_sizes)
    assert sizes[0] < sizes[-1]
    steps = [[*loader.plan.steps(0, rank=rank, world_size=world_size)] for rank in range(world_size)]
    assert sum(step.rows.size for rank in steps for step in rank) == sum(
        step.rows.size for step in loader.plan.steps(0)
    )
    assert {len(rank) for rank in steps} == {len([*loader.plan.steps(0)])}


def test_state_of_many_datasets_is_under_1_kb(corpus, second: Path, labelled: Path):
    folders = [corpus.settings["shards"], str(second), str(labelled)]
    shards = [{"shards": folder, "repeat": 1 + 0.1 * i} for i, folder in enumerate(folders)]
    assert len(json.dumps(corpus.loader(shards=shards).state_dict())) < 1024


def test_groups_of_a_file_are_those_of_the_batches(corpus, labelled: Path, tmp_path: Path):
    np.save(tmp_path / "groups.npy", np.arange(40) // 4)
    loader = corpus.loader(shards=str(labelled), groups={"source": str(tmp_path / "groups.npy"), "size": 4})
    rows = torch.cat([batch["rows"] for batch in loader]).reshape(-1, 4)
    assert (rows // 4 == rows[:, :1] // 4).all()
