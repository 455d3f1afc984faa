"""Weights between those of a run and those it began with: better than either on other data, without a training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mmdata.config import ModelConfig
from mmdata.config.wrong_place import not_a_run
from mmdata.errors import ConfigError, DataError
from mmdata.hashing import fast_hash_of
from mmdata.recognize import Kind, recognize
from mmdata.train import DualEncoder
from mmdata.train.models.open_clip import CONFIG_NAME
from mmdata.train.models.weights import difference
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
    return next(curve(run, other, (alpha,)))


def curve(run: TrainedRun, other: str | os.PathLike[str], alphas: Sequence[float] = ALPHAS) -> Iterator[TrainedRun]:
    """`interpolated` at each alpha; the other model is loaded once, before the first is asked for."""
    if wrong := [alpha for alpha in alphas if not 0 <= alpha <= 1]:
        raise ConfigError(f"--alpha {wrong[0]}: a number from 0, the other model, to 1, the run")
    zero_shot = _load(Path(other), run)
    if differs := _difference(run.model, zero_shot):
        raise ConfigError(f"'{other}' is of another architecture than '{run.checkpoint}': {differs}")
    theirs = {name: value.cpu() for name, value in zero_shot.state_dict().items()}
    parts = (theirs[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in sorted(theirs))
    mixed_with = f"{fast_hash_of(parts) % 2**64:016x}"
    return (
        replace(run, model=_mixed(run.model, theirs, alpha), alpha=alpha, mixed_with=mixed_with) for alpha in alphas
    )


def _mixed(own: DualEncoder, theirs: Mapping[str, Tensor], alpha: float) -> DualEncoder:
    model = copy.deepcopy(own)
    weights = model.state_dict()
    for name, value in weights.items():
        # Each model has a bias or none: features do not depend on it. A batch norm's count of batches is no weight.
        if name in theirs and value.is_floating_point():
            weights[name] = torch.lerp(theirs[name].to(value.device), value, alpha)
    model.load_state_dict(weights)
    return model


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


def _difference(own: nn.Module, other: nn.Module) -> str:
    """In what two models differ, in words; "" if they are of one architecture."""
    states = (own.state_dict(), other.state_dict())
    shapes = [{name: each[name].shape for name in each if name != "logit_bias"} for each in states]
    theirs = dict(other.named_modules())
    parts = ((name, _kind(part), _kind(theirs.get(name))) for name, part in own.named_modules())
    kinds = (f"its {name} is {kind}, and in the run {mine}" for name, mine, kind in parts if mine != kind)
    return difference(*shapes) or next(kinds, "")


def _kind(part: nn.Module | None) -> str:
    """What the shapes of weights do not tell of a part: an activation, the number of heads."""
    heads = getattr(part, "num_heads", getattr(part, "num_attention_heads", None))
    name = "missing" if part is None else type(part).__name__
    return name + ("" if heads is None else f" of {heads} heads")
