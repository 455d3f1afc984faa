"""How far the queue's features are from what the model makes of the same rows now.

They are sound negatives only as long as both lie in one space.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mmdata.batch import Batch
from mmdata.train.memory.ema import embed
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import collectives


class QueueDrift:
    """Keeps one batch until its features are the oldest of the queue, and then embeds it again. A forward each time.

    Batches are kept at fixed steps, so a resumed run keeps the same ones. The one that was kept when a run was killed
    is not measured. Costs the memory of one batch on the device.

    Args:
        rows: of the queue.
        after_steps: updates before the queue begins.
        micro_batch_size: rows per forward; None: all at once.
        autocast_dtype: of the forward; None: that of the weights.
    """

    def __init__(
        self,
        rows: int,
        after_steps: int = 0,
        *,
        micro_batch_size: int | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.rows, self.after_steps = rows, after_steps
        self.micro_batch_size, self.autocast_dtype = micro_batch_size, autocast_dtype
        self._kept: tuple[Batch, DualEncoderOutput, int] | None = None
        self._measured: dict[str, float] = {}

    def keep(self, features: DualEncoderOutput, batch: Batch, step: int) -> None:
        """Take a batch that goes into the queue, `step` updates having been made before its own."""
        if self._kept is None and step >= self.after_steps and step % self._depth(batch) == 0:
            self._kept = batch, features, step

    def telemetry(self) -> dict[str, float]:
        """What was measured last, and not told yet; empty if nothing was.

        Returns:
            oldest_age_steps: how old the features were; and oldest_similarity: mean cosine to those of the model then.
        """
        measured, self._measured = self._measured, {}
        return measured

    def measure(self, model: nn.Module, step: int) -> None:
        """Measure after `step` updates, if the batch that is kept leaves the queue now. A collective then.

        Args:
            model: not wrapped in DDP; put into eval mode and back.
            step: the same on all ranks.
        """
        if self._kept is None or step - self._kept[2] < self._depth(self._kept[0]):
            return
        (batch, before, age), self._kept = self._kept, None
        was_training = model.training
        model.eval()
        # Else compiled blocks would be compiled once more, for a forward without a graph.
        with torch.compiler.set_stance("force_eager"):
            now = embed(model, batch, micro_batch_size=self.micro_batch_size, autocast_dtype=self.autocast_dtype)
        model.train(was_training)
        cosine = torch.stack(
            [F.cosine_similarity(old.float(), new.float()) for old, new in zip(before[:2], now[:2], strict=True)]
        ).mean(0)
        counted = batch["valid"] & cosine.isfinite()  # the queue masks what is not finite, too
        sums = torch.stack([cosine.where(counted, 0.0).sum(), counted.sum()])
        total, count = collectives.all_reduce_sum(sums).tolist()
        if count:
            self._measured = {"oldest_age_steps": step - age, "oldest_similarity": total / count}

    def _depth(self, batch: Batch) -> int:
        """Steps after which a batch has left the queue."""
        return -(-self.rows // (len(batch["valid"]) * collectives.world_size()))
