"""Numbers of a log line, over all ranks, since the last line: loss, speed, time spent waiting for data, padding."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.batch import Batch
from mmdata.train import distributed


class Meter:
    """Sums between two log lines. Those of losses and tokens live in the checkpoint: a resumed curve has no seam."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group  # ranks to sum over, over CPU tensors
        self._steps = 0
        self._loss_sum = 0.0
        self.step_ms = 0.0  # that an update took before the last `read`, without waiting for data
        self._restart()

    def waited_for(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each one came is counted as waiting for data."""
        while True:
            before_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._wait_s += time.perf_counter() - before_s
            self._batches += 1
            # Added up where the batch is: to look at a number on a GPU would be to wait for it.
            self._samples = batch["valid"].sum() + self._samples
            self._tokens += batch["attention_mask"].numel()
            self._useful_tokens = (batch["attention_mask"] * batch["valid"].unsqueeze(1)).sum() + self._useful_tokens
            yield batch

    def add_loss(self, loss: float) -> None:
        """Count one update, if its loss is finite."""
        if math.isfinite(loss):
            self._steps += 1
            self._loss_sum += loss

    def read(self) -> dict[str, float | None]:
        """Values since the last call. A collective: all ranks must call.

        Returns:
            loss: mean over the updates, None if all were skipped; samples_per_s: valid rows over all ranks;
            data_wait_share: of time, mean over ranks; padding_share: of tokens that mean nothing.
        """
        elapsed_s = time.perf_counter() - self._start_s
        self.step_ms = 1000 * (elapsed_s - self._wait_s) / max(1, self._batches)
        samples, useful = int(self._samples), int(self._useful_tokens)
        sums = torch.tensor(
            [self._wait_s / elapsed_s, samples / elapsed_s, self._tokens, useful, 1.0], dtype=torch.float64
        )
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        wait, samples_per_s, tokens, useful_tokens, ranks = sums.tolist()
        loss = self._loss_sum / self._steps if self._steps else None
        self._steps, self._loss_sum = 0, 0.0
        self._restart()
        return {
            "loss": loss,
            "samples_per_s": samples_per_s,
            "data_wait_share": wait / ranks,
            "padding_share": 1.0 - useful_tokens / max(1.0, tokens),
        }

    @contextlib.contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Time spent in here (evaluation, checkpoints) is no training time."""
        before_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - before_s

    def state_dict(self) -> dict[str, Any]:
        """The sums that a resumed run goes on with, of all ranks. A collective: all ranks must call."""
        tokens = torch.tensor([self._tokens, int(self._useful_tokens)])
        if self._group is not None:
            dist.all_reduce(tokens, group=self._group)
        return {"steps": self._steps, "loss_sum": self._loss_sum, "tokens": tokens.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`, on any number of ranks."""
        self._steps, self._loss_sum = int(state["steps"]), float(state["loss_sum"])
        if distributed.rank() == 0:  # `read` adds up the ranks' tokens; older checkpoints have none
            self._tokens, self._useful_tokens = state.get("tokens", (0, 0))

    def _restart(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = 0.0
        self._batches = 0
        self._tokens = 0
        self._samples: int | Tensor = 0
        self._useful_tokens: int | Tensor = 0
