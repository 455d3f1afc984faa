"""torch.compile where it works, and what it lacks where it does not."""

from __future__ import annotations

import getpass
import logging
import os
import sys
import tempfile
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


def failure(error: BaseException) -> str:
    """What to say where an error in a step is that of torch.compile, in one line with the remedy; else ""."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        return ""
    found = [error]
    while (cause := getattr(found[-1], "inner_exception", None) or found[-1].__cause__) and cause not in found:
        found.append(cause)
    if not any(_is_of_compiler(one) for one in found):
        return ""
    last = found[-1]
    output = getattr(last, "output", None)  # of a C++ compiler: its message begins with the whole command
    lines = [line.strip() for line in str(last if output is None else output).splitlines() if line.strip()]
    reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "without a message")
    return (
        f"torch.compile failed ({type(last).__name__}: {reason[:300]}); a compiler that was stopped may have left half "
        f"a file: remove torch's cache, '{cache_folder()}', and start again; if that does not help, set train.compile "
        "to false"
    )


def cache_folder() -> str:
    """The folder in which torch keeps what it has compiled."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return named or os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


def _is_of_compiler(error: BaseException) -> bool:
    kind = type(error)
    if kind.__name__ == "BackendCompilerFailed" or kind.__module__.startswith(("torch._inductor", "triton")):
        return True
    # A cached library that is cut is loaded while a step runs, behind no error of the compiler's own.
    is_of_file = isinstance(error, (ImportError, OSError))
    return is_of_file and ("file too short" in str(error) or os.path.abspath(cache_folder()) in str(error))


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
