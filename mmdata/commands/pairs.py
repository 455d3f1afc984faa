"""How a finished run tells the pairs of a compositional test apart, with and without the pictures."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from mmdata.batch import Batch
from mmdata.config import DataConfig
from mmdata.train.evaluation.evaluate import compositional, embed
from mmdata.trained import TrainedRun
from mmdata.trained.pairs import load_pairs, read_pairs


@cache
def _pairs_of(path: str, data: str) -> tuple[tuple[Batch, list[str]], ...]:
    """The batches of a compositional test, decoded once."""
    return tuple(load_pairs(path, DataConfig.model_validate_json(data)))


def score_pairs(folder: Path, path: str) -> dict[str, Any]:
    """Accuracy for each type of swap, and what is left of it without the pictures: 50 % where a pair has two images.

    TYPE_blind: every picture is the mean of all, so the text alone scores. TYPE_shuffled: those of the pair before.
    """
    trained = TrainedRun.load(folder)
    data = trained.config.data.model_copy(update={"seed": 0, "groups": None, "negative_captions": None})
    batches = _pairs_of(path, data.model_dump_json())
    types = [name for _, names in batches for name in names]
    features = embed(trained.model, (batch for batch, _ in batches))
    assert features.text is not None, "pairs have captions"
    mean = torch.nn.functional.normalize(features.image.mean(0, keepdim=True)).expand_as(features.image)
    looks = {"": features.image, "_blind": mean, "_shuffled": features.image.roll(2, 0)}
    one_image = read_pairs(path)[0].has_one_image
    line: dict[str, Any] = {"logit_scale": trained.model.logit_scale.exp().item()}
    for name, images in looks.items():
        scores = compositional(images, features.text, types, one_image=one_image)
        line |= {f"{kind}{name}": values["accuracy"] for kind, values in scores.items()}
    return line
