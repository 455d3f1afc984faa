"""A step of each shape before the first one: what a shape needs is made then, or found to be missing.

The plan knows the shapes of all batches before a byte is read. So code is compiled and memory taken for each of them at
the start, and a batch that does not fit ends the run there, not after 5,000 steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
from torch import nn

from mmdata.batch import Batch, to_device
from mmdata.errors import ConfigError, counted
from mmdata.train.run.random_state import rng_state, set_rng_state

GIB = 1 << 30


def rehearse(
    blank: Sequence[tuple[str, Callable[[], Batch]]],
    step: Callable[[Batch], object],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: Callable[[str], object],
    say: Callable[[str], None],
) -> None:
    """Make a step of each shape, and leave model, optimizer and random numbers as they were. A collective.

    Args:
        blank: shapes in words, and what makes a batch of each without a row; the same on all ranks, the largest first.
        step: adds the gradients of a batch on the device; its collectives must leave nothing behind.
        model: its gradients are dropped, and its buffers put back.
        optimizer: of the model; the memory of its averages is taken meanwhile, if they do not exist yet.
        begin: called with the words before each step; may raise, on all ranks.
        say: writes a line into the log.

    Raises:
        ConfigError: the device has too little memory for a shape; names the shape.
    """
    device = next(model.parameters()).device
    started, on_gpu = time.perf_counter(), device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with _as_it_was(model, device):
        averages: list[torch.Tensor] = []
        for number, (words, make) in enumerate(blank, start=1):
            begin(words)
            say(f"rehearsing shape {number} of {len(blank)}: {words}")
            try:
                if number == 1 and not optimizer.state:
                    for group in optimizer.param_groups:  # the size of factored averages (adafactor) does not matter
                        kept = 2 if "betas" in group else int("momentum" in group)
                        averages += [torch.empty_like(weight) for weight in group["params"] for _ in range(kept)]
                step(to_device(_with_rows(make()), device))
            except torch.cuda.OutOfMemoryError as error:
                raise ConfigError(_too_large(words, error)) from error
            model.zero_grad(set_to_none=True)
        del averages
    needed = f", most memory {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB" if on_gpu else ""
    seconds = time.perf_counter() - started
    say(f"rehearsed {counted(len(blank), 'batch shape')} in {seconds:.1f} s{needed}")


def _with_rows(blank: Batch) -> Batch:
    """The batch as if all its rows were valid and different."""
    rows = torch.arange(len(blank["rows"]))
    batch: dict[str, Any] = {**blank, "valid": torch.ones_like(blank["valid"]), "rows": rows}
    batch |= {name: rows for name in ("image_hash", "caption_hash", "negative_caption_hash") if name in batch}
    if "negative_valid" in batch:
        batch["negative_valid"] = torch.ones_like(batch["negative_valid"])
    if "boxes_valid" in batch:
        batch["boxes_valid"] = torch.ones_like(batch["boxes_valid"])
    if "box_text_hash" in batch:
        batch["box_text_hash"] = torch.arange(1, batch["box_text_hash"].numel() + 1).view_as(batch["box_text_hash"])
    batch["keys"] = [str(row) for row in range(len(rows))]
    return cast(Batch, batch)


@contextlib.contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Generator[None]:
    """Put back what steps change besides gradients: random numbers, and buffers such as a batch norm's."""
    random_state = rng_state(device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    set_rng_state(random_state, device)


def _too_large(words: str, error: BaseException) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"out of memory in the rehearsal of {words} ({reason}): set train.micro_batch_size, or lower it, or "
        "data.global_batch_size; model.gradient_checkpointing and train.parallel fsdp save memory too"
    )
