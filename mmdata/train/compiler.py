"""torch.compile where it works, and what it lacks where it does not."""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import torch

logger = logging.getLogger(__name__)


def compiler_error(device: torch.device, backend: str = "inductor") -> str:
    """Why torch.compile builds no code for a device here, "" if it does: compiles a small function to find out."""
    config: Any = import_module("torch.compiler.config")
    try:
        # A cached graph would not need the compiler; torch warns of caches that are off.
        with config.patch(force_disable_caches=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
            torch.compile(_small, backend=backend)(torch.ones(2, device=device))
    except Exception as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


@cache
def compiles(device: torch.device) -> bool:
    """Whether torch.compile builds code for a device; says once what is lost where it does not."""
    error = compiler_error(device)
    if error:
        logger.warning(
            "towers and loss run without torch.compile, with more time and memory: it builds no code for device '%s' "
            "here (%s); on a GPU it needs Triton and a C compiler",
            device.type,
            error,
        )
    return not error


def up_to_graphs(count: int) -> AbstractContextManager[Any]:
    """Inside, a compiled function may have so many graphs; calls beyond run as they do without torch.compile.

    The limit is a thread's own, and autograd calls backward for a GPU in another thread than forward.
    """
    settings: Any = import_module("torch._dynamo.config")
    most = max(count, settings.recompile_limit), max(count, settings.accumulated_recompile_limit)
    return settings.patch(recompile_limit=most[0], accumulated_recompile_limit=most[1])


def _small(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
