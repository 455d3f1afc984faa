"""One training step: embed, mine, contrast, backward. Micro-batches change memory and time, not gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from mmdata.train.accelerator import generator_states, set_generator_states
from mmdata.train.batches import has_rows, split
from mmdata.train.models.dual_encoder import DualEncoder
from mmdata.train.ranks import collectives, parallel, sharding

LossFunction = Callable[[Any, Any], Tensor]
"""(output of the model, batch) to a scalar."""

Part = TypeVar("Part")


class StepOutput(NamedTuple):
    """What a step leaves besides gradients.

    Attributes:
        loss: scalar of the global batch, detached.
        output: what the model gave for this rank's rows, detached; a `DualEncoderOutput` from a `DualEncoder`.
    """

    loss: Tensor
    output: Any


def train_step(
    model: nn.Module,
    batch: Mapping[str, object],
    loss_function: LossFunction,
    *,
    micro_batch_size: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> StepOutput:
    """Add the gradients of one batch to `model`'s parameters; clipping, the optimizer and zero_grad are the caller's.

    With micro-batches the loss still sees the whole batch; see `gradient_cache` for what that costs and needs.

    Args:
        model: a DualEncoder, or a module of your own whose forward takes a batch; also inside DDP.
        batch: this rank's rows: a `Batch` on the model's device, or a dict with any keys whose tensors and lists have
            one entry for each row.
        loss_function: from the model's output and the batch, such as `objective.ContrastiveLoss()`.
        micro_batch_size: rows per forward; None: all rows in one.
        autocast_dtype: torch.bfloat16 or torch.float16 runs the model under autocast; losses stay float32.
        scaler: scales the loss (float16); the caller unscales and steps with it.

    Returns:
        The loss, and the model's output for all rows.

    Raises:
        ValueError: micro_batch_size below 1, a model without parameters, or entries of the batch with different numbers
            of rows.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1: got {micro_batch_size}")
    encoder = collectives.unwrap(model)
    if isinstance(encoder, DualEncoder):
        encoder.clamp_logit_scale_()
    # Not the batch's: row numbers or hashes that stayed on the CPU would turn autocast off on a GPU.
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None:
        raise ValueError(f"{type(encoder).__name__} has no parameters: there is nothing to train")

    def forward(part: Mapping[str, object]) -> Any:
        if isinstance(encoder, DualEncoder):  # DDP and FSDP walk through all that they are given, each key a string
            part = {name: value for name, value in part.items() if isinstance(value, Tensor)}
        # One autocast region a forward: its cache of cast weights must not outlive the pass that filled it.
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            return model(part)

    parts = [batch] if micro_batch_size is None else list(split(batch, micro_batch_size))
    if len(parts) > 1:
        return gradient_cache(forward, parts, lambda output: loss_function(output, batch), model=model, scaler=scaler)
    output = forward(batch)
    loss = loss_function(output, batch)
    (loss if scaler is None else scaler.scale(loss)).backward()
    sharding.average_whole(model)
    return StepOutput(loss.detach(), tree_map_only(Tensor, torch.detach, output))


def gradient_cache(
    forward: Callable[[Part], Any],
    parts: Iterable[Part],
    loss: Callable[[Any], Tensor],
    *,
    model: nn.Module | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> StepOutput:
    """Add the gradients of a loss over a whole batch, with the activations of one part in memory at a time.

    A first pass computes the outputs of all parts without a graph; the loss gives the gradients of these outputs; a
    second pass carries them into the parameters, part by part, with the random numbers (dropout) of the first. It costs
    one more forward, and needs a model that treats each row by itself (no batch norm).

    Args:
        forward: from a part to a tensor, or tuples, lists and dicts of tensors (also a NamedTuple, or a ModelOutput of
            transformers). A tensor has rows of its part; one without dimensions, such as a scale, must be equal in all
            parts, and its gradient counts once.
        parts: the parts of the batch; `forward` is called twice with each.
        loss: scalar, from the outputs of all parts, which have been concatenated along the rows.
        model: the module that `forward` calls, if it is in DDP, sharded (FSDP2) or compiled: the ranks average its
            gradients once, in the last part. Then all that the loss uses of it must be among the outputs.
        scaler: scales the loss (float16).

    Returns:
        The loss, and the outputs of all parts.

    Raises:
        ValueError: no part, or outputs of different structure.
        RuntimeError: outputs that cannot be concatenated.

    Example:
        def forward(part):
            return model.encode_image(part["image"]), model.encode_text(part["text"]), model.logit_scale.exp()

        parts = [{name: value[i : i + 64] for name, value in batch.items()} for i in range(0, 1024, 64)]
        gradient_cache(forward, parts, lambda output: losses.clip_loss(*output))
        optimizer.step()

    Source: Gao et al. 2021, gradient caching (arXiv:2101.06983).
    """
    parts = list(parts)
    if not parts:
        raise ValueError("gradient_cache needs at least one part of a batch: got none")
    outputs, states = _first_pass(forward, parts, model)
    structure = tree_flatten(outputs[0])[1]
    if unlike := [number for number, output in enumerate(outputs) if tree_flatten(output)[1] != structure]:
        raise ValueError(f"gradient_cache: forward gave outputs of different structure for parts 0 and {unlike[0]}")
    of_parts = list(zip(*map(tree_leaves, outputs), strict=True))  # each leaf in all parts
    leaves = [_concatenated(values) for values in of_parts]
    output = tree_unflatten(leaves, structure)
    value = loss(output)
    (value if scaler is None else scaler.scale(value)).backward()
    end = _random_state()
    grads = [_grads_by_part(leaf, values) for leaf, values in zip(leaves, of_parts, strict=True)]
    for number, (part, state) in enumerate(zip(parts, states, strict=True)):
        with parallel.adds_up(model, last=number == len(parts) - 1):
            _set_random_state(state)
            again = [
                (new, grad[number])
                for new, grad in zip(tree_leaves(forward(part)), grads, strict=True)
                if grad[number] is not None and new.requires_grad
            ]
            if again:  # none if both towers are frozen and only the scale is trained
                torch.autograd.backward([new for new, _ in again], [grad for _, grad in again])
    _set_random_state(end)
    return StepOutput(value.detach(), tree_map_only(Tensor, torch.detach, output))


def _first_pass(
    forward: Callable[[Part], Any], parts: Sequence[Part], model: nn.Module | None
) -> tuple[list[Any], list[list[Tensor]]]:
    """Each part's output without a graph, and the random state before it."""
    # A compiled model draws other dropout without a graph than with one: it makes one, which is dropped immediately.
    compiled = model is not None and parallel.is_compiled(model)
    outputs: list[Any] = []
    states: list[list[Tensor]] = []
    for part in parts:
        states.append(_random_state())
        # Not the last: DDP must not prepare for a backward pass that does not come.
        with torch.set_grad_enabled(compiled), parallel.adds_up(model, last=False):
            outputs.append(tree_map_only(Tensor, torch.detach, forward(part)))
    # In an autocast region of the caller, the second pass would get weights that this pass has cast without a graph.
    torch.clear_autocast_cache()
    return outputs, states


def _concatenated(values: Sequence[Any]) -> Any:
    """One output of all parts, as a leaf that collects its gradient; what has no rows is that of the first part."""
    joined = values[0]
    if has_rows(joined):
        joined = torch.cat(list(values))
    return joined.requires_grad_() if isinstance(joined, Tensor) and joined.is_floating_point() else joined


def _grads_by_part(leaf: Any, values: Sequence[Any]) -> list[Tensor | None]:
    """The gradient of an output cut as its parts were; that of a scalar counts in the last part only."""
    grad = leaf.grad if isinstance(leaf, Tensor) else None
    if grad is None:
        return [None] * len(values)
    if not grad.ndim:
        return [*[None] * (len(values) - 1), grad]
    return list(grad.split([len(value) for value in values]))


def _random_state() -> list[Tensor]:
    """States of the CPU's generator and of all GPUs': which of them a forward draws from, only the forward knows."""
    return [torch.get_rng_state(), *generator_states()]


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    set_generator_states(states[1:])
