"""Random transforms in a loader: the same pixels with any number of threads, and in a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import Corpus

USERS = """
from torchvision.transforms import v2

def jittered(image, size, generator):
    crop = v2.RandomResizedCrop(size, scale=(0.3, 1.0))
    return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)])(image)
"""

AUGMENT = {"horizontal_flip_prob": 0.5, "color_jitter": 0.4}


@pytest.mark.parametrize(
    "changes",
    [
        {"transform": "users_of_loader:jittered"},
        {"augment": AUGMENT},
        {"augment": AUGMENT, "image_buckets": None, "image_patches": [4, 9, 16], "patch_size": 8},
    ],
    ids=["torchvision", "augment", "augmented patches"],
)
@pytest.mark.sweep(keep=1)
def test_loader_pixels_are_the_same_with_any_workers(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
):
    (tmp_path / "users_of_loader.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)

    def epoch(number: int, **workers: Any) -> list[Tensor]:
        loader = corpus.loader(**changes, **workers)
        loader.set_epoch(number)
        torch.manual_seed(len(workers))
        return [batch["pixel_values"].clone() for batch in loader]

    alone = epoch(1, num_workers=0)
    others = [{"num_workers": 2}, {"num_workers": 4}, {"num_workers": 2, "num_processes": 1}]
    for workers in others:
        found = epoch(1, **workers)
        assert len(found) == len(alone)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True)), workers
    assert not all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(epoch(0, num_workers=0), alone, strict=True)
    )
