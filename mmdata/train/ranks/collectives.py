"""Process groups, and the collectives that the losses need. With one process every collective is the identity."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmdata.errors import ConfigError
from mmdata.launcher import slurm_variables
from mmdata.train.accelerator import best_device

Gradients = TypeVar("Gradients")

DEVICES = ("auto", "cpu", "cuda", "mps")
TIMEOUT = timedelta(minutes=10)
"""A collective that waits longer for another rank is an error."""
LONG = timedelta(days=1)
"""The same where one rank works and the others wait for it."""
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""After a timeout nccl writes into files which collectives each rank was in; what the environment says counts."""
ABORT_S = 10.0
"""Time for cutting the connections after an error."""
SETTLE_S = 0.2
"""Time that a thread of gloo gets at exit to release the tensors of the last collective."""


def is_initialized() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_initialized() else 1


def cpu_group() -> dist.ProcessGroup | None:
    """All ranks, for what they tell each other through CPU tensors and objects; None with one rank.

    On a GPU the host would wait for the result, and so for all work before it. The first call is a collective.
    """
    if world_size() == 1:
        return None
    everyone = dist.group.WORLD
    assert everyone is not None
    if dist.get_backend() == "gloo":
        return everyone
    if not _cpu_group or _cpu_group[0] is not everyone:
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=TIMEOUT))
        _cpu_group[:] = [everyone, group]
    return _cpu_group[1]


_cpu_group: list[dist.ProcessGroup] = []
"""The default group, and the group that `cpu_group` has made beside it."""


def check_ranks(batches: object, own: tuple[int, int] | None = None) -> None:
    """Raise a ConfigError if a loader gives the share of another rank than this one.

    Rows would come several times in an epoch, or never. Loaders without rank and world_size are not checked.

    Args:
        batches: a loader.
        own: rank and world size of the trainer; None: those of the process group, 0 of 1 without one.
    """
    found = getattr(batches, "rank", None), getattr(batches, "world_size", None)
    wanted = own or (rank(), world_size())
    if not isinstance(found[0], int) or not isinstance(found[1], int) or found == wanted:
        return
    remedy = "give the loader that rank and world size"
    if own is None and not is_initialized():
        remedy = "call mmdata.train.distributed.init() before, or give the loader rank=0, world_size=1"
    raise ConfigError(
        f"the loader gives the share of rank {found[0]} of {found[1]}, and this process trains as rank {wanted[0]} of "
        f"{wanted[1]}: rows would come several times or never; {remedy}"
    )


def init(device: str = "auto", *, join: bool = True) -> torch.device:
    """Join the ranks that torchrun or srun started (nccl on GPUs, gloo on CPUs); alone, only choose the device.

    The environment of this process then has the variables of torchrun, see `slurm_variables`.

    The process leaves them when it ends, with an error or without: a program need not call `finish`.

    Args:
        device: "auto" (a GPU where there is one), "cpu", "cuda", or "mps" (Apple's GPU, without torchrun).
        join: False for a program that works alone, also as one of several tasks of srun.

    Returns:
        The device of this rank.

    Raises:
        ConfigError: "cuda" or "mps" where torch sees no such GPU, fewer GPUs than ranks on this host, or several ranks
            on "mps"; variables of Slurm and torch that contradict each other.
    """
    if device not in DEVICES:
        raise ConfigError(f"device '{device}': expected {', '.join(DEVICES)}")
    if join and not is_initialized():
        os.environ.update(slurm_variables(os.environ))
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if device == "mps" and not (alone and torch.backends.mps.is_available()):
        why = "torch sees no GPU of Apple's" if alone else "ranks of torchrun cannot exchange what is on Apple's GPU"
        raise ConfigError(f"device 'mps': {why}; use device 'cpu'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch sees no GPU; use device 'cpu', or check the driver with nvidia-smi")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank}: this host has {torch.cuda.device_count()} GPU(s); "
            "start that many ranks on it at most (torchrun --nproc-per-node, srun --ntasks-per-node)"
        )
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if device != "cpu" and alone and best_device() == "mps":
        place = torch.device("mps")
    if use_cuda:
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Batches of many shapes leave gaps between blocks of memory; segments that grow leave none. torch reads it
            # when the first memory of a GPU is taken.
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(place)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ and not is_initialized():
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
        # With its device nccl connects the ranks now, and no collective has to guess it. gloo takes none.
        backend, device_id = ("nccl", place) if use_cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=device_id)
        atexit.register(_finish_at_exit)
    return place


def finish(*, failed: bool = False) -> None:
    """Leave the process group, if there is one.

    A group's threads end when the last reference to it goes, for example a trainer's. DDP (torch 2.15) never releases
    its group, the default one.

    Args:
        failed: after an error of this rank, which the others may not have: nccl would wait for what they have not sent,
            so its connections are cut instead. gloo does not wait.
    """
    _cpu_group.clear()
    everyone = dist.group.WORLD if is_initialized() else None
    if everyone is not None and failed and dist.get_backend() == "nccl":
        # Within nccl an abort may wait, too; what then remains ends with the process.
        aborting = threading.Thread(target=everyone.abort, daemon=True, name="mmdata-abort")
        aborting.start()
        aborting.join(ABORT_S)
    elif everyone is not None:
        dist.destroy_process_group()
    gc.collect()


def _finish_at_exit() -> None:
    """Leave while the interpreter still runs, and after an error that it or `cli.run` has printed without waiting.

    After a collective, a thread of gloo takes the interpreter's lock to release the tensors. If it comes after the
    interpreter is gone, the process aborts ("terminate called without an active exception") and its own exit code is
    lost. After an error Python keeps the traceback, and with it the trainer and the gloo group that was used last, so
    the traceback is dropped first. The default group under DDP stays; its thread, which only waits for the lock, gets
    it while this one sleeps.
    """
    failed = getattr(sys, "last_value", None) is not None
    for name in ("last_value", "last_traceback", "last_exc"):
        setattr(sys, name, None)
    finish(failed=failed)
    time.sleep(SETTLE_S)


def wrap(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself alone; under DDP with more ranks.

    Buffers are not broadcast at each forward: pixel mean and deviation are constants, and the statistics of batch norms
    are shared before an evaluation.
    """
    if world_size() == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    # torch 2.15 renamed the argument and warns of the old name.
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    constant: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    ddp = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, **constant)
    _fix_reduction_order(ddp)
    return ddp


def _fix_reduction_order(ddp: DistributedDataParallel) -> None:
    """Make DDP reduce the last parameter first, from the first step on. A collective; call it before the first step.

    So a run has the same rounding after it is resumed. DDP reduces gradients in flat buffers, laid out by the order in
    which those of its first backward pass come. The place of a number in its buffer decides in which order the ranks'
    values are added: from three ranks on another layout gives other rounding. So the first pass is one of zeros, in an
    order that is fixed, without code of the model; gradients are None after it.
    """
    trained = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    inner = ddp.module
    try:
        ddp.module = _Zeros(trained)
        cast(Tensor, ddp(torch.zeros((), device=trained[0].device))).backward()
    finally:
        ddp.module = inner
    for parameter in trained:
        parameter.grad = None


class _Zeros(nn.Module):
    """Parameters whose gradients, all 0, are computed from the last to the first."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)

    def forward(self, total: Tensor) -> Tensor:
        for parameter in self._in_order:  # backward begins with what was added last
            total = total + 0.0 * parameter.sum()
        return total


@torch.no_grad()
def share_weights(model: nn.Module, ends: tuple[str, ...] = ("",)) -> None:
    """Give all ranks the weights and buffers of rank 0 whose names end with one of these. A collective.

    DDP does so too, but what is copied of a model before, such as a teacher, would have each rank's own.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if world_size() > 1 and name.endswith(ends):
            dist.broadcast(tensor.detach(), 0)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    inner: Any = model
    while True:
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile has no public way back; tests/train/test_distributed.py
            inner = inner._orig_mod
        else:
            return inner


def all_reduce_sum(value: Tensor) -> Tensor:
    """The sum over ranks, without gradient."""
    total = value.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def gather(rows: Tensor) -> Tensor:
    """All ranks' rows in rank order: (B, ...) to (W*B, ...). No gradient. B must be equal on all ranks."""
    if world_size() == 1:
        return rows
    everything = rows.new_empty((world_size() * rows.shape[0], *rows.shape[1:]))
    _renamed("all_gather_single", "all_gather_into_tensor")(everything, rows.detach().contiguous())
    return everything


def _renamed(new: str, old: str) -> Callable[..., object]:
    """A collective of torch: since 2.14 it has another name, and the old one warns."""
    return getattr(dist, new, None) or getattr(dist, old)


def gather_with_grad(rows: Tensor) -> Tensor:
    """As `gather`; backward sums the ranks' gradients of these rows (a reduce-scatter)."""
    return rows if world_size() == 1 else _Gather.apply(rows)


def first_order_only(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Raise where the gradient that `backward` computes would itself be differentiated.

    torch's `once_differentiable` raises only where the incoming gradient requires one. That of `loss.backward()` does
    not, so the second derivative would silently be without the part that goes through the function.

    Args:
        backward: of an autograd.Function, a static method.

    Raises:
        RuntimeError: (when called) the caller set `create_graph=True`, as `torch.autograd.functional.hessian` does.
    """

    @wraps(backward)
    def checked(*arguments: Any) -> Gradients:
        if torch.is_grad_enabled():  # in backward: only with create_graph
            raise RuntimeError(
                "the losses of mmdata.train have no second derivative, and create_graph=True asks for one: call "
                "backward() or torch.autograd.grad() without it; for a gradient penalty, or a Hessian, write the loss "
                "in operations of torch"
            )
        return backward(*arguments)

    return checked


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gather(rows)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own = grad.new_empty((grad.shape[0] // world_size(), *grad.shape[1:]))
        _renamed("reduce_scatter_single", "reduce_scatter_tensor")(own, grad.contiguous())
        return own


def log_sum_exp(partial: Tensor) -> Tensor:
    """Element by element, the log of the sum over ranks of exp(partial), with gradient."""
    return partial if world_size() == 1 else _LogSumExp.apply(partial)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        top = partial.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX)
        top = top.where(top != -torch.inf, 0.0)
        total = (partial - top).exp()
        dist.all_reduce(total)
        ctx.share = (partial - top).exp_().div_(total.clamp(min=torch.finfo(total.dtype).tiny))
        return total.log() + top

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total * ctx.share
