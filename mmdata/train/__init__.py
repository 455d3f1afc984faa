"""The GPU half: towers, miners, losses and the training step. Its input is any iterable of batches.

- `step`: one update of the features: embed → mine → loss, each replaceable; `objective` makes the loss of settings.
- `models/`, `losses/`, `miners/`: the parts of that step. `memory/`: what outlives a batch.
- `run/`: the loop around the step, its checkpoints, log and watchdog. `ranks/`: several processes.
- `evaluation/`: retrieval, zero-shot and compositional scores.
- Nothing here reads a shard: `batches` says what the loop needs of a loader, and any iterable of batches will do.
"""

from mmdata.train import losses, miners
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.models.dual_encoder import DualEncoder, DualEncoderOutput
from mmdata.train.objective import ContrastiveLoss
from mmdata.train.prefetch import DevicePrefetcher
from mmdata.train.ranks import collectives as distributed
from mmdata.train.run.optimizer import make_optimizer
from mmdata.train.run.trainer import Trainer
from mmdata.train.step import StepOutput, gradient_cache, train_step

__all__ = [
    "EMA",
    "ContrastiveLoss",
    "DevicePrefetcher",
    "DualEncoder",
    "DualEncoderOutput",
    "FeatureQueue",
    "StepOutput",
    "Trainer",
    "distributed",
    "gradient_cache",
    "losses",
    "make_optimizer",
    "miners",
    "train_step",
]


def __dir__() -> list[str]:  # for tab completion: what users import, without the modules behind it
    return __all__
