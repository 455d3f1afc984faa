"""What a run keeps beside its weights: the queue and the feature cache, where settings ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.train.batches import Batches
from mmdata.train.memory.drift import QueueDrift
from mmdata.train.memory.feature_cache import FeatureCache
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.precision import AUTOCAST, choose_precision
from mmdata.train.ranks.lockstep import on_first


@dataclass(frozen=True)
class FeatureMemory:
    """The run's queue and feature cache; each is optional."""

    queue: FeatureQueue | None
    drift: QueueDrift | None
    cache: FeatureCache | None

    @classmethod
    def from_config(cls, config: TrainConfig, batches: Batches, folder: Path, device: torch.device) -> Self:
        """As a configuration asks; the cache lies in the run's folder.

        Raises:
            ConfigError: a cache of batches that have no index.
        """
        queue = drift = None
        if config.queue is not None:
            queue = FeatureQueue(config.queue, config.mining_after_steps)
            drift = QueueDrift(
                config.queue,
                config.mining_after_steps,
                micro_batch_size=config.micro_batch_size,
                autocast_dtype=AUTOCAST[choose_precision(config.precision, device)],
            )
        return cls(queue, drift, FeatureCache.from_config(config.feature_cache, batches, folder))

    def keep(
        self, output: DualEncoderOutput, batch: Batch, step: int, of_teacher: DualEncoderOutput | None = None
    ) -> None:
        """Take in a batch and its features, `step` updates having been made before its own. A collective.

        Args:
            output: what the model made of the batch.
            batch: this rank's rows.
            step: updates.
            of_teacher: what the moving average made of it, for the queue; None: the queue gets the model's.
        """
        if self.cache is not None:
            self.cache.keep(output, batch, step)
        for part in (self.queue, self.drift):
            if part is not None:
                part.keep(of_teacher or output, batch, step)

    def telemetry(self, step: int, drift: dict[str, float]) -> Iterator[tuple[str, dict[str, float | list[float]]]]:
        """Kind and numbers of each line for metrics.jsonl after `step` updates; `drift` as `QueueDrift` measured it."""
        for kind, part in (("queue", self.queue), ("feature_cache", self.cache)):
            if part is not None:
                yield kind, part.telemetry(step) | (drift if kind == "queue" else {})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"queue": self.queue and self.queue.state_dict(), "cache": self.cache and self.cache.state_dict()}

    def load_state_dict(
        self, state: dict[str, Any], step: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> str:
        """Restore what `state_dict` gave after `step` updates; returns a line for the log, or "".

        Raises:
            DataError: the files of the cache are missing, or of another shape; on all ranks.
        """
        if self.queue is not None:
            self.queue.load_state_dict(state["queue"], device)
        cache = self.cache
        if cache is None:
            return ""
        on_first(lambda: cache.load_state_dict(state["cache"], step), group)
        return cache.note
