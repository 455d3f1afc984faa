"""One training step: embed, mine, contrast, backward. Micro-batches change memory and time, not gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmdata.batch import Batch
from mmdata.train.models.dual_encoder import DualEncoder, DualEncoderOutput
from mmdata.train.ranks import collectives, parallel

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of the towers' autocast, by `train.precision`."""

LossFunction = Callable[[DualEncoderOutput, Batch], Tensor]


class StepOutput(NamedTuple):
    """What a step leaves besides gradients.

    Attributes:
        loss: scalar of the global batch, detached.
        output: features and scale of this rank's rows, detached.
    """

    loss: Tensor
    output: DualEncoderOutput


def train_step(
    model: nn.Module,
    batch: Batch,
    loss_function: LossFunction,
    *,
    micro_batch_size: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> StepOutput:
    """Add the gradients of one batch to `model`'s parameters; clipping, the optimizer and zero_grad are the caller's.

    With micro-batches the loss still sees the whole batch: features are computed without a graph, the loss gives
    their gradients, and a second pass carries those into the towers with the same random numbers (dropout) as the
    first. Costs one more forward; needs layers that treat each row by itself (no batch norm).

    Args:
        model: a DualEncoder or a module with its forward, also inside DDP.
        batch: this rank's rows, on the model's device.
        loss_function: from the model's output and the batch, such as `objective.ContrastiveLoss()`.
        micro_batch_size: rows per forward; None, or at least B: all at once.
        autocast_dtype: torch.bfloat16 or torch.float16 runs the towers under autocast; losses stay float32.
        scaler: scales the loss (float16); the caller unscales and steps with it.

    Returns:
        The loss and the features.

    Raises:
        ValueError: micro_batch_size below 1.

    Source: Gao et al. 2021, gradient caching (arXiv:2101.06983).
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1: got {micro_batch_size}")
    encoder = collectives.unwrap(model)
    if isinstance(encoder, DualEncoder):
        encoder.clamp_logit_scale_()
    scale = scaler.scale if scaler is not None else _identity
    device = batch["pixel_values"].device
    rows = batch["pixel_values"].shape[0]
    if micro_batch_size is None or micro_batch_size >= rows:
        with _autocast(device, autocast_dtype):
            output = cast(DualEncoderOutput, model(batch))
        loss = loss_function(output, batch)
        scale(loss).backward()
        return StepOutput(loss.detach(), _map(torch.detach, output))
    parts = list(split(batch, micro_batch_size))
    return _cached_step(model, batch, parts, loss_function, _Passes(device, autocast_dtype, scale))


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """Parts of `size` rows, the last one with what is left."""
    for start in range(0, batch["pixel_values"].shape[0], size):
        rows = slice(start, start + size)
        yield cast(Batch, {key: cast(Any, value)[rows] for key, value in batch.items()})


class _Passes(NamedTuple):
    device: torch.device
    autocast_dtype: torch.dtype | None
    scale: Callable[[Tensor], Tensor]


def _cached_step(
    model: nn.Module, batch: Batch, parts: list[Batch], loss_function: LossFunction, passes: _Passes
) -> StepOutput:
    # First pass on the bare model: DDP has nothing to do where there is no graph.
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    # A compiled tower draws other dropout without a graph than with one: it makes one, which is dropped at once.
    first_pass = torch.enable_grad if parallel.is_compiled(bare) else torch.no_grad
    outputs: list[DualEncoderOutput] = []
    states: list[list[Tensor]] = []
    for part in parts:
        states.append(_random_state(passes.device))
        # One autocast region a forward: its cache of cast weights must not carry graph-less copies to the next pass.
        with first_pass(), _autocast(passes.device, passes.autocast_dtype):
            outputs.append(_map(torch.detach, cast(DualEncoderOutput, bare(part))))
    output = _concatenate(outputs)
    leaves = _map(lambda value: value.requires_grad_(), output)
    loss = loss_function(leaves, batch)
    passes.scale(loss).backward()
    end = _random_state(passes.device)

    start = 0
    for part, state in zip(parts, states, strict=True):
        stop = start + part["pixel_values"].shape[0]
        last = stop == batch["pixel_values"].shape[0]
        with parallel.adds_up(model, last=last):
            _set_random_state(passes.device, state)
            with _autocast(passes.device, passes.autocast_dtype):
                again = cast(DualEncoderOutput, model(part))
            surrogate = _surrogate(again, leaves, slice(start, stop), with_scalars=last)
            if surrogate.requires_grad:  # not where both towers are frozen and only the scale is trained
                surrogate.backward()
        start = stop
    _set_random_state(passes.device, end)
    return StepOutput(loss.detach(), _map(torch.detach, output))


def _surrogate(output: DualEncoderOutput, leaves: DualEncoderOutput, rows: slice, *, with_scalars: bool) -> Tensor:
    """A scalar whose gradient with respect to `output` is the cached one; scale and bias count once, not per part."""
    total = output.image_features.new_zeros(())
    for value, leaf in zip(output, leaves, strict=True):
        if value is None or leaf is None or leaf.grad is None or not value.requires_grad:
            continue
        if value.ndim:
            total = total + (value * leaf.grad[rows]).sum()
        elif with_scalars:
            total = total + value * leaf.grad
    return total


def _concatenate(outputs: list[DualEncoderOutput]) -> DualEncoderOutput:
    images = torch.cat([output.image_features for output in outputs])  # (B, D)
    texts = torch.cat([output.text_features for output in outputs])  # (B, D)
    extra = [output.negative_text_features for output in outputs if output.negative_text_features is not None]
    return outputs[0]._replace(
        image_features=images, text_features=texts, negative_text_features=torch.cat(extra) if extra else None
    )


def _map(change: Callable[[Tensor], Tensor], output: DualEncoderOutput) -> DualEncoderOutput:
    return DualEncoderOutput(*(None if value is None else change(value) for value in output))  # type: ignore[arg-type]


def _autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(device: torch.device, state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def _identity(value: Tensor) -> Tensor:
    return value
