"""The GPU half: towers, miners, losses and the training step. Its input is any iterable of batches."""

from mmdata.train import distributed, losses, miners
from mmdata.train.model import DualEncoder, DualEncoderOutput
from mmdata.train.prefetch import DevicePrefetcher
from mmdata.train.step import StepOutput, train_step

__all__ = [
    "DevicePrefetcher",
    "DualEncoder",
    "DualEncoderOutput",
    "StepOutput",
    "distributed",
    "losses",
    "miners",
    "train_step",
]
