"""Weights between those of a run and those it began with: better than either on other data, without a training."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmdata.config import ModelConfig
from mmdata.config.wrong_place import not_a_run
from mmdata.errors import ConfigError, DataError
from mmdata.recognize import Kind, recognize
from mmdata.train import DualEncoder
from mmdata.train.models.open_clip import CONFIG_NAME
from mmdata.trained.run import TrainedRun, load_run

ALPHAS = (0.0, 0.25, 0.5, 0.75)
"""Points of the curve that `mmdata evaluate --interpolate-with` measures beside the run itself, at 1."""


def interpolated(run: TrainedRun, other: str | os.PathLike[str], alpha: float) -> TrainedRun:
    """The run with (1 − alpha) of another model's weights and alpha of its own.

    Args:
        run: the fine-tuned model; stays as it is.
        other: what it was fine-tuned from: a run, a checkpoint, a CLIP or SigLIP of transformers, or a model of
            open_clip, of the same architecture.
        alpha: from 0, the other model, to 1, the run.

    Raises:
        ConfigError: alpha is outside of 0 to 1; or the other model is of another architecture, or has another
            tokenizer; says what differs.
        DataError: there is no model.

    Source: Wortsman et al. 2021, WiSE-FT, equation 1 (arXiv:2109.01903).
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"--alpha {alpha}: a number from 0, the other model, to 1, the run")
    zero_shot, model = _load(Path(other), run), copy.deepcopy(run.model)
    if difference := _difference(model, zero_shot):
        raise ConfigError(f"'{other}' is of another architecture than '{run.checkpoint}': {difference}")
    theirs, own = zero_shot.state_dict(), model.state_dict()
    # Each has a bias or none: features do not depend on it.
    pairs = {name: (theirs.get(name, value).to(value.device), value) for name, value in own.items()}
    model.load_state_dict({name: torch.lerp(*pair, alpha) for name, pair in pairs.items()})
    return replace(run, model=model, alpha=alpha)


def _load(path: Path, run: TrainedRun) -> DualEncoder:
    if recognize(path) in (Kind.RUN, Kind.CHECKPOINT):
        found = load_run(path, "cpu")
        if found.tokenizer.identity != run.tokenizer.identity:
            raise ConfigError(f"'{path}' was trained with another tokenizer than '{run.checkpoint}'")
        return found.model
    if path.is_file() or (path / CONFIG_NAME).is_file():
        return DualEncoder.from_config(ModelConfig(open_clip=str(path), quick_gelu=run.config.model.quick_gelu))
    if not (path / "config.json").is_file():
        raise DataError(f"'{path}': {not_a_run(path)}")
    return DualEncoder.from_config(ModelConfig(name="pretrained", clip=str(path)))


def _difference(own: torch.nn.Module, other: torch.nn.Module) -> str:
    """The first part in which two models differ, in words; "" if they are of one architecture."""
    facts: list[dict[str, Any]] = []
    for model in (own, other):
        kinds = {
            name: type(part).__name__ for name, part in model.named_modules() if name and not list(part.children())
        }
        facts.append(kinds | {name: tuple(value.shape) for name, value in model.state_dict().items()})
    mine, theirs = ({name: fact for name, fact in each.items() if name != "logit_bias"} for each in facts)
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"its {name} is {theirs.get(name, 'missing')}, and in the run {mine.get(name, 'missing')}"
    return ""
