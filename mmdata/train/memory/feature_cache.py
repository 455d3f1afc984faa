"""The features that training computes anyway, in a file of one row for each row of the index. Rank 0 writes.

Later runs read the file (`mmdata neighbours --features`), and the run itself for groups between its epochs. A resumed
run does not roll it back. A kill at any moment leaves a file that can be read, and every row in it is whole or marked
as not written.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError, TrainingError
from mmdata.files import naming
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.memory.neighbours import FeatureSide, side_features
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives

FEATURES = "features.npy"
STEPS = "features.steps.npy"
AGES = 20
"""Similarities are summed separately for ages of 1, 2 and 3, 4 to 7, … steps; this is the number of such sums."""
NEVER_WRITTEN = -1
BEING_WRITTEN = -2
"""Stands in `features.steps.npy` while a row's features are copied; only a kill leaves it there."""


class FeatureCache:
    """`features.npy`, float16 (rows, D), and `features.steps.npy`, int32 (rows,): updates made before each row's.

    A row that was never written is zeros, and its step is -1. `mmdata neighbours --features` gives such rows no group.

    After a kill the files may be ahead of the checkpoint. The resumed run makes the same steps and writes the same rows
    again. Until then those rows are not compared with their new features, so `telemetry` counts fewer rewritten rows
    than an undisturbed run; the files end with the same bytes.

    Args:
        folder: of the files.
        rows: of the index.
        side: which features are written.
        trained: how many of the rows are trained on; None: all.
    """

    def __init__(
        self,
        folder: Path,
        rows: int,
        *,
        side: FeatureSide = "pair",
        trained: int | None = None,
    ) -> None:
        self.folder, self.rows = folder, rows
        self.side: FeatureSide = side
        self.trained = rows if trained is None else trained
        self.note = ""
        """What resuming found in the files, for the log."""
        self._files: _Files | None = None
        self._pending: _PendingBatch | None = None
        self._counts, self._sums = np.zeros(AGES, dtype=np.int64), np.zeros(AGES)

    @classmethod
    def from_config(cls, side: FeatureSide | None, batches: Batches, folder: Path) -> FeatureCache | None:
        """The cache of a configuration, or None.

        Raises:
            ConfigError: the batches are of no index.
        """
        if side is None:
            return None
        extras = LoaderExtras.of(batches)
        index = extras.index
        if index is None:
            raise ConfigError(
                f"train.feature_cache: {type(batches).__name__} has no index, whose rows the cache has one row for "
                "each: leave it out, or train from indexed shards"
            )
        return cls(folder, len(index), side=side, trained=extras.num_rows)

    @torch.no_grad()
    def keep(self, output: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Take the features of this rank's rows. A collective.

        Args:
            output: what the model made of the batch.
            batch: B rows, as many on each rank; those that are not valid are left out.
            step: updates made before this one.
        """
        features = side_features(output.image_features, output.text_features, self.side)  # (B, D)
        rows = batch["rows"].where(batch["valid"] & features.isfinite().all(1), -1)
        rows, features = collectives.gather(rows), collectives.gather(features.half())
        if collectives.rank() == 0:
            self._write()
            self._pending = _PendingBatch(HostCopy(rows, features), step)

    def telemetry(self, step: int) -> dict[str, float | list[float]]:
        """Describe the cache after `step` updates, and the rows rewritten since the last call; empty except on rank 0.

        Returns:
            never_written_share: of the rows that are trained on, those that no batch has held.
            age_steps_mean, age_steps_max: updates since a row was written, over the written rows.
            rewritten: number of rows written again.
            similarity: mean cosine of their old and new features; the drift is 1 minus it.
            similarity_by_age: the same for old features of age 1, 2 and 3, 4 to 7, … steps.
        """
        self._write()
        if self._files is None:
            return {}
        steps = self._files.steps
        ages = np.maximum(step - steps[steps >= 0].astype(np.int64), 0)  # below 0: a killed run wrote the row later
        with np.errstate(invalid="ignore"):
            by_age: list[float] = (self._sums / self._counts).tolist()
        rewritten = int(self._counts.sum())
        similarity = float(self._sums.sum()) / rewritten if rewritten else math.nan
        self._counts[:], self._sums[:] = 0, 0.0
        return {
            "never_written_share": 1 - len(ages) / max(1, self.trained),
            "age_steps_mean": float(ages.mean()) if len(ages) else math.nan,
            "age_steps_max": int(ages.max()) if len(ages) else math.nan,
            "rewritten": rewritten,
            "similarity": similarity,
            "similarity_by_age": by_age,
        }

    def features(self) -> NDArray[np.float16]:
        """The file itself, (rows, D), with all that is written so far; zeros where nothing is. On rank 0.

        Raises:
            TrainingError: no batch was written.
        """
        self._write()
        if self._files is None:
            raise TrainingError("feature cache: no batch of it has been written")
        return self._files.features

    def state_dict(self) -> dict[str, Any]:
        """The sums that `telemetry` has not reported yet; the files are synced and stay where they are."""
        self._write()
        if self._files is None:
            return {"width": None}
        self._files.sync()
        return {
            "width": self._files.features.shape[1],
            "counts": self._counts.tolist(),
            "sums": self._sums.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Go on with the files as they are; `state` was taken after `step` updates.

        Raises:
            DataError: they are missing, or of another shape.
        """
        if collectives.rank() != 0 or state["width"] is None:
            return
        self._files = _Files.open(self.folder, self.rows, state["width"])
        self._counts, self._sums = np.array(state["counts"], dtype=np.int64), np.array(state["sums"])
        if ahead := int((self._files.steps >= step).sum()):
            self.note = (
                f"feature cache: {ahead} rows are of steps from {step} on, later than the checkpoint; they are "
                "compared with new features once this run has written them again"
            )

    def _write(self) -> None:
        """Write the pending batch, whose copy from the device is done by now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rows, features = pending.read()
        if self._files is None:
            self._files = _Files.create(self.folder, self.rows, features.shape[1])
        self._compare(rows, features, pending.step)
        self._files.write(rows, features, pending.step)

    def _compare(self, rows: NDArray[np.int64], features: NDArray[np.float16], step: int) -> None:
        """Add the similarity of old and new features to the sums, except for rows that a killed run wrote later."""
        assert self._files is not None
        written = self._files.steps[rows]
        known = (written >= 0) & (written < step)
        old = self._files.features[rows[known]].astype(np.float32)
        ages = np.log2(step - written[known]).astype(np.int64).clip(max=AGES - 1)
        np.add.at(self._counts, ages, 1)
        np.add.at(self._sums, ages, _cosines(old, features[known].astype(np.float32)))


class _PendingBatch(NamedTuple):
    """A batch on its way from the device: rows int64 (N,), -1 where there is none, and features float16 (N, D)."""

    rows_and_features: HostCopy
    step: int

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """Each row once, in rising order; of a row that came twice, the last features."""
        rows, features = (copied.numpy()[::-1] for copied in self.rows_and_features.read())
        unique, first = np.unique(rows, return_index=True)
        exists = unique >= 0
        return unique[exists], features[first[exists]]


class _Files:
    """The two files, mapped into memory."""

    def __init__(self, features: np.memmap[Any, Any], steps: np.memmap[Any, Any]) -> None:
        self.features, self.steps = features, steps

    @classmethod
    def create(cls, folder: Path, rows: int, width: int) -> _Files:
        """Files without a written row. They replace those of a run that ended before its first checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        features = np.lib.format.open_memmap(folder / FEATURES, mode="w+", dtype="<f2", shape=(rows, width))
        steps = np.lib.format.open_memmap(folder / STEPS, mode="w+", dtype="<i4", shape=(rows,))
        for name in (FEATURES, STEPS):
            _allocate(folder / name)
        steps[:] = NEVER_WRITTEN
        return cls(features, steps)

    @classmethod
    def open(cls, folder: Path, rows: int, width: int) -> _Files:
        try:
            features = np.lib.format.open_memmap(folder / FEATURES, mode="r+")
            steps = np.lib.format.open_memmap(folder / STEPS, mode="r+")
        except (OSError, ValueError) as error:
            raise DataError(
                f"feature cache '{folder}': the checkpoint has one, and it cannot be read ({error}); put {FEATURES} "
                f"and {STEPS} back, or give another train.output to start anew"
            ) from error
        if (features.shape, features.dtype, steps.shape) != ((rows, width), np.float16, (rows,)):
            raise DataError(
                f"feature cache '{folder / FEATURES}': {features.dtype} {features.shape} with steps {steps.shape}, "
                f"expected float16 ({rows}, {width}): it is of another run; give another train.output to start anew"
            )
        # A kill in the middle of a copy leaves rows that are half old and half new.
        torn = steps == BEING_WRITTEN
        features[torn], steps[torn] = 0.0, NEVER_WRITTEN
        return cls(features, steps)

    def write(self, rows: NDArray[np.int64], features: NDArray[np.float16], step: int) -> None:
        # A killed process leaves its stores in the order in which it made them: a row with a step is whole.
        self.steps[rows] = BEING_WRITTEN
        self.features[rows] = features
        self.steps[rows] = step

    def sync(self) -> None:
        self.features.flush()
        self.steps.flush()


def _allocate(path: Path) -> None:
    """Take the disk space of a mapped file now: a later store to a page that finds none kills the process (SIGBUS)."""
    with naming(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.einsum("nd,nd->n", one, other) / np.maximum(lengths, np.float32(1e-12))
