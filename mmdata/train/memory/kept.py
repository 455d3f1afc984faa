"""What a run keeps beside its weights, behind one interface; the settings ask for each part of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmdata.batch import Batch
from mmdata.config import TrainConfig
from mmdata.train.batches import Batches, LoaderExtras, field_features
from mmdata.train.memory.ema import EMA
from mmdata.train.memory.feature_cache import FeatureCache
from mmdata.train.memory.frozen import FrozenEncoder
from mmdata.train.memory.neighbours import group_neighbours, mean_similarity
from mmdata.train.memory.queue import FeatureQueue
from mmdata.train.miners import TeacherMask
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import check_same_batches, on_all, on_first


class RunMemory:
    """A run's averaged weights, teachers, queue and feature cache; None for what its settings do not ask for.

    One average serves as both where `train.ema` and `train.teacher` have one decay.

    Args:
        config: how to train.
        model: to be trained, not compiled or wrapped yet.
        batches: the loader.
        folder: of the run; the cache lies there.
        autocast_dtype: of the towers; None: that of the weights.
        distilled: the frozen model of `train.distill.teacher`.

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
        distilled: nn.Module | None = None,
    ) -> None:
        self.config, self.batches = config, batches
        self.device = next(model.parameters()).device
        self.ema = self.teacher = self.queue = self.cache = self.distilled = None
        forward: dict[str, Any] = {"micro_batch_size": config.micro_batch_size, "autocast_dtype": autocast_dtype}
        if config.teacher is not None and config.teacher.fields is None:
            self.teacher = EMA(model, config.teacher, **forward)
        if config.ema is not None:
            is_teacher = self.teacher is not None and self.teacher.config.decay == config.ema.decay
            self.ema = self.teacher if is_teacher else EMA(model, config.ema, autocast_dtype=autocast_dtype)
        if distilled is not None:
            self.distilled = FrozenEncoder(distilled, **forward)
        if config.queue is not None:
            self.queue = FeatureQueue(config.queue, config.mining_after_steps, device=self.device)
        if config.feature_cache is not None:
            self.cache = FeatureCache.of_loader(config.feature_cache, batches, folder)
        teacher = None if self.teacher is self.ema else self.teacher
        parts: dict[str, Any] = {"ema": self.ema, "teacher": teacher, "queue": self.queue, "cache": self.cache}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._averages = [part for part in self._parts.values() if isinstance(part, EMA)]
        self._of_teacher: DualEncoderOutput | None = None  # features of the batch, for the queue

    def shard(self, device: torch.device) -> None:
        """Share the weights of averages and teachers out over the ranks, as the model's are. A collective."""
        for part in (*self._averages, self.distilled):
            if part is not None:
                part.shard(device)

    def teacher_mask(self, batch: Batch, step: int) -> TeacherMask | None:
        """The teacher's false negatives in the batch of the update after `step` updates. A collective."""
        self._of_teacher = None
        config = self.config.teacher
        if config is None or step < self.config.mining_after_steps:
            return None
        if config.fields is not None and config.margin is not None:
            return TeacherMask.gather(*field_features(batch, config.fields, "train.teacher.fields"), config.margin)
        assert self.teacher is not None, "a teacher of fields has a margin"
        features = self.teacher.embed(batch)
        self._of_teacher = features
        return self.teacher.teacher_mask(features)

    def distilled_features(self, batch: Batch) -> DualEncoderOutput | None:
        """What the model of `train.distill.teacher` makes of the batch."""
        return None if self.distilled is None else self.distilled.embed(batch)

    def keep(self, model: nn.Module, output: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Take in an update, `step` updates having been made before it. A collective.

        Args:
            model: after the update.
            output: what it made of the batch before.
            batch: this rank's rows.
            step: updates.
        """
        for average in self._averages:
            average.update(model)
        if self.cache is not None:
            self.cache.keep(output, batch, step)
        if self.queue is not None:
            self.queue.keep(self._of_teacher or output, batch, step)

    def regroup(self, epoch: int) -> dict[str, float]:
        """Let the loader go on with the neighbours of now, at the start of an epoch where it is due. A collective.

        Rank 0 computes. Rows that no batch has held have no group.

        Returns:
            seconds; and similarity of two rows of a group, random_similarity of two of random groups (mean cosines),
            which are there on the rank that computed and not where the run has made these groups before. Empty where
            the loader takes no groups now.
        """
        regroups, cache = LoaderExtras.of(self.batches).regroups, self.cache
        if regroups is None or cache is None or not regroups.is_due(epoch):
            return {}
        group, started, found = collectives.cpu_group(), time.perf_counter(), dict[str, float]()

        def make() -> None:
            if regroups.has_groups(epoch):
                return
            features = cache.features()
            search: dict[str, Any] = {"seed": self.config.seed + epoch, "device": self.device}
            of_rows = group_neighbours(features, regroups.group_size, same=regroups.rows_alike(), **search)
            near, random = mean_similarity(features, of_rows, **search)
            found.update(similarity=near, random_similarity=random)
            regroups.write_groups(epoch, of_rows.numpy())

        on_first(make, group, takes=collectives.LONG)
        on_all(lambda: regroups.use_groups(epoch), group)
        check_same_batches(LoaderExtras.of(self.batches).identity, group)
        return {"seconds": time.perf_counter() - started, **found}

    def telemetry(self, step: int) -> Iterator[tuple[str, dict[str, float | list[float]]]]:
        """Kind and numbers of each line for metrics.jsonl after `step` updates."""
        for kind, part in (("queue", self.queue), ("feature_cache", self.cache)):
            if part is not None:
                yield kind, part.telemetry(step)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave. A collective.

        Raises:
            DataError: the files of the cache are missing, or of another shape; on all ranks.
        """
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
