"""Whatever is set: the same batches from threads and a worker process, on two ranks, and from a state in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdata import Batch

from .conftest import TARGETS, Corpus, placed
from .worker_processes import nothing_left, transforms

__all__ = ["nothing_left"]  # a fixture

RECAPS = [{"table": "FOLDER/recaps.parquet"}]
BOXED: dict[str, Any] = {"shards": "FOLDER/boxed", "targets": TARGETS}
KINDS: dict[str, dict[str, Any]] = {
    "captions of two sources": {"join": RECAPS, "captions": {"shards": 0.4, "join:recap": 0.6}},
    "captions that are dropped": {"caption_dropout": 0.4, "caption_template": "a small photo of {}, near the street"},
    "a function of captions": {"text_transform": "my_transforms:change"},
    "negative captions": {"negative_captions": "FOLDER/negatives.parquet"},
    "every caption": {"captions": "every"},
    "weights of rows": {"row_weights": "captions"},
    "an order": {"order": "FOLDER/order.npy", "shuffle": False},
    "a share": {"val": {"share": 0.3}},
    "weights of datasets": {
        "shards": [{"shards": "FOLDER/first", "weight": 3}, {"shards": "FOLDER/second", "weight": 1}]
    },
    "groups": {"shards": "FOLDER/labelled", "groups": {"size": 2}},
    "candidates": {"shards": "FOLDER/labelled", "groups": {"candidates": 1}},
    "a token budget": {"token_budget": 320, "global_batch_size": 16},
    "patches": {"image_patches": [4, 9, 16], "image_buckets": None, "patch_size": 8},
    "a transform of torchvision": {"transform": "my_transforms:jittered"},
    "augmentation": {"augment": {"horizontal_flip_prob": 0.5, "color_jitter": 0.4}},
    "boxes": {**BOXED, "augment": {"horizontal_flip_prob": 0.5}},
    "crops that hold their boxes": {**BOXED, "targets": {**TARGETS, "keep_boxes": True}},
    "boxes in patches": {**BOXED, "image_patches": [4, 9, 16], "image_buckets": None, "patch_size": 8},
    "boxes of groups": {**BOXED, "groups": {"size": 2, "source": "FOLDER/groups.npy"}},
    "boxes in a transform of torchvision": {
        **BOXED,
        "targets": {name: value for name, value in TARGETS.items() if name != "keypoint_swaps"},
        "transform": "my_transforms:boxes_too",
    },
}

TRANSFORMS = """
    from torchvision.transforms import v2

    def change(text, rng):
        words = [word for word in text.split() if rng.random() < 0.7]
        return " ".join(["look:", *words, *words[: rng.randrange(9)]])

    def jittered(image, size, generator):
        crop = v2.RandomResizedCrop(size, scale=(0.3, 1.0))
        return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)])(image)

    def boxes_too(sample, size, generator):
        crop = v2.RandomResizedCrop(size, scale=(0.3, 1.0))
        return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()])(sample)
"""


@pytest.fixture(scope="module")
def files(corpus: Corpus, second: Path, labelled: Path, boxed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what the settings name."""
    folder = tmp_path_factory.mktemp("files")
    named = {"first": corpus.folder / "shards", "second": second, "labelled": labelled, "boxed": boxed}
    for name, shards in named.items():
        (folder / name).symlink_to(shards)
    corpus.table(folder / "recaps.parquet", recap=[f"recaption {row}" + " of a tree" * (row % 9) for row in range(50)])
    corpus.table(folder / "negatives.parquet", captions=[[f"a cat {row}"] for row in range(50)])
    np.save(folder / "groups.npy", np.arange(50) // 2)
    np.save(folder / "order.npy", np.concatenate([np.arange(40, 10, -1), [7, 7, 7, 3], np.arange(11, 20)]))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_from_threads_a_process_two_ranks_and_a_state(
    corpus: Corpus,
    files: Path,
    same: Callable[[Batch, Batch], bool],
    join: Callable[[list[Batch]], Batch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
):
    transforms(tmp_path, monkeypatch, TRANSFORMS)
    settings = placed(KINDS[kind], files)
    with corpus.loader(**settings, num_workers=0) as loader:
        loader.set_epoch(1)
        expected = list(loader)
    with corpus.loader(**settings, num_workers=4) as loader:
        loader.set_epoch(1)
        given = list(islice(loader, 2))
        state = loader.state_dict()
    ranks = [corpus.loader(**settings, rank=rank, world_size=2, num_workers=2, num_processes=rank) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    given += [join(list(parts)) for parts in zip(*ranks, strict=True)]
    for loader in ranks:
        loader.close()
    assert len(given) == len(expected) > 2
    assert all(same(one, other) for one, other in zip(given, expected, strict=True))
