"""Prepares a run's model for training: compiles it, puts it into DDP, or shards it (FSDP2)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmdata.config import TrainConfig
from mmdata.train.compiler import compiles
from mmdata.train.ranks import collectives, sharding
from mmdata.train.ranks.sharding import blocks_of, towers_of

logger = logging.getLogger("mmdata")

FEW_SHAPES = 8
"""With `train.compile: auto` the plan of a run that is compiled has so many batch shapes at most."""


def prepare(
    model: nn.Module,
    config: TrainConfig,
    device: torch.device,
    *,
    autocast_dtype: torch.dtype | None,
    blank_batches: Callable[[], Sequence[object]] | None = None,
) -> nn.Module:
    """The model as `train_step` takes it. Copy the model before this call, make the optimizer after it.

    Args:
        model: changed in place if it is compiled or sharded.
        config: how to train; one rank is never sharded.
        device: where the model is.
        autocast_dtype: of the towers.
        blank_batches: gives one entry for each batch shape; None where the shapes are not known.
    """
    on_gpu = device.type == "cuda"
    if config.compile is True or (config.compile == "auto" and on_gpu and compiles(device) and _are_few(blank_batches)):
        compile_blocks(model)
    if config.parallel == "fsdp" and collectives.world_size() > 1:
        sharding.shard(model, device, autocast_dtype=autocast_dtype)
        return model
    return collectives.wrap(model, device)


def _are_few(blank_batches: Callable[[], Sequence[object]] | None) -> bool:
    """Whether the batches have so few shapes that compiling pays; says so if it does not. Unknown ones count as few."""
    shapes = 0 if blank_batches is None else len(blank_batches())
    if shapes > FEW_SHAPES and collectives.rank() == 0:
        logger.warning(
            "train.compile: the blocks are not compiled, since the batches have %d shapes, and each takes about 10 s; "
            "set train.compile to true if the run is long",
            shapes,
        )
    return shapes <= FEW_SHAPES


@contextmanager
def adds_up(model: nn.Module | None, *, last: bool) -> Generator[None]:
    """Around one of several passes: the ranks average the sum of all gradients once, in the last pass."""
    if model is not None and sharding.is_sharded(model):
        sharding.set_last_pass(model, last=last)
    with nullcontext() if last else apart(model):
        yield
    if last and model is not None:
        sharding.average_whole(model)


def apart(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Around steps whose gradients are dropped: DDP must not prepare for reductions that belong to no update."""
    return (
        cast("AbstractContextManager[Any]", model.no_sync())
        if isinstance(model, DistributedDataParallel)
        else nullcontext()
    )


BACKEND = "inductor"
"""Of torch.compile; tests replace it."""
MAX_GRAPHS = 512
"""Graphs of all blocks together. Shapes beyond run as they do without torch.compile, and torch says so once.

A plan has 16 shapes or so. A shape takes a graph in each tower, two with micro-batches that do not divide the rows of
a batch (of one row, another one for towers of several blocks), and one more in the text tower for negative captions.
"""


def compile_blocks(model: nn.Module) -> None:
    """Compile each transformer block of a model in place, with static shapes; names in its state dict stay as they are.

    The blocks of a tower share their graphs: one for each shape, which is small and soon made. A tower without blocks
    is compiled whole. Evaluation runs all as it was (`evaluate.embed`): its shapes are others, and come once.

    Args:
        model: a DualEncoder, or a module whose parts are the towers.
    """
    settings: Any = import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, MAX_GRAPHS)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, MAX_GRAPHS)
    # It cuts graphs where DDP's buckets end, so that gradients are averaged meanwhile: blocks are such cuts already.
    settings.optimize_ddp = False
    for tower in towers_of(model):
        for part in list(blocks_of(tower)) or [tower]:
            part.compile(backend=BACKEND, dynamic=False)


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is compiled, by `compile_blocks`, Module.compile or torch.compile."""
    # torch has no public name for either; a test says so if it drops one.
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in model.modules()
    )
