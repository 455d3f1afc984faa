"""What a run keeps beside its weights, behind one interface; the settings ask for each part of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.train.batches import Batches
from mmdata.train.memory.drift import QueueDrift
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.feature_cache import FeatureCache
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.memory.regroup import regroup
from mmdata.train.miners import TeacherMask
from mmdata.train.models.dual_encoder import DualEncoderOutput


class RunMemory:
    """A run's teacher, queue and feature cache; None for what its settings do not ask for.

    Args:
        config: how to train.
        model: to be trained, not compiled or wrapped yet.
        batches: the loader.
        folder: of the run; the cache lies there.
        autocast_dtype: of the towers; None: that of the weights.

    Raises:
        ConfigError: a cache of batches that have no index.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: Batches,
        folder: Path,
        *,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        device, after_steps = next(model.parameters()).device, config.mining_after_steps
        embedding: dict[str, Any] = {"micro_batch_size": config.micro_batch_size, "autocast_dtype": autocast_dtype}
        self.batches, self.device, self.seed = batches, device, config.seed
        self.teacher = self.queue = self.drift = self.cache = None
        if config.teacher is not None:
            self.teacher = EMA(model, config.teacher, **embedding)
        if config.queue is not None:
            self.queue = FeatureQueue(config.queue, after_steps, device=device)
            self.drift = QueueDrift(config.queue, after_steps, **embedding)
        if config.feature_cache is not None:
            self.cache = FeatureCache.of_loader(config.feature_cache, batches, folder)
        self._after_steps = after_steps
        self._of_teacher: DualEncoderOutput | None = None  # features of the batch, for the queue

    def shard(self, device: torch.device) -> None:
        """Share the teacher's weights out over the ranks, as the model's are. A collective."""
        if self.teacher is not None:
            self.teacher.shard(device)

    def teacher_mask(self, batch: Batch, step: int) -> TeacherMask | None:
        """The teacher's false negatives in the batch of the update after `step` updates. A collective."""
        self._of_teacher = None
        if self.teacher is None or step < self._after_steps:
            return None
        if self.queue is None and self.teacher.config.margin is None:
            return None
        features = self.teacher.embed(batch)
        self._of_teacher = features if self.queue else None
        return self.teacher.teacher_mask(features)

    def keep(self, model: nn.Module, output: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Take in an update, `step` updates having been made before it. A collective.

        Args:
            model: after the update.
            output: what it made of the batch before.
            batch: this rank's rows.
            step: updates.
        """
        if self.teacher is not None:
            self.teacher.update(model)
        if self.cache is not None:
            self.cache.keep(output, batch, step)
        for part in (self.queue, self.drift):
            if part is not None:
                part.keep(self._of_teacher or output, batch, step)
        if self.drift is not None:
            self.drift.measure(model, step + 1)

    def regroup(self, epoch: int) -> dict[str, float]:
        """Give the loader new groups at the start of an epoch, where it takes them; see `regroup`. A collective."""
        return regroup(self.batches, self.cache, epoch, seed=self.seed, device=self.device)

    def telemetry(self, step: int) -> Iterator[tuple[str, dict[str, float | list[float]]]]:
        """Kind and numbers of each line for metrics.jsonl after `step` updates."""
        drift = self.drift.telemetry() if self.drift else {}
        for kind, part in (("queue", self.queue), ("feature_cache", self.cache)):
            if part is not None:
                yield kind, part.telemetry(step) | (drift if kind == "queue" else {})

    def _parts(self) -> dict[str, Any]:
        parts = {"teacher": self.teacher, "queue": self.queue, "cache": self.cache}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave. A collective.

        Raises:
            DataError: the files of the cache are missing, or of another shape; on all ranks.
        """
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
