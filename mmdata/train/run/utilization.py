"""How much of a GPU a run uses: the operations of its towers a second, their share of the peak, and memory.

What a batch takes is counted once for each shape, on a copy of the model that has shapes and no numbers.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmdata.batch import Batch, to_device
from mmdata.train.peaks import peak_flops

logger = logging.getLogger("mmdata")

GIB = 1 << 30
_ROWS = 2
"""Rows whose operations are counted: a batch norm refuses one."""


class Utilization:
    """Counts what the batches since the last line took of a device.

    Args:
        model: as it is before it is compiled or sharded; not kept.
        device: of this rank; other than a GPU has no peak and no memory of its own.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._copy: nn.Module | None = None
        try:
            self._copy = without_numbers(model)
        except Exception as error:  # a model of the user's own may hold what cannot be copied, such as a lock
            logger.info("the log shows no operations a second: the model cannot be copied (%s)", error)
        self._flops: dict[tuple[object, ...], float] = {}
        self._sum = 0.0
        gpu = device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if gpu else None
        if gpu and self._peak is None:
            logger.info("the log shows no share of the peak: that of '%s' is not known", torch.cuda.get_device_name())

    def add(self, batch: Batch) -> float:
        """Count a batch; returns the seconds that it took, which are many times more for a new shape."""
        started = time.perf_counter()
        self._sum += self.count(batch)
        return time.perf_counter() - started

    def count(self, batch: Batch) -> float:
        """Operations of a batch, 0 where they are not known: from its first rows, once for each shape of a row."""
        if self._copy is None:
            return 0.0
        shape = tuple((name, value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor))
        if shape not in self._flops:
            try:
                self._flops[shape] = count_flops(self._copy, _first(batch, _ROWS)) / min(_ROWS, len(batch["valid"]))
            except Exception as error:  # a model of the user's own may do what needs numbers
                logger.info("the log shows no operations a second: the model does not run without numbers (%s)", error)
                self._copy = None
                return 0.0
        return self._flops[shape] * len(batch["valid"])

    def read(self, elapsed_s: float) -> dict[str, float | None]:
        """Values since the last call, for this rank.

        Returns:
            tflops: 10¹² operations a second; mfu_share: these as a share of the device's peak for bfloat16 (model
            FLOPs utilization); memory_gib: the most that tensors took. None: not known.

        Source: mfu: Chowdhery et al. 2022, PaLM, appendix B (arXiv:2204.02311).
        """
        a_second, self._sum = self._sum / elapsed_s, 0.0
        values: dict[str, float | None] = {
            "tflops": a_second / 1e12 if self._copy is not None else None,
            "mfu_share": a_second / self._peak if self._copy is not None and self._peak else None,
            "memory_gib": None,
        }
        if self._device.type == "cuda":
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        return values


def _first(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch, all of whose entries begin with the dimension of rows."""
    entries = cast("dict[str, Any]", batch)
    return cast(Batch, {name: value[:rows] for name, value in entries.items()})


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy of a model on torch's "meta" device, which takes no memory for weights."""
    memo: dict[int, object] = {}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    found = copy.deepcopy(model, memo)
    part: Any
    for part in found.modules():
        if getattr(part, "gradient_checkpointing", False):  # what is computed a second time is no progress
            part.gradient_checkpointing = False
    return found


def count_flops(model: nn.Module, batch: Mapping[str, object]) -> float:
    """Operations of a batch's products, forward and backward: a multiplication and an addition are two.

    Args:
        model: from `without_numbers`.
        batch: on any device; its numbers are not read.
    """
    model.zero_grad(set_to_none=True)
    # The fused kernels compute products of attention again in backward, and are counted by other rules.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.enable_grad():
        output = model(to_device(batch, "meta"))  # type: ignore[arg-type]
        features = [part.float().sum() for part in output if isinstance(part, Tensor) and part.requires_grad]
        if features:
            torch.stack(features).sum().backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())
