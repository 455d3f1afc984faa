"""The features that training computes anyway, in a file of one row for each row of the index.

A checkpoint and the file fit each other after a kill too: what is overwritten is noted before, and put back on resume,
so that the steps made again find what they found the first time. Rank 0 writes.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mmdata.atomic import naming
from mmdata.batch import Batch
from mmdata.config.train import FeatureCacheConfig
from mmdata.errors import ConfigError, DataError
from mmdata.train.batches import Batches, HasIndex
from mmdata.train.memory.neighbours import Of, side_features
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives

FEATURES, STEPS, UNDO = "features.npy", "features.steps.npy", "features.undo"
AGES = 20
"""Of ages 1, 2 and 3, 4 to 7, …: similarities are kept for each."""
_SAMPLED_ROWS = 4096


class FeatureCache:
    """`features.npy`, float16 (rows, D), and `features.steps.npy`, int32 (rows,): updates before each one's, or -1.

    Rows of the first are zeros where never written, as `mmdata neighbours --features` takes them. `features.undo` holds
    what was overwritten since the last checkpoint: twice the bytes written since then, at most.

    Args:
        folder: of the files.
        rows: of the index.
        every_steps: a batch is written of so many.
        of: what is written.
    """

    def __init__(self, folder: Path, rows: int, *, every_steps: int = 1, of: Of = "pair") -> None:
        self.folder, self.rows, self.every_steps = folder, rows, every_steps
        self.of: Of = of
        self.note = ""
        """What resuming did to the files, for the log."""
        self._files: _Files | None = None
        self._coming: _Coming | None = None
        self._saved = False  # the checkpoint that was written since makes the notes of what came before it needless
        self._ahead_of = -1  # rows written at this step or later are of a run further ahead, and not compared
        self._counts, self._sums = np.zeros(AGES, dtype=np.int64), np.zeros(AGES)

    @classmethod
    def from_config(cls, config: FeatureCacheConfig | None, batches: Batches, folder: Path) -> FeatureCache | None:
        """The cache that a configuration asks for, if it does.

        Raises:
            ConfigError: the batches are of no index.
        """
        if config is None:
            return None
        if not isinstance(batches, HasIndex):
            raise ConfigError(
                f"train.feature_cache: {type(batches).__name__} has no index, whose rows the cache has one row for "
                "each: leave it out, or train from indexed shards"
            )
        return cls(folder, len(batches.index), every_steps=config.every_steps, of=config.side)

    @torch.no_grad()
    def keep(self, output: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Take in the features of this rank's rows. A collective.

        Args:
            output: what the model made of the batch.
            batch: B rows, as many on each rank; those that are not valid are left out.
            step: updates made before this one.
        """
        if step % self.every_steps:
            return
        features = side_features(output.image_features, output.text_features, self.of)  # (B, D)
        rows = batch["rows"].where(batch["valid"] & features.isfinite().all(1), -1)
        rows, features = collectives.gather(rows), collectives.gather(features.half())
        if collectives.rank() == 0:
            self._write()
            self._coming = _Coming(HostCopy(rows, features), step)

    def telemetry(self, step: int) -> dict[str, float | list[float]]:
        """Of the cache after `step` updates, and of the rows written again since the last call; empty on other ranks.

        Returns:
            never_written_share: rows that no batch has held.
            age_steps_mean, age_steps_max: updates since a row was written, over those that were.
            rewritten: rows written again.
            similarity: mean cosine of their old and new features; 1 - it is the drift.
            similarity_by_age: the same by the age that the old ones had reached: 1, 2 and 3, 4 to 7, …
        """
        self._write()
        if self._files is None:
            return {}
        steps = self._files.steps
        ages = step - steps[steps >= 0].astype(np.int64)
        with np.errstate(invalid="ignore"):
            by_age: list[float] = (self._sums / self._counts).tolist()
        rewritten = int(self._counts.sum())
        similarity = float(self._sums.sum()) / rewritten if rewritten else math.nan
        self._counts[:], self._sums[:] = 0, 0.0
        return {
            "never_written_share": 1 - len(ages) / self.rows,
            "age_steps_mean": float(ages.mean()) if len(ages) else math.nan,
            "age_steps_max": int(ages.max()) if len(ages) else math.nan,
            "rewritten": rewritten,
            "similarity": similarity,
            "similarity_by_age": by_age,
        }

    def state_dict(self) -> dict[str, Any]:
        """What tells these files from others; they themselves are synced and stay where they are."""
        self._write()
        if self._files is None:
            return {"of": self.of, "width": None}
        self._files.sync()
        self._saved = True
        return {
            "of": self.of,
            "width": self._files.features.shape[1],
            "written": int((self._files.steps >= 0).sum()),
            "digest": self._files.digest(),
            "counts": self._counts.tolist(),
            "sums": self._sums.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Put the files back to where they were after `step` updates, when `state` was taken.

        Raises:
            DataError: they are missing, or others.
        """
        if collectives.rank() != 0 or state["width"] is None:
            return
        files = _Files.open(self.folder, self.rows, state["width"])
        undone = files.undo(step)
        ahead = int((files.steps >= step).sum())
        if not ahead and files.digest() != state["digest"]:
            raise DataError(
                f"feature cache '{self.folder / FEATURES}': not that of the checkpoint of step {step}, which had "
                f"{state['written']} rows written and now has {int((files.steps >= 0).sum())}; put features.* of that "
                "run back, or give another train.output to start anew"
            )
        self._files, self._ahead_of = files, step if ahead else -1
        self._counts, self._sums = np.array(state["counts"], dtype=np.int64), np.array(state["sums"])
        if ahead:
            self.note = (
                f"feature cache: {ahead} rows are of steps from {step} on, later than the checkpoint; until they are "
                "written again they are not compared"
            )
        elif undone:
            self.note = f"feature cache: {undone} rows that were written after step {step} have been put back"

    def _write(self) -> None:
        """Write what has come, its copy from the device being done by now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        rows, features = coming.read()
        if self._files is None:
            self._files = _Files.create(self.folder, self.rows, features.shape[1])
        if self._saved:
            self._files.forget()
            self._saved = False
        self._compare(rows, features, coming.step)
        self._files.write(rows, features, coming.step)

    def _compare(self, rows: NDArray[np.int64], features: NDArray[np.float16], step: int) -> None:
        assert self._files is not None
        written = self._files.steps[rows]
        known = (written >= 0) & ((written < self._ahead_of) | (self._ahead_of < 0) | (written < step))
        old = self._files.features[rows[known]].astype(np.float32)
        ages = np.log2(np.maximum(step - written[known], 1)).astype(np.int64).clip(max=AGES - 1)
        np.add.at(self._counts, ages, 1)
        np.add.at(self._sums, ages, _cosines(old, features[known].astype(np.float32)))


class _Coming(NamedTuple):
    """A batch on its way from the device: rows int64 (N,), -1 where there is none, and features float16 (N, D)."""

    rows_and_features: HostCopy
    step: int

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """Each row once, rising; of one that came twice the last features."""
        rows, features = (copied.numpy()[::-1] for copied in self.rows_and_features.read())
        unique, first = np.unique(rows, return_index=True)
        there = unique >= 0
        return unique[there], features[first[there]]


class _Files:
    """The three files; a kill leaves in `features.undo` at least what the other two need to be put back."""

    def __init__(self, folder: Path, features: np.memmap[Any, Any], steps: np.memmap[Any, Any]) -> None:
        self.features, self.steps = features, steps
        fields = [("by", "<i4"), ("row", "<i8"), ("step", "<i4"), ("feature", "<f2", (features.shape[1],))]
        self._record = np.dtype(fields)
        self._undo_path = folder / UNDO
        self._undo = self._undo_path.open("ab")

    @classmethod
    def create(cls, folder: Path, rows: int, width: int) -> _Files:
        """Nothing written; files that lie there are of a run that ended before its first checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNDO).unlink(missing_ok=True)
        features = np.lib.format.open_memmap(folder / FEATURES, mode="w+", dtype="<f2", shape=(rows, width))
        steps = np.lib.format.open_memmap(folder / STEPS, mode="w+", dtype="<i4", shape=(rows,))
        for name in (FEATURES, STEPS):
            _allocate(folder / name)
        steps[:] = -1
        return cls(folder, features, steps)

    @classmethod
    def open(cls, folder: Path, rows: int, width: int) -> _Files:
        try:
            features = np.lib.format.open_memmap(folder / FEATURES, mode="r+")
            steps = np.lib.format.open_memmap(folder / STEPS, mode="r+")
        except (OSError, ValueError) as error:
            raise DataError(
                f"feature cache '{folder}': the checkpoint has one, and it cannot be read ({error}); put {FEATURES}, "
                f"{STEPS} and {UNDO} back, or give another train.output to start anew"
            ) from error
        if (features.shape, features.dtype, steps.shape) != ((rows, width), np.float16, (rows,)):
            raise DataError(
                f"feature cache '{folder / FEATURES}': {features.dtype} {features.shape} with steps {steps.shape}, "
                f"expected float16 ({rows}, {width}): it is of another run; give another train.output to start anew"
            )
        return cls(folder, features, steps)

    def write(self, rows: NDArray[np.int64], features: NDArray[np.float16], step: int) -> None:
        records = np.empty(len(rows), dtype=self._record)
        records["by"], records["row"] = step, rows
        records["step"], records["feature"] = self.steps[rows], self.features[rows]
        with naming(self._undo_path):
            self._undo.write(records.tobytes())
            self._undo.flush()
        self.features[rows] = features
        self.steps[rows] = step

    def undo(self, step: int) -> int:
        """Put back what was overwritten from `step` on; the number of rows."""
        content = self._undo_path.read_bytes()
        whole = len(content) // self._record.itemsize * self._record.itemsize
        records = np.frombuffer(content[:whole], dtype=self._record)
        records = records[records["by"] >= step]
        rows, first = np.unique(records["row"], return_index=True)  # the oldest record of a row: what it held at `step`
        self.features[rows] = records["feature"][first]
        self.steps[rows] = records["step"][first]
        self.sync()
        self.forget()
        return len(rows)

    def forget(self) -> None:
        """No way back to before now."""
        self._undo.truncate(0)

    def sync(self) -> None:
        self.features.flush()
        self.steps.flush()

    def digest(self) -> str:
        """Of all steps and of the features of some rows: it is asked for at each checkpoint."""
        some = np.linspace(0, len(self.steps) - 1, min(len(self.steps), _SAMPLED_ROWS)).astype(np.int64)
        return hashlib.sha256(self.steps.tobytes() + self.features[some].tobytes()).hexdigest()


def _allocate(path: Path) -> None:
    """Take the disk space of a file that is mapped: without it, a page written to a full disk kills the process."""
    with naming(path), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _cosines(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.einsum("nd,nd->n", one, other) / np.maximum(lengths, np.float32(1e-12))
