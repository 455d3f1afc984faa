"""A loss or gradient that is not finite ends a run with an error that names the rows of the batch.

A gradient scaler (fp16) skips such updates and lowers its scale, which cures an overflow of scaled gradients only. A
loss that is not finite, or an overflow at every scale, ends the run too, before its sound checkpoints are deleted.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives

LEAST_SCALE = 1.0
"""Below this scale gradients are scaled down: they overflow float16 without any scaling."""
SKIPS_AT_THE_END = 5
"""A run whose last updates, this many in a row, were skipped ends with an error. A scale that has just grown costs one
or two; five mean that the gradient has grown by a factor of 2^5."""


class FiniteUpdates:
    """Checks each update of a run, and counts those that the scaler has skipped.

    It keeps what its messages need of a batch, and not the pixels, whose memory is free when the step is done.

    Args:
        scaler: of the run; disabled where the precision needs none.
        output: the run's folder.

    Attributes:
        skipped: updates skipped over the whole run.
        bad_in_a_row: the newest updates whose loss or gradient was not finite.
    """

    def __init__(self, scaler: torch.amp.GradScaler, output: Path) -> None:
        self._scaler, self._output = scaler, output
        self.skipped = self.bad_in_a_row = 0
        self._step, self._rows, self._keys = 0, torch.empty(0), list[str]()
        self._unchecked: HostCopy | None = None

    def made(self, step: int, batch: Batch, loss: Tensor, norm: Tensor) -> None:
        """Begin to read the loss of an update and the norm of its gradient, `step` updates having been made before."""
        self._step, self._rows, self._keys = step, batch["rows"], batch["keys"]
        self._unchecked = HostCopy(loss, norm)

    def check(self, total_steps: int) -> tuple[float, float] | None:
        """The loss of the last update and the norm of its gradient; None if they were checked before.

        It waits for that update, not for the next.

        Args:
            total_steps: of the run.

        Raises:
            TrainingError: the loss is not finite; the gradient is not, and there is no scaler, or its scale is as low
                as can be; the run ends with updates left out. On all ranks: both numbers are those of the global batch.
        """
        if self._unchecked is None:
            return None
        loss, norm = map(float, self._unchecked.read())
        self._unchecked = None
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_in_a_row = 0
            return loss, norm
        self.bad_in_a_row += 1
        why = ""
        if self._scaler.is_enabled() and math.isfinite(loss):
            self.skipped += 1
            is_last = self._step + 1 == total_steps
            if self._scaler.get_scale() < LEAST_SCALE:
                why = f" at every loss scale down to {LEAST_SCALE:g}"
            elif is_last and self.bad_in_a_row >= min(SKIPS_AT_THE_END, total_steps):
                why = f" at the end of the run, and the last {self.bad_in_a_row} updates were left out"
            else:
                return loss, norm
        rows, path = self._rows.tolist(), self._output / f"not_finite_rank{collectives.rank()}.json"
        path.write_text(json.dumps({"step": self._step, "rows": rows, "keys": self._keys}) + "\n")
        raise TrainingError(
            f"step {self._step}: loss is {loss} and its gradient's norm {norm}{why}, on rank "
            f"{collectives.rank()} with rows {str(rows[:8])[1:-1]}{', …' if len(rows) > 8 else ''} (all in {path}); "
            f"checkpoints up to step {max(0, self._step - self.bad_in_a_row)} are sound: lower train.lr, or use "
            "train.precision bf16 or fp32"
        )

    def sound_step(self, step: int) -> int | None:
        """The last step whose weights gave a finite loss and gradient, if the newest did not; else None.

        Args:
            step: updates judged.
        """
        return step - 1 - self.bad_in_a_row if self.bad_in_a_row else None
