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
from mmdata.errors import TrainingError
from mmdata.train.log.utilization import FlopCounter, peak_flops
from mmdata.train.ranks import collectives

GIB = 1 << 30
NOTICEABLE = 0.05
"""Share of the time spent waiting for data from which on the log names the cause."""
STILL_MOST = 100
"""Updates in a row without loss and gradient that end a run. The last batch of an epoch may have one row, and so no
negatives."""


class Meter:
    """Sums between two log lines. Checkpoints hold those of losses and tokens, so that a resumed curve has no seam.

    Args:
        group: ranks to sum over, over CPU tensors.
        flops: counts the operations of batches, for a device whose rates are known; None: no rates.
        stats: the loader's clock, a `mmdata.loader.Stats`, which knows why the loop waits; None: nothing does.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, flops: FlopCounter | None = None, stats: Any = None
    ) -> None:
        self._group, self._flops, self._stats = group, flops, stats
        self._stats_before = stats and stats.copy()
        self._said = ""  # the cause of waiting that was named last
        self._steps = self._still = 0
        self._loss_sum = 0.0
        self.region_loss: Tensor | None = None  # of the last update
        self._device = torch.device("cpu")  # of the batches
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
            self._device = batch["valid"].device
            if self._flops is not None:
                with self.paused():  # a new shape takes seconds
                    self._operations += self._flops.count(batch)
            # Summed on the batch's device: reading a number from a GPU would wait for it.
            self._samples = batch["valid"].sum() + self._samples
            if "attention_mask" in batch:  # a user's model may need no texts
                self._tokens += batch["attention_mask"].numel()
                useful = (batch["attention_mask"] * batch["valid"].unsqueeze(1)).sum()
                self._useful_tokens = useful + self._useful_tokens
            yield batch
            del batch  # its memory may be needed for the next one

    def add_loss(self, loss: float, norm: float) -> None:
        """Count one update, if its loss is finite.

        Args:
            loss: of the update.
            norm: of its gradient.

        Raises:
            TrainingError: loss and gradient have been exactly 0 for `STILL_MOST` updates; on all ranks.
        """
        self._still = 0 if loss != 0 or norm != 0 else self._still + 1
        if self._still == STILL_MOST:
            raise TrainingError(
                f"loss and gradient have been exactly 0 for {STILL_MOST} updates: no row is valid, or no negative "
                "passes train.miner, train.teacher and the masks; loosen them"
            )
        if math.isfinite(loss):
            self._steps += 1
            self._loss_sum += loss

    def read(self) -> dict[str, float | None]:
        """Values since the last call. A collective: all ranks must call.

        Returns:
            loss: mean over the updates, None if all were skipped; region_loss: of the last, None if it is not finite
            (`train.regions`); samples_per_s: valid rows over all ranks; step_ms: of an update on this rank, without
            waiting for data; data_wait_share: of time, mean over ranks; padding_share: of tokens that mean nothing. On
            a GPU also tflops: 10¹² operations a second of the towers; mfu_share: these as a share of the device's peak
            for bfloat16 (model FLOPs utilization); memory_gib: the most that tensors took. None: not known.

        Source: mfu: Chowdhery et al. 2022, PaLM, appendix B (arXiv:2204.02311).
        """
        elapsed_s = time.perf_counter() - self._start_s
        samples, useful = int(self._samples), int(self._useful_tokens)
        sums = torch.tensor(
            [self._wait_s / elapsed_s, samples / elapsed_s, self._tokens, useful, 1.0], dtype=torch.float64
        )
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        wait, samples_per_s, tokens, useful_tokens, ranks = sums.tolist()
        self._wait_share = wait / ranks
        values = {
            "loss": self._loss_sum / self._steps if self._steps else None,
            "samples_per_s": samples_per_s,
            "step_ms": 1000 * (elapsed_s - self._wait_s) / max(1, self._batches),
            "data_wait_share": self._wait_share,
            "padding_share": 1.0 - useful_tokens / max(1.0, tokens),
            **self._rates(elapsed_s),
        }
        if self.region_loss is not None:
            last = float(self.region_loss)
            values["region_loss"] = last if math.isfinite(last) else None
        self._steps, self._loss_sum = 0, 0.0
        self._restart()
        return values

    def explain_wait(self) -> str | None:
        """A line for the log after the last `read`: why the loop waits for data, if that is new and noticeable."""
        if self._stats is None:
            return None
        found, self._stats_before = self._stats.since(self._stats_before).bottleneck(), self._stats.copy()
        if found is None or self._wait_share < NOTICEABLE or found.stage == self._said:
            return None
        self._said = found.stage
        return f"data wait {self._wait_share:.0%}: {found.words}; `mmdata bench CONFIG` measures what would help"

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
        if collectives.rank() == 0:  # `read` adds up the ranks' tokens
            self._tokens, self._useful_tokens = state["tokens"]

    def _rates(self, elapsed_s: float) -> dict[str, float | None]:
        if self._flops is None:
            return {}
        a_second = self._operations / elapsed_s if self._flops.knows else None
        rates: dict[str, float | None] = {"tflops": a_second and a_second / 1e12}
        if self._device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self._device))
            rates["mfu_share"] = a_second / peak if a_second is not None and peak else None
            rates["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        return rates

    def _restart(self) -> None:
        self._start_s = time.perf_counter()
        self._wait_s = self._operations = 0.0
        self._batches = self._tokens = 0
        self._samples: int | Tensor = 0
        self._useful_tokens: int | Tensor = 0
