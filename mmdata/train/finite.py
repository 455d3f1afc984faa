"""A loss or gradient that is not finite ends a run, naming the rows that made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mmdata.batch import Batch
from mmdata.train import distributed
from mmdata.train.host_copy import HostCopy


class TrainingError(ValueError):
    """The run cannot go on: the message names the step, the rows and the remedy."""


@dataclass(frozen=True)
class Update:
    """An update whose numbers nobody has looked at yet.

    Attributes:
        step: updates made before it.
        batch: this rank's rows.
        loss_and_norm: two scalars, the loss and the norm of its gradient.
    """

    step: int
    batch: Batch
    loss_and_norm: HostCopy

    def read(self) -> tuple[float, float]:
        """The loss and the norm of its gradient; waits for this update, not for the next."""
        loss, norm = self.loss_and_norm.read()
        return float(loss), float(norm)

    def explain(self, output: Path) -> str:
        """Message for a loss or gradient that is not finite; the batch's rows go into a file of `output`."""
        loss, norm = self.read()
        rows, keys = self.batch["rows"].tolist(), self.batch["keys"]
        path = output / f"not_finite_rank{distributed.rank()}.json"
        path.write_text(json.dumps({"step": self.step, "rows": rows, "keys": keys}) + "\n")
        return (
            f"step {self.step}: loss is {loss} and its gradient's norm {norm}, on rank "
            f"{distributed.rank()} with rows {str(rows[:8])[1:-1]}{', …' if len(rows) > 8 else ''} (all in {path}); "
            "the checkpoints before it are sound: lower train.lr, or use train.precision bf16 or fp32"
        )
