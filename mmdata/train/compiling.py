"""torch.compile for the towers: one graph for each shape that batches have, made when the first batch of it comes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from mmdata.errors import ConfigError

BACKEND = "inductor"
MAX_GRAPHS = 512
"""Graphs of all towers together. Shapes beyond run as they do without torch.compile, and torch says so once.

A plan has 16 shapes or so. A shape takes a graph in each tower, two with micro-batches that do not divide the rows of
a batch, and one more in the text tower for extra captions.
"""


def compile_towers(model: nn.Module, device: torch.device) -> None:
    """Compile each tower of a model in place, with static shapes; names in its state dict stay as they are.

    Evaluation runs the towers as they were (`evaluate.embed`): its shapes are others, and come once.

    Args:
        model: a DualEncoder, or a module whose parts are the towers.
        device: where it is.

    Raises:
        ConfigError: what torch.compile needs on this device is missing.
    """
    _try(device)
    settings: Any = import_module("torch._dynamo.config")
    settings.recompile_limit = max(settings.recompile_limit, MAX_GRAPHS)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, MAX_GRAPHS)
    for tower in towers_of(model):
        tower.compile(backend=BACKEND, dynamic=False)


def towers_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that have parts themselves: not its projections."""
    return [part for part in model.children() if any(True for _ in part.children())]


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile_towers` has been here."""
    return any(getattr(tower, "_compiled_call_impl", None) is not None for tower in towers_of(model))


def _try(device: torch.device) -> None:
    """Compile something small now: without a compiler the first step of training would fail, minutes later."""
    # What a cache has would not need the compiler.
    options: dict[str, Any] = {"options": {"force_disable_caches": True}} if BACKEND == "inductor" else {}
    try:
        torch.compile(_small, backend=BACKEND, **options)(torch.ones(2, device=device))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler (g++) and Python's headers"
        raise ConfigError(
            f"train.compile: torch.compile builds no code for device '{device.type}' here ({reason}); "
            f"it needs {needed}: install them, or set train.compile to false"
        ) from error


def _small(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
