"""The GPU half: towers, miners, losses and the training step. Its input is any iterable of batches.

- `run/`: a step of training (embed → mine → loss, each replaceable), the loop around it, checkpoints and watchdog.
- `models/`, `losses/`, `miners`: the parts of that step. `memory/`: what outlives a batch.
- `ranks/`: several processes. `log/`: what a run says of itself.
- `evaluation/`: retrieval, zero-shot and compositional scores.
- The files here are below all of these. `batches` says what the loop needs of a loader: nothing here reads a shard.

The names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdata.train import losses as losses
    from mmdata.train import miners as miners
    from mmdata.train.memory.ema import EMA as EMA
    from mmdata.train.memory.queue import FeatureQueue as FeatureQueue
    from mmdata.train.models.dual_encoder import DualEncoder as DualEncoder
    from mmdata.train.models.dual_encoder import DualEncoderOutput as DualEncoderOutput
    from mmdata.train.prefetch import DevicePrefetcher as DevicePrefetcher
    from mmdata.train.ranks import collectives as distributed  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from mmdata.train.run.objective import ContrastiveLoss as ContrastiveLoss
    from mmdata.train.run.optimizer import make_optimizer as make_optimizer
    from mmdata.train.run.step import StepOutput as StepOutput
    from mmdata.train.run.step import gradient_cache as gradient_cache
    from mmdata.train.run.step import train_step as train_step
    from mmdata.train.run.trainer import Trainer as Trainer

_HOME = {
    "EMA": "memory.ema",
    "ContrastiveLoss": "run.objective",
    "DevicePrefetcher": "prefetch",
    "DualEncoder": "models.dual_encoder",
    "DualEncoderOutput": "models.dual_encoder",
    "FeatureQueue": "memory.queue",
    "StepOutput": "run.step",
    "Trainer": "run.trainer",
    "gradient_cache": "run.step",
    "make_optimizer": "run.optimizer",
    "train_step": "run.step",
}
_MODULES = {"distributed": "ranks.collectives", "losses": "losses", "miners": "miners"}

__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]  # they are imported above


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mmdata.train.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'mmdata.train' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"mmdata.train.{_HOME[name]}"), name)


def __dir__() -> list[str]:  # for tab completion: what users import, without the modules behind it
    return __all__
