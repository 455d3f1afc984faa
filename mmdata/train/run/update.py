"""A loss or gradient that is not finite ends a run with an error that names the rows of the batch.

A gradient scaler (fp16) skips such updates and lowers its scale, which cures an overflow of scaled gradients only. A
loss that is not finite, or an overflow at every scale, ends the run too, before its sound checkpoints are deleted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Self

from mmdata.batch import Batch
from mmdata.errors import TrainingError
from mmdata.train.prefetch import HostCopy
from mmdata.train.ranks import collectives

LEAST_SCALE = 1.0
"""Below this scale gradients are scaled down: they overflow float16 without any scaling."""
SKIPS_AT_THE_END = 5
"""A run whose last updates, this many in a row, were skipped ends with an error. A scale that has just grown costs one
or two; five mean that the gradient has grown by a factor of 2^5."""


@dataclass(frozen=True)
class Update:
    """An update whose loss and gradient have not been checked yet.

    It keeps what its messages need of the batch, and not the pixels, whose memory is free when the step is done.

    Attributes:
        step: updates made before it.
        rows: int64 (B,), row numbers of this rank's rows.
        keys: of these rows.
        valid: bool (B,), which of them hold data.
        loss_and_norm: two scalars, the loss and the norm of its gradient.
    """

    step: int
    rows: Tensor
    keys: list[str]
    valid: Tensor
    loss_and_norm: HostCopy

    @classmethod
    def of(cls, step: int, batch: Batch, loss_and_norm: HostCopy) -> Self:
        """An update made from a batch."""
        return cls(step, batch["rows"], batch["keys"], batch["valid"], loss_and_norm)

    def read(self) -> tuple[float, float]:
        """The loss and the norm of its gradient; waits for this update, not for the next."""
        loss, norm = self.loss_and_norm.read()
        return float(loss), float(norm)

    def explain(self, output: Path, why: str, sound_step: int) -> str:
        """Message for an update that ends the run; the batch's rows go into a file of `output`.

        Args:
            output: the run's folder.
            why: a clause after the numbers, or "".
            sound_step: the weights after this many updates gave a finite loss and gradient, those after it did not.
        """
        loss, norm = self.read()
        rows = self.rows.tolist()
        path = output / f"not_finite_rank{collectives.rank()}.json"
        path.write_text(json.dumps({"step": self.step, "rows": rows, "keys": self.keys}) + "\n")
        return (
            f"step {self.step}: loss is {loss} and its gradient's norm {norm}{why}, on rank "
            f"{collectives.rank()} with rows {str(rows[:8])[1:-1]}{', …' if len(rows) > 8 else ''} (all in {path}); "
            f"checkpoints up to step {sound_step} are sound: lower train.lr, or use train.precision bf16 or fp32"
        )


class FiniteUpdates:
    """Checks each update of a run, and counts those that the scaler has skipped.

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

    def judge(self, update: Update, *, last: bool) -> tuple[float, float]:
        """Count one update; returns its loss and the norm of its gradient.

        Args:
            update: they come in order.
            last: the run ends with it.

        Raises:
            TrainingError: the loss is not finite; the gradient is not, and there is no scaler, or its scale is as low
                as can be; the run ends with updates left out. On all ranks: both numbers are those of the global batch.
        """
        loss, norm = update.read()
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_in_a_row = 0
            return loss, norm
        self.bad_in_a_row += 1
        why = ""
        if self._scaler.is_enabled() and math.isfinite(loss):
            self.skipped += 1
            if self._scaler.get_scale() < LEAST_SCALE:
                why = f" at every loss scale down to {LEAST_SCALE:g}"
            elif last and self.bad_in_a_row >= min(SKIPS_AT_THE_END, update.step + 1):
                why = f" at the end of the run, and the last {self.bad_in_a_row} updates were left out"
            else:
                return loss, norm
        raise TrainingError(update.explain(self._output, why, max(0, update.step - self.bad_in_a_row)))

    def sound_step(self, step: int) -> int | None:
        """The last step whose weights gave a finite loss and gradient, if the newest did not; else None.

        Args:
            step: updates judged.
        """
        return step - 1 - self.bad_in_a_row if self.bad_in_a_row else None
