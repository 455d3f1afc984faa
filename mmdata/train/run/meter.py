"""Numbers of a log line, over all ranks, since the last line: loss, speed, time spent waiting for data, padding."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmdata.batch import Batch
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.ranks import collectives
from mmdata.train.run.utilization import Utilization


class Meter:
    """Sums between two log lines. Checkpoints hold those of losses and tokens, so that a resumed curve has no seam.

    Args:
        group: ranks to sum over, over CPU tensors.
        utilization: counts what the batches take of the device; None: nothing does.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, utilization: Utilization | None = None) -> None:
        self._group, self._utilization = group, utilization
        self._steps = 0
        self._loss_sum = 0.0
        self.step_ms = 0.0  # of an update between the last two calls of `read`, without waiting for data
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
            if self._utilization is not None:
                self._start_s += self._utilization.add(batch)
            # Summed on the batch's device: reading a number from a GPU would wait for it.
            self._samples = batch["valid"].sum() + self._samples
            if "attention_mask" in batch:  # a user's model may need no texts
                self._tokens += batch["attention_mask"].numel()
                useful = (batch["attention_mask"] * batch["valid"].unsqueeze(1)).sum()
                self._useful_tokens = useful + self._useful_tokens
            yield batch
            del batch  # its memory may be needed for the next one

    def expect(self, batch: Batch) -> None:
        """Count the operations of a batch's shape before one comes: it takes seconds, and training waits for it."""
        if self._utilization is not None:
            self._utilization.count(batch)

    def add_loss(self, loss: float) -> None:
        """Count one update, if its loss is finite."""
        if math.isfinite(loss):
            self._steps += 1
            self._loss_sum += loss

    def read(self) -> dict[str, float | None]:
        """Values since the last call. A collective: all ranks must call.

        Returns:
            loss: mean over the updates, None if all were skipped; samples_per_s: valid rows over all ranks; step_ms: of
            an update on this rank, without waiting for data; data_wait_share: of time, mean over ranks; padding_share:
            of tokens that mean nothing; and those of `Utilization.read`.
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
        used = self._utilization.read(elapsed_s) if self._utilization is not None else {}
        return {
            "loss": loss,
            "samples_per_s": samples_per_s,
            "step_ms": self.step_ms,
            "data_wait_share": wait / ranks,
            "padding_share": 1.0 - useful_tokens / max(1.0, tokens),
            **used,
        }

    def begin(self) -> None:
        """Count time from here on: loading a checkpoint or trying the compiler before it is no step."""
        self._start_s = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Time inside this context (evaluation, checkpoints) does not count as training time."""
        before_s = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - before_s

    def state_dict(self) -> dict[str, Any]:
        """The sums over all ranks with which a resumed run goes on. A collective."""
        tokens = torch.tensor([self._tokens, int(self._useful_tokens)])
        if self._group is not None:
            dist.all_reduce(tokens, group=self._group)
        return {"steps": self._steps, "loss_sum": self._loss_sum, "tokens": tokens.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, on any number of ranks."""
        self._steps, self._loss_sum = int(state["steps"]), float(state["loss_sum"])
        if collectives.rank() == 0:  # `read` adds up the ranks' tokens; older checkpoints have none
            self._tokens, self._useful_tokens = state.get("tokens", (0, 0))

    def _restart(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = 0.0
        self._batches = 0
        self._tokens = 0
        self._samples: int | Tensor = 0
        self._useful_tokens: int | Tensor = 0


NOTICEABLE = 0.05
"""Share of the time spent waiting for data from which on the log names the cause."""


class DataWait:
    """Reads the clock of a loader between two log lines.

    Args:
        batches: the loader; without a clock there are no lines.
        config: the run's settings, named in the advised command; without this file no command is advised.
    """

    def __init__(self, batches: Batches, config: Path) -> None:
        self._stats = LoaderExtras.of(batches).stats
        self._before = self._stats and self._stats.copy()
        self._config = config
        self._said = ""  # the stage named last

    def explain(self, wait_share: float, step_ms: float | None) -> str | None:
        """A line for the log, or None where there is nothing new to say.

        Args:
            wait_share: of the time since the last call, spent waiting for data.
            step_ms: milliseconds of an update without that; None: the workers slow it, so it is no measure of the step.
        """
        if self._stats is None:
            return None
        interval = self._stats.since(self._before)
        self._before = self._stats.copy()
        found = interval.bottleneck()
        if found is None or wait_share < NOTICEABLE or found.stage == self._said:
            return None
        self._said = found.stage
        line = f"data wait {wait_share:.0%}: {found.words}"
        if not self._config.is_file():  # a loop of the user's own, whose loader no command can make
            return line
        step = "" if step_ms is None else f" --step-ms {step_ms:.0f}"
        return f"{line}; `mmdata bench {self._config}{step}` measures what would help"
