"""A loss or gradient that is not finite ends a run, naming the rows that made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mmdata.batch import Batch
from mmdata.train import distributed


class TrainingError(ValueError):
    """The run cannot go on: the message names the step, the rows and the remedy."""


@dataclass(frozen=True)
class Update:
    """An update whose numbers nobody has looked at yet."""

    step: int
    batch: Batch
    loss: Tensor
    grad_norm: Tensor

    def explain(self, output: Path) -> str:
        """Message for a loss or gradient that is not finite; the batch's rows go into a file of `output`."""
        rows, keys = self.batch["rows"].tolist(), self.batch["keys"]
        path = output / f"not_finite_rank{distributed.rank()}.json"
        path.write_text(json.dumps({"step": self.step, "rows": rows, "keys": keys}) + "\n")
        return (
            f"step {self.step}: loss is {float(self.loss)} and its gradient's norm {float(self.grad_norm)}, on rank "
            f"{distributed.rank()} with rows {str(rows[:8])[1:-1]}{', …' if len(rows) > 8 else ''} (all in {path}); "
            "the checkpoints before it are sound: lower train.lr, or use train.precision bf16 or fp32"
        )
