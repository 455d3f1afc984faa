"""A batch without a row of each shape: the same entries, types and sizes as the batches of the epoch have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdata import Batch

from .conftest import Corpus
from .test_negative_captions import file

__all__ = ["file"]

VARIANTS: list[dict[str, Any]] = [
    {},
    {},
    {"image_buckets": None, "image_patches": [40, 48], "patch_size": 8},
    {"image_buckets": None, "image_size": 32, "token_budget": 320, "global_batch_size": 16},
    {"negative_captions": "the file"},
]


def signature(batch: Batch) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Name, type and size of each entry."""
    sizes = {name: tuple(v.shape) if isinstance(v, Tensor) else (len(v),) for name, v in batch.items()}  # type: ignore[arg-type]
    return tuple((name, str(getattr(batch[name], "dtype", "list")), size) for name, size in sorted(sizes.items()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_blank_batches_have_the_shapes_of_the_epoch(
    corpus: Corpus, file: Path, changes: dict[str, Any], world_size: int
):
    given = {name: str(file) if value == "the file" else value for name, value in changes.items()}
    loader = corpus.loader(rank=world_size - 1, world_size=world_size, num_workers=0, **given)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        blank = [(words, make()) for words, make in loader.blank_batches()]
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (epoch, 0)
        assert all(not batch["valid"].any() and set(batch["rows"].tolist()) == {-1} for _, batch in blank)
        pixels = [batch["pixel_values"].numel() for _, batch in blank]
        assert pixels == sorted(pixels, reverse=True)
        signatures = [signature(batch) for _, batch in blank]
        real = [signature(batch) for batch in loader]
        assert len(set(signatures)) == len(signatures)
        assert set(signatures) == set(real)
        steps = [int(words.partition("steps: ")[2].split()[0]) for words, _ in blank]
        assert steps == [real.count(each) for each in signatures]


def test_blank_batches_say_their_shape(corpus: Corpus):
    words = [words for words, _ in corpus.loader(image_buckets=[[32, 32]], text_buckets=1).blank_batches()]
    assert words == ["8 rows of 32 × 32 pixels and 32 tokens (steps: 7 of an epoch's 7)"]


def test_blank_batches_leave_the_loader_where_it_was(corpus: Corpus):
    loader = corpus.loader()
    batches = iter(loader)
    first = next(batches)
    for _, make in loader.blank_batches():
        make()
    assert torch.equal(first["rows"], next(iter(corpus.loader()))["rows"])
    assert len([first, *batches]) == len(loader)
    assert loader.stats.rows == 50
