"""FSDP2: each rank keeps a share of every weight, of its gradient and of its optimizer state.

Results are those of DDP: a gradient is the mean over ranks, and checkpoints have the same names and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmdata.train.ranks import collectives


def shard(model: nn.Module, device: torch.device, *, autocast_dtype: torch.dtype | None = None) -> None:
    """Shard a model in place over all ranks: each block, then each tower, then the rest. A collective.

    A block's weights are gathered for its forward and again for its backward, and its gradients scattered after that,
    or after the last of several micro-batches. Scales, biases and norms stay whole on each rank: they are few,
    `train_step` averages their gradients together (`average_whole`), and a norm computes in float32 also under
    autocast.

    Args:
        model: on `device`; all ranks get rank 0's weights.
        device: of this rank.
        autocast_dtype: of the towers. Weights of blocks, matrices that autocast would cast, are gathered in this type;
            others, such as embeddings, in their own. So results are those of autocast on whole weights, and every
            forward, also of an evaluation, must run under autocast. Gradients are averaged in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    collectives.share_weights(model)
    small = {p for name, p in model.named_parameters() if p.ndim < 2 or name.endswith("bias")}
    mesh = init_device_mesh(device.type, (collectives.world_size(),))
    own = MixedPrecisionPolicy()
    in_blocks = own
    if autocast_dtype is not None:
        # The inputs stay as they are: autocast leaves the sum that runs through the blocks in float32.
        in_blocks = MixedPrecisionPolicy(autocast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=in_blocks, ignored_params=small)
    for part in (*towers_of(model), model):
        fully_shard(part, mesh=mesh, mp_policy=own, ignored_params=small)
    for name in ("encode_image", "encode_text"):  # evaluations call them, and they use the weights of the whole
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    _OWN.add(model)


_OWN: WeakSet[nn.Module] = WeakSet()
"""The models that `shard` has sharded."""


def is_shard(value: Tensor) -> bool:
    """Whether a tensor is this rank's share of a larger one."""
    return isinstance(value, DTensor)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has been through `shard`."""
    return hasattr(model, "set_requires_gradient_sync")


def set_last_pass(model: nn.Module, *, last: bool) -> None:
    """Whether the next backward pass is the last of a step: then gradients are averaged.

    Args:
        model: sharded.
        last: False: the gradients stay whole on each rank, and those of the next pass are added.
    """
    cast(Any, model).set_requires_gradient_sync(last)


def average_whole(model: nn.Module) -> None:
    """Average over ranks the gradients of parameters that each rank has whole. A collective; after a step's last pass.

    Args:
        model: one that `shard` has not sharded is left as it is.
    """
    if model not in _OWN:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not is_shard(p)]
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        mean = collectives.all_reduce_sum(torch.cat([g.flatten() for g in alike])) / collectives.world_size()
        for gradient, part in zip(alike, mean.split([g.numel() for g in alike]), strict=True):
            gradient.copy_(part.view_as(gradient))


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Clip the norm of the whole gradient to `max_norm`; returns the norm before, the same on all ranks.

    Args:
        parameters: whole tensors, shares, or both.
        max_norm: None leaves the gradient as it is.
    """
    largest = math.inf if max_norm is None else max_norm
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])  # whole, shares: torch does not take both in one call
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[is_shard(parameter)].append(parameter)
    if not kinds[1]:
        return nn.utils.clip_grad_norm_(kinds[0], largest)
    norms = [whole(nn.utils.get_total_norm([cast(Tensor, p.grad) for p in kind])) for kind in kinds if kind]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, largest, norm)
    return norm


def whole(value: Tensor) -> Tensor:
    """The whole tensor of a share, on its device (a collective); any other tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def towers_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that have parts themselves: not its projections."""
    return [part for part in model.children() if any(True for _ in part.children())]


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """A transformer's blocks: elements of each ModuleList (transformers), or Sequential of one class (timm).

    Those of lists within them are not given.
    """
    for part in module.children():
        is_list = isinstance(part, nn.ModuleList)
        if is_list or (isinstance(part, nn.Sequential) and len(part) > 1 and len({type(one) for one in part}) == 1):
            yield from (block for block in part.children() if any(True for _ in block.parameters()))
        else:
            yield from blocks_of(part)
