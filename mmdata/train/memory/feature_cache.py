"""The features that training computes anyway, in a file of one row for each row of the index. Rank 0 writes.

Later runs read the file (`mmdata neighbours --features`), and the run itself for groups between its epochs. A resumed
run does not roll it back. A kill at any moment leaves a file that can be read, and every row in it is whole or marked
as not written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.files import naming
from mmdata.system import reserve
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.memory.neighbours import FeatureSide, side_features
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_first

FEATURES = "features.npy"
STEPS = "features.steps.npy"
NEVER_WRITTEN = -1
BEING_WRITTEN = -2
"""Stands in `features.steps.npy` while a row's features are copied; only a kill leaves it there."""


class FeatureCache:
    """`features.npy`, float16 (rows, D), and `features.steps.npy`, int32 (rows,): updates made before each row's.

    A row that was never written is zeros, and its step is -1. `mmdata neighbours --features` gives such rows no group.

    After a kill the files may be ahead of the checkpoint. The resumed run makes the same steps and writes the same rows
    again; until then `telemetry` does not compare those rows with their new features.

    Args:
        folder: of the files.
        rows: of the index.
        side: which features are written.
        trained: how many of the rows are trained on; None: all.
    """

    def __init__(self, folder: Path, rows: int, *, side: FeatureSide = "pair", trained: int | None = None) -> None:
        self.folder, self.rows = folder, rows
        self.side: FeatureSide = side
        self.trained = rows if trained is None else trained
        self._files: tuple[np.memmap[Any, Any], np.memmap[Any, Any]] | None = None  # features and steps
        self._pending: tuple[HostCopy, int] | None = None  # rows and features of a batch, and its step
        self._rewritten, self._similarity = 0, 0.0

    @classmethod
    def of_loader(cls, side: FeatureSide, batches: Batches, folder: Path) -> FeatureCache:
        """The cache of a loader's rows.

        Raises:
            ConfigError: the batches are of no index.
        """
        extras = LoaderExtras.of(batches)
        if extras.index is None:
            raise ConfigError(
                f"train.feature_cache: {type(batches).__name__} has no index, whose rows the cache has one row for "
                "each: leave it out, or train from indexed shards"
            )
        return cls(folder, len(extras.index), side=side, trained=extras.num_rows)

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
            self._pending = HostCopy(rows, features), step

    def telemetry(self, step: int) -> dict[str, float | list[float]]:
        """Describe the cache after `step` updates, and the rows rewritten since the last call; empty except on rank 0.

        Returns:
            never_written_share: of the rows that are trained on, those that no batch has held.
            age_steps_mean, age_steps_max: updates since a row was written, over the written rows.
            rewritten: number of rows written again.
            similarity: mean cosine of their old and new features; the drift is 1 minus it.
        """
        self._write()
        if self._files is None:
            return {}
        steps = self._files[1]
        ages = np.maximum(step - steps[steps >= 0].astype(np.int64), 0)  # below 0: a killed run wrote the row later
        rewritten, similarity = self._rewritten, self._similarity
        self._rewritten, self._similarity = 0, 0.0
        return {
            "never_written_share": 1 - len(ages) / max(1, self.trained),
            "age_steps_mean": float(ages.mean()) if len(ages) else math.nan,
            "age_steps_max": int(ages.max(initial=0)),
            "rewritten": rewritten,
            "similarity": similarity / rewritten if rewritten else math.nan,
        }

    def features(self) -> NDArray[np.float16]:
        """The file itself, (rows, D), with all that is written so far; zeros where nothing is. On rank 0."""
        self._write()
        assert self._files is not None, "a batch was kept"
        return self._files[0]

    def state_dict(self) -> dict[str, Any]:
        """The number of columns, None before the first batch, and the sums of `telemetry`. The files stay in place."""
        self._write()
        for file in self._files or ():
            file.flush()
        width = self._files and self._files[0].shape[1]
        return {"width": width, "rewritten": self._rewritten, "similarity": self._similarity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the files as they are. A collective.

        Raises:
            DataError: they are missing, or of another shape; on all ranks.
        """
        on_first(lambda: state["width"] is None or self.open(state["width"]), collectives.cpu_group())
        self._rewritten, self._similarity = state["rewritten"], state["similarity"]

    def create(self, width: int) -> None:
        """Make files without a written row. They replace those of a run that ended before its first checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        features = np.lib.format.open_memmap(self.folder / FEATURES, mode="w+", dtype="<f2", shape=(self.rows, width))
        steps = np.lib.format.open_memmap(self.folder / STEPS, mode="w+", dtype="<i4", shape=(self.rows,))
        for path in (self.folder / FEATURES, self.folder / STEPS):
            with naming(path), path.open("r+b") as file:
                reserve(file.fileno(), path.stat().st_size)
        steps[:] = NEVER_WRITTEN
        self._files = features, steps

    def open(self, width: int) -> None:
        """Map the files that an earlier process has written."""
        try:
            features = np.lib.format.open_memmap(self.folder / FEATURES, mode="r+")
            steps = np.lib.format.open_memmap(self.folder / STEPS, mode="r+")
        except (OSError, ValueError) as error:
            raise DataError(
                f"feature cache '{self.folder}': the checkpoint has one, and it cannot be read ({error}); put "
                f"{FEATURES} and {STEPS} back, or give another train.output to start anew"
            ) from error
        if (features.shape, features.dtype, steps.shape) != ((self.rows, width), np.float16, (self.rows,)):
            raise DataError(
                f"feature cache '{self.folder / FEATURES}': {features.dtype} {features.shape} with steps "
                f"{steps.shape}, expected float16 ({self.rows}, {width}): it is of another run; give another "
                "train.output to start anew"
            )
        # A kill in the middle of a copy leaves rows that are half old and half new.
        torn = steps == BEING_WRITTEN
        features[torn], steps[torn] = 0.0, NEVER_WRITTEN
        self._files = features, steps

    def write(self, rows: NDArray[np.int64], new: NDArray[np.float16], step: int) -> None:
        """Write features (n, D) of different rows (n,), and compare them with those that they replace."""
        if self._files is None:
            self.create(new.shape[1])
        assert self._files is not None
        features, steps = self._files
        known = (steps[rows] >= 0) & (steps[rows] < step)  # later steps: written before a kill
        old, again = torch.from_numpy(features[rows[known]]), torch.from_numpy(new[known])
        self._rewritten += len(old)
        self._similarity += float(F.cosine_similarity(old.float(), again.float()).sum())
        # A killed process leaves its stores in the order in which it made them: a row with a step is whole.
        steps[rows] = BEING_WRITTEN
        features[rows] = new
        steps[rows] = step

    def _write(self) -> None:
        """Write the pending batch, whose copy from the device is done by now."""
        if self._pending is None:
            return
        (copy, step), self._pending = self._pending, None
        rows, features = (copied.numpy()[::-1] for copied in copy.read())
        unique, last = np.unique(rows, return_index=True)  # of a row that came twice, the last features
        exists = unique >= 0
        self.write(unique[exists], features[last[exists]], step)
